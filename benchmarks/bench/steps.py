"""Measure the steps of optimizers, each in pairs with a step of the baseline."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from bench.cases import Case
from bench.optimizers import BASELINE, OPTIMIZERS, candidate, make_step
from bench.results import Timed
from bench.timing import sample_in_turn, step_sampler
from torch import Tensor, nn

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
        embedding, params = case.parameters(device)
        optimizer, step = make_step(name, embedding, params, case.clip)
        # The first makes the state, and the next ones may compile or cache what later ones use.
        for _ in range(3):
            step()
        state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
        extra_bytes, launches = _of_cuda(step) if device == "cuda" else (None, None)
        samples = _sample(case, embedding, params, step, device, seconds)
        yield Timed(
            case,
            name,
            samples,
            sum(map(_tensor_bytes, state)),
            extra_bytes,
            candidate(name).moved_bytes(case),
            launches,
        )


def _sample(
    case: Case,
    embedding: nn.Parameter,
    params: list[nn.Parameter],
    step: Callable[[], object],
    device: str,
    seconds: float,
) -> list[tuple[float, float, float]]:
    """Seconds of a step, of a step of the baseline, and of a copy of the matrix, by round."""
    _, baseline = make_step(BASELINE, embedding, params, case.clip)
    source, target = embedding.detach(), torch.empty_like(embedding)
    samplers = [
        step_sampler(step, device),
        step_sampler(baseline, device),
        step_sampler(lambda: target.copy_(source), device),
    ]
    rounds = sample_in_turn(samplers, least=_LEAST_PAIRS, most=_MOST_PAIRS, seconds=seconds)
    return [(step, baseline, copy) for step, baseline, copy in rounds]


def _of_cuda(step: Callable[[], object]) -> tuple[int, int]:
    """The peak of what a step allocates, in bytes, and how often it launches something.

    The allocator counts the first; on a CPU ``benchmarks/memory.py`` has torch's profiler do that.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra_bytes = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return extra_bytes, sum(event.device_type == on_gpu for event in profile.events())


def _tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor; a subclass counts as its inner tensors, such as 8-bit codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_tensor_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()
