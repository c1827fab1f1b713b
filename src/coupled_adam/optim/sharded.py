"""Sums over the parts of all ranks, and, of a DTensor, this rank's part.

``torch.distributed.tensor`` is imported inside the functions, and only once there is a DTensor, as
importing it here would double the time that ``import coupled_adam`` takes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ranks = tuple[Any, ...]
"""Process groups, or pairs of a device mesh and one of its dimensions."""

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of plain tensors, in contrast to subclasses such as DTensor."""


def is_dtensor(x: Tensor) -> bool:
    """Whether a tensor is a DTensor, sharded or replicated."""
    return type(x) not in PLAIN and hasattr(x, "placements")


def full_tensor(x: Tensor) -> Tensor:
    """Gather a DTensor's parts into a full tensor on every rank; a plain tensor is returned."""
    full: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return full


def to_local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor is returned as it is."""
    local: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return local


def global_offset(matrix: Tensor) -> tuple[int, int]:
    """The row and column, in the full matrix [V, H], of the first element of this rank's part."""
    if not is_dtensor(matrix):
        return 0, 0
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(matrix, DTensor)
    _, (row, column) = compute_local_shape_and_global_offset(
        matrix.shape, matrix.device_mesh, matrix.placements
    )
    return row, column


def shards(placement: Any, dimension: int) -> bool:
    """Whether a placement shards this dimension of a matrix."""
    # Not is_shard(), which is False for the strided shards of FSDP2 with tensor parallelism.
    return getattr(placement, "dim", None) == dimension


def is_shared(p: Tensor) -> bool:
    """Whether other ranks have parts of a matrix that this one does not have."""
    return is_dtensor(p) and any(shards(x, 0) or shards(x, 1) for x in p.placements)  # type: ignore[attr-defined]


def ranks_over(p: Tensor, dimension: int) -> Ranks:
    """The ranks over which a dimension of a DTensor is sharded, as :func:`add_up` takes them."""
    placements = p.placements  # type: ignore[attr-defined]
    mesh = p.device_mesh  # type: ignore[attr-defined]
    return tuple((mesh, i) for i, x in enumerate(placements) if shards(x, dimension))


def ranks_of(process_group: "ProcessGroup | None") -> Ranks:
    """The ranks of a process group, of the default one if None, as :func:`add_up` takes them."""
    if process_group is not None:
        return (process_group,)
    import torch.distributed as dist

    return (dist.group.WORLD,) if dist.is_available() and dist.is_initialized() else ()


def add_up(vectors: Sequence[tuple[Tensor, Ranks]]) -> list[Tensor]:
    """Add vectors [n] over ranks, concatenated: one all-reduce for each process group.

    Args:
        vectors: each vector, and the ranks over which it is added; none to leave it as it is.

    Returns:
        The vectors, added up, in their order, dtypes and devices.
    """
    results = []
    # By device as well, as vectors are concatenated; the order is that of the optimizer's groups,
    # which is the same on all ranks, as collectives need it.
    groups: dict[Any, list[int]] = {}
    for i, (vector, ranks) in enumerate(vectors):
        results.append(vector)
        if ranks:
            groups.setdefault((ranks, vector.device), []).append(i)
    for (ranks, device), members in groups.items():
        # The kernels of the ranks may differ in the dtype of their sums; all ranks must send one.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        total = all_reduced(torch.cat([results[i].to(wide) for i in members]), ranks)
        for i, added in zip(members, total.split([len(results[i]) for i in members])):
            results[i] = added.to(results[i])
    return results


def all_reduced(total: Tensor, ranks: Ranks) -> Tensor:
    """The sum of a vector [n] over ranks: one mesh dimension or process group after another."""
    from torch.distributed import _functional_collectives as collectives

    for group_or_mesh in ranks:
        total = _where_served(total, group_or_mesh)
        total = collectives.wait_tensor(collectives.all_reduce(total, "sum", group_or_mesh))
    return total


def _where_served(total: Tensor, ranks: Any) -> Tensor:
    """The vector on a device whose tensors the ranks can send; FSDP can keep some on the host."""
    if isinstance(ranks, tuple):
        return total.to(ranks[0].device_type)
    served = [device.type for device in ranks._device_types]
    return total if total.device.type in served else total.to(served[0])


def mean_over(values: Tensor, dim: int) -> Tensor:
    """The mean of a matrix [V, H] over a dimension, laid out by :func:`moment_placements`.

    If the dimension is sharded, this takes one all-reduce.
    """
    if not is_dtensor(values):
        return values.mean(dim)
    from torch.distributed.tensor import DTensor, Replicate

    # sum / V, not mean: with shards of unequal size, DTensor's mean would gather the matrix.
    total = values.sum(dim)
    assert isinstance(total, DTensor)
    whole = [Replicate() if placement.is_partial() else placement for placement in total.placements]
    return total.redistribute(placements=whole) / values.shape[dim]


def zero_moment(p: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros for a mean of a DTensor [V, H] over a dimension, as :func:`moment_placements` says."""
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    # From the local part, so that no rank ever has zeros for the whole.
    local = torch.zeros(p.to_local().shape[1 - dim], dtype=dtype, device=p.device)
    whole: Tensor = DTensor.from_local(
        local,
        p.device_mesh,
        moment_placements(p, dim),
        shape=p.shape[1 - dim : 2 - dim],  # [H] for the mean over V; shards may differ in size
        stride=(1,),
    )
    return whole.to(p.device)  # FSDP2 can keep parameters on the host


def moment_placements(p: Tensor, dim: int) -> list[Any]:
    """The placements of a mean of ``p`` over ``dim``: sharded as the other dimension is."""
    from torch.distributed.tensor import Replicate, Shard

    result: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        if not shards(placement, 1 - dim):
            result.append(Replicate())
        elif hasattr(placement, "split_factor"):  # strided, as in FSDP2 with tensor parallelism
            result.append(type(placement)(0, split_factor=placement.split_factor))
        else:
            result.append(Shard(0))
    return result


def place_moment(values: Tensor, p: Tensor, dim: int) -> Tensor:
    """Redistribute a vector, if it is a DTensor, to the layout of a mean of ``p`` over ``dim``."""
    if not is_dtensor(values):
        return values
    placed: Tensor = values.redistribute(placements=moment_placements(p, dim))  # type: ignore[attr-defined]
    return placed


def is_laid_out(value: Tensor, p: Tensor, dim: int | None) -> bool:
    """Whether a tensor has the layout of ``p``, or for a dimension that of a mean over it."""
    if not is_dtensor(p) or not is_dtensor(value):
        return is_dtensor(p) == is_dtensor(value)
    placements = list(p.placements) if dim is None else moment_placements(p, dim)  # type: ignore[attr-defined]
    same: bool = value.device_mesh == p.device_mesh  # type: ignore[attr-defined]
    return same and list(value.placements) == placements  # type: ignore[attr-defined]
