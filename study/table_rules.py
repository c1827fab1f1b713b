"""Optimizers that keep no matrix of state for a table of token embeddings, and zero-sum AdamW.

Written from their formulas, one function for each, so that what they have in common can be seen:
all divide the gradient by a number for the row and a number for the column.

- ``lean``: LEAN with its two choices, how the columns' second moment is taken and when sums over
  the rows are used. "plain" columns are those of g^2, "weighted" ones of (w g)^2 with the rows'
  weights w, and "half" ones of (w^(1/2) g)^2. "exact" sums are this step's; "delayed" ones those
  of the step before, so that a step is one pass over memory.
- ``ember``: Ember, "Token Geometry" (arXiv 2607.01455).
- ``adafactor``: :class:`torch.optim.Adafactor` (arXiv 1804.04235) without its relative step sizes.
- ``balanced``: the embedding optimizer of DeepSeek-V4.1's report: alternating row and column
  normalisations of a Nesterov momentum, which is a matrix of state.
- ``adam``: Adam itself, for the question of what zero-sum updates do to it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import embedding_parameters
from coupled_adam.lab.arms import AdamWArm
from coupled_adam.lab.embedding_sgd import PartlyAdamW
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import FAST

State = dict[str, Tensor]


def lean(g: Tensor, group: dict[str, Any], state: State) -> Tensor:
    """The displacement of each row, [V, H], by LEAN; ``group`` says which of its four versions."""
    t, beta2, rows = state["step"].item(), group["betas"][1], len(g)
    delayed = group["delayed"] and t > 1
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))
    nu = state.setdefault("column", torch.zeros_like(g[0]))
    before = dict(state)
    nu_before = nu.clone()

    r.lerp_(g.square().mean(1), 1 - beta2)
    active = r > 0
    state["count"] = count = active.sum()
    state["mean_row"] = r.sum() / count / (1 - beta2**t)
    mean_row = before["mean_row"] if delayed else state["mean_row"]
    relative = r / (1 - beta2**t) / mean_row
    w = torch.where(active, relative ** (-group["exponent"] / 2), 0.0)[:, None]
    nu.lerp_((w ** group["column_weight"] * g).square().mean(0), 1 - beta2)
    # Means are over the rows that have had a gradient: nu is one over all of them.
    if delayed:
        column = nu_before * rows / before["count"] / (1 - beta2 ** (t - 1))
    else:
        column = nu * rows / count / (1 - beta2**t)
    step: Tensor = group["lr"] * w * g / (column.sqrt() + 1e-8)
    state["mean"] = mean = step.sum(0) / count
    if not group["zero_sum"]:
        return step
    if group["delayed"]:
        return step - before["mean"] * active[:, None] if delayed else step
    return step - mean * active[:, None]


def ember(g: Tensor, group: dict[str, Any], state: State) -> Tensor:
    """The displacement by Ember: v_ij = r_i c_j / s, all moving averages of means of g^2."""
    t, beta2 = state["step"].item(), group["betas"][1]
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))
    c = state.setdefault("column", torch.zeros_like(g[0]))
    square = g.square()
    r.lerp_(square.mean(1), 1 - beta2)
    c.lerp_(square.mean(0), 1 - beta2)
    v = torch.outer(r, c) / r.mean().clamp(min=1e-30) / (1 - beta2**t)
    return zero_sum(group, group["lr"] * g / (v.sqrt() + 1e-8))


def adafactor(g: Tensor, group: dict[str, Any], state: State) -> Tensor:
    """The displacement by Adafactor: beta2 grows as 1 - t^-0.8, its RMS is at most 1."""
    decay = state["step"].item() ** -0.8
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))
    c = state.setdefault("column", torch.zeros_like(g[0]))
    square = g.square() + torch.finfo(g.dtype).eps ** 2
    r.lerp_(square.mean(1), decay)
    c.lerp_(square.mean(0), decay)
    u = g / (torch.outer(r, c) / r.mean()).sqrt()
    return zero_sum(group, group["lr"] * u / u.square().mean().sqrt().clamp(min=1.0))


def balanced(g: Tensor, group: dict[str, Any], state: State) -> Tensor:
    """The displacement by DeepSeek-V4.1's rule, with an update of RMS 0.18 before the rate.

    Written from a description of the report, which masks rows below 1e-3. It does not say of what;
    here it is the largest row's norm, since gradients have no scale of their own.
    """
    beta1 = group["betas"][0]
    m = state.setdefault("exp_avg", torch.zeros_like(g))
    m.mul_(beta1).add_(g)
    u = g + beta1 * m if beta1 else m.clone()
    u[u.norm(dim=1) < 1e-3 * u.norm(dim=1).max()] = 0  # rows without a gradient to speak of
    for k in range(11):
        u /= u.norm(dim=1 - k % 2, keepdim=True).clamp(min=1e-12)
    return zero_sum(group, group["lr"] * 0.18 * u / u.square().mean().sqrt())


def adam(g: Tensor, group: dict[str, Any], state: State) -> Tensor:
    """The displacement by Adam."""
    t, (beta1, beta2) = state["step"].item(), group["betas"]
    m = state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = state.setdefault("exp_avg_sq", torch.zeros_like(g)).lerp_(g.square(), 1 - beta2)
    u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
    return zero_sum(group, group["lr"] * u)


def zero_sum(group: dict[str, Any], step: Tensor) -> Tensor:
    """The displacement, with its mean removed if the group says so."""
    return step - step.mean(0) if group["zero_sum"] else step


RULES: dict[str, Callable[[Tensor, dict[str, Any], State], Tensor]] = {
    "lean": lean,
    "ember": ember,
    "adafactor": adafactor,
    "balanced": balanced,
    "adam": adam,
}


class TableAdamW(PartlyAdamW):
    """AdamW, except that groups with a ``table_rule`` are updated by it; they have no decay."""

    option = "table_rule"

    @torch.no_grad()
    def step_group(self, group: dict[str, Any]) -> None:
        """Update the group's parameters."""
        for p in group["params"]:
            state = self.state[p]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            p -= RULES[group["table_rule"]](p.grad, group, state)


def table(rule: str, *, zero_sum: bool, **options: Any) -> Variant:
    """The variant of an AdamW arm whose tables are updated by a rule, with the arm's betas."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
        assert isinstance(recipe.arm(arm), AdamWArm)
        adamw = recipe.arm(arm).optimizer(model, recipe.training)
        tables = {*embedding_parameters(model).values()}
        groups = [dict(group) for group in adamw.param_groups]
        for group in groups:
            if tables & {*group["params"]}:
                group |= {"table_rule": rule, "zero_sum": zero_sum, **options}
        return TableAdamW(groups, recipe.training.lr, recipe.training.betas, recipe.training.eps)

    return dataclasses.replace(FAST, build_optimizer=build)


def _lean(columns: str, timing: str, exponent: float = 0.75, *, zero_sum: bool = True) -> Variant:
    return table(
        "lean",
        zero_sum=zero_sum,
        exponent=exponent,
        column_weight={"plain": 0.0, "half": 0.5, "weighted": 1.0}[columns],
        delayed=timing == "delayed",
    )


PLAIN_EXACT, PLAIN_DELAYED = _lean("plain", "exact"), _lean("plain", "delayed")
HALF_DELAYED = _lean("half", "delayed")
WEIGHTED_EXACT, WEIGHTED_DELAYED = _lean("weighted", "exact"), _lean("weighted", "delayed")
PLAIN_DELAYED_FREE = _lean("plain", "delayed", zero_sum=False)
WEIGHTED_DELAYED_FREE = _lean("weighted", "delayed", zero_sum=False)
EMBER_FREE, EMBER_ZERO_SUM = (table("ember", zero_sum=z) for z in (False, True))
ADAM_ZERO_SUM = table("adam", zero_sum=True)
ADAFACTOR_FREE, BALANCED_FREE = (table(r, zero_sum=False) for r in ("adafactor", "balanced"))
BALANCED_0_FREE = BALANCED_FREE  # the momentum is the arm's beta1
