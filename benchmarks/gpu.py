"""All that is to be found out on a GPU, in at most ten minutes: is it right, and how fast?

    python benchmarks/gpu.py benchmarks/results/bench/h200.json       # or: make gpu

Runs tests/optim/test_cuda.py; measures the two passes over a matrix in bytes per second, against a
copy; whole steps in pairs with torch's fused AdamW, with what was expected of them; their launches
and memory; then training steps of the recipe ``124M-5B``, in pairs with AdamW. What was measured so
far is written after each part. ``benchmarks/speed_table.py`` makes the page's table from the file.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coupled_adam import CoupledAdamW, bench
from coupled_adam.bench import Case
from coupled_adam.bench.optimizers import make_step
from coupled_adam.bench.timing import sample_in_turn, step_sampler
from coupled_adam.bench.training import training_speed
from coupled_adam.files import write_atomically
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training.environment import environment

ROOT = Path(__file__).parent.parent
TESTS = "tests/optim/test_cuda.py"
OPTIMIZERS = ("CoupledAdamW", "AdamW foreach")


def expected(case: Case) -> float | None:
    """The expected upper bound of the time of CoupledAdamW's step, relative to fused AdamW's.

    It follows from the number of launches and from the bytes that are moved: 6 matrices compared
    with AdamW's 7, or with 10 if AdamW's gradients are clipped, since the norm reads the gradient
    once more, and scaling reads and writes it.
    """
    if case.dtype != "float32":
        return None
    if case.clip:
        return 0.75
    return 0.86 if case.matrix_bytes > 2**30 else 0.90


def run_tests() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([*failures, lines[-1] if lines else done.stderr]))
    return {"returncode": done.returncode, "summary": lines[-1:], "failures": failures}


def passes(case: Case, device: str, seconds: float) -> dict[str, Any]:
    """Measure GB/s of the sums (1 matrix is read), the update (3 read, 2 written), and a copy."""
    embedding, _ = case.parameters(device)
    optimizer = CoupledAdamW([embedding], lr=1e-4, coupled=True)
    optimizer.step()
    ((update,), _) = optimizer._collect()
    update.t = 2.0
    update.measure(update_moment=False)
    source, target = embedding.detach(), torch.empty_like(embedding)

    def apply() -> None:
        update.moment_updated = False
        update.kernel.apply(update)

    samplers = [
        step_sampler(lambda: update.measure(update_moment=False), device),
        step_sampler(apply, device),
        step_sampler(lambda: target.copy_(source), device),
    ]
    rounds = sample_in_turn(samplers, least=6, most=100, seconds=seconds)
    found: dict[str, Any] = {"case": dataclasses.asdict(case)}
    for name, matrices, times in zip(("sums", "update", "copy"), (1, 5, 2), zip(*rounds)):
        found[name] = matrices * case.matrix_bytes / sorted(times)[len(times) // 2] / 1e9
    print(
        f"{case.label}: sums {found['sums']:,.0f} GB/s, update {found['update']:,.0f} GB/s, "
        f"copy {found['copy']:,.0f} GB/s"
    )
    return found


def launches(case: Case, name: str) -> int:
    """Count a step's launches on the GPU: kernels, and operations that set or copy memory."""
    embedding, others = case.parameters("cuda")
    _, step = make_step(name, embedding, others, case.clip)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in profile.events())


def steps(cases: list[Case], device: str, seconds: float) -> list[dict[str, Any]]:
    results = []
    for timed in bench.bench(cases, OPTIMIZERS, device=device, seconds=seconds):
        case, ratio = timed.case, timed.ratio
        most = expected(case) if timed.optimizer == OPTIMIZERS[0] else None
        count = launches(case, timed.optimizer) if device == "cuda" else None
        parts = [
            f"{case.label}, {timed.optimizer}: {ratio.median:.2f} "
            f"({ratio.low:.2f}–{ratio.high:.2f}) of AdamW fused",
            f"expected at most {most:.2f}" if most is not None else "",
            f"{count} launches" if count is not None else "",
            f"{(timed.extra_bytes or 0) / 1e6:.1f} MB beside the state",
            ratio.remark,
        ]
        print(", ".join(part for part in parts if part), flush=True)
        results.append({**timed.to_dict(), "expected": most, "launches": count})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", default=["50304x768", "128256x4096"])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each optimizer and case")
    parser.add_argument("--recipe", default="124M-5B")
    parser.add_argument("--steps", type=int, default=200, help="of training, with each optimizer")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences in such a step")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU, and torch finds none here", file=sys.stderr)
        return 2
    here, machine = environment(), bench.describe_machine(device)
    print(f"{machine.device}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("\n".join(machine.notes), flush=True)
    cases = [
        bench.parse_case(shape, dtype, clip)
        for shape in options.shapes
        for dtype in ("float32", "bfloat16")
        for clip in (False, True)
    ]
    bench.check_memory(cases, device)
    recipe = override(load_recipe(options.recipe), {"training.batch_size": options.batch_size})
    content: dict[str, Any] = {"environment": here, "machine": machine.to_dict()}
    parts: dict[str, Callable[[], Any]] = {
        "tests": run_tests,
        "passes": lambda: [passes(x, device, options.seconds) for x in cases if not x.clip],
        "results": lambda: steps(cases, device, options.seconds),
        "training": lambda: training_speed(recipe, device=device, steps=options.steps),
    }
    for name, part in parts.items():
        found = part()
        if name == "training":
            print(found.summary)
            found = found.to_dict()
        content[name] = found
        write_atomically(options.target, json.dumps(content))
    return int(content["tests"]["returncode"] != 0)


if __name__ == "__main__":
    sys.exit(main())
