"""Time and memory of the questions about tokens, of a repair, and of a callback's call.

    python benchmarks/token_questions.py benchmarks/results/token_questions.json [QUESTION ...]

Each question is asked in a process of its own with one thread, of matrices in safetensors files
that are written in pieces. CPU seconds depend little on other work on the machine.
The peak memory is that of the whole process; of it, the pages of the files, which the system
can take back, are given apart. Questions named on the command line are asked again; the results of
the others are kept.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from coupled_adam.files import write_atomically
from coupled_adam.lab.training.environment import environment

CASES = {  # rows, columns
    "neighbours": (256000, 4096),
    "undertrained": (64000, 4096),
    "repair": (64000, 4096),
    "compare": (64000, 4096),
    "callback": (50304, 768),
    "callback tiny": (4096, 64),
}
UNUSED = 500  # rows at the end that no text contains, and that resemble each other

SETUP = """
import json, os, resource, sys, time
from pathlib import Path
import numpy as np, torch
from coupled_adam.embeddings import analyze, load_embeddings
from coupled_adam.embeddings.changes import compare
from coupled_adam.embeddings.monitor import Monitor
from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.repair import repair_model
from coupled_adam.embeddings.undertrained import undertrained

question, folder, unused = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def pages(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

def matrix(name):
    return load_embeddings(folder / name)[0].matrix

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rows, columns = first.shape
        self.head = torch.nn.Linear(columns, rows, bias=False)
        self.head.weight = torch.nn.Parameter(first.float())
    def get_output_embeddings(self):
        return self.head
    def get_input_embeddings(self):
        return self.head
    def forward(self, x):
        return self.head(x)

first = matrix("first")
is_unused = np.arange(len(first)) >= len(first) - unused
if question.startswith("callback"):
    model, monitor = Model(), Monitor(1)
    hidden = torch.randn(4096, first.shape[1])
    def ask():
        with torch.no_grad():
            monitor.watch(model, 1)
            model(hidden)
            monitor.measure(model, True)
elif question == "undertrained":
    def ask():
        assert undertrained(first, is_unused, ~is_unused).alike is not None
elif question == "neighbours":
    def ask():
        nearest(first, [4, 5, 6, 7, 8], centered=True)  # 3 is dead
elif question == "compare":
    second = matrix("second")
    def ask():
        assert 0 < compare(first, second).cka < 1
elif question == "repair":
    def ask():
        (report,) = repair_model(folder / "first", folder / "out")
        assert [*report.rows] == [3]
undertrained(torch.randn(9, 3), np.arange(9) > 5, np.arange(9) < 6)  # load what is loaded once
analyze(torch.randn(9, 3))
extra = 0.0
if question.startswith("callback"):  # without the logits themselves, which training needs anyway
    ask()
    start = time.process_time()
    with torch.no_grad():
        model(hidden)
    extra = time.process_time() - start
start, wall = time.process_time(), time.perf_counter()
ask()
result = {
    "cpu_seconds": time.process_time() - start - extra,
    "seconds": time.perf_counter() - wall,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    "of_files_gb_at_the_end": pages("RssFile") / 1e9,
}
print(json.dumps(result))
"""


def write(folder: Path, rows: int, columns: int, seed: int) -> None:
    """A tied model without layers: healthy rows, a dead one, and some that were never trained."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True})
    )
    shape = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]}
    header = json.dumps({"transformer.wte.weight": shape}).encode()
    header += b" " * (-len(header) % 8)
    random = torch.Generator().manual_seed(seed)
    block = torch.randn(4096, columns, generator=random) * 0.02 + 0.005
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, rows, 4096):
            piece = block[: rows - start].roll(start // 4096, 1)  # other rows, at little cost
            piece[max(rows - UNUSED - start, 0) :] *= 0.05
            if start == 0:
                piece[3] = 0
            file.write(piece.bfloat16().view(torch.uint8).numpy().tobytes())


def main(target: Path, questions: list[str]) -> None:
    content = json.loads(target.read_text()) if target.exists() else {"results": {}}
    for question in questions or CASES:
        rows, columns = CASES[question]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(folder / "first", rows, columns, 0)
            if question == "compare":
                write(folder / "second", rows, columns, 1)
            command = [sys.executable, "-c", SETUP, question, name, str(UNUSED)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(done.stderr)
        result = {"rows": rows, "columns": columns, **json.loads(done.stdout)}
        content["results"][question] = {**result, "environment": environment()}
        print(question, result, flush=True)
        write_atomically(target, json.dumps(content, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
