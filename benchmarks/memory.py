"""Measure what a step on a CPU allocates beside parameters, gradients and states.

    python benchmarks/memory.py 8192x256

torch's profiler counts what torch's allocators provide, not what C code allocates by itself, such
as the sums [H] of each thread in our kernel.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from bench.cases import parse_case
from bench.optimizers import OPTIMIZERS, make_step


def peak(step: Callable[[], object]) -> int:
    """The largest sum of the bytes that one call has allocated and not yet freed."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    return max(itertools.accumulate((e["args"]["Bytes"] for e in changes), initial=0))


def third_step(shape: str, name: str) -> int:
    """The peak in the third step, when an optimizer's state and caches exist."""
    case = parse_case(shape, "float32", clip=False)
    _, step = make_step(name, *case.parameters("cpu"), clip=False)
    step()
    step()
    return peak(step)


if __name__ == "__main__":
    for shape in sys.argv[1:]:
        for name in OPTIMIZERS:
            print(f"{shape} {name}: {third_step(shape, name):,} bytes")
