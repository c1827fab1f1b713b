"""The update on a CPU, block by block: what one operation reads is in the cache for the next.

Memory is passed over twice, which is the least possible: once over the gradient for its column sums
of squares, once over gradient, first moment and parameter.
"""

import torch
from torch import Tensor

_BLOCK_BYTES = 2**21  # of each tensor and for each thread: three of them share a core's cache
_SUM_ROWS = 4096  # that are summed one after the other; the rounding of float32 is then about 5e-7


def sums_of_squares(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_i g_i^2 over the rows of [V, H], [H], accumulated in a wider dtype; any strides."""
    if grad.stride(0) == 1 and grad.stride(1) != 1:  # [H, V] in memory: each column lies together
        lengths: Tensor = torch.linalg.vector_norm(grad.T, dim=1, dtype=dtype)
        return lengths.square()
    rows, columns = grad.shape
    height = min(_SUM_ROWS, rows)
    zeros = torch.zeros(height, 1, dtype=dtype)
    ones = torch.ones(max(height, columns), 1, dtype=dtype)
    weight = ones[:columns, 0]
    total: Tensor | None = None
    for start in range(0, rows, height):
        block = grad[start : start + height].to(dtype).contiguous()
        size = len(block)
        # Of the operations that sum over rows, torch has one that is as fast as memory: layer
        # norm's gradient of its weight, sum_i dy_i (x_i - mean) rstd; dy = x, mean = 0, rstd = 1.
        part: Tensor = torch.ops.aten.native_layer_norm_backward(
            *(block, block, [columns], zeros[:size], ones[:size], weight, None),
            output_mask=[False, True, False],
        )[1]
        total = part if total is None else total.add_(part)
    assert total is not None  # there is a row
    return total


def update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    step_size: Tensor,
    *,
    beta1: float,
    decay: float,
    factor: float,
) -> None:
    """m <- beta1 m + (1 - beta1) factor g, then e <- decay e - step_size m, in place.

    Args:
        param, grad, exp_avg: [V, H], any strides.
        step_size: [H].
        decay: 1 - lr x weight_decay of AdamW, or 1.
        factor: on the gradient: 1, -1 to maximize, below 1 to clip.
    """
    if param.stride(0) < param.stride(1):  # [H, V] in memory
        param, grad, exp_avg, step_size = param.T, grad.T, exp_avg.T, step_size.unsqueeze(1)
    rows, columns = param.shape
    block = _BLOCK_BYTES * torch.get_num_threads() // (param.element_size() * columns)
    for start in range(0, rows, max(block, 1)):
        part = slice(start, start + max(block, 1))
        p, g, m = param[part], grad[part], exp_avg[part]
        if factor != 1:
            g = g * factor
        m.lerp_(g.to(m.dtype), 1 - beta1)
        if decay != 1:
            p.mul_(decay)
        p.addcmul_(m, step_size if step_size.dim() == 1 else step_size[part], value=-1)
