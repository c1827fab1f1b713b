"""Timing of operations in turn in one process, so that all run under the same conditions.

A machine's speed changes from second to second (other processes, clock rates), but hardly between
the two samples of a pair. Results are therefore ratios within pairs.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

NOISY = 0.2
"""Ratios are called noisy if their quartiles differ by more than this share of the median."""

SAMPLE_SECONDS = 5e-3
"""The minimum duration of a sample; a sample of shorter steps is the mean over several."""


class Quartiles(NamedTuple):
    """The lower quartile, the median and the upper quartile of ratios."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        """Compute the quartiles of at least two values."""
        low, median, high = statistics.quantiles(values, n=4)
        return cls(low, median, high)

    @property
    def noisy(self) -> bool:
        """Whether the quartiles differ by more than :data:`NOISY` times the median."""
        return self.high - self.low > NOISY * self.median

    @property
    def remark(self) -> str:
        """A remark for the table if the ratios are noisy; otherwise an empty string."""
        return "too noisy to tell" if self.noisy else ""


def sample_in_turn(
    samplers: Sequence[Callable[[], float]], *, least: int, most: int, seconds: float = math.inf
) -> list[tuple[float, ...]]:
    """Call the samplers in turn, round after round, until ``seconds`` have passed.

    The first two samplers swap places in every second round, so that each of them runs equally
    often after the other and after the last sampler of a round. If ``least`` and ``most`` are even,
    so is the number of rounds. Python's garbage collector is disabled during the measurement.

    Args:
        samplers: functions that measure something once and return seconds.
        least, most: the minimum and maximum number of rounds; they take precedence over
            ``seconds``.

    Returns:
        For each round the seconds of every sampler, in the order of ``samplers``.
    """
    # The first two in both orders.
    orders = [list(range(len(samplers))) for _ in range(2)]
    orders[1][:2] = 1, 0
    rounds: list[tuple[float, ...]] = []
    # A collection would fall into a single sample, and take longer than a step of a small matrix.
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
    """Create a function that returns the mean seconds of a step over :data:`SAMPLE_SECONDS`.

    A single step is timed if it takes longer than that. A few steps are made in advance: one that
    creates the optimizer's state, and others to find out how many steps a sample needs.
    """

    def sample(steps: int) -> float:
        start = now(device)
        for _ in range(steps):
            step()
        return (now(device) - start) / steps

    # The shortest of a few steps, since any of them may have been interrupted.
    step()
    shortest = sample(1)
    for _ in range(4):
        if shortest < SAMPLE_SECONDS:
            shortest = min(shortest, sample(1))
    steps = math.ceil(SAMPLE_SECONDS / shortest)
    return lambda: sample(steps)


def now(device: str) -> float:
    """The time in seconds, once the device has finished all work that was submitted to it."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
