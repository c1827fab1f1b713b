"""Means, deviations and t-tests over the seeds of a run, and the fits to its second moments."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.rendering.tables import fixed

SIGNIFICANCE = 0.05
"""A difference is called significant if p is below this value, the 95 % level of App. F."""


def sample_deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation, which divides by n - 1; None for fewer than two values.

    It is exactly 0 if the values differ by no more than float64 rounding.
    """
    if len(values) < 2:
        return None
    if max(values) - min(values) <= 1e-12 * max(map(abs, values)):
        return 0.0
    return float(np.std(values, ddof=1))


def shorthand(values: Sequence[float], digits: int = 3) -> str:
    """Format mean and sample standard deviation: ``0.123 (4)`` is 0.123 +- 0.004 (App. F).

    A single value, which has no deviation, is written with ``digits`` decimals, and so are values
    that are all equal. The result is a dash if there are no values or if one is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        return "–"
    mean = float(np.mean(values))
    deviation = sample_deviation(values)
    if not deviation:
        return fixed(mean, digits)
    # As text, since rounding may carry: 0.0096 becomes 0.01, with two decimals instead of three.
    digit, _, exponent = f"{deviation:.0e}".partition("e")
    if int(exponent) > 0:
        return f"{fixed(mean, 0)} ({deviation:.0f})"
    if max(abs(mean), deviation) < 1e-5:  # 3e-9 (5), which few zeros can be told from
        power = int(f"{max(abs(mean), deviation):e}".partition("e")[2])
        return f"{fixed(mean / 10.0**power, power - int(exponent))}e{power} ({digit})"
    return f"{fixed(mean, -int(exponent))} ({digit})"


def one_sided_t_test(
    values: Sequence[float], baseline: Sequence[float], better: Literal["lower", "higher"]
) -> float | None:
    """The p-value of Student's one-sided t-test that ``values`` are better (App. F).

    The test assumes equal variances. It is not possible, and the result is None, if either side has
    fewer than two values or if a value is not finite.
    """
    deviation, baseline_deviation = sample_deviation(values), sample_deviation(baseline)
    if deviation is None or baseline_deviation is None:
        return None
    if not all(map(math.isfinite, (*values, *baseline))):
        return None
    mean, baseline_mean = float(np.mean(values)), float(np.mean(baseline))
    if deviation == baseline_deviation == 0:  # without variance the difference is exact
        difference = mean - baseline_mean if better == "higher" else baseline_mean - mean
        return 0.0 if difference > 1e-12 * max(abs(mean), abs(baseline_mean)) else 1.0
    # From the moments, since ttest_ind computes its own and warns if a side has no variance.
    moments = (mean, deviation, len(values), baseline_mean, baseline_deviation, len(baseline))
    alternative: Literal["less", "greater"] = "less" if better == "lower" else "greater"
    return float(stats.ttest_ind_from_stats(*moments, alternative=alternative).pvalue)


@dataclasses.dataclass(frozen=True)
class Paired:
    """A paired t-test: the mean difference of values and baseline, and the two-sided p.

    The 95 % confidence interval reaches from ``low`` to ``high``.
    """

    difference: float
    low: float
    high: float
    p: float
    pairs: int

    @property
    def significant(self) -> bool:
        """Whether p is below :data:`SIGNIFICANCE`."""
        return self.p < SIGNIFICANCE

    @property
    def direction(self) -> Literal["lower", "higher"]:
        """Whether the values are lower or higher than the baseline's, on average."""
        return "lower" if self.difference < 0 else "higher"

    def one_sided(self, better: Literal["lower", "higher"]) -> float:
        """The p-value of the one-sided test that the values are lower, or higher."""
        if self.p == 1:  # no difference at all
            return 1.0 if self.low == self.high else 0.5
        return self.p / 2 if better == self.direction else 1 - self.p / 2


def paired_t_test(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Test whether the differences between runs of equal seeds have a mean other than 0.

    Runs with the same seed share their initialisation and the order of their batches. What both
    sides owe to the seed cancels in the difference, which the unpaired test of the paper counts as
    noise. The result is None for fewer than two common seeds, or if a value is not finite.
    """
    seeds = sorted(values.keys() & baseline.keys())
    pairs = np.array([(values[seed], baseline[seed]) for seed in seeds])
    if len(pairs) < 2 or not np.isfinite(pairs).all():
        return None
    differences = pairs[:, 0] - pairs[:, 1]
    mean, rounding = float(differences.mean()), 1e-12 * float(np.abs(pairs).max())
    if np.ptp(differences) <= rounding:  # without variance the difference is exact
        return Paired(mean, mean, mean, 0.0 if abs(mean) > rounding else 1.0, len(pairs))
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(1 - SIGNIFICANCE)
    return Paired(mean, float(interval.low), float(interval.high), float(test.pvalue), len(pairs))


def fit_proportional(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """A and R^2 of the least-squares fit y = A x, [n] each; R^2 is NaN if all y are equal."""
    a = float(x @ y / (x @ x))
    residual = float(((y - a * x) ** 2).sum())
    variation = float(((y - y.mean()) ** 2).sum())
    return a, 1 - residual / variation if variation else math.nan


@dataclasses.dataclass(frozen=True)
class SecondMomentFit:
    """E[v] = A p, of AdamW's second moments of tokens and their probabilities (Figs. 4 and 5).

    Attributes:
        A: that of the least-squares fit, which follows the few most frequent tokens.
        r_squared: R^2 of this fit.
        A_of_logarithms: that of the fit to the logarithms, which follows most tokens.
    """

    A: float
    r_squared: float
    A_of_logarithms: float


def second_moment_fit(
    probability: NDArray[np.float64], moment: NDArray[np.float64]
) -> SecondMomentFit:
    """Fit the second moments, averaged over H, to the unigram probabilities, [V] each.

    Tokens that do not occur are left out, and so are, from the logarithms, those whose moment is 0.
    """
    occurs = probability > 0
    p, v = probability[occurs], moment[occurs]
    ratios = (v / p)[v > 0]
    return SecondMomentFit(
        *fit_proportional(p, v), float(np.exp(np.log(ratios).mean())) if len(ratios) else math.nan
    )


def shown_p(p: float) -> str:
    """A p-value for a text, with two digits: ``p = 0.012``, or ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
