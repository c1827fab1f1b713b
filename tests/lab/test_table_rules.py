"""Each rule against its formula, from the whole history of gradients, in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from coupled_adam import LEAN, CoupledAdamW
from coupled_adam.errors import UsageError
from coupled_adam.lab.arms import ARMS
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.table_rules import RULES, TableRuleAdamW

V, H, LR, EPS = 7, 3, 0.01, 1e-8


def average(history, beta):
    """The moving average of a history that begins at zero."""
    weights = (1 - beta) * beta ** np.arange(len(history))[::-1]
    return np.tensordot(weights, np.array(history), 1)


def adam(history, beta1, beta2, exponent=1.0):
    t = len(history)
    m = average(history, beta1) / (1 - beta1**t)
    v = average(np.square(history), beta2) / (1 - beta2**t)
    return m / (v.mean(0) ** ((1 - exponent) / 2) * v ** (exponent / 2) + EPS)


def ember(history, beta1, beta2):
    v = average(np.square(history), beta2) / (1 - beta2 ** len(history))
    return history[-1] / (np.sqrt(np.outer(v.mean(1), v.mean(0)) / v.mean()) + EPS)


def adafactor(history, beta1, beta2):
    r, c = np.zeros(V), np.zeros(H)
    for t, g in enumerate(history, 1):
        r += t**-0.8 * (np.square(g).mean(1) - r)
        c += t**-0.8 * (np.square(g).mean(0) - c)
    u = history[-1] / np.sqrt(np.outer(r, c) / r.mean())
    return u / max(1, np.sqrt(np.square(u).mean()))


def balanced(history, beta1, beta2):
    m = sum(beta1**age * g for age, g in enumerate(history[::-1]))
    u = history[-1] + beta1 * m
    for k in range(11):
        u = u / np.linalg.norm(u, axis=1 - k % 2, keepdims=True)
    return 0.18 * u / np.sqrt(np.square(u).mean())


def row_moment(history, beta1, beta2):
    t = len(history)
    r = average(np.square(history).mean(2), beta2) / (1 - beta2**t)
    return average(history, beta1) / (1 - beta1**t) / (np.sqrt(r)[:, None] + EPS)


def lion(history, beta1, beta2):
    before = average(history[:-1], beta2) if history[1:] else 0.0
    return np.sign(beta1 * before + (1 - beta1) * history[-1])


def unit(*axes):
    def formula(history, beta1, beta2):
        m = average(history, beta1)
        return m / np.sqrt(np.square(m).mean(axes, keepdims=True))

    return formula


def first_lean_in_two_passes(history, beta1, beta2):
    """The sums of the same step, and columns of the plain gradient; of rows that all have one."""
    squares = average(np.square(history), beta2) / (1 - beta2 ** len(history))
    r, nu = squares.mean(1), squares.mean(0)
    u = (r / r.mean())[:, None] ** -0.375 * history[-1] / (np.sqrt(nu) + EPS)
    return u - u.mean(0)


def lean(zero_sum_from=1):
    """Row by row; a row's average begins at zero."""

    def limited(log_nu):
        center = np.mean(log_nu)
        return np.exp(center + np.clip(log_nu - center, -np.log(1e4), np.log(1e4)).mean())

    def squares_of_a_step(past, beta2):
        """Each column's over the rows that had a gradient, each bias-corrected; 0 for none."""
        if not past:
            return np.zeros(H)
        seen = [max(1, np.any(past[:t], axis=(0, 2)).sum()) for t in range(1, len(past) + 1)]
        means = [np.square(g).sum(0) / k for g, k in zip(past, seen)]
        return average(means, beta2) / (1 - beta2 ** len(past))

    def updates(history, beta2):
        *past, g = history
        t, nu = len(history), squares_of_a_step(past, beta2)
        known = nu > 0
        q = (np.square(g)[:, known] / nu[known]).sum(1) / max(1, known.sum())
        r = average(np.square(history).mean(2), beta2) / (1 - beta2**t)
        rho = limited(np.log(nu[known])) if past else 1.0
        u = np.zeros((V, H))
        for i in np.flatnonzero(r):
            limit = 30 / np.sqrt(q[i]) if q[i] else np.inf
            weight = min((r[i] / rho) ** -0.375, limit)
            u[i, known] = weight * g[i, known] / (np.sqrt(nu[known]) + EPS)
        return u, r > 0

    def displacement(history, beta1, beta2):
        u, moves = updates(history, beta2)
        if len(history) - 1 < zero_sum_from:
            return u
        u_before, _ = updates(history[:-1], beta2)
        return u - np.outer(moves, u_before.sum(0) / np.any(history[:-1], axis=(0, 2)).sum())

    return displacement


def without_mean(formula, **options):
    def zero_sum(history, beta1, beta2):
        u = formula(history, beta1, beta2, **options)
        return u - u.mean(0)

    return zero_sum


CASES = {
    "sgd": (lambda history, *_: sum(0.9**age * g for age, g in enumerate(history[::-1])), {}),
    "adam": (adam, {}),
    "adam, zero-sum": (without_mean(adam), {"zero_sum": True}),
    "adam, half": (without_mean(adam, exponent=0.5), {"zero_sum": True, "exponent": 0.5}),
    "lean": (lean(), {"zero_sum_from": 0}),
    "lean, later": (lean(3), {"zero_sum_from": 3 * (1 - 0.99)}),
    "lean, free": (lean(np.inf), {"zero_sum_from": np.inf}),
    "first_lean": (first_lean_in_two_passes, {"delayed": False}),
    "ember": (ember, {}),
    "ember, zero-sum": (without_mean(ember), {"zero_sum": True}),
    "adafactor": (adafactor, {}),
    "balanced": (balanced, {}),
    "row_moment": (row_moment, {}),
    "lion": (lion, {}),
    "sign": (lambda history, beta1, _: np.sign(average(history, beta1)), {}),
    "matrix": (unit(0, 1), {}),
    "rows": (unit(1), {}),
    "columns": (unit(0), {}),
}


def test_every_rule_has_a_case():
    assert {case.partition(",")[0] for case in CASES} == RULES.keys()


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    # Rows of very different sizes, as frequent and rare tokens have.
    scale = torch.logspace(0, -2, V, dtype=torch.float64)[:, None]
    return [torch.randn(V, H, generator=generator, dtype=torch.float64) * scale for _ in range(4)]


def tables(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(V, H, dtype=torch.float64)) for _ in range(2)]


def stepped(optimizer, parameters, gradients):
    """Step as Lightning does, which zeroes gradients within the step."""
    for g in gradients:

        def backward(g=g):
            optimizer.zero_grad()
            for p in parameters:
                p.grad = g.clone() if p.grad is None else p.grad + g
            return 1.25

        assert optimizer.step(backward) == 1.25


@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_its_formula(case, gradients):
    """And other parameters are AdamW's, a checkpoint continues, the state is what it is to be."""
    formula, options = CASES[case]
    name = case.partition(",")[0]
    rule = RULES[name]
    table, other = tables()
    start, control = table.detach().numpy().copy(), nn.Parameter(other.detach().clone())
    group = {"params": [table], "betas": rule.betas, "rule": name, **rule.options, **options}
    optimizer = TableRuleAdamW([group, {"params": [other]}], lr=LR, eps=EPS)
    stepped(optimizer, (table, other), gradients)
    stepped(torch.optim.AdamW([control], lr=LR), (control,), gradients)
    assert torch.equal(other, control)

    history = [g.numpy() for g in gradients]
    steps = range(1, len(history) + 1)
    expected = start - LR * sum(formula(history[:t], *rule.betas) for t in steps)
    np.testing.assert_allclose(table.detach(), expected, rtol=1e-8)

    state = optimizer.state[table]
    assert sum(x.numel() for x in state.values()) == rule.numbers(V, H) + 1  # with the step
    again = tables()
    resumed = TableRuleAdamW([{**group, "params": again[:1]}, {"params": again[1:]}], lr=LR)
    stepped(resumed, again, gradients[:2])
    loaded = TableRuleAdamW([{**group, "params": again[:1]}, {"params": again[1:]}], lr=LR)
    loaded.load_state_dict(resumed.state_dict())
    stepped(loaded, again, gradients[2:])
    assert torch.equal(again[0], table)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("lean")])
def test_lean_with_gradients_of_all_kinds(case, gradients):
    """Rows and columns that begin late, rows that pause, and one that jumps to 10^12 times."""
    formula, options = CASES[case]
    gradients += [g.flip(0) for g in gradients]
    for step, g in enumerate(gradients):
        g[1] *= step >= 2
        g[2] *= step != 3
        g[:, 0] *= step >= 3
        g[:, 2] *= 1e3  # another unit
    gradients[5][0] *= 1e12
    (table, _), rule = tables(), RULES["lean"]
    start = table.detach().numpy().copy()
    group = {"params": [table], "betas": rule.betas, "rule": "lean", **rule.options, **options}
    optimizer = TableRuleAdamW([group], lr=LR, eps=EPS)
    history = [g.numpy() for g in gradients]
    for t, g in enumerate(gradients, 1):
        before = table.detach().clone()
        stepped(optimizer, (table,), [g])
        if t == 6 and "free" in case:  # the row that jumps: 30 times the rate
            moved = (before - table.detach())[0].square().mean().sqrt()
            assert moved.item() == pytest.approx(30 * LR, rel=1e-6)
        expected = start - LR * sum(formula(history[:s], *rule.betas) for s in range(1, t + 1))
        np.testing.assert_allclose(table.detach(), expected, rtol=1e-8, atol=1e-12)


def test_the_rule_lean_is_lean(gradients):
    """Of the package: both only measure in the first step, and later take back what the mean moved.

    With a beta2 of 0.5 from the second step on.
    """
    (table, _), (ours, _) = tables(), tables()
    lean, betas = RULES["lean"], (0.0, 0.5)
    group = {"params": [table], "betas": betas, "rule": "lean", **lean.options}
    rule = TableRuleAdamW([group], lr=LR, eps=EPS)
    options = {key: value for key, value in LEAN.items() if key != "lr_factor"}
    options |= {"params": [ours], "coupled": True, "weight_decay": 0.0, "betas": betas}
    package = CoupledAdamW([options], lr=LR, eps=EPS)
    for optimizer, matrix in ((rule, table), (package, ours)):
        stepped(optimizer, (matrix,), gradients)
    torch.testing.assert_close(table, ours, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_an_arm(rule):
    """Of a recipe, with the rule's betas and its own rate; all but the embeddings are AdamW's."""
    plain = {"optimizer": "table_rule", "rule": rule, "lr_factor": 4, "beta1": 0.5}
    recipe = override(
        load_recipe("tiny"), {"arms.rule": plain, "arms.adamw": {"optimizer": "adamw"}}
    )
    model = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300, bias=False))
    model[1].weight = model[0].weight
    (group,) = (
        group
        for group in recipe.arms["rule"].build_optimizer(model, recipe.training).param_groups
        if "rule" in group
    )
    assert group["params"] == [model[0].weight]
    assert (group["lr"], group["betas"]) == (4 * recipe.training.lr, (0.5, RULES[rule].betas[1]))
    assert recipe.arms["rule"].label == f"{rule}, f = 4, beta1 0.5"


def test_the_arm_sgd_has_the_rule_sgd():
    """At a rate that has no default; all else is as for any other rule."""
    training = load_recipe("tiny").training
    model = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300, bias=False))
    sgd, rule = ARMS["sgd"](lr_factor=300), ARMS["table_rule"](rule="sgd", lr_factor=300)
    groups = sgd.build_optimizer(model, training).param_groups
    assert groups == rule.build_optimizer(model, training).param_groups
    assert groups[0]["lr"] == 300 * training.lr
    assert groups[0]["momentum"] == 0.9
    with pytest.raises(TypeError, match="lr_factor"):
        ARMS["sgd"]()


def test_rules_and_options_that_do_not_exist():
    with pytest.raises(
        UsageError, match=r"rule_options.zerosum is not an option of ember: .*zero_sum"
    ):
        ARMS["table_rule"](rule="ember", rule_options={"zerosum": True})
    assert "rule_options" not in ARMS["table_rule"](rule="ember").options  # a page shows these
    label = ARMS["table_rule"](rule="ember", rule_options={"zero_sum": True}).label
    assert label == "ember, zero_sum 1"
