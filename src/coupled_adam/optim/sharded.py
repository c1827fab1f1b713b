"""The mean over all rows of a matrix, wherever its rows lie.

``torch.distributed.tensor`` is imported only where a DTensor shows that it has been: it would
double the time of ``import coupled_adam``.
"""

import torch
from torch import Tensor


def is_sharded(p: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(p, "placements")


def whole(values: Tensor) -> Tensor:
    """A tensor from all its parts, on every rank."""
    full: Tensor = values.full_tensor() if is_sharded(values) else values  # type: ignore[attr-defined]
    return full


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
    """Zeros [H] for the matrix ``p``, placed as :func:`mean` places its result."""
    columns = p.shape[1 - vocab_dim]
    if not is_sharded(p):
        return torch.zeros(columns, dtype=dtype, device=p.device)
    from torch.distributed import tensor as dtensor

    assert isinstance(p, dtensor.DTensor)
    return dtensor.zeros(
        columns,
        dtype=dtype,
        device_mesh=p.device_mesh,
        placements=[
            dtensor.Shard(0) if placement.is_shard(1 - vocab_dim) else dtensor.Replicate()
            for placement in p.placements
        ],
    )
