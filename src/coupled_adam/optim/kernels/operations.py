"""The two passes with torch's operations, on any device.

On a CPU they work block by block, so that each operation finds in the cache what the one before it
has read, and every matrix passes through memory only once in each pass. No temporary is as large as
the matrix. On other devices blocks only limit the size of temporaries.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from coupled_adam.optim.reference import step_size
from coupled_adam.optim.rounding import round_
from coupled_adam.optim.update import Update

skips = False

_BLOCK_BYTES = 2**21  # per tensor and thread: the blocks of three tensors share a core's cache
_DEVICE_BLOCK_BYTES = 2**26  # on other devices: large, so that launches are few
_SUM_ROWS = 4096  # summed sequentially in float32, with a relative rounding error of about 5e-7


def measure(update: Update, update_moment: bool) -> None:
    """Sum the squared gradient; on a CPU also update ``exp_avg`` if neither is transposed."""
    grad, exp_avg = update.grad, update.exp_avg
    dtype = update.exp_avg_sq.dtype
    if update.exp_avg_sq_row is not None:
        update.row_sums = _norms(grad, 1, dtype).square()
    if not grad.numel():
        update.sums = torch.zeros_like(update.exp_avg_sq)
        return
    if not grad.is_cpu or _is_transposed(grad):
        update.sums = _norms(grad, 0, dtype).square()
        return
    update.moment_updated = update_moment and not _is_transposed(exp_avg)
    sums = []
    for part in _blocks(grad, _SUM_ROWS):
        if update.moment_updated:
            exp_avg[part].lerp_(grad[part].to(exp_avg.dtype), 1 - update.beta1)
        sums.append(_sum_of_squares(grad[part], dtype))
    update.sums = functools.reduce(Tensor.add_, sums)


def center(update: Update) -> None:
    """Update ``exp_avg`` and sum it over the rows, each with its weight, block by block."""
    dtype = update.exp_avg_sq.dtype
    update.moment_sums = torch.zeros_like(update.exp_avg_sq)
    for part in _blocks(update.exp_avg, _SUM_ROWS):
        if not update.moment_updated:
            _update_moment(update, part)
        m = update.exp_avg[part].to(dtype)
        if update.weights is None:
            update.moment_sums += m.sum(0)
        else:
            update.moment_sums.addmv_(m.T, update.weights[part])
    update.moment_updated = True


def apply(update: Update) -> None:
    """Update nu; then, block by block, m + (1 - beta1) (factor g - m) and decay e - rate m."""
    rates = step_size(update)
    decay, mean = update.decay, update.moment_sums
    if mean is not None:
        mean = mean / update.vocab_size
    for part in _blocks(update.param):
        if not update.moment_updated:
            _update_moment(update, part)
        p, m = update.param[part], update.exp_avg[part]
        if update.weights is not None:
            m = update.weights[part, None] * m
        if mean is not None:
            m = m - mean
        if update.noise is not None:
            values = (decay * p.to(rates.dtype)).addcmul_(m.to(rates.dtype), rates, value=-1)
            round_(p, values, update.noise._replace(row=update.noise.row + part.start))
            continue
        if isinstance(decay, Tensor) or decay != 1:
            p.mul_(decay)
        p.addcmul_(m, rates, value=-1)


def _update_moment(update: Update, part: slice) -> None:
    """m + (1 - beta1) (factor g - m) for some rows."""
    g, m, factor = update.grad[part], update.exp_avg[part], update.factor
    if isinstance(factor, Tensor) or factor != 1:
        g = g.to(update.exp_avg_sq.dtype) * factor
    m.lerp_(g.to(m.dtype), 1 - update.beta1)


def _norms(matrix: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The Euclidean norms over a dimension; 0 over none."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=dim, dtype=dtype)
    return norms


def _blocks(matrix: Tensor, most: int | None = None) -> Iterator[slice]:
    """Slices of rows that fit into a CPU's caches, or that limit the temporaries of a device.

    Args:
        matrix: [rows, columns].
        most: the largest number of rows in a slice.
    """
    rows = len(matrix)
    row = max(1, matrix.element_size() * matrix.shape[1])
    if not matrix.is_cpu:
        rows = max(1, _DEVICE_BLOCK_BYTES // row)
    elif not _is_transposed(matrix):
        rows = max(1, _BLOCK_BYTES * torch.get_num_threads() // row)
    rows = min(rows, most or rows)
    for start in range(0, len(matrix), max(1, rows)):
        yield slice(start, start + rows)


def _is_transposed(matrix: Tensor) -> bool:
    """Whether the columns of [rows, columns] are contiguous in memory, and not the rows."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def _sum_of_squares(block: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the rows of the squared elements, [columns].

    Among torch's operations that sum over rows, only one is as fast as the memory: the gradient of
    a layer norm's weight, sum_i dy_i (x_i - mean) rstd. With dy = x, mean = 0 and rstd = 1, it is
    the sum of squares.
    """
    block = block.to(dtype).contiguous()
    rows, columns = block.shape
    zeros, ones = torch.zeros(rows, 1, dtype=dtype), torch.ones(rows, 1, dtype=dtype)
    result: Tensor = torch.ops.aten.native_layer_norm_backward(
        block,
        block,
        [columns],
        zeros,
        ones,
        torch.ones(columns, dtype=dtype),
        None,
        output_mask=[False, True, False],
    )[1]
    return result
