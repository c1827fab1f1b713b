"""Pieces of flattened matrices, which FSDP1, DeepSpeed's ZeRO and Megatron leave on each rank.

A matrix [V, H] is flattened, and each rank holds a range of its elements that may begin and end in
the middle of a row. Element k of a piece at offset o belongs to column (o + k) mod H. So a piece
is cut into up to three matrices: what it has of its first row, its whole rows, and what it has of
its last row. This module is the :class:`~coupled_adam.optim.matrix.Kernel` of a piece. It calls the
kernels of these matrices and adds up their sums; :mod:`coupled_adam.optim.sharded` adds those of
all ranks.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coupled_adam.optim import reference, sharded
from coupled_adam.optim.matrix import OPTIONS, Matrix, Scalars, Sums

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

serves, skips = frozenset(OPTIONS), False
weigh_rows = reference.weigh_rows


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

    Example:
        >>> shard = FlatShard((50304, 768), offset=rank * numel, process_group=group)
        >>> CoupledAdamW([{"params": [piece], "coupled": True, "flat_shards": [shard]}])
    """

    shape: tuple[int, ...]
    offset: int
    process_group: "ProcessGroup | None" = None
    start: int = 0
    numel: int | None = None

    def of(self, flat: Tensor) -> Tensor:
        """The piece, as a view of the tensor that holds it."""
        return flat[self.start : None if self.numel is None else self.start + self.numel]


def shards_of(group: dict[str, Any]) -> dict[Tensor, list[FlatShard]]:
    """The pieces in each flat parameter of a param group; whole parameters are left out."""
    flat_shards = group.get("flat_shards")
    if not flat_shards:
        return {}
    return {
        p: [shards] if isinstance(shards, FlatShard) else list(shards)
        for p, shards in zip(group["params"], flat_shards)
        if shards is not None
    }


@dataclass(frozen=True)
class Segment:
    """A matrix within a piece: the elements, and the rows and columns of the whole matrix."""

    elements: slice
    rows: slice
    columns: slice

    def of(self, piece: Tensor) -> Tensor:
        """The segment of a piece, [rows, columns], as a view."""
        rows = self.rows.stop - self.rows.start
        matrix: Tensor = piece[self.elements].unflatten(0, (rows, -1))
        return matrix


def segments(shard: FlatShard, numel: int) -> Iterator[Segment]:
    """Cut a piece of this size into the matrices that lie in it, of which none is empty."""
    width = shard.shape[1]
    k = 0
    while k < numel:
        row, column = divmod(shard.offset + k, width)
        rows = (numel - k) // width if column == 0 else 0
        columns = width if rows else min(width - column, numel - k)
        taken = max(rows, 1) * columns
        yield Segment(
            slice(k, k + taken), slice(row, row + max(rows, 1)), slice(column, column + columns)
        )
        k += taken


@dataclass(eq=False)
class Submatrix:
    """A segment as a matrix of its own, its sums, and the tokens and features that it holds."""

    matrix: Matrix
    tokens: slice
    features: slice
    sums: Sums


def matrices(parameter: Matrix, shards: Sequence[FlatShard]) -> Iterator[Matrix]:
    """The flattened matrices of which pieces lie in a parameter.

    Args:
        parameter: the parameter, and the vectors of all matrices one after the other.
        shards: the pieces.
    """
    vocab_dim = parameter.group["vocab_dim"]
    features = [shard.shape[1 - vocab_dim] for shard in shards]
    tokens = [shard.shape[vocab_dim] for shard in shards]

    def cut(vectors: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
        return [None] * len(shards) if vectors is None else vectors.split(sizes)

    exp_avg_sqs, maxima = (
        cut(parameter.exp_avg_sq, features),
        cut(parameter.max_exp_avg_sq, features),
    )
    rows = cut(parameter.exp_avg_sq_row, tokens)
    for i, shard in enumerate(shards):
        ranks = sharded.ranks_of(shard.process_group)
        exp_avg_sq = exp_avg_sqs[i]
        assert exp_avg_sq is not None
        yield replace(
            parameter,
            step=parameter.step.clone() if i else parameter.step,  # each matrix counts its own
            vocab_size=tokens[i],
            hidden_size=features[i],
            param=shard.of(parameter.param),
            grad=shard.of(parameter.grad),
            exp_avg=None if parameter.exp_avg is None else shard.of(parameter.exp_avg),
            exp_avg_sq=exp_avg_sq,
            max_exp_avg_sq=maxima[i],
            exp_avg_sq_row=rows[i],
            position=parameter.position + i,
            row_ranks=ranks,
            column_ranks=ranks,
            shard=shard,
            kernel=sys.modules[__name__],
        )


def split(matrix: Matrix) -> Iterator[tuple[Matrix, slice, slice]]:
    """A matrix for each segment of a piece, with copies of what segments share, and its place."""
    from coupled_adam.optim.kernels import choose

    assert matrix.shard is not None
    by_columns = matrix.group["vocab_dim"] == 1
    for segment in segments(matrix.shard, matrix.param.numel()):
        param, grad = segment.of(matrix.param), segment.of(matrix.grad)
        exp_avg = None if matrix.exp_avg is None else segment.of(matrix.exp_avg)
        tokens, features = segment.rows, segment.columns
        if by_columns:
            tokens, features = features, tokens
            param, grad = param.T, grad.T
            exp_avg = None if exp_avg is None else exp_avg.T
        maximum, rows = matrix.max_exp_avg_sq, matrix.exp_avg_sq_row
        submatrix = replace(
            matrix,
            param=param,
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=matrix.exp_avg_sq[features].clone(),
            max_exp_avg_sq=None if maximum is None else maximum[features].clone(),
            exp_avg_sq_row=None if rows is None else rows[tokens].clone(),
        )
        submatrix.kernel = choose(submatrix)
        yield submatrix, tokens, features


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """Add up the sums of the segments; of all tokens and features, also those that are elsewhere.

    With ``zero_sum`` the moment is left to ``center``, which sums it on all ranks alike.
    """
    wide = torch.float64 if matrix.param.is_cpu else torch.float32
    sums = Sums(torch.zeros_like(matrix.exp_avg_sq, dtype=wide), memo=[])
    sums.present = sums.squares.new_full((1,), 0.0 if matrix.absent else 1.0)
    if matrix.exp_avg_sq_row is not None:
        sums.row_squares = torch.zeros_like(matrix.exp_avg_sq_row, dtype=wide)
    for submatrix, tokens, features in split(matrix):
        measured = submatrix.kernel.measure(submatrix, as_is and not matrix.group["zero_sum"])
        squares = measured.squares
        sums.squares[features] += squares if squares.dim() == 1 else squares.sum(0)  # over parts
        if sums.row_squares is not None:
            assert measured.row_squares is not None
            sums.row_squares[tokens] += measured.row_squares
        sums.memo.append(Submatrix(submatrix, tokens, features, measured))
    return sums


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update ``exp_avg``, and add up the sums of the segments' rows."""
    sums.updates = torch.zeros_like(sums.squares)
    for sub in sums.memo:
        scalars_of_segment = _hand_down(sums, sub, scalars)
        sub.sums.updates = None
        sub.matrix.kernel.center(sub.matrix, sub.sums, scalars_of_segment)
        sums.updates[sub.features] += sub.sums.updates


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update the segments, and then nu, of which each segment has updated its copy."""
    for sub in sums.memo:
        sub.matrix.kernel.apply(sub.matrix, sub.sums, _hand_down(sums, sub, scalars))
    reference.step_size(matrix, sums, scalars)


def _hand_down(sums: Sums, sub: Submatrix, scalars: Scalars) -> Scalars:
    """Tell a segment what is known of the whole matrix now; return its scalars."""
    sub.sums.squares = sums.squares[sub.features]
    sub.sums.rows = sums.rows
    sub.sums.weights = None if sums.weights is None else sums.weights[sub.tokens]
    sub.sums.updates = None if sums.updates is None else sums.updates[sub.features]
    if scalars.noise is None:
        return scalars
    noise = scalars.noise._replace(row=sub.tokens.start, column=sub.features.start)
    return scalars._replace(noise=noise)


def spread(moment: Tensor, shards: Sequence[FlatShard], dim: int, like: Tensor) -> Tensor:
    """Give each element of flat matrices the value of its column (``dim`` 0) or of its row (1).

    Args:
        moment: the values of all columns, or rows, of the matrices one after the other.
        shards: the pieces in ``like``.
        dim: the dimension over which the values are means.
        like: the flat tensor, whose shape and dtype the result has; 0 outside of the pieces.
    """
    result = torch.zeros_like(like)
    for shard, values in zip(shards, moment.split([shard.shape[1 - dim] for shard in shards])):
        piece = shard.of(result)
        for segment in segments(shard, piece.numel()):
            segment_values = values[segment.columns] if dim == 0 else values[segment.rows, None]
            segment.of(piece).copy_(segment_values)
    return result


def mean_over(
    values: Tensor | None, shards: Sequence[FlatShard], dim: int, like: Tensor
) -> Tensor | None:
    """The means of flat matrices over a dimension, one after the other, in float64.

    All ranks that share the matrices must call this, also those that have no values.

    Args:
        values: a value for each element of the pieces, flat, or None.
        shards: the pieces in ``values``.
        dim: the dimension of the matrices over which to average.
        like: the flat parameter.

    Returns:
        The means, or None if no rank has values.

    Raises:
        ValueError: if only some of the elements have values.
    """
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    means, count, size = [], 0.0, 0
    for shard in shards:
        # The last number is how many elements have values.
        total = torch.zeros(shard.shape[1 - dim] + 1, dtype=wide, device=like.device)
        if values is not None:
            piece = shard.of(values)
            for segment in segments(shard, piece.numel()):
                columns_or_rows = segment.columns if dim == 0 else segment.rows
                total[columns_or_rows] += segment.of(piece).sum(dim, dtype=wide)
            total[-1] = piece.numel()
        total = sharded.add_up(total, sharded.ranks_of(shard.process_group))
        means.append(total[:-1] / shard.shape[dim])
        count, size = count + total[-1].item(), size + shard.shape[0] * shard.shape[1]
    if not count:
        return None
    if count != size:
        raise ValueError(
            f"the ranks have loaded the second moments of {count:.0f} of the {size} elements of a "
            "flattened matrix: do the ranks' checkpoints belong together?"
        )
    return torch.cat(means)


def norms(shards: dict[Tensor, list[FlatShard]]) -> list[Tensor]:
    """The norms of the gradients of flattened parameters, over the ranks that share them.

    All ranks call this with the same parameters, of which they may have nothing, or no gradient.
    """
    by_ranks: dict[Any, list[Tensor]] = {}
    for p, (shard, *_) in shards.items():
        if p.requires_grad:
            square = p.new_zeros((), dtype=torch.promote_types(p.dtype.to_real(), torch.float32))
            if p.grad is not None:
                square += torch.linalg.vector_norm(p.grad, dtype=square.dtype).square()
            by_ranks.setdefault((sharded.ranks_of(shard.process_group), p.device), []).append(
                square
            )
    return [
        sharded.add_up(torch.stack(squares).sum(), ranks).sqrt()
        for (ranks, _), squares in by_ranks.items()
    ]


def of_fsdp1(model: nn.Module) -> dict[Tensor, FlatShard]:
    """What FSDP1 has flattened and sharded of a model's original parameters, on every rank.

    These are parameters of :class:`torch.distributed.fsdp.FullyShardedDataParallel` with
    ``use_orig_params=True`` and any strategy that shards.
    """
    shards: dict[Tensor, FlatShard] = {}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        flat: Any = getattr(handle, "flat_param", None)
        if getattr(flat, "_params", None) is None or not handle.uses_sharded_strategy:
            continue
        for p, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos):
            shards[p] = FlatShard(
                tuple(shape), info.intra_param_start_idx or 0, handle.process_group
            )
    return shards
