"""One table of cases for every kernel, and how a step is compared with the float64 oracle.

Before each step the oracle is given what the optimizer has stored, and takes the same step. So no
error outlives a step, and all that is left of one are the roundings of what is stored.
"""

import io

import numpy as np
import torch
from oracle import CoupledAdamOracle
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim import flat, row_sparse, update

MOMENTUM = (0.9, 0.95)
LEAN_SOON = {"row_exponent": 0.75, "zero_sum": True, "betas": (0.0, 0.5)}
"""LEAN, with so short a memory that the third step already takes back what the second has moved."""
CASES = {
    "coupled": {},
    "coupled, decay": {"weight_decay": 0.1, "maximize": True},
    "coupled, penalty": {"cls": CoupledAdam, "weight_decay": 0.1},
    "coupled, penalty, maximize": {"cls": CoupledAdam, "weight_decay": 0.1, "maximize": True},
    "coupled, amsgrad": {"amsgrad": True, "second_moment_scale": 0.25},
    "coupled, betas of 0": {"betas": (0.0, 0.0)},
    "coupled, no momentum": {"betas": (0.0, 0.95), "weight_decay": 0.1},
    "coupled, short momentum": {"betas": (0.05, 0.95)},
    "coupled, long memory": {"betas": (0.9, 0.999999), "eps": 1e-3},
    "rows": {"row_exponent": 0.5},
    "rows, no momentum": {"row_exponent": 1.0, "betas": (0.0, 0.95)},
    "zero-sum": {"zero_sum": True, "betas": (0.8, 0.5), "weight_decay": 0.1},
    "zero-sum, maximize": {"zero_sum": True, "betas": (0.8, 0.5), "maximize": True},
    "zero-sum, no momentum": {"zero_sum": True, "betas": (0.0, 0.5)},
    "LEAN": LEAN_SOON,
    "LEAN, long memory": {**LEAN_SOON, "betas": (0.0, 0.99)},
    "LEAN, momentum": {**LEAN_SOON, "betas": (0.7, 0.5), "second_moment_scale": 0.25},
    "LEAN, penalty": {
        "cls": CoupledAdam,
        "row_exponent": 0.5,
        "zero_sum": True,
        "betas": (0.8, 0.5),
        "weight_decay": 0.1,
        "maximize": True,
    },
}
"""Options of a coupled group, and the optimizer's class where it is not CoupledAdamW."""

LEAN = {name: options for name, options in CASES.items() if not name.startswith("coupled")}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("rows", "columns of more", "every other row", "transposed", "grad transposed", "[H, V]")
"""In memory, of parameter and gradient; the last is the only one with another ``vocab_dim``."""


def tolerance(dtype):
    """What a step may be wrong by, relative to the largest number: its roundings.

    A number in half precision is rounded once or twice; others are sums over a thousand rows.
    """
    return (4 if dtype.itemsize == 2 else 160) * torch.finfo(dtype).eps


def laid_out(values, layout):
    """The same values [m, n] in other strides."""
    m, n = values.shape
    if layout == "transposed":
        return values.T.contiguous().T
    if layout == "columns of more":
        return torch.cat([values.new_full((m, 1), 7.0), values, values], 1)[:, 1 : n + 1]
    if layout == "every other row":
        return values.repeat_interleave(2, 0)[::2]
    return values.contiguous()


def gradient(shape, seed, dtype=torch.float64, vocab_dim=0):
    """As an embedding's: rare and frequent tokens, of which one never occurs if there are more."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape[vocab_dim]
    frequency = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) ** 4
    frequency[0] = 0.0 if rows > 1 else 1.0
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * frequency.double().unsqueeze(1 - vocab_dim)).to(dtype)


def matrix(shape, seed=0, dtype=torch.float64):
    """The values of a parameter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def use(monkeypatch, kernel):
    """From now on a kernel updates every matrix, whatever ``choose`` would have said."""
    for module in (flat, row_sparse, update):
        monkeypatch.setattr(module, "choose", lambda _: kernel)


def optimizer_of(params, *, cls=CoupledAdamW, **options):
    """All parameters are in one coupled group."""
    options = {"lr": 1e-2, "weight_decay": 0.0, "betas": MOMENTUM, **options}
    return cls(params, coupled=True, **options)


def through_disk(value):
    """As it is saved and loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def take_steps(optimizer, seeds, vocab_dim=None):
    """With random gradients; with a dimension, of its first token none."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for p in filter(lambda p: p.requires_grad, group["params"]):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                if vocab_dim is not None:
                    p.grad.select(vocab_dim, 0).zero_()
        optimizer.step()


def in_rows(tensor, group):
    """In float64; a matrix with a row for each token, [V, H]."""
    array = tensor.detach().double().cpu().numpy()
    return (array.T if array.ndim == 2 and group["vocab_dim"] == 1 else array).copy()


def is_lean(group):
    return bool(group.get("row_exponent") or group.get("zero_sum"))


LEAN_STATE = {"exp_avg_sq": "nu", "row_exp_avg_sq": "r", "mean_update": "d", "exp_avg": "m"}
NUMBERS = ("lr", "eps", "weight_decay", "amsgrad", "maximize", "second_moment_scale")


def oracle_of(cls, group, p, state=None):
    """The oracle, with what the optimizer has stored of a matrix."""
    oracle = CoupledAdamOracle(
        in_rows(p, group),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        decoupled_weight_decay=issubclass(cls, CoupledAdamW),
        row_exponent=group.get("row_exponent", 0.0),
        zero_sum=group.get("zero_sum", False),
        **{name: float(group[name]) for name in NUMBERS},
    )
    if not state:
        return oracle
    oracle.t = int(state["step"])
    if is_lean(group):
        for name, ours in LEAN_STATE.items():
            if name in state:
                setattr(oracle, ours, in_rows(state[name], group))
        return oracle
    oracle.v = np.tile(in_rows(state["exp_avg_sq"], group), (len(oracle.m), 1))
    if "exp_avg" in state:
        oracle.m = in_rows(state["exp_avg"], group)
    if group["amsgrad"]:
        oracle.nu_max = in_rows(state["max_exp_avg_sq"], group)
    return oracle


def assert_as_oracle(cls, group, p, state, oracle, is_stepped=True):
    """The parameter and the state, which after a step has what the options need, and no more."""
    expected = {}
    if state:
        expected = {"step": np.array(float(oracle.t)), "exp_avg_sq": oracle.nu}
        if group["betas"][0] != 0 if is_stepped else "exp_avg" in state:
            expected["exp_avg"] = oracle.m
        if group["amsgrad"]:
            expected["max_exp_avg_sq"] = oracle.nu_max
        if is_lean(group):
            expected["row_exp_avg_sq"] = oracle.r
        else:
            expected["exp_avg_sq"] = oracle.v.mean(0)
        if group.get("zero_sum"):
            expected["mean_update"] = oracle.d
        assert state.keys() == expected.keys()
    # An L2 penalty is added to the gradient in the gradient's dtype, before anything else.
    has_penalty = oracle.weight_decay and not oracle.decoupled_weight_decay
    smallest = torch.finfo(p.dtype).smallest_normal * torch.finfo(p.dtype).eps
    for name, tensor in {**state, "param": p}.items():
        values = {**expected, "param": oracle.embeddings}[name]
        scale, dtype = np.abs(values).max(), p.dtype if has_penalty else tensor.dtype
        most = tolerance(dtype) * scale + smallest
        if name in ("mean_update", "param"):
            # Sums, in which much may cancel, of what is stored as the moment; in float16 that may
            # be subnormal, where all numbers have the same absolute error.
            scale = max(scale, oracle.largest_update)
            most = tolerance(p.dtype) * scale + smallest * max(1.0, oracle.largest_factor)
        error = np.abs(in_rows(tensor, group) - values).max()
        assert error <= most, (name, error, most)


def check_steps(shape, dtype, layout="rows", *, steps=3, device="cpu", **options):
    """Steps of a matrix [V, H] beside the oracle; returns the optimizer and the parameter."""
    vocab_dim = int(layout == "[H, V]")
    of_grad = layout.removeprefix("grad ")
    of_param = "rows" if of_grad != layout else layout
    shape = shape[::-1] if vocab_dim else shape
    p = nn.Parameter(laid_out(matrix(shape, 0, dtype).to(device), of_param))
    p = p.clone() if options.get("differentiable") else p
    optimizer = optimizer_of([p], vocab_dim=vocab_dim, **options)
    (group,) = optimizer.param_groups
    for step in range(steps):
        grad = gradient(shape, step + 1, dtype, vocab_dim)
        p.grad = laid_out(grad.to(device), of_grad)
        oracle = oracle_of(type(optimizer), group, p, optimizer.state.get(p))
        oracle.step(in_rows(grad, group))
        optimizer.step()
        assert_as_oracle(type(optimizer), group, p, optimizer.state[p], oracle)
    return optimizer, p
