"""The optimizers that are timed: ours, torch's, and those of other packages."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from coupled_adam import CoupledAdamW
from coupled_adam.bench.cases import Case

BASELINE = "AdamW fused"
"""What every optimizer is paired with: torch's fastest AdamW."""

Maker = Callable[[nn.Parameter, list[nn.Parameter], float | None], Optimizer]
"""Makes an optimizer for an embedding matrix, other parameters, and a norm to clip to.

Only :class:`~coupled_adam.CoupledAdamW` clips in its step; for others the norm is ignored here,
and :func:`make_step` puts ``clip_grad_norm_`` before the step.
"""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An optimizer that can be timed.

    Attributes:
        make: makes it.
        matrices_moved: how many matrices [V, H] a step has to read from memory or write to it, at
            least; None where that is not known. AdamW reads p, g, m, v and writes p, m, v: 7.
            Coupled Adam reads g and m and writes m while it sums the squares of g, then reads m
            and p and writes p: 6. The step's other vectors, [H], are not counted.
    """

    make: Maker
    matrices_moved: int | None = None

    def moved_bytes(self, case: Case) -> int | None:
        """``matrices_moved`` times the matrix's size; None with other parameters or clipping."""
        if self.matrices_moved is None or case.others or case.clip:
            return None
        return self.matrices_moved * case.matrix_bytes


def coupled(**options: Any) -> Candidate:
    """CoupledAdamW with these options, the embedding matrix coupled and nothing else."""

    def make(embedding: nn.Parameter, others: list[nn.Parameter], clip: float | None) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": [embedding], "coupled": True}]
        if others:
            groups.append({"params": others})
        return CoupledAdamW(groups, lr=1e-4, max_grad_norm=clip, **options)

    return Candidate(make, matrices_moved=6)


def uncoupled(cls: Any, matrices_moved: int | None = None, **options: Any) -> Candidate:
    """Any other optimizer class with these options."""
    return Candidate(
        lambda embedding, others, _: cls([embedding, *others], lr=1e-4, **options), matrices_moved
    )


def optimizers_here() -> dict[str, Candidate]:
    """The optimizers that can be timed here, by name: packages that are not installed are left out.

    A variant of ours is one more entry: ``coupled(option=value)``.
    """
    found = {
        "CoupledAdamW": coupled(),
        "CoupledAdamW fused": coupled(fused=True),
        "AdamW": uncoupled(torch.optim.AdamW, foreach=False),
        "AdamW foreach": uncoupled(torch.optim.AdamW, foreach=True),
        "AdamW averaged": uncoupled(AveragedAdamW),
    }
    if importlib.util.find_spec("optimi"):
        import optimi

        found["optimi AdamW"] = uncoupled(optimi.AdamW)
    if importlib.util.find_spec("pytorch_optimizer"):
        import pytorch_optimizer

        found["pytorch_optimizer StableAdamW"] = uncoupled(pytorch_optimizer.StableAdamW)
    if importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = uncoupled(AdamW8bit)
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes AdamW"] = uncoupled(bitsandbytes.optim.AdamW)
        found["bitsandbytes AdamW8bit"] = uncoupled(bitsandbytes.optim.AdamW8bit)
    return found


def candidate(name: str) -> Candidate:
    """An optimizer of :func:`optimizers_here`, or the baseline."""
    if name == BASELINE:
        return uncoupled(torch.optim.AdamW, matrices_moved=7, fused=True)
    return optimizers_here()[name]


def make_step(
    name: str, embedding: nn.Parameter, others: list[nn.Parameter], clip: bool
) -> tuple[Optimizer, Callable[[], object]]:
    """An optimizer and its step, which with ``clip`` includes clipping to a norm of 1."""
    optimizer = candidate(name).make(embedding, others, 1.0 if clip else None)
    if not clip or isinstance(optimizer, CoupledAdamW):
        return optimizer, optimizer.step

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_([embedding, *others], 1.0)
        optimizer.step()

    return optimizer, clip_and_step


class AveragedAdamW(Optimizer):
    """Coupled Adam read literally: keeps all V × H second moments and averages them each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, with the default constants of torch's AdamW."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(
                        step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
                state["step"] += 1
                exp_avg, exp_avg_sq, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
                exp_avg.mul_(0.9).add_(p.grad, alpha=0.1)
                exp_avg_sq.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                mean = exp_avg_sq.mean(0, keepdim=True)
                denominator = (mean / (1 - 0.999**step)).sqrt_().add_(1e-8)
                p.mul_(1 - group["lr"] * 1e-2)
                p.addcdiv_(exp_avg / (1 - 0.9**step), denominator, value=-group["lr"])
