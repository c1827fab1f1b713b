"""Other rules for a table of token embeddings, to compare Coupled Adam and LEAN with.

Each is one function of the gradient [V, H], the param group and the state, written from its
paper's formulas. Nearly all divide the gradient by a number for the row and a number for the
column. A recipe has them as ``{optimizer: table_rule, rule: ember}``. To add one, write the
function and its record in :data:`RULES`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim.lean import LARGEST_STEP, LOG_LIMIT

Group = dict[str, Any]
State = dict[str, Tensor]

# Each rule takes the gradient g [V, H], and returns what is subtracted from the table, [V, H].
# Entries of the state are [V, H], too, unless a comment says otherwise.


def sgd(g: Tensor, group: Group, state: State) -> Tensor:
    """SGD with momentum (Algorithm 2 of arXiv 2502.08441)."""
    momentum = state.setdefault("momentum_buffer", torch.zeros_like(g))
    momentum.mul_(group["momentum"]).add_(g)
    step: Tensor = group["lr"] * momentum
    return step


def adam(g: Tensor, group: Group, state: State) -> Tensor:
    """Adam (arXiv 1412.6980), with or without zero-sum updates.

    With v_ij Adam's second moment and nu_j its mean over the rows, the denominator is
    sqrt(nu_j^(1 - a) v_ij^a) + eps: Coupled Adam's for an ``exponent`` a of 0, and Adam's for 1.
    """
    t, (beta1, beta2), a = state["step"].item(), group["betas"], group["exponent"]
    m = state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = state.setdefault("exp_avg_sq", torch.zeros_like(g)).lerp_(g.square(), 1 - beta2)
    v = v / (1 - beta2**t)
    v = v if a == 1 else v.mean(0) ** (1 - a) * v**a
    return _zero_sum(group, group["lr"] * m / (1 - beta1**t) / (v.sqrt() + group["eps"]))


def lean(g: Tensor, group: Group, state: State) -> Tensor:
    """LEAN, as :data:`coupled_adam.LEAN`; all sums over rows are those of the step before.

    From step ``zero_sum_from`` / (1 - beta2) on (inf: never) the next step takes back by what a
    step has moved the mean.
    """
    t, beta2, a = state["step"].item(), group["betas"][1], group["exponent"]
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))  # [V]
    nu = state.setdefault("column", torch.zeros_like(g[0]))  # [H]
    d = state.get("mean", torch.zeros_like(nu))  # [H]
    # 1. The columns' second moments, their geometric mean, and the rows' squares in their units
    known = nu > 0
    column = nu / (1 - beta2 ** (t - 1)) if t > 1 else nu
    logs = column[known].log()
    mean_log = logs.mean()
    rho = (mean_log + (logs - mean_log).clamp(-LOG_LIMIT, LOG_LIMIT).mean()).exp()
    q = (g.square() / torch.where(known, column, torch.inf)).sum(1) / known.sum().clamp(min=1)
    # 2. The rows' weights: no row moves further than 30 times the rate, in root mean square
    r.lerp_(g.square().mean(1), 1 - beta2)
    powers = (r / (1 - beta2**t) / rho) ** (-a / 2)
    w = torch.where(r > 0, torch.minimum(powers, LARGEST_STEP / q.sqrt()), 0.0)[:, None]  # [V, 1]
    # 3. The step, and the moments and the mean for the next one
    step: Tensor = torch.where(known, group["lr"] * w * g / (column.sqrt() + group["eps"]), 0.0)
    seen = ((r > 0) | (g != 0).any(1)).sum().clamp(min=1)
    nu.lerp_(g.square().sum(0) / seen, 1 - beta2)
    begun = t >= group["zero_sum_from"] / (1 - beta2)
    state["mean"] = step.sum(0) / seen if begun else torch.zeros_like(d)
    return step - d * (w > 0)


def first_lean(g: Tensor, group: Group, state: State) -> Tensor:
    """LEAN's first edition with its choices: how columns are measured, and when sums are used.

    Rows are compared with the mean of the rows' second moments. The columns' second moment is that
    of w^c g with the rows' weights w and c = ``column_weight``. ``delayed`` sums are those of the
    step before, so that a step is one pass over memory; otherwise they are this step's.
    """
    t, beta2, rows = state["step"].item(), group["betas"][1], len(g)
    delayed = group["delayed"] and t > 1
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))  # [V]
    nu = state.setdefault("column", torch.zeros_like(g[0]))  # [H]
    before = dict(state)
    nu_before = nu.clone()  # nu is updated in place
    # 1. The rows' weights
    r.lerp_(g.square().mean(1), 1 - beta2)
    active = r > 0
    state["count"] = count = active.sum()
    state["mean_row"] = r.sum() / count / (1 - beta2**t)
    relative = r / (1 - beta2**t) / (before if delayed else state)["mean_row"]
    w = torch.where(active, relative ** (-group["exponent"] / 2), 0.0)[:, None]  # [V, 1]
    # 2. The columns' rates. Means are over the rows that have had a gradient; nu is one over all V
    nu.lerp_((w ** group["column_weight"] * g).square().mean(0), 1 - beta2)
    if delayed:
        column = nu_before * rows / before["count"] / (1 - beta2 ** (t - 1))
    else:
        column = nu * rows / count / (1 - beta2**t)
    step: Tensor = group["lr"] * w * g / (column.sqrt() + group["eps"])
    # 3. The mean that is taken back: of this step, or, delayed, of the step before
    state["mean"] = mean = step.sum(0) / count  # [H]
    if not group["zero_sum"]:
        return step
    if group["delayed"]:
        return step - before["mean"] * active[:, None] if delayed else step
    return step - mean * active[:, None]


def ember(g: Tensor, group: Group, state: State) -> Tensor:
    """Ember (arXiv 2607.01455): v_ij = r_i c_j / s, all moving averages of means of g^2."""
    t, beta2 = state["step"].item(), group["betas"][1]
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))  # [V]
    c = state.setdefault("column", torch.zeros_like(g[0]))  # [H]
    square = g.square()
    r.lerp_(square.mean(1), 1 - beta2)
    c.lerp_(square.mean(0), 1 - beta2)
    v = torch.outer(r, c) / r.mean().clamp(min=1e-30) / (1 - beta2**t)
    return _zero_sum(group, group["lr"] * g / (v.sqrt() + group["eps"]))


def adafactor(g: Tensor, group: Group, state: State) -> Tensor:
    """Adafactor (arXiv 1804.04235), no relative rate: beta2 = 1 - t^-0.8, an RMS of at most 1."""
    decay = state["step"].item() ** -0.8
    r = state.setdefault("row", torch.zeros_like(g[:, 0]))  # [V]
    c = state.setdefault("column", torch.zeros_like(g[0]))  # [H]
    square = g.square() + torch.finfo(g.dtype).eps ** 2  # as the paper's eps_1, against 0 / 0
    r.lerp_(square.mean(1), decay)
    c.lerp_(square.mean(0), decay)
    u = g / (torch.outer(r, c) / r.mean()).sqrt()
    return _zero_sum(group, group["lr"] * u / u.square().mean().sqrt().clamp(min=1.0))


def balanced(g: Tensor, group: Group, state: State) -> Tensor:
    """DeepSeek-V4.1's rule: row and column normalisations of a Nesterov momentum, of RMS 0.18.

    Written from a description of the report, which masks rows below 1e-3. It does not say of what;
    here it is the largest row's norm, since gradients have no scale of their own.
    """
    beta1 = group["betas"][0]
    m = state.setdefault("exp_avg", torch.zeros_like(g))
    m.mul_(beta1).add_(g)
    u = g + beta1 * m if beta1 else m.clone()
    u[u.norm(dim=1) < 1e-3 * u.norm(dim=1).max()] = 0  # rows without a gradient to speak of
    for k in range(11):  # rows first, and rows last
        u /= u.norm(dim=1 - k % 2, keepdim=True).clamp(min=1e-12)
    return _zero_sum(group, group["lr"] * 0.18 * u / u.square().mean().sqrt())


def row_moment(g: Tensor, group: Group, state: State) -> Tensor:
    """Adam with one second moment for each row, as Adam-mini gives embeddings (2406.16793)."""
    t, (beta1, beta2) = state["step"].item(), group["betas"]
    m = state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    r = state.setdefault("row", torch.zeros_like(g[:, :1]))  # [V, 1]
    r.lerp_(g.square().mean(1, keepdim=True), 1 - beta2)
    step: Tensor = group["lr"] * m / (1 - beta1**t) / ((r / (1 - beta2**t)).sqrt() + group["eps"])
    return step


def lion(g: Tensor, group: Group, state: State) -> Tensor:
    """Lion (arXiv 2302.06675)."""
    beta1, beta2 = group["betas"]
    m = state.setdefault("exp_avg", torch.zeros_like(g))
    step: Tensor = group["lr"] * m.lerp(g, 1 - beta1).sign()
    m.lerp_(g, 1 - beta2)
    return step


def normalized(
    normalize: Callable[[Tensor], Tensor], g: Tensor, group: Group, state: State
) -> Tensor:
    """A function of the momentum [V, H] alone, which is the gradient if beta1 = 0."""
    m = state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 1 - group["betas"][0])
    step: Tensor = group["lr"] * normalize(m)
    return step


def _unit(matrix: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A matrix [V, H] divided by its root mean squares over some dimensions; zeros stay zeros."""
    norm = matrix.square().mean(dims, keepdim=True).sqrt()
    return matrix / norm.clamp(min=torch.finfo(matrix.dtype).tiny)


def _zero_sum(group: Group, step: Tensor) -> Tensor:
    """The displacement [V, H], with its mean removed if the group says so."""
    return step - step.mean(0) if group["zero_sum"] else step


@dataclass(frozen=True)
class Rule:
    """A rule, and what its paper says of it.

    Attributes:
        displacement: what is subtracted from the table, [V, H], from the gradient [V, H], the
            group's options and the state of the table, in which ``step`` counts from 1.
        betas: the paper's betas.
        numbers: how many numbers of state it keeps for a table, from V and H.
        options: its own options, with their defaults.
    """

    displacement: Callable[[Tensor, Group, State], Tensor]
    betas: tuple[float, float]
    numbers: Callable[[int, int], int]
    options: Mapping[str, bool | float] = field(default_factory=dict)


_LEAN = {"exponent": 0.75, "zero_sum_from": 1.0}
_FIRST_LEAN = {"exponent": 0.75, "delayed": True, "column_weight": 0.0, "zero_sum": True}


def _matrix(V: int, H: int) -> int:
    return V * H


RULES: dict[str, Rule] = {
    "sgd": Rule(sgd, (0.0, 0.0), _matrix, {"momentum": 0.9}),
    "adam": Rule(adam, (0.9, 0.999), lambda V, H: 2 * V * H, {"exponent": 1.0, "zero_sum": False}),
    "lean": Rule(lean, (0.0, 0.99), lambda V, H: V + 2 * H, _LEAN),
    # With the number of active rows, the mean of r, and the mean of the displacement.
    "first_lean": Rule(first_lean, (0.0, 0.99), lambda V, H: V + 2 * H + 2, _FIRST_LEAN),
    "ember": Rule(ember, (0.0, 0.999), lambda V, H: V + H, {"zero_sum": False}),
    "adafactor": Rule(adafactor, (0.0, 0.999), lambda V, H: V + H, {"zero_sum": False}),
    "balanced": Rule(balanced, (0.95, 0.999), _matrix, {"zero_sum": False}),
    "row_moment": Rule(row_moment, (0.9, 0.95), lambda V, H: V * H + V),
    "lion": Rule(lion, (0.9, 0.99), _matrix),
    "sign": Rule(functools.partial(normalized, torch.sign), (0.9, 0.95), _matrix),
    "matrix": Rule(functools.partial(normalized, lambda m: _unit(m, (0, 1))), (0.9, 0.95), _matrix),
    "rows": Rule(functools.partial(normalized, lambda m: _unit(m, (1,))), (0.9, 0.95), _matrix),
    # SCALE (arXiv 2506.16659) gives the head a momentum of columns of unit norm.
    "columns": Rule(functools.partial(normalized, lambda m: _unit(m, (0,))), (0.9, 0.95), _matrix),
}
"""The rules by name. Norms are root mean squares, so that a rate means what it means with Adam."""


class TableRuleAdamW(torch.optim.AdamW):
    """AdamW, except that param groups with a ``rule`` are updated by it, without weight decay.

    Since this is a single optimizer, it needs only one schedule and one checkpoint.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step, by AdamW or by the rule of the param group."""
        loss = None
        if closure is not None:  # before the groups change: it may call zero_grad
            with torch.enable_grad():
                loss = closure()
        # AdamW's own step is given the groups that are its own, whatever happens in it.
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "rule" not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "rule" in group:
                self._step_tables(group)
        return loss

    @torch.no_grad()
    def _step_tables(self, group: Group) -> None:
        """Update the tables of a group by its rule."""
        for table in group["params"]:
            if table.grad is not None:
                state = self.state[table]
                # AdamW's loading expects a number of steps.
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                table -= RULES[group["rule"]].displacement(table.grad, group, state)
