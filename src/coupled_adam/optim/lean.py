"""LEAN's constants, and the rate that follows from the number of steps; for torch and for JAX."""

import math
from numbers import Integral
from typing import Any

LOG_LIMIT = math.log(1e4)  # how far a column may be from the others in rho
LARGEST_STEP = 30.0  # of a row, relative to the rate
LEAN_LR_FACTOR = 2.0
"""LEAN's learning rate where nothing says it, relative to the optimizer's; for long trainings."""

LEAN: dict[str, Any] = {
    "betas": (0.0, 0.99),
    "row_exponent": 0.75,
    "zero_sum": True,
    "lr_factor": None,
}
"""The variant that keeps no matrix of state: ``CoupledAdamW(model, embeddings="lean")``.

Its state of an embedding matrix V x H is V + 2 H numbers, where AdamW's is 2 V x H. It is not in
arXiv 2502.08441; docs/study/optimizers.md compares it with AdamW at tuned betas. Its ``lr_factor``
is chosen by ``steps=``, the number of optimizer steps of the training (:func:`lean_lr_factor`), or
is 2 without it; ``embeddings=LEAN | {"lr_factor": 4}`` sets it.
"""

ADAMW: dict[str, Any] = {"coupled": False, "betas": (0.0, 0.999), "lr_factor": None}
"""AdamW with a rate and betas of their own for the embeddings: ``embeddings="adamw"``.

It is what to compare LEAN with, and takes the same ``lr_factor``, by ``steps=`` or without it.
"""


def lean_lr_factor(steps: int, *, beside_muon: bool = False) -> float:
    """LEAN's learning rate in a training of so many steps, relative to the other parameters'.

    It is 30,000 / steps, and 15,000 / steps where Muon updates the hidden matrices, at least 1 and
    at most 16. docs/study/rate.md has the trainings that this was read from, and how far it is from
    the best factor of others.

    Raises:
        ValueError: if ``steps`` is not a positive whole number.
    """
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps <= 0:
        raise ValueError(
            f"Invalid steps: {steps!r} (a positive whole number: the optimizer steps of the whole "
            "training)"
        )
    return min(16.0, max(1.0, (15_000 if beside_muon else 30_000) / int(steps)))
