"""Measure the steps of optimizers, each in pairs with a step of the baseline."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from bench.cases import Case
from bench.optimizers import BASELINE, OPTIMIZERS, candidate, make_step
from bench.results import Timed
from bench.timing import sample_in_turn, step_sampler
from torch import Tensor

_LEAST_PAIRS, _MOST_PAIRS = 6, 100


def bench(
    cases: Iterable[Case],
    optimizers: Sequence[str] = (),
    *,
    device: str = "cpu",
    seconds: float = 4.0,
) -> Iterator[Timed]:
    """Time optimizers, each in pairs with torch's fused AdamW.

    Args:
        cases: the parameters that they update.
        optimizers: names of :data:`~bench.optimizers.OPTIMIZERS` (default: all).
        device: the device of parameters, gradients and states.
        seconds: approximate duration of each measurement; at least six pairs are timed.
    """
    for case, name in itertools.product(cases, optimizers or OPTIMIZERS):
        memory = _memory(case, name, device)
        samples = _sample(case, name, device, seconds)
        yield Timed(case, name, samples, *memory, candidate(name).moved_bytes(case))


def _sample(case: Case, name: str, device: str, seconds: float) -> list[tuple[float, float, float]]:
    """Seconds of a step, of a step of the baseline, and of a copy of the matrix, by round."""
    embedding, params = case.parameters(device)
    _, step = make_step(name, embedding, params, case.clip)
    _, baseline = make_step(BASELINE, embedding, params, case.clip)
    source, target = embedding.detach(), torch.empty_like(embedding)
    samplers = [
        step_sampler(step, device),
        step_sampler(baseline, device),
        step_sampler(lambda: target.copy_(source), device),
    ]
    rounds = sample_in_turn(samplers, least=_LEAST_PAIRS, most=_MOST_PAIRS, seconds=seconds)
    return [(step, baseline, copy) for step, baseline, copy in rounds]


def _memory(case: Case, name: str, device: str) -> tuple[int, int | None]:
    """Bytes of an optimizer's state, and the peak of what its third step allocates in addition.

    That is what CUDA's allocator counts, and None on other devices, which do not count;
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
    return sum(map(_tensor_bytes, state)), extra


def _tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor; a subclass counts as its inner tensors, such as 8-bit codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()
