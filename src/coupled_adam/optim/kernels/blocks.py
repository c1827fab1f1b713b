"""The reference, block by block: for devices and options that no other kernel serves.

Temporaries are as large as a block, in single precision, and on a CPU they stay in its caches. Sums
over many rows are those of blocks, added in double precision where the device has it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums

SKIPS_ON_DEVICE = False

_BLOCK_BYTES = 2**20
_DEVICE_BLOCK_BYTES = 2**26  # large, so that launches are few
_SUM_ROWS = 4096  # summed in single precision, with a relative rounding error of about 5e-7


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """The sums of g^2 over this rank's tokens, [columns]; with LEAN over its columns, [rows]."""
    sums = [reference.sum_squares(block, unscaled) for _, block in blocks(matrix)]
    rows = [block.rows for block in sums if block.rows is not None]
    if matrix.is_lean:
        assert matrix.row_exp_avg_sq is not None
        return Sums(rows=torch.cat([*rows, matrix.row_exp_avg_sq.new_zeros(0)]))
    return Sums(columns=_total(matrix, [x.columns for x in sums if x.columns is not None]))


def apply(matrix: CoupledMatrix, sums: Sums | None, scalars: Scalars) -> Tensor | None:
    """Update the matrix by Coupled Adam or by LEAN."""
    if not matrix.is_lean:
        assert sums is not None
        rates = reference.step_size(matrix, sums, scalars)
        for rows, block in blocks(matrix):
            reference.update_coupled(block, rates, _of_block(scalars, rows))
        return None
    weights = None if sums is None else sums.weights
    parts = [
        reference.lean(block, None if weights is None else weights[rows], _of_block(scalars, rows))
        for rows, block in blocks(matrix)
    ]
    return _total(matrix, parts, 2 * len(matrix.exp_avg_sq) + 1)


def blocks(matrix: CoupledMatrix) -> Iterator[tuple[slice, CoupledMatrix]]:
    """The rows of each block, and the block as a matrix; none where this rank has no rows."""
    rows, columns = matrix.param.shape
    most = _BLOCK_BYTES * torch.get_num_threads() if matrix.param.is_cpu else _DEVICE_BLOCK_BYTES
    size = max(1, min(_SUM_ROWS, most // (4 * max(1, columns))))
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
    wide = torch.float32 if nu.device.type == "mps" else torch.float64
    total = nu.new_zeros(size or len(nu), dtype=wide)
    for part in parts:
        total += part
    return total.to(nu.dtype)


def _of_block(scalars: Scalars, rows: slice) -> Scalars:
    """The scalars of a block, whose rounding noise begins at its first row."""
    if scalars.noise is None:
        return scalars
    noise = scalars.noise._replace(row=scalars.noise.row + rows.start)
    return scalars._replace(noise=noise)
