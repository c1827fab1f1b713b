"""Numbers over seeds."""

import math
from collections.abc import Sequence

import numpy as np


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
