"""The memory that an optimizer needs: its state, and what a step allocates in addition."""

import itertools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.bench.cases import Case
from coupled_adam.bench.optimizers import make_step


class Memory(NamedTuple):
    """Bytes of an optimizer's state, and the peak of the extra bytes that a step allocates."""

    state_bytes: int
    extra_bytes: int | None


@contextmanager
def memory_meter(device: str) -> Iterator[Callable[[Case, str], Memory]]:
    """Yield a function that measures an optimizer, given by its name, in a case.

    On a CPU the function measures in another process and discards its output: torch's profiler
    writes to the terminal, and it should not run in a process that is timed. The process is
    started by multiprocessing's "spawn" method, so a script that uses this function needs
    ``if __name__ == "__main__":``.
    """
    if device != "cpu":
        yield lambda case, name: measure_memory(case, name, device)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_silence) as process:

        def measure(case: Case, name: str) -> Memory:
            try:
                return process.submit(measure_memory, case, name, device).result()
            except BrokenProcessPool:  # killed, such as by a system that has no more memory
                raise MemoryError(f"the process that measures {name} has ended early") from None

        yield measure


def measure_memory(case: Case, name: str, device: str) -> Memory:
    """Measure an optimizer in its third step, when its state and its caches exist.

    ``extra_bytes`` counts the memory that torch's allocators provide, and not what C code
    allocates by itself, such as the sums [H] of each thread in our kernel. It is None on devices
    that do not count allocations.
    """
    embedding, others = case.parameters(device)
    optimizer, step = make_step(name, embedding, others, case.clip)
    for _ in range(2):
        step()
    state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    extra = {"cpu": _profiled_peak, "cuda": _cuda_peak}.get(device)
    return Memory(sum(map(_tensor_bytes, state)), None if extra is None else extra(step))


def _silence() -> None:
    """Discard all output of this process, including that of C++ code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for terminal in (1, 2):
        os.dup2(nowhere, terminal)


def _cuda_peak(step: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    step()
    most: int = torch.cuda.max_memory_allocated()
    return most - before


def _profiled_peak(step: Callable[[], object]) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    peak: int = max(itertools.accumulate((e["args"]["Bytes"] for e in changes), initial=0))
    return peak


def _tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor; a subclass counts as its inner tensors, such as 8-bit codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()
