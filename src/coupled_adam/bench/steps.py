"""Measure the steps of optimizers, each in pairs with a step of the baseline."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from coupled_adam.bench.cases import Case
from coupled_adam.bench.memory import measure_memory
from coupled_adam.bench.optimizers import BASELINE, OPTIMIZERS, candidate, make_step
from coupled_adam.bench.results import Timed
from coupled_adam.bench.timing import sample_in_turn, step_sampler

_LEAST_PAIRS, _MOST_PAIRS = 6, 100


def bench(
    cases: Iterable[Case],
    optimizers: Sequence[str] = (),
    *,
    device: str = "cpu",
    seconds: float = 4.0,
) -> Iterator[Timed]:
    """Time optimizers, each in pairs with :data:`~coupled_adam.bench.BASELINE`.

    Args:
        cases: the parameters that they update.
        optimizers: names of :data:`~coupled_adam.bench.OPTIMIZERS` (default: all).
        device: the device of parameters, gradients and states.
        seconds: approximate duration of each measurement; at least six pairs are timed.
    """
    for case, name in itertools.product(cases, optimizers or OPTIMIZERS):
        memory = measure_memory(case, name, device)
        yield Timed(
            case,
            name,
            _sample(case, name, device, seconds),
            memory.state_bytes,
            memory.extra_bytes,
            candidate(name).moved_bytes(case),
        )


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
