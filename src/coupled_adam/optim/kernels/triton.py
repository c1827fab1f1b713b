"""The update on a GPU: three Triton kernels, the first and last of which pass over the matrices.

``_sums`` adds up the squared gradient, in parts of the rows; ``_finish`` does all arithmetic with
vectors [H], which is :func:`coupled_adam.optim.reference.step_size` once more; ``_update`` changes
the first moment and the parameter. With ``zero_sum``, ``_center`` changes the first moment and adds
up the rows' updates before. All sums have a fixed order, so that results are the same bits
at every call, and nothing waits for the device, so that a step can be captured in a CUDA graph.
"""

import math
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optim import reference, sharded
from coupled_adam.optim.update import Update

skips = True

_SUMS_BLOCK = (16, 128)  # tokens and features that a program takes at a time; swapped for [H, V]
_FINISH_BLOCK = (32, 32)
_UPDATE_BLOCK = (8, 256)
_MOST_PROGRAMS = 512  # of the first kernel: an A100 and what is larger run them all at once
# Multiplications and additions are rounded one by one: from the same step size every GPU computes
# the same bits, and they are a CPU's.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise what Triton raises where it cannot compile for this device and this dtype."""
    # Aligned as most matrices are: what is compiled here is then used for them.
    param, grad, exp_avg = torch.zeros(3, 16, 16, dtype=dtype, device=device)
    moment = torch.zeros(16, device=device)
    group = {
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled_weight_decay": True,
        "second_moment_scale": 1.0,
        "row_exponent": 0.0,
        "zero_sum": False,
        "vocab_dim": 0,
    }
    update = Update(
        group=group,
        parameter=param,
        moment=moment,
        step=torch.zeros(()),
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=moment,
        max_exp_avg_sq=None,
        traced=False,
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        kernel=sys.modules[__name__],
        t=1.0,
    )
    measure(update, False)
    apply(update)


def measure(update: Update, update_moment: bool) -> None:
    """The sums, in float32; [parts, columns], over parts of the rows, where no rank has others.

    The first moment is left to ``apply``: to update it here would move as many bytes.
    """
    grad = update.grad
    rows, columns = grad.shape
    across, parts, block = _grid(grad)
    sums = torch.empty(parts, columns, dtype=torch.float32, device=grad.device)
    row_sums = None
    if update.exp_avg_sq_row is not None:
        row_sums = torch.empty(across, rows, dtype=torch.float32, device=grad.device)
    if columns:
        with _device_of(grad):
            _sums[across, parts](
                grad, *grad.stride(), sums, row_sums, rows, columns, *block, **_OPTIONS
            )
    if row_sums is not None:
        update.row_sums = row_sums.sum(0)
    update.sums = sums.sum(0) if sharded.is_dtensor(update.parameter) else sums


def center(update: Update) -> None:
    """Update ``exp_avg``, and sum it over this rank's rows, each with its weight."""
    grad, exp_avg = update.grad, update.exp_avg
    rows, columns = exp_avg.shape
    across, parts, block = _grid(exp_avg)
    sums = torch.empty(parts, columns, dtype=torch.float32, device=exp_avg.device)
    if columns:
        with _device_of(exp_avg):
            _center[across, parts](
                grad,
                *grad.stride(),
                exp_avg,
                *exp_avg.stride(),
                update.weights,
                sums,
                rows,
                columns,
                1 - update.beta1,
                _on(exp_avg.device, update.factor),
                update.skip,
                *block,
                **_OPTIONS,
            )
    update.moment_sums, update.moment_updated = sums.sum(0), True


def _grid(matrix: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The numbers of programs that sum over columns and over rows, and the block of each."""
    rows, columns = matrix.shape
    tall, wide = _block(matrix, _SUMS_BLOCK)
    across = _cdiv(columns, wide)
    return across, max(1, min(_MOST_PROGRAMS // max(1, across), _cdiv(rows, tall))), (tall, wide)


def apply(update: Update) -> None:
    """Update nu and its maximum, then ``exp_avg`` and ``param``."""
    assert update.sums is not None
    param, grad, exp_avg = update.param, update.grad, update.exp_avg
    exp_avg_sq, max_exp_avg_sq = update.exp_avg_sq, update.max_exp_avg_sq
    group, noise = update.group, update.noise
    beta1, beta2 = update.beta1, update.beta2
    assert not isinstance(beta1, Tensor)
    assert not isinstance(beta2, Tensor)
    rows, columns = param.shape
    rates = torch.empty_like(exp_avg_sq)
    mean = None if update.moment_sums is None else update.moment_sums / update.vocab_size
    device = param.device
    factor, t = _on(device, update.factor), _on(device, update.t)
    lr = _on(device, update.lr)
    if update.exp_avg_sq_row is not None:
        lr = lr * reference.row_scale(update)
    t = t if isinstance(t, Tensor) else int(t)
    if columns:
        with _device_of(param):
            _finish[(_cdiv(columns, _FINISH_BLOCK[1]),)](
                update.sums,
                1 if update.sums.dim() == 1 else len(update.sums),
                exp_avg_sq,
                max_exp_avg_sq,
                rates,
                columns,
                t,
                factor,
                lr,
                update.skip,
                # beta^t is computed from the logarithm, which single precision spoils least.
                math.log(beta1) if beta1 else -math.inf,
                math.log(beta2) if beta2 else -math.inf,
                beta2,
                (1 - beta2) / update.vocab_size,
                group["second_moment_scale"],
                group["eps"],
                *_FINISH_BLOCK,
                **_OPTIONS,
            )
            if rows:
                tall, wide = _block(param, _UPDATE_BLOCK)
                _update[(_cdiv(rows, tall) * _cdiv(columns, wide),)](
                    param,
                    *param.stride(),
                    grad,
                    *grad.stride(),
                    exp_avg,
                    *exp_avg.stride(),
                    rates,
                    update.weights,
                    mean,
                    rows,
                    columns,
                    None if update.moment_updated else 1 - beta1,
                    _on(device, update.decay),
                    factor,
                    update.skip,
                    t if noise is not None else None,
                    noise.row if noise is not None else 0,
                    noise.column if noise is not None else 0,
                    tall,
                    wide,
                    **_OPTIONS,
                )
    # As torch's operations tell autograd.
    moments = [exp_avg_sq] if max_exp_avg_sq is None else [exp_avg_sq, max_exp_avg_sq]
    torch.autograd.graph.increment_version([param, exp_avg, *moments])


def _on(device: torch.device, value: float | Tensor) -> float | Tensor:
    return value.to(device) if isinstance(value, Tensor) else value


def _block(matrix: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a program's block, longest where elements are neighbours in memory."""
    return block if matrix.stride(1) == 1 else (block[1], block[0])


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _device_of(x: Tensor) -> Any:
    """Makes a tensor's device the current one, on which Triton launches."""
    return torch.xpu.device_of(x) if x.is_xpu else torch.cuda.device_of(x)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    grad,
    row_stride,
    column_stride,
    sums,
    row_sums,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    # Each program takes every parts-th block of rows: programs that run together read what lies
    # side by side.
    for first in tl.range(part * ROWS, rows, parts * ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = _place(row, row_stride, column, column_stride)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        total += g * g
        if row_sums is not None:
            place = tl.program_id(0) * rows + row
            tl.store(row_sums + place, tl.sum(g * g, axis=1), mask=row < rows)
    tl.store(sums + part * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _center(  # type: ignore[no-untyped-def]
    grad,
    grad_row_stride,
    grad_column_stride,
    exp_avg,
    exp_avg_row_stride,
    exp_avg_column_stride,
    row_weights,
    sums,
    rows,
    columns,
    weight,
    factor,
    skip,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if tl.load(skip) != 0:
            return
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    factor = _number(factor).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in tl.range(part * ROWS, rows, parts * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        g = grad + _place(row, grad_row_stride, column, grad_column_stride)
        m = exp_avg + _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
        moment = _updated(g, m, mask, weight, factor)
        if row_weights is not None:
            total += tl.load(row_weights + row, mask=row < rows, other=0.0)[:, None] * moment
        else:
            total += moment
    tl.store(sums + part * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["parts", "t"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    sums,
    parts,
    exp_avg_sq,
    max_exp_avg_sq,
    rates,
    columns,
    t,
    factor,
    lr,
    skip,
    log_beta1,
    log_beta2,
    beta2,
    share,
    scale,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if tl.load(skip) != 0:
            return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & inside[None, :]
        total += tl.load(sums + part[:, None] * columns + column[None, :], mask=mask, other=0.0)
    sum_of_squares = tl.sum(total, axis=0)
    factor = _number(factor).to(tl.float32)
    # share = (1 - beta2) / V. Clipped to nothing, even a square that overflowed is nothing.
    mean_square = tl.where(factor == 0, 0.0, sum_of_squares * factor * factor) * share
    nu = beta2 * tl.load(exp_avg_sq + column, mask=inside, other=0.0) + mean_square
    tl.store(exp_avg_sq + column, nu, mask=inside)
    if max_exp_avg_sq is not None:
        maximum = tl.load(max_exp_avg_sq + column, mask=inside, other=0.0)
        nu = tl.maximum(maximum, nu, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq + column, nu, mask=inside)
    # In float64, as 1 - beta^t loses five digits in float32.
    t = _number(t).to(tl.float64)
    correction1 = (1 - tl.exp(t * log_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp(t * log_beta2)).to(tl.float32)
    denominator = tl.sqrt_rn(tl.div_rn(scale * nu, correction2)) + eps
    step_size = tl.div_rn(tl.div_rn(_number(lr).to(tl.float32), correction1), denominator)
    tl.store(rates + column, step_size, mask=inside)


@triton.jit(do_not_specialize=["t", "first_row", "first_column"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    param,
    param_row_stride,
    param_column_stride,
    grad,
    grad_row_stride,
    grad_column_stride,
    exp_avg,
    exp_avg_row_stride,
    exp_avg_column_stride,
    rates,
    row_weights,
    mean,
    rows,
    columns,
    weight,
    decay,
    factor,
    skip,
    t,
    first_row,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if tl.load(skip) != 0:
            return
    # The last rows first: of the gradient, they are what the sums have left in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    row = block // across * ROWS + tl.arange(0, ROWS)
    column = block % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    rate = tl.load(rates + column, mask=inside, other=0.0)[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    param += _place(row, param_row_stride, column, param_column_stride)
    grad += _place(row, grad_row_stride, column, grad_column_stride)
    exp_avg += _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
    p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        m = _updated(grad, exp_avg, mask, weight, _number(factor).to(tl.float32))
    else:  # _center has updated it
        m = tl.load(exp_avg, mask=mask, other=0.0).to(tl.float32)
    if row_weights is not None:
        m = tl.load(row_weights + row, mask=row < rows, other=0.0)[:, None] * m
    if mean is not None:
        m -= tl.load(mean + column, mask=inside, other=0.0)[None, :]
    p = _number(decay).to(tl.float32) * p - rate * m
    if t is not None:  # round stochastically, as coupled_adam.optim.rounding does
        key = _mix(_number(t).to(tl.uint32))
        token, feature = (row + first_row).to(tl.uint32), (column + first_column).to(tl.uint32)
        random = _mix(_mix(_mix(token) ^ key)[:, None] ^ feature[None, :])
        bits = (p.to(tl.uint32, bitcast=True) + (random >> 16)) & 0xFFFF0000
        p = tl.where(p == p, bits.to(tl.float32, bitcast=True), p)
    tl.store(param, p.to(param.dtype.element_ty), mask=mask)


@triton.jit
def _updated(grad, exp_avg, mask, weight, factor):  # type: ignore[no-untyped-def]
    """Update a block of the first moment, and return it as it is stored.

    This, also in half precision, is what moves the parameter.
    """
    g = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg, mask=mask, other=0.0).to(tl.float32)
    m += weight * (factor * g - m)
    m = m.to(exp_avg.dtype.element_ty)
    tl.store(exp_avg, m, mask=mask)
    return m.to(tl.float32)


@triton.jit
def _place(row, row_stride, column, column_stride):  # type: ignore[no-untyped-def]
    """Where elements are; a matrix may have more of them than int32 counts."""
    return (row.to(tl.int64) * row_stride)[:, None] + (column.to(tl.int64) * column_stride)[None, :]


@triton.jit
def _number(value):  # type: ignore[no-untyped-def]
    """A number that is passed, or read where it lies on the device."""
    value = tl.core.to_tensor(value)
    return tl.load(value) if value.dtype.is_ptr() else value


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """``rounding.mix``."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
