"""The first four minutes on a GPU: is everything right there, and how fast is it?

    PYTHONPATH=src python benchmarks/gpu.py                      # or: make gpu
    PYTHONPATH=src python benchmarks/gpu.py --parts steps host   # only these

It takes torch, Triton and numpy, and pytest for the tests; no other package, no installed one of
ours, no network. The parts, in this order: ``tests`` that need a GPU, on several workers; ``steps``
of a matrix, in pairs with torch's fused AdamW, beside the least that a step can do and beside what
``torch.compile`` makes of others; ``host``, the same of a matrix so small that only the host's time
counts; ``training`` steps of a GPT-2. A part that fails leaves the others alone, and what is known
so far is written after each measurement. ``benchmarks/speed_table.py`` makes the page from the
file.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.cases import parse_case
from bench.machine import describe_machine
from bench.optimizers import ON_A_GPU
from bench.steps import bench
from bench.timing import Quartiles, now, sample_in_turn
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.files import write_atomically

ROOT = Path(__file__).parent.parent
TESTS = ("tests/optim/test_cuda.py", "tests/optim/test_gpu.py")
TEST_SECONDS = 120
BRIEFLY = ("LEAN", "Coupled Adam", "e - c g")
IN_FLOAT32 = tuple(name for name in ON_A_GPU if "rounded" not in name)
STEPS = (
    ("50304x768", "float32", IN_FLOAT32),
    ("128256x4096", "float32", IN_FLOAT32),
    ("50304x768", "bfloat16", ON_A_GPU),
    ("128256x4096", "bfloat16", ON_A_GPU),
    ("256000x2304", "float32", BRIEFLY),
    ("262144x8192", "bfloat16", BRIEFLY),
    ("8192x512", "float32", BRIEFLY),
)


class Share:
    """A pytest plugin: a worker's share of the tests, and what became of each."""

    def __init__(self, worker: int, workers: int) -> None:
        self.worker, self.workers = worker, workers
        self.end = time.monotonic() + TEST_SECONDS
        self.results: list[dict[str, Any]] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self.worker :: self.workers]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            result = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.failed:
                result["problem"] = str(report.longrepr)
            self.results.append(result)

    def pytest_runtest_setup(self, item: Any) -> None:
        if time.monotonic() > self.end:
            raise TimeoutError(f"not tried, as the tests took more than {TEST_SECONDS} s")


def run_share(worker: int, workers: int) -> list[dict[str, Any]]:
    """Run a worker's share of the tests, in a process of its own."""
    import pytest

    share = Share(worker, workers)
    # The project's conftest.py needs packages that these tests do not.
    options = ["-q", "--no-header", "--no-summary", "--noconftest", "-p", "no:cacheprovider"]
    tests = [str(ROOT / name) for name in TESTS]
    status = pytest.main([*options, "--rootdir", str(ROOT), *tests], plugins=[share])
    if not share.results and status:
        share.results.append(
            {"name": f"worker {worker}", "outcome": "failed", "problem": f"pytest: {status!s}"}
        )
    return share.results


def tests(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each test: what became of it, how long it took, and what went wrong."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, context) as pool:
        shares = [pool.submit(run_share, i, options.workers) for i in range(options.workers)]
        for share in concurrent.futures.as_completed(shares):
            yield from share.result()


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of a matrix, by case and optimizer."""
    for shape, dtype, names in [(options.shape, "float32", IN_FLOAT32)] if options.shape else STEPS:
        yield from measured(shape, dtype, tuple(names), options)


def host(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of a matrix whose update takes the device less time than the host."""
    yield from measured("256x64", "float32", BRIEFLY, options)


def measured(
    shape: str, dtype: str, names: tuple[str, ...], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Time optimizers with a matrix; an optimizer that fails leaves the others alone."""
    case = parse_case(shape, dtype, clip=False)
    for name in names:
        try:
            (timed,) = bench([case], [name], device=options.device, seconds=options.seconds)
        except Exception as error:  # such as too little memory, or a compiler's
            print(f"{case.label}, {name}: {type(error).__name__}: {error}", flush=True)
            yield {"case": case.label, "optimizer": name, "problem": traceback.format_exc()}
            continue
        ratio = timed.ratio
        remarks = [
            f"{case.label}, {name}: {timed.seconds * 1e3:.3f} ms, {ratio.median:.2f} "
            f"({ratio.low:.2f}–{ratio.high:.2f}) of AdamW fused",
            f"{timed.launches} launches" if timed.launches is not None else "",
            f"{(timed.extra_bytes or 0) / 1e6:.1f} MB beside the state",
            ratio.remark,
        ]
        print(", ".join(filter(None, remarks)), flush=True)
        yield timed.to_dict()


class GPT(nn.Module):
    """A GPT-2 with tied embeddings, of torch's modules: 124M parameters by default."""

    def __init__(self, rows: int, columns: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(rows, columns), nn.Embedding(length, columns)
        nn.init.normal_(self.tokens.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            columns,
            max(1, columns // 64),
            4 * columns,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(columns), enable_nested_tensor=False
        )
        self.head = nn.Linear(columns, rows, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy of all tokens [batch, length + 1] but the first."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        places = torch.arange(length, device=ids.device)
        hidden = self.tokens(inputs) + self.positions(places)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def trainer(options: argparse.Namespace, name: str) -> Callable[[], float]:
    """A training step, in bfloat16 autocast and clipped, that returns its seconds."""
    device, (batch, length) = options.device, (options.batch_size, options.length)
    case = parse_case(options.shape or STEPS[0][0], "float32", clip=True)
    torch.manual_seed(0)
    model = GPT(case.rows, case.columns, options.layers, length).to(device)
    optimizer: torch.optim.Optimizer
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        groups = param_groups(model, name, vocab_size=case.rows)
        optimizer = CoupledAdamW(groups, lr=1e-4, fused=True)

    def train() -> float:
        ids = torch.randint(case.rows, (batch, length + 1), device=device)
        start = now(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return now(device) - start

    for _ in range(3):
        train()
    return train


def training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole training steps on random tokens, in pairs with AdamW's."""
    for name in ("coupled", "lean"):
        pair = [trainer(options, name), trainer(options, "AdamW")]
        rounds = sample_in_turn(pair, least=6, most=100, seconds=options.seconds * 10)
        ratio = Quartiles.of(ours / theirs for ours, theirs in rounds)
        print(f"training, {name}: {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) of AdamW")
        yield {"optimizer": name, "ratio": ratio, "samples": rounds}


PARTS = {"tests": tests, "steps": steps, "host": host, "training": training}


def environment() -> dict[str, Any]:
    """The software and hardware."""
    packages = {"torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        packages["triton"] = importlib.metadata.version("triton")  # imported by the first step only
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "python": platform.python_version(),
        "packages": packages,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu/<the GPU>.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", metavar="VxH", help="of the only matrix of steps and training")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each optimizer and case")
    parser.add_argument("--workers", type=int, default=max(1, min(7, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--layers", type=int, default=12, help="of the model that is trained")
    parser.add_argument("--length", type=int, default=1024, help="of its sequences")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a training step")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU, and torch finds none here", file=sys.stderr)
        return 2
    machine = describe_machine(options.device)
    print(f"{machine.device}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("\n".join(machine.notes), flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", machine.device.lower())
    target = options.out or ROOT / "benchmarks" / "results" / "gpu" / f"{name}.json"
    content: dict[str, Any] = {"environment": environment(), "machine": machine.to_dict()}
    problems = []
    for part in [part for part in PARTS if part in options.parts]:
        content[part], start = [], time.monotonic()
        try:
            for result in PARTS[part](options):
                content[part].append(result)
                write_atomically(target, json.dumps(content))
                if "problem" in result:
                    problems.append(result)
        except Exception:  # the next part may work
            problems.append({"name": part, "problem": traceback.format_exc()})
            print(problems[-1]["problem"], flush=True)
        outcomes = [result.get("outcome") for result in content[part]]
        counted = [
            f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(filter(None, outcomes))
        ]
        print(", ".join([f"{part}: {time.monotonic() - start:.0f} s", *counted]), flush=True)
    for problem in problems:
        print(f"FAILED: {problem.get('name') or problem['optimizer']}\n{problem['problem']}")
    return int(bool(problems))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main())
