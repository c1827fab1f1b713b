"""How long things take, sampled in turn in one process, so that all of them see the same machine.

The machine's speed changes from second to second (other processes, clock rates), but hardly within
the two samples of a pair. What counts is therefore the ratio within pairs.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

NOISY = 0.2
"""Ratios are called noisy where their quartiles differ by more than this share of the median."""

SAMPLE_SECONDS = 5e-3
"""The least time of a sample. Of shorter steps it takes as many as fill it, and is their mean."""


class Quartiles(NamedTuple):
    """The lower quartile, the median and the upper quartile of ratios."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4)
        return cls(low, median, high)

    @property
    def noisy(self) -> bool:
        """The quartiles are further apart than :data:`NOISY` times the median."""
        return self.high - self.low > NOISY * self.median

    @property
    def remark(self) -> str:
        """The words for a table where the ratios are noisy; otherwise empty."""
        return "too noisy to tell" if self.noisy else ""


def sample_in_turn(
    samplers: Sequence[Callable[[], float]], *, least: int, most: int, seconds: float = math.inf
) -> list[tuple[float, ...]]:
    """Call the samplers in turn, round after round, until the seconds are over.

    In every second round the first two change places, so that each follows the other, and whatever
    comes last in a round, equally often. An even number of rounds, where ``least`` and ``most`` are
    even. Python's garbage collector is off meanwhile.

    Args:
        samplers: each measures something once, and returns seconds.
        least, most: the number of rounds, whatever time they take.
    """
    orders = [list(range(len(samplers))) for _ in range(2)]
    orders[1][:2] = 1, 0
    rounds: list[tuple[float, ...]] = []
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        while len(rounds) < least or (
            len(rounds) < most and (len(rounds) % 2 == 1 or time.perf_counter() < end)
        ):
            measured = {i: samplers[i]() for i in orders[len(rounds) % 2]}
            rounds.append(tuple(measured[i] for i in range(len(samplers))))
    finally:
        if collects:
            gc.enable()
    return rounds


def step_sampler(step: Callable[[], object], device: str) -> Callable[[], float]:
    """Measures the mean seconds of a step over :data:`SAMPLE_SECONDS`, or one step if it is longer.

    Takes a few steps first: one that makes the optimizer's state, others to find how many fit.
    """

    def sample(steps: int) -> float:
        start = now(device)
        for _ in range(steps):
            step()
        return (now(device) - start) / steps

    step()
    shortest = sample(1)
    for _ in range(4):
        if shortest < SAMPLE_SECONDS:
            shortest = min(shortest, sample(1))
    steps = math.ceil(SAMPLE_SECONDS / shortest)
    return lambda: sample(steps)


def now(device: str) -> float:
    """Seconds of a clock, after all that the device has been given to do is done."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
