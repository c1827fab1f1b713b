"""Pieces of flattened matrices, which FSDP1, DeepSpeed's ZeRO and Megatron leave on each rank.

A matrix [V, H] is flattened, and each rank holds a range of its elements that may begin and end in
the middle of a row. Element k of a piece at offset o belongs to column (o + k) mod H. So a piece
is cut into up to three matrices: what it has of its first row, its whole rows, and what it has of
its last row. This module is the :class:`~coupled_adam.optim.update.Kernel` of a piece. It calls the
kernels of these matrices and adds up their sums; :mod:`coupled_adam.optim.sharded` adds those of
all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coupled_adam.optim import reference, sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from coupled_adam.optim.update import Update

skips = False


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
    if not flat_shards:  # nearly always, and every step asks several times
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
class Part:
    """A segment as an update of its own, and the tokens and features that it holds."""

    update: "Update"
    tokens: slice
    features: slice


def split(update: "Update") -> list[Part]:
    """Make an update of each segment of a piece, with copies of what the segments share."""
    assert update.shard is not None
    by_columns = update.group["vocab_dim"] == 1
    parts = []
    for segment in segments(update.shard, update.param.numel()):
        matrices = [segment.of(x) for x in (update.param, update.grad, update.exp_avg)]
        tokens, features = segment.rows, segment.columns
        if by_columns:
            tokens, features = features, tokens
            matrices = [matrix.T for matrix in matrices]
        maximum, rows = update.max_exp_avg_sq, update.exp_avg_sq_row
        part = replace(
            update,
            param=matrices[0],
            grad=matrices[1],
            exp_avg=matrices[2],
            exp_avg_sq=update.exp_avg_sq[features].clone(),
            max_exp_avg_sq=None if maximum is None else maximum[features].clone(),
            exp_avg_sq_row=None if rows is None else rows[tokens].clone(),
        )
        parts.append(Part(part, tokens, features))
    return parts


def measure(update: "Update", update_moment: bool) -> None:
    """Add up the sums of the segments; of all tokens and features, also those that are elsewhere.

    With ``zero_sum`` the moment is left to ``center``, which sums it on all ranks alike.
    """
    wide = torch.float64 if update.param.is_cpu else torch.float32
    update.sums = torch.zeros_like(update.exp_avg_sq, dtype=wide)
    update.present = update.sums.new_full((1,), 0.0 if update.absent else 1.0)
    if update.exp_avg_sq_row is not None:
        update.row_sums = torch.zeros_like(update.exp_avg_sq_row, dtype=wide)
    for part in update.memo:
        part.update.measure(update_moment and not update.group["zero_sum"])
        sums = part.update.sums  # a kernel may leave partial sums
        update.sums[part.features] += sums if sums.dim() == 1 else sums.sum(0)
        if update.row_sums is not None:
            update.row_sums[part.tokens] += part.update.row_sums


def center(update: "Update") -> None:
    """Update ``exp_avg``, and add up the sums of the segments' rows."""
    assert update.sums is not None
    update.moment_sums = torch.zeros_like(update.sums)
    for part in update.memo:
        _hand_down(update, part)
        part.update.moment_sums = None
        part.update.kernel.center(part.update)
        update.moment_sums[part.features] += part.update.moment_sums


def apply(update: "Update") -> None:
    """Update the segments, and then nu, of which each segment has updated its copy."""
    for part in update.memo:
        _hand_down(update, part)
        part.update.kernel.apply(part.update)
    reference.step_size(update)


def _hand_down(update: "Update", part: Part) -> None:
    """Tell a segment what is known of the whole matrix now."""
    assert update.sums is not None
    segment = part.update
    segment.sums = update.sums[part.features]
    segment.t, segment.factor = update.t, update.factor
    if update.weights is not None:
        segment.weights = update.weights[part.tokens]
        segment.totals = update.sums.sum(), update.exp_avg_sq.sum()
    if update.moment_sums is not None:
        segment.moment_sums = update.moment_sums[part.features]
    if update.noise is not None:
        segment.noise = update.noise._replace(row=part.tokens.start, column=part.features.start)


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
            part = values[segment.columns] if dim == 0 else values[segment.rows, None]
            segment.of(piece).copy_(part)
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
    found: dict[Tensor, FlatShard] = {}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        flat: Any = getattr(handle, "flat_param", None)
        if getattr(flat, "_params", None) is None or not handle.uses_sharded_strategy:
            continue
        for p, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos):
            found[p] = FlatShard(
                tuple(shape), info.intra_param_start_idx or 0, handle.process_group
            )
    return found
