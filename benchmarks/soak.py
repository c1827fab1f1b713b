"""Runs that are killed at random again and again, compared with uninterrupted ones.

    python benchmarks/soak.py benchmarks/results/soak.json --minutes 60 --steps 5000
    python benchmarks/soak.py benchmarks/results/soak-places.json --minutes 60 --places

The first kills one long run at random moments. It and an uninterrupted one train the recipe
``tiny`` with Coupled Adam on one thread each, with a checkpoint every second or two. One of them is
stopped at random moments, also during its start, in three of four cases by kill -9, otherwise by
SIGTERM or Ctrl-C, and then resumed. After the given minutes it is left alone until it finishes.
Weights, log and evaluation of both must be the same bit for bit.

With ``--places`` small comparisons are killed by kill -9 just before a random file operation (one
that creates, renames or removes) while they prepare the corpus, continue a run, save a checkpoint,
export the model, evaluate, or write the report. They are then continued, and killed again. In the
end corpus, weights, logs, evaluations and reports must be the same as those of a comparison to
which nothing happened, with no leftovers; and once there is a report, it must be whole after every
kill.
"""

import argparse
import collections
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from coupled_adam import cli
from coupled_adam.files import write_atomically
from coupled_adam.lab import comparison
from coupled_adam.lab.training import run
from coupled_adam.lab.training.checkpoints import Checkpoints
from coupled_adam.lab.training.environment import environment

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
            "coupled_adam.cli",
            *command,
            *options,
            "training.evaluate_every=10",
            "training.evaluation_batches=1",
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
            names = [p.stem for p in (folder / "interrupted" / "checkpoints").glob("step-*.json")]
            resumed_at.append(max((int(n.removeprefix("step-")) for n in names), default=0))
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


RECIPE = """
name: small
model: {architecture: gpt2, vocab_size: 300, n_layer: 1, n_head: 2, n_embd: 8}
data: {held_out: 0.1}
training:
  {steps: 10, batch_size: 4, sequence_length: 16, lr: 0.01, warmup: 4, evaluate_every: 5,
    evaluation_batches: 1, test_batches: 1}
arms: {coupled_adam: {optimizer: coupled_adam}}
seeds: [1]
"""
PLACES = {
    "corpus": [(comparison, "prepare_corpus")],
    "resume": [(run, "claim"), (run, "record_resumption"), (run, "cut_log"), (Checkpoints, "last")],
    "checkpoint": [(Checkpoints, "_save")],
    "model": [(run, "save_model")],
    "evaluation": [(comparison, "evaluate_run")],
    "report": [(comparison, "report")],
}
"""The functions that each of the places stands for."""


def build_in_kill(place: str, number: int) -> None:
    """Let this process kill itself before its n-th file operation inside these functions."""
    inside = 0
    left = number

    def operation(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if inside and (writes or changes):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            inside += 1
            try:
                return function(*arguments, **options)
            finally:
                inside -= 1

        return within

    for owner, name in PLACES[place]:
        setattr(owner, name, entered(getattr(owner, name)))
    sys.addaudithook(operation)


def compare(folder: Path, place: str | None = None, number: int = 0) -> int:
    """Run or continue a comparison in a process of its own; returns its exit code."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        output = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if place is not None:
            build_in_kill(place, number)
        arguments = ["compare", "--resume", "--device", "cpu", "--recipe", folder / "small.yaml"]
        arguments += ["--out", folder / "out", "--cache", folder / "cache", "--logger"]
        code = cli.main([*map(str, arguments), f"--data.text={folder.parent / 'text.txt'}"])
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def comparison_result(folder: Path) -> dict[str, Any]:
    """What must not depend on what happened to a comparison; its leftovers, which must be none."""
    out, cache = folder / "out", folder / "cache"
    runs = sorted(path.parent for path in out.glob("*/config.yaml"))
    logs = [(path / "metrics.jsonl").read_text().splitlines() for path in runs]
    report = ["results.json", "summary.csv", "table.md", "table.tex"]
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in runs]
    (corpus,) = [json.loads(path.read_text()) for path in cache.glob("*/corpus.json")]
    return {
        "corpus": corpus["digests"],
        "weights": [hashlib.sha256(content).hexdigest() for content in weights],
        "logs": [
            [
                {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
                for line in log
            ]
            for log in logs
        ],
        "evaluations": [(path / "evaluation.json").read_text() for path in runs],
        "report": [(out / "report" / name).read_text() for name in report],
        "leftovers": [str(path) for path in folder.rglob(".coupled-adam-*")],
    }


def soak_places(folder: Path, minutes: float, seed: int) -> dict[str, object]:
    """Kill comparisons at file operations in all places until the time is over."""
    chance = random.Random(seed)
    kills = dict.fromkeys(PLACES, 0)
    counts = collections.Counter[str]()
    (folder / "text.txt").write_text("\n\n".join(sorted(topics.values(), key=len)[-3:]))
    began = time.monotonic()
    expected: dict[str, Any] = {}
    Figure.savefig = lambda _, file, **__: file.write(b"blank")  # which takes most of the time
    for cycle in itertools.count():
        here = folder / str(cycle)
        here.mkdir()
        (here / "small.yaml").write_text(RECIPE)
        finished = 0
        while finished < (1 if not expected else 3):  # the report is made anew each time
            place = chance.choice([*PLACES] if not finished else ["report", "resume"])
            number = chance.randint(1, chance.choice([4, 8, 16, 32]))
            code = compare(here, place if expected else None, number)
            if code == -signal.SIGKILL:
                kills[place] += 1
            assert code in (0, -signal.SIGKILL), (code, (here / "log").read_text()[-5000:])
            finished += code == 0
            if finished:  # there is a report, whatever has happened to the next one
                counts["whole reports after kills"] += code != 0
                result = {**comparison_result(here), "leftovers": []}
                assert not expected or result == {**expected, "leftovers": []}, here
        result = comparison_result(here)
        expected = expected or result
        assert result == expected, here
        assert not result["leftovers"]
        counts["comparisons"] += 1
        shutil.rmtree(here)
        if time.monotonic() - began > 60 * minutes:
            break
    return {
        "minutes": (time.monotonic() - began) / 60,
        "seed": seed,
        "kills": kills,
        **counts,
        "all_the_same": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args()
    here = environment()
    with tempfile.TemporaryDirectory() as folder:
        if options.places:
            result = soak_places(Path(folder), options.minutes, options.seed)
        else:
            result = soak(Path(folder), options.steps, options.minutes, options.seed)
    write_atomically(options.target, json.dumps({"environment": here, **result}, indent=2))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
