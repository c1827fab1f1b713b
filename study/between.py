"""Between Adam and Coupled Adam, with a second moment [V, H] and zero-sum updates.

:class:`coupled_adam.CoupledAdamW` with ``row_exponent`` keeps one number for each token instead.
How much is lost without the moment of every element?
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import param_groups
from coupled_adam.lab.arms import AdamWArm
from coupled_adam.lab.embedding_sgd import PartlyAdamW
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


class ZeroSumAdamW(PartlyAdamW):
    """AdamW, except that groups with an ``exponent`` a have zero-sum updates between two extremes.

    With v_ij Adam's second moment and nu_j its mean over the rows, the denominator of the update is
    sqrt(nu_j^(1 - a) v_ij^a) + eps: Coupled Adam's for a = 0, and Adam's for a = 1. The mean of the
    rows' updates is subtracted from each of them.
    """

    option = "exponent"

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the group's parameters, which must not have weight decay."""
        for p in group["params"]:
            self._step_zero_sum(group, p, self.state[p])

    @torch.no_grad()
    def _step_zero_sum(self, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        state["step"] += 1
        t, (beta1, beta2) = state["step"].item(), group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        v = state["exp_avg_sq"] / (1 - beta2**t)
        a = group["exponent"]
        mean = v.mean(0) ** (1 - a) * v**a
        update = state["exp_avg"] / (1 - beta1**t) / (mean.sqrt() + group["eps"])
        p -= group["lr"] * (update - update.mean(0))


def zero_sum(exponent: float) -> Variant:
    """The variant of an AdamW arm with the exponent a, and the arm's ``lr_factor``."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
        training, options = recipe.training, recipe.arm(arm)
        assert isinstance(options, AdamWArm)
        rate = {"lr": options.lr_factor * training.lr}
        groups = param_groups(model, rate, weight_decay=training.weight_decay)
        for group in groups:
            if group.pop("coupled"):
                group["exponent"] = exponent
        return ZeroSumAdamW(groups, training.lr, training.betas, training.eps)

    return Variant(build_optimizer=build)


ZERO_SUM_05, ZERO_SUM_1 = zero_sum(0.5), zero_sum(1.0)
