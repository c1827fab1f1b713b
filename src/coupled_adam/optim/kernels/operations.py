"""The passes with torch's operations, on any device.

On a CPU they work block by block, so that each operation finds in the cache what the one before it
has read, and every matrix passes through memory only once in each pass. No temporary is as large as
the matrix: the largest is a block in single precision. On other devices blocks only limit the size
of temporaries.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.matrix import Matrix, Scalars, Sums
from coupled_adam.optim.rounding import round_

serves = frozenset(
    {"coupled", "second_moment_scale", "row_exponent", "zero_sum", "vocab_dim"}
    | {"stochastic_rounding"}
)
skips = False
weigh_rows = reference.weigh_rows

_BLOCK_BYTES = 2**21  # per tensor and thread: the blocks of three tensors share a core's cache
_DEVICE_BLOCK_BYTES = 2**26  # on other devices: large, so that launches are few
_SUM_ROWS = 4096  # summed sequentially in float32, with a relative rounding error of about 5e-7


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """Sum the squared gradient; on a CPU also update ``exp_avg`` if neither is transposed."""
    grad, exp_avg = matrix.grad, matrix.exp_avg
    dtype = matrix.exp_avg_sq.dtype
    row_squares = None
    if matrix.exp_avg_sq_row is not None:
        row_squares = _norms(grad, 1, dtype).square()
    if not grad.numel():
        return Sums(torch.zeros_like(matrix.exp_avg_sq), row_squares)
    if not grad.is_cpu or _is_transposed(grad):
        return Sums(_norms(grad, 0, dtype).square(), row_squares)
    updates_moment = as_is and exp_avg is not None and not _is_transposed(exp_avg)
    squares = []
    for rows in _blocks(grad, _SUM_ROWS):
        if updates_moment:
            _update_moment(matrix, rows, 1.0)
        squares.append(_sum_of_squares(grad[rows], dtype))
    sums = Sums(functools.reduce(Tensor.add_, squares), row_squares)
    sums.moment = exp_avg if updates_moment else None
    return sums


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update ``exp_avg`` and sum it over the rows, each with its weight, block by block."""
    assert sums.weights is not None
    sums.updates = torch.zeros_like(matrix.exp_avg_sq)
    for rows in _blocks(matrix.grad, _SUM_ROWS):
        m = _moment(matrix, sums, scalars, rows).to(matrix.exp_avg_sq.dtype)
        sums.updates.addmv_(m.T, sums.weights[rows])
    sums.moment = matrix.exp_avg


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu; then, block by block, m + (1 - beta1) (factor g - m) and decay e - rate m."""
    rates = reference.step_size(matrix, sums, scalars)
    decay, weights = matrix.decay, sums.weights
    mean = None if sums.updates is None else sums.updates / sums.active
    for rows in _blocks(matrix.param):
        p, m = matrix.param[rows], _moment(matrix, sums, scalars, rows)
        if weights is not None:
            m = weights[rows, None] * m
        if mean is not None and weights is not None:  # no gradient yet: the row does not move
            m -= torch.outer(weights[rows].ne(0).to(m.dtype), mean)
        if scalars.noise is not None:
            values = (decay * p.to(rates.dtype)).addcmul_(m.to(rates.dtype), rates, value=-1)
            noise = scalars.noise
            round_(p, values, noise._replace(row=noise.row + rows.start))
            continue
        if isinstance(decay, Tensor) or decay != 1:
            p.mul_(decay)
        p.addcmul_(m, rates, value=-1)


def _moment(matrix: Matrix, sums: Sums, scalars: Scalars, rows: slice) -> Tensor:
    """m of some rows, updated unless it has been; without momentum the scaled gradient."""
    if matrix.exp_avg is None:
        grad = matrix.grad[rows].to(matrix.exp_avg_sq.dtype)
        is_scaled = isinstance(scalars.factor, Tensor) or scalars.factor != 1
        return grad * scalars.factor if is_scaled else grad
    if sums.moment is None:
        _update_moment(matrix, rows, scalars.factor)
    return matrix.exp_avg[rows]


def _update_moment(matrix: Matrix, rows: slice, factor: float | Tensor) -> None:
    """m + (1 - beta1) (factor g - m) for some rows."""
    assert matrix.exp_avg is not None
    g, m = matrix.grad[rows], matrix.exp_avg[rows]
    if isinstance(factor, Tensor) or factor != 1:
        g = g.to(matrix.exp_avg_sq.dtype) * factor
    m.lerp_(g.to(m.dtype), 1 - matrix.beta1)


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
