"""The memory that an optimizer needs: its state, and what a step allocates in addition."""

from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.bench.cases import Case
from coupled_adam.bench.optimizers import make_step


class Memory(NamedTuple):
    """Bytes of an optimizer's state, and the peak of the extra bytes that a step allocates."""

    state_bytes: int
    extra_bytes: int | None


def measure_memory(case: Case, name: str, device: str) -> Memory:
    """Measure an optimizer in its third step, when its state and its caches exist.

    ``extra_bytes`` is what CUDA's allocator counts, and None on other devices, which do not count;
    ``benchmarks/memory.py`` has torch's profiler count on a CPU.
    """
    embedding, params = case.parameters(device)
    optimizer, step = make_step(name, embedding, params, case.clip)
    # The first step makes the state, and the second may compile or cache what later ones use.
    for _ in range(2):
        step()
    state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    extra = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before
    return Memory(sum(map(_tensor_bytes, state)), extra)


def _tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor; a subclass counts as its inner tensors, such as 8-bit codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()
