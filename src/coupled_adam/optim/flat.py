"""Pieces of flattened matrices, which DeepSpeed's ZeRO 1 and 2 leave on each rank.

A matrix [V, H] is flattened, and each rank holds a range of its elements that may begin and end in
the middle of a row. Element k of a piece at offset o belongs to column (o + k) mod H. So a piece
is cut into up to three matrices: what it has of its first row, its whole rows, and what it has of
its last row. This module is the :class:`~coupled_adam.optim.matrix.Kernel` of a piece. It calls the
kernels of these matrices and adds up their sums; :mod:`coupled_adam.optim.sharded` adds those of
all ranks. Of LEAN's r each rank has all V numbers, so that rows on two ranks need no bookkeeping.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from coupled_adam.optim import reference, sharded
from coupled_adam.optim.kernels import blocks, choose
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SKIPS_ON_DEVICE = False


@dataclass(frozen=True)
class FlatShard:
    """Where a piece of a flattened matrix lies, for the param-group option ``flat_shards``.

    All ranks that share a matrix must say so, including those that hold none of its elements.

    Args:
        shape: the shape of the whole parameter; [V, H] (or [H, V]) in a coupled group.
        offset: how many elements of the flattened parameter come before the piece.
        process_group: the ranks that share the parameter, each element of which is on one of them;
            None for the default process group.
        start: where the piece begins in the tensor that the optimizer has.
        numel: the number of elements; None for all that follow ``start``.

    Examples:
        >>> shard = FlatShard((50304, 768), offset=rank * numel, process_group=group)
        >>> CoupledAdamW([{"params": [piece], "coupled": True, "flat_shards": [shard]}])
    """

    shape: tuple[int, ...]
    offset: int
    process_group: "ProcessGroup | None" = None
    start: int = 0
    numel: int | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> "FlatShard":
        """Itself, as it does not change, and process groups cannot be copied."""
        return self

    def view(self, flat: Tensor) -> Tensor:
        """The piece, [numel], as a view of the tensor that holds it."""
        return flat[self.start : None if self.numel is None else self.start + self.numel]

    def fits(self, p: Tensor) -> bool:
        """Whether the piece lies within a tensor of one dimension, and within a matrix."""
        length = p.numel() - self.start if self.numel is None else self.numel
        lies_within = p.dim() == 1 and 0 <= self.start <= self.start + length <= p.numel()
        is_matrix = len(self.shape) == 2 and min(self.shape) > 0
        return lies_within and is_matrix and 0 <= self.offset <= math.prod(self.shape) - length


def shards_of(group: dict[str, Any]) -> dict[Tensor, list[FlatShard]]:
    """The pieces in each flat parameter of a param group; whole parameters are left out."""
    flat_shards = group.get("flat_shards")
    if not flat_shards:  # of nearly all groups, in each step
        return {}
    return {
        p: [shards] if isinstance(shards, FlatShard) else list(shards)
        for p, shards in zip(group["params"], flat_shards)
        if shards is not None
    }


def shapes(group: dict[str, Any], p: Tensor) -> list[tuple[int, ...]]:
    """The shape of a parameter, or those of the matrices of which pieces lie in it."""
    return [shard.shape for shard in shards_of(group).get(p, ())] or [p.shape]


class Segment(NamedTuple):
    """A matrix within a piece, and the tokens and features of the whole that it holds."""

    matrix: CoupledMatrix
    tokens: slice  # of range(V)
    features: slice  # of range(H)


def matrices(parameter: CoupledMatrix) -> Iterator[CoupledMatrix]:
    """The flattened matrices of which pieces lie in a parameter.

    Its vectors are those of all matrices, one after the other.
    """
    vocab_dim = parameter.group["vocab_dim"]
    shards = shards_of(parameter.group)[parameter.parameter]
    features = [shard.shape[1 - vocab_dim] for shard in shards]  # H of each matrix
    tokens = [shard.shape[vocab_dim] for shard in shards]  # V of each matrix

    def of_each(vectors: Tensor | None, sizes: Sequence[int]) -> Sequence[Any]:
        return [None] * len(shards) if vectors is None else vectors.split(sizes)

    # Views, so that what a step writes to them is in the optimizer's state.
    nu, maxima, means = (
        of_each(vectors, features)
        for vectors in (parameter.exp_avg_sq, parameter.max_exp_avg_sq, parameter.mean_update)
    )
    rows = of_each(parameter.row_exp_avg_sq, tokens)
    for i, shard in enumerate(shards):
        # A piece has neither whole columns nor, at its ends, whole rows.
        ranks = sharded.ranks_of(shard.process_group)
        yield replace(
            parameter,
            # A step is counted for each matrix, but only once in the parameter's state.
            step=parameter.step.clone() if i else parameter.step,
            vocab_size=tokens[i],
            hidden_size=features[i],
            param=shard.view(parameter.param),
            grad=shard.view(parameter.grad),
            exp_avg=None if parameter.exp_avg is None else shard.view(parameter.exp_avg),
            exp_avg_sq=nu[i],
            max_exp_avg_sq=maxima[i],
            row_exp_avg_sq=rows[i],
            mean_update=means[i],
            index=parameter.index + i,
            row_ranks=ranks,
            column_ranks=ranks,
            shard=shard,
        )


def segments(matrix: CoupledMatrix) -> Iterator[Segment]:
    """Cut a piece into segments, of which none is empty.

    Each has a copy of the second moments that Coupled Adam updates, since others have the same
    columns; LEAN only reads these vectors in a pass.
    """
    assert matrix.shard is not None
    width, offset = matrix.shard.shape[1], matrix.shard.offset
    start, stop = 0, matrix.param.numel()

    def part_of(vector: Tensor | None, place: slice) -> Any:
        if vector is None:
            return None
        return vector[place] if matrix.is_lean else vector[place].clone()

    while start < stop:
        # 1. The next elements: the end of a row, all whole rows, or the beginning of the last row
        row, column = divmod(offset + start, width)
        rows = max((stop - start) // width, 1) if column == 0 else 1
        columns = min(width - column, stop - start)
        elements = slice(start, start + rows * columns)
        start += rows * columns
        # 2. Their matrix, as it is stored; then with tokens as rows, as kernels expect it
        param, grad, exp_avg = (
            None if x is None else x[elements].unflatten(0, (rows, columns))
            for x in (matrix.param, matrix.grad, matrix.exp_avg)
        )
        assert param is not None
        assert grad is not None
        tokens, features = slice(row, row + rows), slice(column, column + columns)
        if matrix.group["vocab_dim"] == 1:
            tokens, features = features, tokens
            param, grad, exp_avg = param.T, grad.T, None if exp_avg is None else exp_avg.T
        segment = replace(
            matrix,
            param=param,
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=part_of(matrix.exp_avg_sq, features),
            max_exp_avg_sq=part_of(matrix.max_exp_avg_sq, features),
            row_exp_avg_sq=part_of(matrix.row_exp_avg_sq, tokens),
            mean_update=part_of(matrix.mean_update, features),
            shard=None,
        )
        segment.kernel = choose(segment)
        yield Segment(segment, tokens, features)


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """Add up the sums of the segments, [H]; 0 for features of which none is here."""
    total = torch.zeros_like(matrix.exp_avg_sq, dtype=_wide(matrix))  # [H]
    summed = []
    for segment in segments(matrix):
        sums = segment.matrix.kernel.sum_squares(segment.matrix, unscaled)
        squares = sums.columns  # [columns], or [parts, columns] for parts of the rows
        total[segment.features] += squares if squares.dim() == 1 else squares.sum(0)
        summed.append((segment, sums))
    return Sums(total, kernel_state=summed)


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update the segments, and then nu, of which each has updated its copy."""
    for segment, sums_of_segment in sums.kernel_state:
        # What all ranks have summed in place of the segment's own sums.
        sums_of_segment.columns = sums.columns[segment.features]
        own = scalars.at(segment.tokens.start, segment.features.start)
        segment.matrix.kernel.apply_coupled(segment.matrix, sums_of_segment, own)
    reference.step_size(matrix, sums, scalars)


def row_squares(matrix: CoupledMatrix, scales: Tensor, scalars: Scalars) -> Tensor:
    """:func:`reference.row_squares` over the columns of the piece, [2, V]."""
    assert matrix.row_exp_avg_sq is not None
    total = matrix.row_exp_avg_sq.new_zeros(2, len(matrix.row_exp_avg_sq), dtype=_wide(matrix))
    for own, tokens, features in segments(matrix):
        total[:, tokens] += blocks.row_squares(own, scales[features], scalars)
    return total


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor:
    """Update the segments with the weights [V] of the rows; add up their sums, [2 H + 1]."""
    assert weights is not None
    width = len(matrix.exp_avg_sq)  # H
    total = torch.zeros(2 * width + 1, dtype=_wide(matrix), device=matrix.param.device)
    for segment in segments(matrix):
        own, features = segment.matrix, segment.features
        at = scalars.at(segment.tokens.start, features.start)
        sums = own.kernel.lean(own, weights[segment.tokens], at)
        assert sums is not None
        updates, squares, count = sums.split([len(own.exp_avg_sq)] * 2 + [1])
        total[:width][features] += updates
        total[width:-1][features] += squares
        if features.start == 0:  # so that a row that is cut counts once
            total[-1:] += count
    return total


def _wide(matrix: CoupledMatrix) -> torch.dtype:
    # That in which add_up adds: float64 where the C kernels sum, which sum in float64.
    return torch.float64 if matrix.param.is_cpu else torch.float32
