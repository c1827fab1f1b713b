"""LEAN's constants, and the embeddings' learning rate; for torch and for JAX."""

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

LOG_LIMIT = math.log(1e4)  # how far a column may be from the others in rho
LARGEST_STEP = 30.0  # of a row, relative to the rate

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


def check_momentum(beta1: float, beta2: float, row_exponent: float, *, is_bfloat16: bool) -> None:
    """Raise ValueError if LEAN's momentum would grow where a row has no gradient any more.

    It moves by m_i / r_i^(a/2), whose numerator shrinks by beta1 in a step, and the denominator by
    beta2^(a/2). In bfloat16 the numerator only shrinks if a step changes it by half a unit of its
    last place or more.
    """
    most = beta2 ** (row_exponent / 2)
    bound = f"below beta2 ** (row_exponent / 2) = {most:.4g}"
    if is_bfloat16 and 1 - beta1 < 2**-8:
        bound = "at most 0.996, or bfloat16 would round the momentum to what it was"
    elif not row_exponent or beta1 == 0 or beta1 < most:
        return
    raise ValueError(
        f"Invalid betas: ({beta1}, {beta2}) with {row_exponent=}: a token without gradients would "
        f"move faster and faster (beta1 must be {bound})"
    )


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


class Rate(NamedTuple):
    """The embeddings' learning rate, relative to the other parameters', and what chose it.

    A group has the two as ``initial_lr_factor`` and ``lr_factor_from``, also in checkpoints. They
    are ``"given"``, LEAN's ``"default"`` for long trainings, or from ``"steps=10000"``, to which
    ``" beside Muon"`` is added where that counts.
    """

    factor: float
    source: str

    @classmethod
    def of(
        cls, lr_factor: float | None, steps: int | None = None, *, beside_muon: bool = False
    ) -> "Rate":
        """The rate for what a user says: a factor, the number of steps, or neither."""
        if steps is not None:
            factor = lean_lr_factor(steps, beside_muon=beside_muon)
            return cls(factor, f"steps={int(steps)}" + " beside Muon" * beside_muon)
        return cls(2.0, "default") if lr_factor is None else cls(lr_factor, "given")

    @classmethod
    def in_group(cls, group: Mapping[str, Any]) -> "Rate":
        """The rate that a param group was built with."""
        return cls(group["initial_lr_factor"], group.get("lr_factor_from", ""))

    @property
    def steps(self) -> int | None:
        """The number of steps that chose it; None if something else did."""
        number = self.source.removeprefix("steps=").partition(" ")[0]
        return int(number) if self.source.startswith("steps=") else None

    def with_steps(self, steps: int) -> "Rate":
        """What another number of steps would have chosen."""
        return Rate.of(None, steps, beside_muon=self.source.endswith("Muon"))

    def __str__(self) -> str:
        """As ``3 times the others', by steps=10000``."""
        return f"{self.factor:.3g} times the others'" + f", by {self.source}" * bool(self.source)
