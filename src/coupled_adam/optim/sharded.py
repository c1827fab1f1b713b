"""DTensors: this rank's part of a matrix, and sums over the parts of all ranks.

``torch.distributed.tensor`` is imported inside the functions, and only once there is a DTensor, as
importing it here would double the time that ``import coupled_adam`` takes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coupled_adam.optim.update import Update

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
    part: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return part


def global_offset(matrix: Tensor) -> tuple[int, int]:
    """The row and column, in the full matrix, of the first element of this rank's part."""
    if not is_dtensor(matrix):
        return 0, 0
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(matrix, DTensor)
    _, (row, column) = compute_local_shape_and_global_offset(
        matrix.shape, matrix.device_mesh, matrix.placements
    )
    return row, column


def same_layout(x: Tensor, other: Tensor) -> bool:
    """Whether both are plain, or both DTensors with the same mesh and placements."""
    if not is_dtensor(x) or not is_dtensor(other):
        return is_dtensor(x) == is_dtensor(other)
    same: bool = x.device_mesh == other.device_mesh  # type: ignore[attr-defined]
    return same and x.placements == other.placements  # type: ignore[attr-defined]


def placed_as(x: Tensor, other: Tensor) -> Tensor:
    """Redistribute a DTensor to another's placements, from which a gradient's may differ."""
    if same_layout(x, other):
        return x
    placed: Tensor = x.redistribute(placements=other.placements)  # type: ignore[attr-defined]
    return placed


def group_by_mesh(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by device mesh (plain ones together), as torch cannot mix them in one call."""
    lists: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return lists.values()


def shards(placement: Any, dimension: int) -> bool:
    """Whether a placement shards this dimension of a matrix."""
    # Not is_shard(), which is False for the strided shards of FSDP2 with tensor parallelism.
    return getattr(placement, "dim", None) == dimension


def all_reduce(updates: Sequence["Update"]) -> None:
    """Replace each update's sums over this rank's rows by the sums over the rows of all ranks.

    The sums of all matrices that are sharded over the same ranks are concatenated, so that they
    need only one all-reduce for each mesh dimension over which rows are sharded.
    """
    groups: dict[Any, list[Update]] = {}
    for update in updates:
        p = update.parameter
        if not is_dtensor(p):
            continue
        placements = p.placements  # type: ignore[attr-defined]
        vocab_dim = update.group["vocab_dim"]
        mesh_dims = tuple(
            i for i, placement in enumerate(placements) if shards(placement, vocab_dim)
        )
        if mesh_dims:
            groups.setdefault((p.device_mesh, mesh_dims, p.device), []).append(update)  # type: ignore[attr-defined]
    for (mesh, mesh_dims, device), members in groups.items():
        from torch.distributed import _functional_collectives as collectives

        # The kernels of the ranks may differ in the dtype of their sums; all ranks must send one.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        sums = [update.sums for update in members if update.sums is not None]
        total = torch.cat([x.to(wide) for x in sums])
        total = total.to(mesh.device_type)  # FSDP2 can keep parameters on the host
        for mesh_dim in mesh_dims:
            total = collectives.all_reduce(total, "sum", (mesh, mesh_dim))
        parts = collectives.wait_tensor(total).split([len(x) for x in sums])
        for update, old, part in zip(members, sums, parts):
            update.sums = part.to(old)


def as_dtensor(part: Tensor, like: Tensor) -> Tensor:
    """Make a DTensor with the layout of ``like`` from each rank's part of a vector [H].

    If ``like`` is a plain tensor, ``part`` is returned as it is.
    """
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole: Tensor = DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return whole


def mean_over_tokens(values: Tensor, vocab_dim: int) -> Tensor:
    """The mean of a matrix over ``vocab_dim``, [H].

    If rows are sharded, this takes one all-reduce of H numbers. The result is replicated over the
    ranks that share the rows, and sharded where the columns are.
    """
    if not is_dtensor(values):
        return values.mean(vocab_dim)
    from torch.distributed.tensor import DTensor, Replicate

    # sum / V, not mean: with shards of unequal size, DTensor's mean would gather the matrix.
    total = values.sum(vocab_dim)
    assert isinstance(total, DTensor)
    whole = [Replicate() if placement.is_partial() else placement for placement in total.placements]
    return total.redistribute(placements=whole) / values.shape[vocab_dim]


def zero_moment(p: Tensor, vocab_dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros [H] for the second moment of ``p``, with the layout of :func:`moment_placements`."""
    columns = to_local(p).shape[1 - vocab_dim]
    part = torch.zeros(columns, dtype=dtype, device=p.device)
    if not is_dtensor(p):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    whole: Tensor = DTensor.from_local(
        part,
        p.device_mesh,
        moment_placements(p, vocab_dim),
        shape=p.shape[1 - vocab_dim : 2 - vocab_dim],
        stride=(1,),
    )
    return whole.to(p.device)  # FSDP2 can keep parameters on the host


def moment_placements(p: Tensor, vocab_dim: int) -> list[Any]:
    """The placements of the second moment [H] of ``p``: sharded as its columns, else replicated."""
    from torch.distributed.tensor import Replicate, Shard

    result: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        if not shards(placement, 1 - vocab_dim):
            result.append(Replicate())
        elif hasattr(placement, "split_factor"):
            result.append(type(placement)(0, split_factor=placement.split_factor))
        else:
            result.append(Shard(0))
    return result


def place_moment(values: Tensor, p: Tensor, vocab_dim: int) -> Tensor:
    """Redistribute a vector [H], if it is a DTensor, to the layout of the second moment of p."""
    if not is_dtensor(values):
        return values
    placed: Tensor = values.redistribute(placements=moment_placements(p, vocab_dim))  # type: ignore[attr-defined]
    return placed


def moment_is_placed(values: Tensor, p: Tensor, vocab_dim: int) -> bool:
    """Whether a vector [H] has the layout of the second moment of ``p``."""
    if not is_dtensor(p) or not is_dtensor(values):
        return is_dtensor(p) == is_dtensor(values)
    same: bool = values.device_mesh == p.device_mesh  # type: ignore[attr-defined]
    return same and list(values.placements) == moment_placements(p, vocab_dim)  # type: ignore[attr-defined]
