"""The optimizers that are timed: this package's and torch's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from bench.cases import Case
from bench.peers import Ember, PlainUpdate
from torch import nn
from torch.optim import Optimizer

from coupled_adam import LEAN, CoupledAdamW

BASELINE = "AdamW fused"
"""The optimizer that every other one is compared with: torch's fastest AdamW."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An optimizer that can be timed.

    Attributes:
        make: creates the optimizer of an embedding matrix, other parameters, and a gradient norm to
            clip to, which only :class:`~coupled_adam.CoupledAdamW` does in its step.
        matrices_moved: the least number of [V, H] matrices that a step has to read from memory or
            write to it; None if it is not known. AdamW reads p, g, m, v and writes p, m, v, which
            makes 7. Coupled Adam reads g and m and writes m while it sums the squares of g, then
            reads m and p and writes p, which makes 6. LEAN reads g and p, and writes p, which makes
            3, or 5 with momentum. Vectors of length H and V are not counted.
        compiled: whether ``torch.compile`` compiles the step.
    """

    make: Callable[[nn.Parameter, list[nn.Parameter], float | None], Optimizer]
    matrices_moved: int | None = None
    compiled: bool = False

    def moved_bytes(self, case: Case) -> int | None:
        """Bytes of the matrices moved; None if unknown, with other parameters, or with clipping."""
        if self.matrices_moved is None or case.others or case.clip:
            return None
        return self.matrices_moved * case.matrix_bytes


def coupled(**options: Any) -> Candidate:
    """CoupledAdamW with these options; only the embedding matrix is coupled."""

    def make(embedding: nn.Parameter, params: list[nn.Parameter], clip: float | None) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": [embedding], "coupled": True}]
        if params:
            groups.append({"params": params})
        return CoupledAdamW(groups, lr=1e-4, **options)

    is_lean = "row_exponent" in options or "zero_sum" in options
    has_momentum = options.get("betas", (0.9, 0.999))[0] != 0
    return Candidate(make, matrices_moved=(3 + 2 * has_momentum) if is_lean else 6)


def uncoupled(
    cls: Any, matrices_moved: int | None = None, compiled: bool = False, **options: Any
) -> Candidate:
    """Any other optimizer class with these options."""
    return Candidate(
        lambda embedding, params, _: cls([embedding, *params], lr=1e-4, **options),
        matrices_moved,
        compiled,
    )


# The learning rate makes no difference for the time of a step.
_LEAN = {key: LEAN[key] for key in LEAN if key != "lr_factor"}

OPTIMIZERS = {
    "CoupledAdamW": coupled(),
    "CoupledAdamW fused": coupled(fused=True),
    "CoupledAdamW a=0.5, zero-sum": coupled(row_exponent=0.5, zero_sum=True),
    "CoupledAdamW LEAN": coupled(**_LEAN),
    "Ember": uncoupled(Ember),
    "e - c g": uncoupled(PlainUpdate, matrices_moved=3),
    "AdamW": uncoupled(torch.optim.AdamW, foreach=False),
    "AdamW foreach": uncoupled(torch.optim.AdamW, foreach=True),
}
"""The optimizers by name. To time another one, add an entry ``coupled(option=value)``."""

ON_A_GPU = {
    "LEAN": OPTIMIZERS["CoupledAdamW LEAN"],
    "LEAN, momentum": coupled(**{**_LEAN, "betas": (0.9, 0.999)}),
    "LEAN, rounded stochastically": coupled(**_LEAN, stochastic_rounding=True),
    "Coupled Adam": OPTIMIZERS["CoupledAdamW fused"],
    "e - c g": OPTIMIZERS["e - c g"],
    "AdamW compiled": uncoupled(torch.optim.AdamW, 7, compiled=True, capturable=True),
    "Ember compiled": uncoupled(Ember, compiled=True, capturable=True),
    "Ember": OPTIMIZERS["Ember"],
    "LEAN, fused=False": coupled(**_LEAN, fused=False),
}
"""Those that ``benchmarks/gpu.py`` times, the rounded one in bfloat16; the last is what runs where
there is no Triton."""


def candidate(name: str) -> Candidate:
    """The optimizer of that name, or the baseline."""
    if name == BASELINE:
        return uncoupled(torch.optim.AdamW, matrices_moved=7, fused=True)
    return {**ON_A_GPU, **OPTIMIZERS}[name]


def make_step(
    name: str, embedding: nn.Parameter, params: list[nn.Parameter], clip: bool
) -> tuple[Optimizer, Callable[[], object]]:
    """Create an optimizer and its step function; with ``clip`` it also clips to a norm of 1."""
    optimizer = candidate(name).make(embedding, params, 1.0 if clip else None)
    if candidate(name).compiled:
        torch.compiler.reset()  # each optimizer is compiled anew, and only so many may be
        return optimizer, torch.compile(optimizer.step)
    if not clip:
        return optimizer, optimizer.step

    # As a training loop does.
    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_([embedding, *params], 1.0)
        optimizer.step()

    return optimizer, clip_and_step
