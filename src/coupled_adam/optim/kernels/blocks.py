"""The reference in blocks of rows: for devices and options that no other kernel serves.

Beside the state, a step takes one block in single precision, or three of a matrix in half
precision, and one more for LEAN with momentum. On a CPU a block stays in the caches, and on a GPU
it is large, so that launches are few. Sums over many rows are those of 4,096 each, added in double
precision where the device has it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums

SKIPS_ON_DEVICE = False

_BLOCK_BYTES = 2**20
_DEVICE_BLOCK_BYTES = 2**28
# Summed in single precision: a relative rounding error of about 5e-7, or of 3e-5 if all numbers of
# a column are equal.
_SUM_ROWS = 4096


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """The sums of g^2 over this rank's tokens, [columns]."""
    dtype = matrix.exp_avg_sq.dtype
    sums = [_sum_over_rows(block.grad, dtype, squared=True) for _, block in blocks(matrix)]
    return Sums(_total(matrix, sums))


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update the matrix by Coupled Adam."""
    rates = reference.step_size(matrix, sums, scalars)
    for rows, block in blocks(matrix, scalars):
        reference.move_coupled(block, rates, scalars.at(rows.start))


def row_squares(matrix: CoupledMatrix, scales: Tensor, scalars: Scalars) -> Tensor:
    """:func:`reference.row_squares` over this rank's columns, [2, rows]."""
    # What records the step sees no blocks.
    parts = [matrix] if matrix.no_host_reads else (block for _, block in blocks(matrix))
    squares = [
        reference.row_squares(block, reference.scaled_gradient(block, scalars), scales)
        for block in parts
    ]
    return torch.cat([*squares, scales.new_zeros(2, 0)], 1)


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor:
    """Update the matrix by LEAN."""
    scales = reference.column_scales(matrix, scalars)  # [columns]
    if weights is None:
        squares, known = row_squares(matrix, scales, scalars), (scales != 0).sum()
        log_nu = reference.log_of_nu(matrix.exp_avg_sq)
        weights = reference.row_weights(matrix, squares, known, log_nu, scalars)
    rates = (matrix.lr / (1 - matrix.beta1**scalars.t) * scales).to(scales)
    active = weights != 0  # [rows]
    parts = [
        _update_lean(block, weights[rows], active[rows, None], rates, scalars.at(rows.start))
        for rows, block in blocks(matrix, scalars)
    ]
    total = _total(matrix, parts, 2 * len(rates))
    return torch.cat([total, active.sum()[None].to(total.dtype)])


def _update_lean(
    block: CoupledMatrix, weights: Tensor, active: Tensor, rates: Tensor, scalars: Scalars
) -> Tensor:
    """:func:`reference.lean` of rows whose weights are known; sum_i u_i and sum_i g_i^2."""
    dtype = rates.dtype
    grad = torch.where(active, reference.scaled_gradient(block, scalars), 0.0)  # [rows, columns]
    squares = _sum_over_rows(grad, dtype, squared=True)
    m = reference.moment(block, grad)
    step = torch.where(active, m, 0.0).to(dtype) if block.exp_avg is not None else m
    del grad, m  # each temporary is as large as the block
    step.mul_(weights[:, None]).mul_(rates)
    updates = _sum_over_rows(step, dtype)
    if (d := reference.given_back(block)) is not None:
        step.addcmul_(active.to(dtype), d, value=-1)
    reference.move(block, step, scalars)
    return torch.cat([updates, squares])


def _sum_over_rows(x: Tensor, dtype: torch.dtype, *, squared: bool = False) -> Tensor:
    """The sums of a block's rows, or of their squares, [columns]."""
    whole = len(x) // _SUM_ROWS
    pieces = x[: whole * _SUM_ROWS].unflatten(0, (whole, _SUM_ROWS)), x[whole * _SUM_ROWS :][None]
    if squared:  # the norm needs no temporary as large as the block
        norms = [torch.linalg.vector_norm(piece, dim=1, dtype=dtype) for piece in pieces]
        return torch.cat(norms).square_().sum(0, dtype=reference.wide(x))
    return torch.cat([piece.sum(1) for piece in pieces]).sum(0, dtype=reference.wide(x))


def blocks(
    matrix: CoupledMatrix, scalars: Scalars | None = None
) -> Iterator[tuple[slice, CoupledMatrix]]:
    """The rows of each block, and the block as a matrix; none where this rank has no rows."""
    rows, columns = matrix.param.shape
    most = _BLOCK_BYTES * torch.get_num_threads() if matrix.param.is_cpu else _DEVICE_BLOCK_BYTES
    if scalars is not None and scalars.noise is not None:
        most //= 8  # the random numbers are 64 bits long
    size = max(1, most // (4 * max(1, columns)))
    r, exp_avg = matrix.row_exp_avg_sq, matrix.exp_avg
    for start in range(0, rows, size):
        block = slice(start, start + size)
        yield (
            block,
            replace(
                matrix,
                param=matrix.param[block],
                grad=matrix.grad[block],
                exp_avg=None if exp_avg is None else exp_avg[block],
                row_exp_avg_sq=None if r is None else r[block],
            ),
        )


def _total(matrix: CoupledMatrix, parts: list[Tensor], size: int | None = None) -> Tensor:
    """The sum of vectors over the blocks; zeros if there are none."""
    nu = matrix.exp_avg_sq
    if not parts:
        return nu.new_zeros(size or len(nu))
    return torch.stack(parts).sum(0).to(nu.dtype)
