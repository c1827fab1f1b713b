"""The passes with torch's operations, on any device.

On a CPU they work block by block, so that each operation finds in the cache what the one before it
has read, and every matrix passes through memory only once in each pass. No temporary is as large as
the matrix: the largest is a block in single precision. On other devices blocks only limit the size
of temporaries.
"""

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

_BLOCK_BYTES = 2**21  # per tensor and thread, in single precision: three share a core's cache
_DEVICE_BLOCK_BYTES = 2**26  # in single precision: large, so that launches are few
_SUM_ROWS = 4096  # summed sequentially in float32, with a relative rounding error of about 5e-7


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """Sum the squared gradient; on a CPU, where neither is transposed, also update ``exp_avg``.

    There it does the work of ``center``, too, for whole rows, while they are in the cache.
    """
    grad, exp_avg, r = matrix.grad, matrix.exp_avg, matrix.exp_avg_sq_row
    dtype = matrix.exp_avg_sq.dtype
    if not grad.is_cpu or _is_transposed(grad) or not grad.numel():
        row_squares = None if r is None else _norms(grad, 1, dtype).square()
        return Sums(_norms(grad, 0, dtype).square(), row_squares)
    updates_moment = as_is and exp_avg is not None and not _is_transposed(exp_avg)
    sums = Sums(torch.zeros_like(matrix.exp_avg_sq), None if r is None else torch.empty_like(r))
    if matrix.group["zero_sum"] and matrix.has_whole_rows and (updates_moment or exp_avg is None):
        sums.updates = torch.zeros_like(sums.squares)
    blocks = _blocks(grad)
    buffer = _buffer(grad, blocks, dtype)
    for rows in blocks:
        if updates_moment:
            _update_moment(matrix, rows, 1.0)
        g = _converted(grad[rows], buffer)
        sums.squares += _sum(g, g)
        if r is None or sums.row_squares is None:
            continue
        sums.row_squares[rows] = _norms(g, 1, dtype).square()
        if sums.updates is not None:
            mean_square = sums.row_squares[rows] / matrix.hidden_size
            weights = reference.row_weights(matrix, r[rows].lerp(mean_square, 1 - matrix.beta2))
            m = g if exp_avg is None else _converted(exp_avg[rows], buffer)
            sums.updates += _sum(torch.mul(m, weights[:, None], out=buffer[: len(m)]))
    sums.moment = exp_avg if updates_moment else None
    return sums


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update ``exp_avg`` and sum it over the rows, each with its weight, block by block."""
    assert sums.weights is not None
    sums.updates = torch.zeros_like(matrix.exp_avg_sq)
    blocks = _blocks(matrix.grad)
    buffer = _buffer(matrix.grad, blocks, sums.updates.dtype)
    for rows in blocks:
        sums.updates.addmv_(_moment(matrix, sums, scalars, rows, buffer).T, sums.weights[rows])
    sums.moment = matrix.exp_avg


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu; then, block by block, m + (1 - beta1) (factor g - m) and decay e - rate w m."""
    rates = reference.step_size(matrix, sums, scalars)
    weights, noise = sums.weights, scalars.noise
    # A rate on a device is not read there.
    decay = 1.0 if isinstance(matrix.decay, Tensor) else matrix.decay
    shift = None if sums.updates is None else rates * sums.updates / sums.active
    blocks = _blocks(matrix.param)
    buffer, param_buffer = (_buffer(x, blocks, rates.dtype) for x in (matrix.grad, matrix.param))
    for rows in blocks:
        p = matrix.param[rows]
        values = _converted(p, param_buffer)
        m = _moment(matrix, sums, scalars, rows, buffer)
        if weights is not None:
            m = torch.mul(m, weights[rows, None], out=buffer[: len(m)])
        if isinstance(matrix.decay, Tensor):
            values.mul_(matrix.decay)
        if shift is not None and weights is not None:
            moves = weights[rows].ne(0).to(shift.dtype)  # a row without a gradient so far does not
            values.addr_(moves, shift, beta=decay)
        elif decay != 1:
            values.mul_(decay)
        values.addcmul_(m, rates, value=-1)
        if noise is not None:
            round_(p, values, noise._replace(row=noise.row + rows.start))
        elif values is not p:
            p.copy_(values)


def _moment(matrix: Matrix, sums: Sums, scalars: Scalars, rows: slice, buffer: Tensor) -> Tensor:
    """m of some rows, updated unless it has been; without momentum the scaled gradient."""
    if matrix.exp_avg is not None:
        if sums.moment is None:
            _update_moment(matrix, rows, scalars.factor)
        return _converted(matrix.exp_avg[rows], buffer)
    g = _converted(matrix.grad[rows], buffer)
    if isinstance(scalars.factor, Tensor) or scalars.factor != 1:
        g = torch.mul(g, scalars.factor, out=buffer[: len(g)])
    return g


def _update_moment(matrix: Matrix, rows: slice, factor: float | Tensor) -> None:
    """m + (1 - beta1) (factor g - m) for some rows."""
    assert matrix.exp_avg is not None
    g, m = matrix.grad[rows], matrix.exp_avg[rows]
    if isinstance(factor, Tensor) or factor != 1:
        g = g.to(matrix.exp_avg_sq.dtype) * factor
    m.lerp_(g.to(m.dtype), 1 - matrix.beta1)


def _buffer(matrix: Tensor, blocks: list[slice], dtype: torch.dtype) -> Tensor:
    """Memory for any of the blocks, allocated once: new pages cost more than the arithmetic."""
    return torch.empty_like(matrix[blocks[0]] if blocks else matrix, dtype=dtype)


def _converted(block: Tensor, buffer: Tensor) -> Tensor:
    """The block in the buffer's dtype: itself, or its copy in the buffer."""
    return block if block.dtype == buffer.dtype else buffer[: len(block)].copy_(block)


def _norms(matrix: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The Euclidean norms over a dimension; 0 over none."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=dim, dtype=dtype)
    return norms


def _blocks(matrix: Tensor) -> list[slice]:
    """Slices of rows that fit into a CPU's caches, or that limit the temporaries of a device."""
    rows = len(matrix)
    row = max(4, matrix.element_size()) * max(1, matrix.shape[1])  # in single precision
    if not matrix.is_cpu:
        rows = max(1, _DEVICE_BLOCK_BYTES // row)
    elif not _is_transposed(matrix):
        rows = max(1, min(_SUM_ROWS, _BLOCK_BYTES * torch.get_num_threads() // row))
    return [slice(start, start + rows) for start in range(0, len(matrix), max(1, rows))]


def _is_transposed(matrix: Tensor) -> bool:
    """Whether the columns of [rows, columns] are contiguous in memory, and not the rows."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def _sum(block: Tensor, times: Tensor | None = None) -> Tensor:
    """The sum over the rows of a contiguous block, or of its product with another, [columns].

    Among torch's operations that sum over rows, only one is as fast as the memory: the gradients of
    a layer norm's weight, sum_i dy_i (x_i - mean) rstd, and of its bias, sum_i dy_i. With mean = 0
    and rstd = 1, the former is the sum of dy x.
    """
    block, times = block.contiguous(), None if times is None else times.contiguous()
    rows, columns = block.shape
    zeros, ones = block.new_zeros(rows, 1), block.new_ones(rows, 1)
    weight = block.new_ones(columns)
    product, total = torch.ops.aten.native_layer_norm_backward(
        block,
        block if times is None else times,
        [columns],
        zeros,
        ones,
        weight,
        weight,
        output_mask=[False, times is not None, times is None],
    )[1:]
    result: Tensor = total if times is None else product
    return result
