"""Sums and means over all rows of a matrix, wherever its rows lie.

``torch.distributed.tensor`` is imported only where a DTensor shows that it has been: it would
double the time of ``import coupled_adam``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that are no subclass of somebody's."""


def is_sharded(p: Tensor) -> bool:
    """Whether this is a DTensor."""
    return type(p) not in PLAIN and hasattr(p, "placements")


def whole(values: Tensor) -> Tensor:
    """A tensor from all its parts, on every rank."""
    full: Tensor = values.full_tensor() if is_sharded(values) else values  # type: ignore[attr-defined]
    return full


def local(values: Tensor) -> Tensor:
    """This rank's part, to be changed in place; all of a plain tensor."""
    part: Tensor = values.to_local() if is_sharded(values) else values  # type: ignore[attr-defined]
    return part


def offset(matrix: Tensor) -> tuple[int, int]:
    """The place in the whole matrix of the first element of this rank's part."""
    if not is_sharded(matrix):
        return 0, 0
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(matrix, DTensor)
    _, (row, column) = compute_local_shape_and_global_offset(
        matrix.shape, matrix.device_mesh, matrix.placements
    )
    return row, column


def alike(*tensors: Tensor) -> bool:
    """Whether all are plain, or all lie on the ranks in the same way, part by part."""
    if not any(map(is_sharded, tensors)):
        return True
    if not all(map(is_sharded, tensors)):
        return False
    first, *others = tensors
    mesh, placements = first.device_mesh, first.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        return False
    return all(x.device_mesh == mesh and x.placements == placements for x in others)  # type: ignore[attr-defined]


def by_mesh(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors in lists that torch takes together: plain ones, and those on each mesh."""
    lists: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return lists.values()


def splits(placement: Any, dimension: int) -> bool:
    """Whether a placement gives each rank a part of this dimension of a matrix."""
    # Not is_shard(): it is False for the strided parts of FSDP2 with tensor parallelism.
    return getattr(placement, "dim", None) == dimension


def over_rows(
    sums: Sequence[Tensor], params: Sequence[Tensor], vocab_dims: Sequence[int]
) -> Callable[[], list[Tensor]]:
    """Start to make of sums over each rank's rows sums over all rows.

    All that go the same way go together, in one all-reduce for each dimension of the mesh over
    which rows are split.

    Args:
        sums: for each parameter, over the rows of its part, [columns of the part].
        params: the parameters, all of them sharded.
        vocab_dims: the dimension of each that counts its rows.

    Returns:
        A function that waits for the sums, and returns them.
    """
    ways: dict[Any, list[int]] = {}
    for index, (p, vocab_dim) in enumerate(zip(params, vocab_dims)):
        placements = p.placements  # type: ignore[attr-defined]
        split = tuple(i for i, placed in enumerate(placements) if splits(placed, vocab_dim))
        if split:
            ways.setdefault((p.device_mesh, split, p.device), []).append(index)  # type: ignore[attr-defined]
    if not ways:
        return lambda: list(sums)
    from torch.distributed import _functional_collectives as collectives

    totals = []
    for (mesh, split, device), members in ways.items():
        # One dtype on all ranks, whichever kernels have made the sums.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        total = torch.cat([sums[index].to(wide) for index in members])
        total = total.to(mesh.device_type)  # where FSDP2 keeps parameters on the host
        for dimension in split:
            total = collectives.all_reduce(total, "sum", (mesh, dimension))
        totals.append((total, members))

    def finish() -> list[Tensor]:
        result = list(sums)
        for total, members in totals:
            parts = collectives.wait_tensor(total).split([len(sums[index]) for index in members])
            for index, part in zip(members, parts):
                result[index] = part.to(sums[index])
        return result

    return finish


def spread(values: Tensor, like: Tensor) -> Tensor:
    """Each rank's part of a vector [H] as a whole that is placed as another; plain, if that is."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole: Tensor = DTensor.from_local(
        values, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return whole


def beside(values: Tensor, p: Tensor, vocab_dim: int) -> Tensor:
    """A vector [H], if it is a DTensor, placed as :func:`zeros` places it beside ``p``."""
    if not is_sharded(values):
        return values
    placed: Tensor = values.redistribute(placements=of_columns(p, vocab_dim))  # type: ignore[attr-defined]
    return placed


def lies_beside(values: Tensor, p: Tensor, vocab_dim: int) -> bool:
    """Whether a vector [H] is placed as :func:`zeros` places it beside the matrix ``p``."""
    if not is_sharded(p) or not is_sharded(values):
        return is_sharded(p) == is_sharded(values)
    same: bool = values.device_mesh == p.device_mesh  # type: ignore[attr-defined]
    return same and list(values.placements) == of_columns(p, vocab_dim)  # type: ignore[attr-defined]


def mean(values: Tensor, vocab_dim: int) -> Tensor:
    """The mean over ``vocab_dim``, [H].

    Where rows are split over ranks this is one all-reduce of H numbers. The result is then
    replicated over those ranks, and split as the columns are.
    """
    if not is_sharded(values):
        return values.mean(vocab_dim)
    from torch.distributed.tensor import DTensor, Replicate

    # sum / V, not mean: the mean over shards of different heights would gather the matrix.
    total = values.sum(vocab_dim)
    assert isinstance(total, DTensor)
    whole = [Replicate() if placement.is_partial() else placement for placement in total.placements]
    return total.redistribute(placements=whole) / values.shape[vocab_dim]


def zeros(p: Tensor, vocab_dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros [H] for the matrix ``p``, placed as :func:`of_columns` says."""
    columns = local(p).shape[1 - vocab_dim]
    part = torch.zeros(columns, dtype=dtype, device=p.device)
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    whole: Tensor = DTensor.from_local(
        part,
        p.device_mesh,
        of_columns(p, vocab_dim),
        shape=p.shape[1 - vocab_dim : 2 - vocab_dim],
        stride=(1,),
    )
    return whole.to(p.device)  # where FSDP2 keeps parameters on the host


def of_columns(p: Tensor, vocab_dim: int) -> list[Any]:
    """How a vector [H] lies beside the matrix ``p``: split as its columns, else replicated."""
    from torch.distributed.tensor import Replicate, Shard

    result: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        if not splits(placement, 1 - vocab_dim):
            result.append(Replicate())
        elif hasattr(placement, "split_factor"):
            result.append(type(placement)(0, split_factor=placement.split_factor))
        else:
            result.append(Shard(0))
    return result
