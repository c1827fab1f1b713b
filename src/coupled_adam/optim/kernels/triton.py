"""The update on a GPU: three Triton kernels, the first and last of which pass over the matrices.

``_sums`` adds up the squared gradient, in parts of the rows; ``_finish`` does all arithmetic with
vectors [H], which is :func:`coupled_adam.optim.reference.step_size` once more; ``_update`` changes
the first moment and the parameter. With ``row_exponent`` or ``zero_sum``, ``_center`` takes the
place of ``_sums``: it has whole rows, and so also gives each row's r and weight, and, of the first
moment that it updates, the weighted sum of the rows. If the gradient is clipped it runs once the
factor is known; without a first moment it has already run as if the factor were 1, and returns at
once if it is. All sums have a fixed order, so that results are the same bits at every call, and
nothing waits for the device, so that a step can be captured in a CUDA graph.
"""

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.matrix import OPTIONS, Matrix, Scalars, Sums

serves = frozenset(
    {"coupled", "second_moment_scale", "row_exponent", "zero_sum", "vocab_dim"}
    | {"stochastic_rounding"}
)
skips = True

_SUMS_BLOCK = (16, 128)  # tokens and features that a program takes at a time; swapped for [H, V]
_FINISH_BLOCK = (128, 16)
_UPDATE_BLOCK = (8, 256)
_CENTER_ELEMENTS = 2048  # of whole rows
_AHEAD_BYTES = 48 * 1024
_WIDEST = 8192  # features of whole rows, for which there are enough registers
_PROGRAMS = 4  # of the kernels that add up, for each unit of the GPU: it runs them all at once
# Multiplications and additions are rounded one by one: from the same step size every GPU computes
# the same bits, and they are a CPU's.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@dataclass
class _Rows:
    """What ``_center`` computes with whole rows; updates and counts in parts of the rows.

    Attributes:
        r: the new r, which ``_update`` stores, [rows].
        weights: r^(-a/2), [rows].
        updates: the sums of w_i m_i, [parts, columns]; None without ``zero_sum``.
        counts: the number of rows with r > 0 and the sum of r, [parts, 2].
        computed: whether all of this holds for the gradient as it is.
    """

    r: Tensor
    weights: Tensor
    updates: Tensor | None
    counts: Tensor
    computed: bool = False


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise what Triton raises where it cannot compile for this device and this dtype."""
    # Aligned as most matrices are: what is compiled here is then used for them.
    param, grad, exp_avg = torch.zeros(3, 16, 16, dtype=dtype, device=device)
    matrix = Matrix(
        group={**OPTIONS, "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True},
        parameter=param,
        step=torch.zeros(()),
        vocab_size=16,
        hidden_size=16,
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=torch.zeros(16, device=device),
        max_exp_avg_sq=None,
        exp_avg_sq_row=None,
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        traced=False,
        kernel=sys.modules[__name__],
    )
    apply(matrix, measure(matrix, False), Scalars())


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """The sums, in float32; [parts, columns], over parts of the rows, where no rank has others.

    The first moment is left to ``apply``, as to update it here would move as many bytes, unless its
    sum is needed: then ``_center`` updates it, here or in :func:`weigh_rows`.
    """
    grad, zero_sum = matrix.grad, matrix.group["zero_sum"]
    rows, columns = grad.shape
    has_rows = _has_rows(matrix) and (as_is or zero_sum)
    if has_rows and (as_is or matrix.exp_avg is None):
        sums = Sums(_empty(grad, _center_grid(grad)[0], columns), memo=_new_rows(matrix))
        _weigh(matrix, sums, Scalars(), sums.squares)
        sums.memo.computed, sums.weights = True, sums.memo.weights
        sums.squares = _whole(matrix, sums.squares)
        return sums
    across, parts, block = _grid(grad)
    squares = _empty(grad, parts, columns)
    row_squares = None
    if matrix.exp_avg_sq_row is not None and not has_rows:
        row_squares = _empty(grad, across, rows)
    if columns:
        with _device_of(grad):
            _sums[across, parts](
                grad, *grad.stride(), squares, row_squares, rows, columns, *block, **_OPTIONS
            )
    return Sums(
        _whole(matrix, squares),
        None if row_squares is None else row_squares.sum(0),
        memo=_new_rows(matrix) if has_rows else None,
    )


def weigh_rows(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Give r and the weights, and with ``zero_sum`` the updates, for the scaled gradient."""
    computed = sums.memo
    if computed is None:
        reference.weigh_rows(matrix, sums, scalars)
        return
    if sums.weights is None:  # the factor may not be 1
        _weigh(matrix, sums, scalars, None)
    sums.weights, sums.rows = computed.weights, _whole(matrix, computed.counts)
    sums.updates = None if computed.updates is None else _whole(matrix, computed.updates)


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update ``exp_avg``, and sum it over this rank's rows, each with its weight."""
    columns = matrix.grad.shape[1]
    across, parts, block = _grid(matrix.grad)
    updates = _empty(matrix.grad, parts, columns)
    if columns:
        _launch_center(
            (across, parts), matrix, scalars, weights=sums.weights, updates=updates, block=block
        )
    sums.updates, sums.moment = updates.sum(0), matrix.exp_avg


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu and its maximum, then ``exp_avg`` unless it has been, r and ``param``."""
    param, grad, exp_avg = matrix.param, matrix.grad, matrix.exp_avg
    group, noise, device = matrix.group, scalars.noise, param.device
    beta1, beta2 = matrix.beta1, matrix.beta2
    assert not isinstance(beta1, Tensor)
    assert not isinstance(beta2, Tensor)
    rows, columns = param.shape
    rates = torch.empty_like(matrix.exp_avg_sq)
    mean = None if sums.updates is None else torch.empty_like(rates)
    factor, t = _on(device, scalars.factor), _on(device, scalars.t)
    t = t if isinstance(t, Tensor) else int(t)
    computed: _Rows | None = sums.memo
    if columns:
        with _device_of(param):
            _finish[(_cdiv(columns, _FINISH_BLOCK[1]),)](
                sums.squares,
                _parts(sums.squares),
                sums.updates,
                sums.rows,
                1 if sums.rows is None else sums.rows.numel() // 2,
                matrix.exp_avg_sq,
                matrix.max_exp_avg_sq,
                rates,
                mean,
                columns,
                t,
                factor,
                _on(device, matrix.lr),
                scalars.skip,
                # beta^t is computed from the logarithm, which single precision spoils least.
                math.log(beta1) if beta1 else -math.inf,
                math.log(beta2) if beta2 else -math.inf,
                beta2,
                (1 - beta2) / matrix.vocab_size,
                group["second_moment_scale"],
                float(matrix.vocab_size),
                group["row_exponent"] / 2,
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
                    *_strides(exp_avg),
                    rates,
                    sums.weights,
                    mean,
                    None if computed is None else matrix.exp_avg_sq_row,
                    None if computed is None else computed.r,
                    rows,
                    columns,
                    None if sums.moment is not None else 1 - beta1,
                    _on(device, matrix.decay),
                    factor,
                    scalars.skip,
                    t if noise is not None else None,
                    noise.row if noise is not None else 0,
                    noise.column if noise is not None else 0,
                    _signed(noise.salt) if noise is not None else 0,
                    tall,
                    wide,
                    **_OPTIONS,
                )
    # As torch's operations tell autograd.
    changed = [param, exp_avg, matrix.exp_avg_sq, matrix.max_exp_avg_sq]
    changed.append(None if computed is None else matrix.exp_avg_sq_row)
    torch.autograd.graph.increment_version([x for x in changed if x is not None])


def _has_rows(matrix: Matrix) -> bool:
    """Whether a program can have whole rows, and r is kept."""
    grad, exp_avg = matrix.grad, matrix.exp_avg
    return (
        matrix.exp_avg_sq_row is not None
        and matrix.has_whole_rows
        and grad.shape[1] <= _WIDEST
        and grad.stride(1) == 1
        and (exp_avg is None or exp_avg.stride(1) == 1)
    )


def _new_rows(matrix: Matrix) -> _Rows:
    r, (parts, _) = matrix.exp_avg_sq_row, _center_grid(matrix.grad)
    assert r is not None
    updates = _empty(r, parts, matrix.grad.shape[1]) if matrix.group["zero_sum"] else None
    return _Rows(torch.empty_like(r), torch.empty_like(r), updates, _empty(r, parts, 2))


def _weigh(matrix: Matrix, sums: Sums, scalars: Scalars, squares: Tensor | None) -> None:
    """Compute all of ``sums.memo`` for the scaled gradient, and the squares of the gradient."""
    computed: _Rows = sums.memo
    parts, block = _center_grid(matrix.grad)
    _launch_center(
        (1, parts),
        matrix,
        scalars,
        weights=computed.weights,
        updates=computed.updates,
        block=block,
        r=matrix.exp_avg_sq_row,
        computed=computed,
        squares=squares,
    )
    if computed.updates is not None:
        sums.moment = matrix.exp_avg


def _launch_center(
    grid: tuple[int, int],
    matrix: Matrix,
    scalars: Scalars,
    *,
    weights: Tensor | None,
    updates: Tensor | None,
    block: tuple[int, int],
    r: Tensor | None = None,
    computed: _Rows | None = None,
    squares: Tensor | None = None,
) -> None:
    grad, size = matrix.grad, block[0] * block[1]
    exp_avg = None if updates is None else matrix.exp_avg
    # The blocks that are read ahead must fit into the shared memory of small GPUs, too.
    bytes_ahead = size * grad.itemsize * (1 if exp_avg is None else 2)
    # Each thread has at least one widest load of 16 bytes; an AMD warp has twice the threads.
    lanes, elements = (64, 16 // grad.itemsize) if torch.version.hip else (32, 8)
    with _device_of(grad):
        _center[grid](
            grad,
            *grad.stride(),
            exp_avg,
            *_strides(exp_avg),
            weights,
            r,
            None if computed is None else computed.r,
            None if computed is None else computed.counts,
            squares,
            updates,
            *grad.shape,
            1 - matrix.beta1,
            _on(grad.device, scalars.factor),
            matrix.beta2,
            (1 - matrix.beta2) / matrix.hidden_size,
            matrix.group["row_exponent"] / 2,
            scalars.skip,
            computed is not None and computed.computed,
            min(3, 1 + _AHEAD_BYTES // bytes_ahead),
            *block,
            **{**_OPTIONS, "num_warps": max(1, min(16, size // (elements * lanes)))},
        )


def _center_grid(matrix: Tensor) -> tuple[int, tuple[int, int]]:
    """The number of programs that take whole rows, and the block of each."""
    rows, columns = matrix.shape
    wide = max(16, triton.next_power_of_2(columns))
    tall = max(1, _CENTER_ELEMENTS // wide)
    most = _PROGRAMS * _units(matrix.device) * _CENTER_ELEMENTS // (tall * wide)
    return max(1, min(most, _cdiv(rows, tall))), (tall, wide)


def _grid(matrix: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The numbers of programs that sum over columns and over rows, and the block of each."""
    rows, columns = matrix.shape
    tall, wide = _block(matrix, _SUMS_BLOCK)
    across = _cdiv(columns, wide)
    most = _PROGRAMS * _units(matrix.device) // max(1, across)
    return across, max(1, min(most, _cdiv(rows, tall))), (tall, wide)


@functools.cache
def _units(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    if device.type != "cuda":
        return 128
    units: int = torch.cuda.get_device_properties(device).multi_processor_count
    return units


def _whole(matrix: Matrix, parts: Tensor) -> Tensor:
    """Sums over parts of the rows, added up if other ranks have rows, too."""
    return parts.sum(0) if matrix.row_ranks else parts


def _parts(sums: Tensor) -> int:
    return 1 if sums.dim() == 1 else len(sums)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(matrix: Tensor | None) -> tuple[int, int]:
    return (0, 0) if matrix is None else matrix.stride()  # type: ignore[return-value]


def _on(device: torch.device, value: float | Tensor) -> float | Tensor:
    return value.to(device) if isinstance(value, Tensor) else value


def _signed(number: int) -> int:
    """The same 32 bits as a signed number, so that one binary serves all."""
    return number - 2**32 if number >= 2**31 else number


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
    weights,
    r,
    new_r,
    counts,
    squares,
    updates,
    rows,
    columns,
    weight,
    factor,
    beta2,
    share,
    exponent,
    skip,
    COMPUTED: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """With r a program has whole rows, and gives their weights; otherwise it reads these."""
    if skip is not None:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if tl.load(skip) != 0:
            return
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    factor = _number(factor).to(tl.float32)  # Triton's interpreter needs one of the above before
    if COMPUTED:  # noqa: SIM102
        if factor == 1:
            return
    for first in tl.range(part * ROWS, rows, parts * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = _place(row, grad_row_stride, column, grad_column_stride)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if squares is not None:
            square += g * g
        if r is not None:
            old = tl.load(r + row, mask=row < rows, other=0.0)
            new = beta2 * old + _scaled(tl.sum(g * g, axis=1), factor) * share  # (1 - beta2) / H
            w = tl.where(new == 0, 0.0, _power(new, -exponent))
            tl.store(new_r + row, new, mask=row < rows)
            tl.store(weights + row, w, mask=row < rows)
            count += tl.where(new != 0, 1.0, 0.0)
            total += new
        else:
            w = tl.load(weights + row, mask=row < rows, other=0.0)
        if updates is not None:
            m = factor * g
            if exp_avg is not None:
                place = _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
                m = _updated(m, exp_avg + place, mask, weight)
            update += w[:, None] * m
    if squares is not None:
        tl.store(squares + part * columns + column, tl.sum(square, axis=0), mask=inside)
    if updates is not None:
        tl.store(updates + part * columns + column, tl.sum(update, axis=0), mask=inside)
    if r is not None:
        tl.store(counts + 2 * part, tl.sum(count, axis=0))
        tl.store(counts + 2 * part + 1, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["parts", "row_parts", "t"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    squares,
    parts,
    updates,
    counts,
    row_parts,
    exp_avg_sq,
    max_exp_avg_sq,
    rates,
    mean,
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
    vocab_size,
    exponent,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102
        if tl.load(skip) != 0:
            return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    square = _total(squares, parts, column, columns, ROWS, COLUMNS)
    lr = _number(lr).to(tl.float32)
    if counts is not None:  # means over the rows with r > 0
        pair = tl.arange(0, 2)
        active, total = tl.split(_total(counts, row_parts, pair, 2, ROWS, 2))
        active = tl.maximum(active, 1.0)
        scale = tl.div_rn(scale * vocab_size, active)
        lr *= _power(tl.div_rn(total, active), exponent)
        if updates is not None:
            update = _total(updates, row_parts, column, columns, ROWS, COLUMNS)
            tl.store(mean + column, tl.div_rn(update, active), mask=inside)
    # share = (1 - beta2) / V
    mean_square = _scaled(square, _number(factor).to(tl.float32)) * share
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
    tl.store(rates + column, tl.div_rn(tl.div_rn(lr, correction1), denominator), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["t", "first_row", "first_column", "salt"]
)
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
    weights,
    mean,
    r,
    new_r,
    rows,
    columns,
    weight,
    decay,
    factor,
    skip,
    t,
    first_row,
    first_column,
    salt,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if skip is not None:  # noqa: SIM102
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
    p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
    place = _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
    if exp_avg is not None and weight is None:  # _center has updated it
        m = tl.load(exp_avg + place, mask=mask, other=0.0).to(tl.float32)
    else:
        grad += _place(row, grad_row_stride, column, grad_column_stride)
        g = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
        m = _number(factor).to(tl.float32) * g
        if exp_avg is not None:
            m = _updated(m, exp_avg + place, mask, weight)
    if weights is not None:
        w = tl.load(weights + row, mask=row < rows, other=0.0)
        m = w[:, None] * m
        if mean is not None:  # a row that never had a gradient does not move
            center = tl.load(mean + column, mask=inside, other=0.0)
            m -= tl.where((w == 0)[:, None], 0.0, center[None, :])
        if r is not None:  # by the programs of the first columns
            own = row < tl.where(block % across == 0, rows, 0)
            tl.store(r + row, tl.load(new_r + row, mask=own, other=0.0), mask=own)
    p = _number(decay).to(tl.float32) * p - rate * m
    if t is not None:  # round stochastically, as coupled_adam.optim.rounding does
        key = _mix(_number(t).to(tl.uint32) ^ salt.to(tl.uint32))
        token, feature = (row + first_row).to(tl.uint32), (column + first_column).to(tl.uint32)
        random = _mix(_mix(_mix(token) ^ key)[:, None] ^ feature[None, :])
        bits = (p.to(tl.uint32, bitcast=True) + (random >> 16)) & 0xFFFF0000
        p = tl.where(p == p, bits.to(tl.float32, bitcast=True), p)
    tl.store(param, p.to(param.dtype.element_ty), mask=mask)


@triton.jit
def _updated(g, exp_avg, mask, weight):  # type: ignore[no-untyped-def]
    """Update a block of the first moment, and return it as it is stored.

    This, also in half precision, is what moves the parameter. As torch.lerp, exact at both ends: a
    large weight loses nothing of a small gradient after a large one.
    """
    m = tl.load(exp_avg, mask=mask, other=0.0).to(tl.float32)
    share = tl.where(weight < 0.5, weight, weight - 1)
    m = (tl.where(weight < 0.5, m, g) + share * (g - m)).to(exp_avg.dtype.element_ty)
    tl.store(exp_avg, m, mask=mask)
    return m.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _total(sums, parts, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up sums over parts of the rows, [parts, columns]."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(sums + part[:, None] * columns + column[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _scaled(squares, factor):  # type: ignore[no-untyped-def]
    """Clipped to nothing, even a square that overflowed is nothing."""
    return tl.where(factor == 0, 0.0, squares * factor * factor)


@triton.jit
def _power(x, exponent):  # type: ignore[no-untyped-def]
    """x^exponent of a number that is not negative; 1 for an exponent of 0."""
    return tl.where(exponent == 0, 1.0, tl.exp2(exponent * tl.log2(x)))


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
