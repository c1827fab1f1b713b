"""Numbers over seeds."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

SIGNIFICANCE = 0.05
"""Below this p a difference is called significant: the 95 % of App. F."""


def shorthand(values: Sequence[float], digits: int = 3) -> str:
    """Mean and sample standard deviation as ``0.123 (4)``, which is 0.123 +- 0.004 (App. F).

    A single value has no deviation: it is written alone, with ``digits`` decimals, as are values
    that are all equal. Without values, or where one is not finite, the result is a dash.
    """
    if not values or not all(map(math.isfinite, values)):
        return "–"
    mean = float(np.mean(values))
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    if deviation == 0:
        return f"{mean:.{digits}f}"
    # Rounding may carry into the next digit: 0.0096 is 0.01, two decimals and not three.
    decimals = max(0, -math.floor(math.log10(float(f"{deviation:.0e}"))))
    return f"{mean:.{decimals}f} ({round(deviation * 10**decimals)})"


def one_sided_t_test(
    values: Sequence[float], baseline: Sequence[float], better: Literal["lower", "higher"]
) -> float | None:
    """Student's p that ``values`` are better than ``baseline`` by chance alone (App. F).

    Equal variances are assumed, as Student did. Returns None with fewer than two values on either
    side, or where one is not finite: there is no test to make.
    """
    if min(len(values), len(baseline)) < 2 or not all(map(math.isfinite, (*values, *baseline))):
        return None
    if len({*values}) == 1 and len({*baseline}) == 1:  # no variance: the difference is exact
        difference = values[0] - baseline[0] if better == "higher" else baseline[0] - values[0]
        return 0.0 if difference > 0 else 1.0
    alternative: Literal["less", "greater"] = "less" if better == "lower" else "greater"
    return float(stats.ttest_ind(values, baseline, alternative=alternative).pvalue)
