"""The update on a GPU: two Triton kernels, each of which passes over memory once.

The order of all sums is fixed, so that results are the same bits at every call; nothing waits for
the device, so that a step can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optim.reference import step_size
from coupled_adam.optim.update import Update

skips = True

_SUM_BLOCK = (64, 128)  # rows and columns that a program of the first kernel takes at a time
_PROGRAMS = 1024  # of the first kernel at most, for a large matrix
_BLOCK = (8, 256)


def check(device: torch.device) -> None:
    """Raise what Triton raises where it cannot compile for this device."""
    grad = torch.ones(1, 1, device=device)
    _measure(grad, torch.float32)


def measure(update: Update, update_moment: bool) -> None:
    """The sums, in float32."""
    update.sums = _measure(update.grad, update.exp_avg_sq.dtype)


def apply(update: Update) -> None:
    """m <- m + (1 - beta1) (factor g - m), then e <- decay e - rate m; after nu."""
    rates = step_size(update)
    param, grad, exp_avg = update.param, update.grad, update.exp_avg
    across = param.stride(1) != 1
    if across:  # [H, V] in memory: the step size is that of a row
        param, grad, exp_avg = param.T, grad.T, exp_avg.T
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    if not param.numel():
        return
    rows, columns = param.shape
    grid = (triton.cdiv(rows, _BLOCK[0]), triton.cdiv(columns, _BLOCK[1]))
    decay, factor, noise = update.decay, update.factor, update.noise
    _update[grid](
        param,
        grad,
        exp_avg,
        rates,
        rows,
        columns,
        param.stride(0),
        grad.stride(0),
        exp_avg.stride(0),
        update.beta1,
        decay,
        factor,
        update.skip,
        *(noise or (None, 0, 0)),
        isinstance(decay, Tensor),
        isinstance(factor, Tensor),
        noise is not None and isinstance(noise.key, Tensor),
        across,
        *_BLOCK,
        num_warps=4,
    )


def _measure(grad: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.stride(0) == 1 and grad.stride(1) != 1:  # [H, V] in memory: each column is contiguous
        lengths: Tensor = torch.linalg.vector_norm(grad.T, dim=1, dtype=dtype)
        return lengths.square()
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows, columns = grad.shape
    wide = triton.cdiv(columns, _SUM_BLOCK[1])
    most = max(1, _PROGRAMS // wide)
    parts = max(1, min(most, triton.cdiv(rows, _SUM_BLOCK[0])))
    partial = torch.empty(parts, columns, dtype=dtype, device=grad.device)
    _sums_of_squares[wide, parts](
        grad, partial, rows, columns, grad.stride(0), *_SUM_BLOCK, num_warps=4
    )
    return partial.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_squares(  # type: ignore[no-untyped-def]
    grad,
    partial,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=partial.dtype.element_ty)
    # Each program takes every parts-th block of rows: neighbours read what lies side by side.
    for first in range(part * ROWS, rows, parts * ROWS):
        row = first + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * stride + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        g = tl.load(grad + place, mask=mask, other=0.0).to(total.dtype)
        total += g * g
    tl.store(partial + part * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    param,
    grad,
    exp_avg,
    step_size,
    rows,
    columns,
    param_stride,
    grad_stride,
    exp_avg_stride,
    beta1,
    decay,
    factor,
    skip,
    key,
    first_row,
    first_column,
    DECAY_IS_TENSOR: tl.constexpr,
    FACTOR_IS_TENSOR: tl.constexpr,
    KEY_IS_TENSOR: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    wide = row.to(tl.int64)[:, None]  # a matrix may have more elements than int32 counts
    if ACROSS:
        s = tl.load(step_size + row, mask=row < rows, other=0.0)[:, None]
    else:
        s = tl.load(step_size + column, mask=column < columns, other=0.0)[None, :]
    if DECAY_IS_TENSOR:
        decay = tl.load(decay).to(s.dtype)
    if FACTOR_IS_TENSOR:
        factor = tl.load(factor).to(s.dtype)
    if skip is not None:
        mask &= (tl.load(skip + row * 0) == 0)[:, None]
    m_place = exp_avg + wide * exp_avg_stride + column[None, :]
    p_place = param + wide * param_stride + column[None, :]
    g = tl.load(grad + wide * grad_stride + column[None, :], mask=mask, other=0.0).to(s.dtype)
    m = tl.load(m_place, mask=mask, other=0.0).to(s.dtype)
    p = tl.load(p_place, mask=mask, other=0.0).to(s.dtype)
    # The moment as it is stored is what moves the parameter, also in half precision.
    m = (m + (1 - beta1) * (factor * g - m)).to(exp_avg.dtype.element_ty)
    p = decay * p - s * m.to(s.dtype)
    tl.store(m_place, m, mask=mask)
    if key is not None:
        if KEY_IS_TENSOR:
            key = tl.load(key)
        token, feature = row[:, None], column[None, :]
        if ACROSS:
            token, feature = feature, token
        random = _mix((token + first_row).to(tl.uint32)) ^ key.to(tl.uint32)
        random = _mix(_mix(random) ^ (feature + first_column).to(tl.uint32))
        bits = (p.to(tl.uint32, bitcast=True) + (random >> 16)) & 0xFFFF0000
        p = tl.where(p == p, bits.to(tl.float32, bitcast=True), p)
    tl.store(p_place, p.to(param.dtype.element_ty), mask=mask)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
