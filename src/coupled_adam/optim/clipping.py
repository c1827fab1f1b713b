"""The total norm of all gradients, and how those of uncoupled groups are clipped.

The gradients of coupled matrices are not changed: their update multiplies them by the factor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.matrix import Matrix, Sums

Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
Plain = tuple[dict[str, Any], Tensors, bool]
"""An uncoupled group, its tensors in the order of torch's ``adam``, and whether any is complex."""


def check_pieces_are_told(groups: Sequence[dict[str, Any]], max_grad_norm: float) -> None:
    """Raise ValueError if some groups' parameters may be pieces and do not say of what."""
    silent = [i for i, group in enumerate(groups) if group.get("flat_shards") is None]
    if 0 < len(silent) < len(groups):
        raise ValueError(
            f"max_grad_norm={max_grad_norm} needs the norm of all gradients, but param "
            f"group {silent[0]} has no flat_shards, while others have: give it a list with a "
            "FlatShard, or None for a whole parameter, for each of its parameters; or clip "
            "before the step, with max_grad_norm=None"
        )


def total_norm(
    coupled: Sequence[Matrix],
    sums: Sequence[Sums],
    plain: Sequence[Plain],
    grad_scale: Tensor | None,
) -> Tensor:
    """The norm of all gradients over all ranks, as in ``clip_grad_norm_``, 0-dim; 0 without any."""
    norms, dtype = [], torch.float32
    for matrix, of_matrix in zip(coupled, sums):
        dtype = torch.promote_types(dtype, matrix.grad.dtype)
        # Of a flattened matrix each rank has the sums of all columns.
        ranks = () if matrix.shard is not None else matrix.column_ranks
        norms.append(sharded.add_up(of_matrix.squares.sum(), ranks).sqrt())
    for group, (params, grads, *_), _ in plain:
        for grad in grads:
            real = grad.real if grad.is_complex() else grad  # dtype.to_real() is not compiled
            dtype = torch.promote_types(dtype, real.dtype)
        shards = flat.shards_of(group)
        whole = [grad for p, grad in zip(params, grads) if p not in shards]
        norms += [
            sharded.full_tensor(torch.nn.utils.get_total_norm(same_mesh))
            for same_mesh in sharded.group_by_mesh(whole)
        ]
        norms += flat.norms(shards)
    if not norms:
        return torch.tensor(0.0)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    )
    return norm if grad_scale is None else norm / grad_scale.to(norm.device)


def clip(
    group: dict[str, Any], grads: list[Tensor], factor: Tensor | None, grad_scale: Tensor | None
) -> Tensor | None:
    """Clip the gradients of an uncoupled group; return the ``grad_scale`` to pass to torch."""
    if factor is None or not grads:
        return grad_scale
    factor = factor.to(grads[0].device)
    # torch's fused kernels divide by grad_scale anyway (in float32), so they can clip for free.
    if group["fused"] and all(grad.dtype != torch.float64 for grad in grads):
        factor = factor.float()
        return 1 / factor if grad_scale is None else grad_scale / factor
    for same_mesh in sharded.group_by_mesh(grads):
        torch._foreach_mul_(same_mesh, factor)
    return grad_scale
