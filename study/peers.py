"""Other optimizers of the embeddings, beside which AdamW and Coupled Adam have to stand.

Written from the papers: one moment for each row is what Adam-mini (arXiv 2406.16793) gives to
embeddings, Lion is arXiv 2302.06675, and a momentum of columns of unit norm is what SCALE (arXiv
2506.16659) gives to the head. Rows of unit norm, signs, and a matrix of unit norm are the other
simple rules. Norms are root mean squares, so that a rate means what it means with Adam.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import embedding_parameters
from coupled_adam.lab.embedding_sgd import PartlyAdamW
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .alternatives import subtract_mean
from .head import FAST


def _unit(matrix: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The matrix divided by its root mean squares over some dimensions; zeros stay zeros."""
    norm = matrix.square().mean(dims, keepdim=True).sqrt()
    return matrix / norm.clamp(min=torch.finfo(matrix.dtype).tiny)


OF_THE_MOMENTUM: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "matrix": lambda momentum: _unit(momentum, (0, 1)),
    "rows": lambda momentum: _unit(momentum, (1,)),
    "columns": lambda momentum: _unit(momentum, (0,)),
}
"""Updates that are functions of the momentum m [V, H] alone, which is the gradient if beta1 = 0."""

RULES = ("row_moment", "lion", *OF_THE_MOMENTUM)


class PeerAdamW(PartlyAdamW):
    """AdamW, except that groups with a ``rule`` are updated by it; they have no weight decay."""

    option = "rule"

    @torch.no_grad()
    def step_group(self, group: dict[str, Any]) -> None:
        """Update the group's parameters."""
        for p in group["params"]:
            assert p.grad is not None
            p -= group["lr"] * self._update(group, p.grad, self.state[p])

    def _update(self, group: dict[str, Any], gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(gradient)
            if group["rule"] == "row_moment":
                state["exp_avg_sq"] = torch.zeros_like(gradient[:, :1])
        state["step"] += 1
        t, (beta1, beta2), momentum = state["step"].item(), group["betas"], state["exp_avg"]
        if group["rule"] == "lion":
            update = momentum.lerp(gradient, 1 - beta1).sign()
            momentum.lerp_(gradient, 1 - beta2)
            return update
        momentum.lerp_(gradient, 1 - beta1)
        if group["rule"] == "row_moment":
            of_rows = gradient.square().mean(1, keepdim=True)
            v = state["exp_avg_sq"].lerp_(of_rows, 1 - beta2) / (1 - beta2**t)
            of_row: Tensor = momentum / (1 - beta1**t) / (v.sqrt() + group["eps"])
            return of_row
        return OF_THE_MOMENTUM[group["rule"]](momentum)


def peer(rule: str) -> Variant:
    """The variant of an AdamW arm whose embeddings are updated by a rule, with the arm's betas."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
        adamw = recipe.arm(arm).optimizer(model, recipe.training)
        embeddings = {*embedding_parameters(model).values()}
        groups = [dict(group) for group in adamw.param_groups]
        for group in groups:
            if embeddings & {*group["params"]}:
                group["rule"] = rule
        return PeerAdamW(groups, recipe.training.lr)

    return dataclasses.replace(FAST, build_optimizer=build)


ROW_MOMENT, LION, SIGN, MATRIX, ROWS, COLUMNS = map(peer, RULES)
CENTERED = dataclasses.replace(FAST, after_step=subtract_mean)
"""AdamW with the mean removed after each step (arXiv 2601.02031)."""
