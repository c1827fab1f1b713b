"""The update on a CPU, block by block: what one operation reads is in the cache for the next.

Memory is passed over twice, which is the least possible: once over the gradient for its column sums
of squares, once over gradient, first moment and parameter.
"""

import functools

import torch
from torch import Tensor

from coupled_adam.optim.rounding import Noise, round_

_BLOCK_BYTES = 2**21  # of each tensor and for each thread: three of them share a core's cache
_SUM_ROWS = 4096  # that are summed one after the other; the rounding of float32 is then about 5e-7


def sums_of_squares(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_i g_i^2 over the rows of [V, H], [H], accumulated in a wider dtype; any strides."""
    if _lies_across(grad):
        lengths: Tensor = torch.linalg.vector_norm(grad.T, dim=1, dtype=dtype)
        return lengths.square()
    rows = min(_SUM_ROWS, len(grad))
    parts = [_sum(grad[start : start + rows], dtype) for start in range(0, len(grad), rows)]
    return functools.reduce(Tensor.add_, parts)


def sums_and_moment_(grad: Tensor, dtype: torch.dtype, exp_avg: Tensor, weight: float) -> Tensor:
    """:func:`sums_of_squares`, and m <- m + weight (g - m) while a block is in the cache."""
    if _lies_across(grad) or _lies_across(exp_avg):
        exp_avg.lerp_(grad.to(exp_avg.dtype), weight)
        return sums_of_squares(grad, dtype)
    size = min(_rows_of_a_block(grad), _SUM_ROWS)
    parts = []
    for start in range(0, len(grad), size):
        block = grad[start : start + size]
        exp_avg[start : start + size].lerp_(block.to(exp_avg.dtype), weight)
        parts.append(_sum(block, dtype))
    return functools.reduce(Tensor.add_, parts)


def update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    step_size: Tensor,
    *,
    beta1: float,
    decay: float,
    factor: float,
    moved: bool = False,
    noise: Noise | None = None,
) -> None:
    """m <- beta1 m + (1 - beta1) factor g, then e <- decay e - step_size m, in place.

    Args:
        param, grad, exp_avg: [V, H], any strides.
        step_size: [H].
        decay: 1 - lr x weight_decay of AdamW, or 1.
        factor: on the gradient: 1, -1 to maximize, below 1 to clip.
        moved: m has been updated by :func:`sums_and_moment_`.
        noise: to round a bfloat16 parameter stochastically.
    """
    across = _lies_across(param)
    if across:
        param, grad, exp_avg, step_size = param.T, grad.T, exp_avg.T, step_size.unsqueeze(1)
    at_once = moved and decay == 1 and noise is None
    size = len(param) if at_once else _rows_of_a_block(param)
    for start in range(0, len(param), size):
        part = slice(start, start + size)
        p, m = param[part], exp_avg[part]
        if not moved:
            g = grad[part] if factor == 1 else grad[part] * factor
            m.lerp_(g.to(m.dtype), 1 - beta1)
        rate = step_size[part] if across else step_size
        if noise is not None:
            values = (decay * p.to(rate.dtype)).addcmul_(m.to(rate.dtype), rate, value=-1)
            if across:
                round_(p.T, values.T, noise._replace(column=noise.column + start))
            else:
                round_(p, values, noise._replace(row=noise.row + start))
            continue
        if decay != 1:
            p.mul_(decay)
        p.addcmul_(m, rate, value=-1)


def _lies_across(matrix: Tensor) -> bool:
    """Whether the columns of [V, H] lie together in memory, and not the rows."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def _rows_of_a_block(matrix: Tensor) -> int:
    row = matrix.element_size() * matrix.shape[1]
    return max(1, _BLOCK_BYTES * torch.get_num_threads() // row)


def _sum(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the operations that sum over rows, torch has one that is as fast as memory.

    It is layer norm's gradient of its weight, sum_i dy_i (x_i - mean) rstd: dy = x, mean 0, rstd 1.
    """
    block = block.to(dtype).contiguous()
    rows, columns = block.shape
    zeros, ones = torch.zeros(rows, 1, dtype=dtype), torch.ones(rows, 1, dtype=dtype)
    result: Tensor = torch.ops.aten.native_layer_norm_backward(
        *(block, block, [columns], zeros, ones, torch.ones(columns, dtype=dtype), None),
        output_mask=[False, True, False],
    )[1]
    return result
