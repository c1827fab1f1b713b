"""Runs that are killed at random again and again, compared with uninterrupted ones.

    python benchmarks/soak.py benchmarks/results/soak.json --minutes 60 --steps 5000

One long run is killed at random moments. It and an uninterrupted one train the recipe
``tiny`` with Coupled Adam on one thread each, with a checkpoint every second or two. One of them is
stopped at random moments, also during its start, in three of four cases by kill -9, otherwise by
SIGTERM or Ctrl-C, and then resumed. After the given minutes it is left alone until it finishes.
Weights, log and evaluation of both must be the same bit for bit.
"""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from coupled_adam.files import write_atomically
from coupled_adam.lab.training.environment import environment
from coupled_adam.runs import CHECKPOINTS, by_step

SIGNALS = {"SIGKILL": 6, "SIGTERM": 1, "SIGINT": 1}
CODES = {"SIGKILL": {-9}, "SIGTERM": {-15, 75}, "SIGINT": {-2, 130}}
"""The exit codes by signal. Until training starts, SIGTERM and SIGINT have their default effect."""


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    command = ["train", "--recipe", "tiny", "--arm", "coupled_adam", "--out", str(folder)]
    options = ["--resume", "--device", "cpu", "--logger", "--steps", str(steps)]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "coupled_adam",
            *command,
            *options,
            "--training.evaluate_every=10",
            "--training.evaluation_batches=1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder.parent / f"{folder.name}.log").open("ab"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def soak(folder: Path, steps: int, minutes: float, seed: int) -> dict[str, object]:
    """Train one run with interruptions and one without at the same time, and compare the two."""
    chance = random.Random(seed)
    uninterrupted = start(folder / "uninterrupted", steps)
    kills: collections.Counter[str] = collections.Counter()
    resumed_at = []
    began = time.monotonic()
    code = None
    while code is None:
        process = start(folder / "interrupted", steps)
        left = began + 60 * minutes - time.monotonic()
        name = chance.choices([*SIGNALS], [*SIGNALS.values()])[0]
        try:
            code = process.wait(chance.uniform(0, 60) if left > 0 else None)
        except subprocess.TimeoutExpired:
            process.send_signal(getattr(signal, name))
            returned = process.wait()
            assert returned in CODES[name] or returned == 0, (name, returned)
            kills[name] += 1
            resumed_at.append(max(by_step(folder / "interrupted" / CHECKPOINTS), default=0))
            code = 0 if returned == 0 else None
    assert code == 0, code
    assert uninterrupted.wait() == 0
    ends = [folder / name for name in ("uninterrupted", "interrupted")]
    weights = [load_file(end / "model" / "model.safetensors") for end in ends]
    logs = [
        [
            {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
            for line in (end / "metrics.jsonl").read_text().splitlines()
        ]
        for end in ends
    ]
    evaluations = [json.loads((end / "evaluation.json").read_text()) for end in ends]
    return {
        "steps": steps,
        "minutes": (time.monotonic() - began) / 60,
        "seed": seed,
        "kills": dict(kills),
        "step_of_the_last_checkpoint_at_each": resumed_at,
        "same_weights": all(torch.equal(x, weights[1][name]) for name, x in weights[0].items()),
        "same_log": logs[0] == logs[1],
        "same_evaluation": evaluations[0] == evaluations[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    here = environment()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.steps, options.minutes, options.seed)
    write_atomically(options.target, json.dumps({"environment": here, **result}, indent=2))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
