"""Clipping by the norm of all gradients: sparse, dense, and those of DTensors, on any meshes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from coupled_adam.optim import row_sparse, sharded


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients by their norm, as :func:`torch.nn.utils.clip_grad_norm_` with more kinds.

    The norm of a sparse gradient is that of the dense one: equal rows are added up before.
    Gradients may be DTensors on several meshes, beside others that are none.

    Args:
        parameters, max_norm, norm_type, error_if_nonfinite, foreach: as in torch.

    Returns:
        The norm of all gradients before, 0-dim.

    Raises:
        RuntimeError: as in torch; or if a sparse gradient on the CPU has rows that are none of its
            table. No gradient has been changed then.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    meshes: dict[Any, list[Tensor]] = {}
    for p in given:
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad = row_sparse.coalesced(p.grad)  # now, as the step needs it, too
            meshes.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    if len(meshes) < 2:
        return torch.nn.utils.clip_grad_norm_(
            given, max_norm, norm_type, error_if_nonfinite, foreach
        )
    norms = [
        get_total_norm([p.grad for p in group if p.grad is not None], norm_type, foreach=foreach)
        for group in meshes.values()
    ]
    total = get_total_norm(map(sharded.full_tensor, norms), norm_type, error_if_nonfinite)
    for group in meshes.values():
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total
