"""The update of a coupled matrix: against the float64 oracle, and what holds for any data."""

import collections
import copy
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim.kernels import native
from optim.cases import CASES, LEAN, check_steps, gradient, matrix, optimizer_of


def gradients(shape, steps, seed=1):
    return [gradient(shape, seed + step) for step in range(steps)]


def run(param, grads, cls, **options):
    """The parameter after a step of any optimizer for each gradient."""
    p = nn.Parameter(param.clone())
    optimizer = cls([p], **options)
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach()


OPTIONS = {
    "no rate": {"lr": 0.0},
    "rate in a tensor": {"lr": torch.tensor(3e-3, dtype=torch.float64)},
    "rate in a tensor [1]": {"lr": torch.tensor([3e-3], dtype=torch.float64)},
    "betas in tensors": {"betas": tuple(torch.tensor([0.8, 0.95], dtype=torch.float64))},
    "foreach": {"foreach": True},
    "no foreach": {"foreach": False},
    "fused": {"fused": True},
    "not fused": {"fused": False},
    "differentiable": {"differentiable": True},
    "differentiable LEAN": {"differentiable": True, **CASES["LEAN, momentum"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_that_are_torchs(options):
    """Whatever kernel they lead to, each of many steps is the oracle's."""
    for dtype in (torch.float64, torch.float32):
        check_steps((23, 7), dtype, steps=20, **options)


@pytest.mark.parametrize("name", ["zero-sum", "LEAN", "LEAN, momentum"])
def test_zero_sum_moves_the_mean_by_one_update(name):
    """What a step moves the mean embedding by is given back in the next one."""
    p = nn.Parameter(matrix((31, 6), 0))
    optimizer = optimizer_of([p], **{**CASES[name], "weight_decay": 0.0})
    start, moved = p.detach().mean(0), []
    for g in gradients((31, 6), 20):
        p.grad = g + 0.1  # all push in one direction
        optimizer.step()
        moved.append(p.detach().mean(0) - start)
        torch.testing.assert_close(
            moved[-1], -optimizer.state[p]["mean_update"], rtol=1e-9, atol=1e-14
        )
    assert moved[-1].abs().max() > 1e-4


@pytest.mark.parametrize("kernel", [{}, {"fused": False}], ids=["fast", "reference"])
@pytest.mark.parametrize("options", LEAN.values(), ids=LEAN)
def test_first_step_of_lean_only_measures(options, kernel):
    """Nothing moves, except by weight decay; the averages have the gradient once."""
    p = nn.Parameter(matrix((31, 6), 0))
    optimizer = optimizer_of([p], **{**options, "weight_decay": 0.0, **kernel})
    (group,), start = optimizer.param_groups, p.detach().clone()
    p.grad = gradient((31, 6), 1)
    optimizer.step()
    assert torch.equal(p, start)
    state, share = optimizer.state[p], 1 - group["betas"][1]
    squares = p.grad.square()
    torch.testing.assert_close(state["row_exp_avg_sq"], share * squares.mean(1))
    torch.testing.assert_close(state["exp_avg_sq"], share * squares[squares.any(1)].mean(0))
    assert not any(x.count_nonzero() for name, x in state.items() if name == "mean_update")
    optimizer.step()
    assert not torch.equal(p, start)


@settings(max_examples=30)
@given(rows=st.integers(2, 50), columns=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_zero_sum_gradient_leaves_the_mean(rows, columns, seed):
    """The paper's point: sum_i g_i = 0 keeps mu where it was. With torch's AdamW it drifts."""
    start = matrix((rows, columns), seed)
    # As in a tied head: g_i = (p_i - [i is the true token]) h, zero-sum over the rows.
    grads = [g - g.mean(0) for g in gradients((rows, columns), 20, seed)]
    options = {"lr": 0.1, "weight_decay": 0.0}
    result = run(start, grads, CoupledAdamW, coupled=True, **options)
    torch.testing.assert_close(result.mean(0), start.mean(0), rtol=0, atol=1e-12)
    assert not torch.equal(result, start)
    if rows > 10:
        drifted = run(start, grads, torch.optim.AdamW, **options).mean(0) - start.mean(0)
        assert drifted.abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(CoupledAdam, torch.optim.Adam), (CoupledAdamW, torch.optim.AdamW)],
)
def test_one_row_is_adam(ours, theirs, options):
    """With V = 1 there is nothing to average: torch's own optimizer is a second oracle."""
    start, grads = matrix((1, 9)), gradients((1, 9), 50)
    result = run(start, grads, ours, coupled=True, weight_decay=0.05, **options)
    expected = run(start, grads, theirs, weight_decay=0.05, **options)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


def test_half_precision_gradients_are_averaged_in_float32():
    """Squares that underflow or overflow in fp16 do not in the shared moment."""
    p = nn.Parameter(torch.zeros(1000, 2, dtype=torch.float16))
    optimizer = CoupledAdamW([p], coupled=True)
    p.grad = torch.full_like(p, 1e-4)
    p.grad[:, 1] = 1e3
    optimizer.step()
    expected = 1e-3 * p.grad[0].double() ** 2
    # A thousand equal numbers, added up in float32 one after the other.
    torch.testing.assert_close(
        optimizer.state[p]["exp_avg_sq"].double(), expected, rtol=1e-4, atol=0
    )


def test_differentiable_passes_gradcheck():
    """Autograd through three steps, to parameter, gradients and states."""

    def steps(p, grad, exp_avg, exp_avg_sq, max_exp_avg_sq):
        p = p.clone()
        optimizer = CoupledAdamW([p], 0.1, coupled=True, differentiable=True, amsgrad=True)
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": exp_avg.clone(),
            "exp_avg_sq": exp_avg_sq.clone(),
            "max_exp_avg_sq": max_exp_avg_sq.clone(),
        }
        for factor in (1.0, -0.5, 2.0):
            p.grad = factor * grad
            optimizer.step()
        return p

    torch.manual_seed(0)
    matrix = {"dtype": torch.float64, "requires_grad": True}
    inputs = (
        torch.randn(4, 3, **matrix),
        torch.randn(4, 3, **matrix),
        torch.randn(4, 3, **matrix),
        (torch.rand(3, dtype=torch.float64) + 0.5).requires_grad_(),
        (torch.rand(3, dtype=torch.float64) + 0.7).requires_grad_(),
    )
    assert torch.autograd.gradcheck(steps, inputs)


@pytest.mark.parametrize("kernel", [{}, {"fused": False}], ids=["fast", "reference"])
@pytest.mark.parametrize("options", LEAN.values(), ids=LEAN)
def test_rows_without_gradient_neither_count_nor_move(options, kernel):
    """The others move as if the matrix had no other rows: 8 new tokens among 5,000."""
    few, many = matrix((8, 16), 0), matrix((5000, 16), 1)
    many[100:108] = few
    few, many = nn.Parameter(few), nn.Parameter(many.clone())
    rest = torch.arange(5000)[(torch.arange(5000) < 100) | (torch.arange(5000) >= 108)]
    before = many.detach()[rest].clone()
    optimizer = optimizer_of([few, many], **{**options, "weight_decay": 0.0, **kernel})
    for g in gradients((8, 16), 20):
        few.grad, many.grad = g, torch.zeros_like(many)
        many.grad[100:108] = g
        optimizer.step()
    torch.testing.assert_close(many[100:108], few, rtol=1e-10, atol=1e-12)
    assert torch.equal(many[rest], before)


@pytest.mark.parametrize(
    ("name", "shares"), [("LEAN", (0.72, 0.16, 0.028)), ("coupled", (1.0, 1.0, 1.0))]
)
def test_columns_of_different_sizes(name, shares):
    """How far the others move of 64 columns, of which one is 10, 100 and 1,000 times as large."""
    lengths = []
    for scale in (1.0, 10.0, 100.0, 1000.0):
        p = nn.Parameter(matrix((200, 64)))
        betas = (CASES[name].get("betas", (0.9, 0.99))[0], 0.99)
        optimizer = optimizer_of([p], **{**CASES[name], "betas": betas, "zero_sum": False})
        for g in gradients((200, 64), 100):
            p.grad = g.clone()
            p.grad[:, 0] *= scale
            before = p.detach().clone()
            optimizer.step()
        lengths.append((p.detach() - before)[:, 1:].norm().item())
    usual, *others = lengths
    assert [length / usual for length in others] == pytest.approx(shares, rel=0.1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("zero_sum", [True, False])
def test_few_rows_do_not_learn_what_they_have_in_common(rows, zero_sum):
    """With zero_sum they stay within an update of where they were, however often pushed."""
    p = nn.Parameter(matrix((50, 6), 0))
    optimizer = optimizer_of([p], **{**CASES["LEAN"], "zero_sum": zero_sum, "weight_decay": 0.0})
    start, update = p.detach().clone(), optimizer.param_groups[0]["lr"]
    p.grad = torch.zeros_like(p)
    p.grad[:rows] = 1.0
    for _ in range(21):  # the first only measures
        optimizer.step()
    moved = (start - p.detach())[:rows]
    expected = update if zero_sum else 20 * update
    torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-6, atol=0)


def test_coupled_adam_warns_where_most_rows_have_no_gradient():
    p = nn.Parameter(torch.randn(100, 4))
    p.grad = torch.zeros(100, 4)
    p.grad[3:7] = 1.0
    message = r"only 4 of the 100 rows of 'wte' \[100, 4\].*may move 5 times as far"
    optimizer = CoupledAdamW([("wte", p)], coupled=True)
    with pytest.warns(UserWarning, match=message):
        optimizer.step()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        optimizer.step()
        CoupledAdamW([nn.Parameter(p.detach().clone())], coupled=True, zero_sum=True).step()


@pytest.mark.parametrize(
    ("scale", "lean"), [(10.0, 0.72), (100.0, 0.16), (1000.0, 0.03)], ids=["10", "100", "1,000"]
)
def test_a_column_larger_than_the_others(scale, lean):
    """How far the others move, relative to columns of one size: docs/optimizer.md has LEAN's."""
    for options, expected in (({"betas": (0.0, 0.99), "row_exponent": 0.75}, lean), ({}, 1.0)):
        moved = []
        for first in (1.0, scale):
            weight = nn.Parameter(torch.zeros(20, 64, dtype=torch.float64))
            group = {**options, "params": [weight], "coupled": True}
            optimizer = CoupledAdamW([group], lr=1e-2, weight_decay=0)
            generator = torch.Generator().manual_seed(0)
            for _ in range(5):
                weight.grad = torch.randn(20, 64, generator=generator, dtype=torch.float64).sign()
                weight.grad[:, 0] *= first
                optimizer.step()
            moved.append(weight.detach()[:, 1:].norm())
        assert moved[1] / moved[0] == pytest.approx(expected, abs=0.005)


class Quantized(torch.Tensor):
    """A weight as quantizing libraries have it: whatever is computed from it is a copy."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].data_)
        plain = [x.data_.clone() if isinstance(x, Quantized) else x for x in args]
        result = func(*plain, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], Quantized):
            args[0].data_ = result
            return args[0]
        return result


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_subclass_whose_slices_are_copies(options):
    """It moves as a plain matrix; where its transpose would have to be updated it is refused."""
    p, q = nn.Parameter(matrix((9, 4))), nn.Parameter(Quantized(matrix((9, 4))))
    optimizers = [optimizer_of([x], **options) for x in (p, q)]
    for g in gradients((9, 4), 3):
        for x, optimizer in zip((p, q), optimizers):
            x.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(q.data.data_, p.detach(), rtol=1e-10, atol=1e-12)
    assert not torch.equal(p, matrix((9, 4)))
    refused = optimizer_of([q], vocab_dim=1, **options)
    with pytest.raises(RuntimeError, match="Quantized, whose transpose may be a copy"):
        refused.step()


@pytest.mark.skipif(native.library() is None, reason="built without a C compiler")
@pytest.mark.parametrize("embeddings", ["coupled", "lean"])
def test_a_step_like_the_one_before(embeddings):
    """Checks nothing anew, and calls few functions: that is what small matrices cost."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64, bias=False))
    optimizer = CoupledAdamW(model, embeddings=embeddings, vocab_size=64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    calls = collections.Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("coupled_adam."):
            calls[frame.f_code.co_name] += 1

    for _ in range(3):
        calls.clear()
        sys.setprofile(count)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    assert not calls.keys() & {"check_parameter", "fit_state", "choose", "is_plain_memory"}
    assert calls.total() <= 62


def test_what_is_remembered_of_steps_does_not_grow():
    """Also if a schedule sets other betas at every step."""
    p = nn.Parameter(matrix((5, 4)))
    optimizer = optimizer_of([p])
    for step, g in enumerate(gradients((5, 4), 10)):
        optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.95)
        p.grad = g
        optimizer.step()
    assert len(optimizer._checked) == 1


# --- a first moment that cannot decay ---


HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("betas", "row_exponent", "dtype", "steps"),
    [
        *(((0.9, 0.99), 1.0, dtype, 400) for dtype in (torch.float32, *HALF)),
        *(((0.99, 0.999), 0.75, dtype, 1000) for dtype in HALF),
        ((0.97, 0.95), 0.75, torch.float32, 2500),
        *((betas, 0.75, torch.float32, 400) for betas in ((0.5, 0.3), (0.9, 0.999))),
    ],
    ids=str,
)
def test_a_row_without_gradients_comes_to_rest(betas, row_exponent, dtype, steps):
    """However much its weight grows; also after its state has been saved and loaded."""
    p = nn.Parameter(torch.zeros(8, 4, dtype=dtype))
    options = {"betas": betas, "row_exponent": row_exponent, "weight_decay": 0.0, "lr": 1e-2}
    optimizer = CoupledAdamW([p], coupled=True, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        p.grad = torch.randn(8, 4, generator=generator).mul(1e-2).to(dtype)
        if step > 3:
            p.grad[0] = 0
        before = p.detach()[0].clone()
        optimizer.step()
        if step == 100:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = CoupledAdamW([p], coupled=True, **options)
            optimizer.load_state_dict(saved)
    assert torch.equal(p[0], before)
    assert p[0].abs().max() < 1
    assert p.isfinite().all()


KINDS = {
    "numbers": float,
    "tensors": lambda x: torch.tensor(x, dtype=torch.float64),
    "NumPy's numbers": np.float64,
    "arrays of one element": lambda x: torch.tensor([x], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("where", ["constructor", "group", "schedule", "load"])
@pytest.mark.parametrize(("betas", "row_exponent"), [((0.99, 0.95), 0.75), ((0.9, 0.81), 1.0)])
def test_betas_with_which_rows_would_move_faster_and_faster(betas, row_exponent, where, kind):
    """m / r^(a/2) of a row without gradients grows: refused, whatever holds such betas."""
    wrong = {"betas": tuple(map(kind, betas))}
    p = nn.Parameter(torch.ones(8, 4))
    p.grad = torch.ones_like(p)
    options = {"coupled": True, "row_exponent": row_exponent}
    optimizer = CoupledAdamW([p], betas=(0.5, betas[1]), **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= wrong

    def schedule():
        optimizer.param_groups[0] |= wrong
        optimizer.step()

    with pytest.raises(ValueError, match=r"Invalid betas: .* faster \(beta1 must be below"):
        {
            "constructor": lambda: CoupledAdamW([p], **wrong, **options),
            "group": lambda: CoupledAdamW([{"params": [p], **wrong, **options}]),
            "load": lambda: optimizer.load_state_dict(saved),
            "schedule": schedule,
        }[where]()
    assert torch.equal(p, torch.ones(8, 4))


def test_a_momentum_that_bfloat16_cannot_hold():
    """Whose decay would be rounded away; in float32 it is as good as any."""
    options = {"coupled": True, "row_exponent": 0.5, "betas": (0.998, 0.999)}
    CoupledAdamW([nn.Parameter(torch.zeros(4, 4))], **options)
    with pytest.raises(ValueError, match="bfloat16 would round the momentum"):
        CoupledAdamW([nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))], **options)


# --- refused before anything moves ---


def given(make):
    """A gradient that does not fit."""

    def prepare(_, p):
        p.grad_dtype = None
        try:
            p.grad = make(p)
        except RuntimeError:
            pytest.skip("torch refuses it itself")

    return RuntimeError, r"cannot couple .* but its gradient is", prepare


def edited(option, value, error=ValueError, message="Invalid {}"):
    """A step refuses what a constructor and a checkpoint refuse."""

    def prepare(optimizer, _):
        optimizer.param_groups[-1][option] = value

    return error, message.format(option), prepare


def sparse(_, p):
    p.grad = p.grad.to_sparse(1)


def moved_away(optimizer, p):
    """As if the model had been moved after the first step."""
    optimizer.state[p] = {name: x.to("meta") for name, x in optimizer.state[p].items()}


def widened(_, p):
    """As ``model.double()`` after the first step."""
    p.data, p.grad = p.double(), None
    p.grad = torch.ones_like(p)


REFUSED = {
    "wider": given(lambda p: torch.ones_like(p, dtype=torch.float64)),
    "whole numbers": given(lambda p: torch.ones_like(p, dtype=torch.int64)),
    "complex": given(lambda p: torch.ones_like(p, dtype=torch.complex64)),
    "elsewhere": given(lambda p: torch.ones_like(p, device="meta")),
    "sparse": (RuntimeError, "sparse gradients.*sparse=False", sparse),
    "moved": (RuntimeError, "on cpu, but exp_avg .* on meta.*load_state", moved_away),
    "double": (RuntimeError, "is torch.float64 .* in torch.float32 .*load_state", widened),
    "capturable": edited("capturable", True, RuntimeError, "{}=True does not"),
    "row_exponent": edited("row_exponent", -0.5),
    "zero_sum": edited("zero_sum", "no"),
    "second_moment_scale": edited("second_moment_scale", -1),
    "eps": edited("eps", -1.0),
    "weight_decay": edited("weight_decay", "0.1"),
    "maximize": edited("maximize", 1),
    "stochastic_rounding": edited("stochastic_rounding", None),
}


@pytest.mark.parametrize(("error", "message", "prepare"), REFUSED.values(), ids=REFUSED)
def test_refused_step(error, message, prepare):
    """Before any parameter or state of any group has changed."""
    first, table, last = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (8, 4), (8, 4)))
    groups = [{"params": [first]}, {"params": [table], "coupled": True}]
    optimizer = CoupledAdamW([*groups, {"params": [last], "coupled": True}], lr=0.1)
    for _ in range(2):
        for p in (first, table, last):
            p.grad = torch.ones_like(p)
        optimizer.step()
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in (first, table)])
    prepare(optimizer, last)
    with pytest.raises(error, match=message):
        optimizer.step()
    after = [(p.detach(), optimizer.state[p]) for p in (first, table)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
