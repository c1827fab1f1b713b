"""The update of :mod:`coupled_adam.optim.reference`, fast.

A kernel is a module with two functions, each of which passes once over its matrices:
``sums_of_squares(grad, dtype)``, the column sums of g^2, and ``update_(param, grad, exp_avg,
step_size, beta1=, decay=, factor=, skip=,
noise=)``. Between them is arithmetic with vectors [H].
``triton`` is for GPUs; for CPUs ``native``, which is in C and does that arithmetic, too, and where
it has not been built, or does not fit, ``compiled`` and ``blocked``.
"""

import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim.kernels import blocked, native
from coupled_adam.optim.rounding import Noise, rounds_stochastically
from coupled_adam.optim.sharded import alike, local

_WORTH_COMPILING = 2**20  # elements: a step of a millisecond


def choose(
    group: dict[str, Any], param: Tensor, grad: Tensor, exp_avg: Tensor, moments: Sequence[Tensor]
) -> ModuleType | None:
    """The kernel for a parameter of a coupled group; None for the reference.

    Args:
        moments: nu, and its maximum with ``amsgrad``.

    The reference is for what is rare or must be traced: differentiable and compiled steps, an L2
    penalty (it is part of the gradient whose squares are summed), matrices of which neither rows
    nor columns lie together, gradients that are placed otherwise than their parameter, and
    ``fused=False``. All ranks decide that alike; which kernel it is may depend on a rank's part.
    """
    if (
        group["fused"] is False
        or group["differentiable"]
        or torch.compiler.is_compiling()
        or not alike(param, grad, exp_avg)
        or (group["weight_decay"] != 0 and not group["decoupled_weight_decay"])
        or 1 not in param.stride()
        or not _on_host(*group["betas"])
    ):
        return None
    param, grad, exp_avg = local(param), local(grad), local(exp_avg)
    if param.is_cpu:
        moments = [local(moment) for moment in moments]
        if group["vocab_dim"] == 0 and native.fits(param, grad, exp_avg, moments):
            return native
        large = param.numel() >= _WORTH_COMPILING
        if group["fused"] and large and not rounds_stochastically(group, param):
            from coupled_adam.optim.kernels import compiled

            return compiled
        return blocked
    if param.is_cuda and param.dtype != torch.float64 and _has_triton():
        from coupled_adam.optim.kernels import triton

        return triton
    return None


def sums_of_squares(kernel: ModuleType, grad: Tensor, vocab_dim: int) -> Tensor:
    """sum_i g_i^2 over the vocabulary, [H], in float32 or wider."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    if vocab_dim == 1:
        grad = grad.T
    if not grad.numel():  # a rank's part of a matrix may be empty
        return grad.new_zeros(grad.shape[1], dtype=torch.float64 if kernel is native else dtype)
    sums: Tensor = kernel.sums_of_squares(grad, dtype)
    return sums


def sums_and_moment_(
    kernel: ModuleType, grad: Tensor, exp_avg: Tensor, beta1: float | Tensor, vocab_dim: int
) -> tuple[Tensor, bool]:
    """The same, and whether the kernel has updated the first moment in the same pass."""
    if not hasattr(kernel, "sums_and_moment_") or not grad.numel():
        return sums_of_squares(kernel, grad, vocab_dim), False
    dtype, weight = torch.promote_types(grad.dtype, torch.float32), 1 - float(beta1)
    if vocab_dim == 1:
        grad, exp_avg = grad.T, exp_avg.T
    return kernel.sums_and_moment_(grad, dtype, exp_avg, weight), True


def coupled_adam_(
    kernel: ModuleType,
    param: Tensor,
    grad: Tensor,
    sums: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float | Tensor,
    *,
    rows: int,
    lr: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    eps: float,
    weight_decay: float,
    max_exp_avg_sq: Tensor | None,
    second_moment_scale: float,
    vocab_dim: int,
    maximize: bool,
    factor: float | Tensor = 1.0,
    skip: Tensor | None = None,
    moved: bool = False,
    noise: Noise | None = None,
) -> None:
    """:func:`coupled_adam.optim.reference.coupled_adam_` by a kernel, with the same arguments.

    Args:
        kernel: from :func:`choose`.
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq: of a sharded parameter, a rank's part.
        sums: :func:`sums_of_squares` of the gradient, over all ranks' rows; None for ``native``,
            which takes them itself.
        rows: V.
        factor: on the gradient, to clip or to unscale it.
        skip: a tensor of one number: where it is not 0, nothing is changed.
        moved: the first moment has been updated by :func:`sums_and_moment_`.
        noise: to round a bfloat16 parameter stochastically.
    """
    if vocab_dim == 1:
        param, grad, exp_avg = param.T, grad.T, exp_avg.T
    beta1, beta2 = float(beta1), float(beta2)
    if isinstance(factor, Tensor) and factor.is_cpu:
        factor = factor.item()

    share = (1 - beta2) / rows
    decay = 1 - lr * weight_decay
    if kernel is native and param.shape[1]:
        native.coupled_adam_(
            *(param, grad, sums, exp_avg, exp_avg_sq, max_exp_avg_sq),
            beta1=beta1,
            beta2=beta2,
            share=float(share * factor * factor),
            scale=float(second_moment_scale / (1 - beta2**step)),
            eps=eps,
            lr=float(lr / (1 - beta1**step)),
            factor=float(-factor if maximize else factor),
            decay=float(decay),
            moved=moved,
            noise=noise,
        )
        return

    assert sums is not None
    nu = exp_avg_sq if skip is None else exp_avg_sq.clone()
    if isinstance(factor, Tensor):
        nu.mul_(beta2).add_(sums * factor.square(), alpha=share)
    else:
        nu.mul_(beta2).add_(sums, alpha=share * factor * factor)
    highest = nu
    if max_exp_avg_sq is not None:
        highest = torch.maximum(max_exp_avg_sq, nu)
        max_exp_avg_sq.copy_(_unless(skip, highest, max_exp_avg_sq))
    if skip is not None:
        exp_avg_sq.copy_(_unless(skip, nu, exp_avg_sq))
    denominator = (highest * (second_moment_scale / (1 - beta2**step))).sqrt_().add_(eps)
    step_size = denominator.reciprocal_().mul_(lr / (1 - beta1**step))
    if not param.numel():
        return
    kernel.update_(
        *(param, grad, exp_avg, step_size),
        beta1=beta1,
        decay=decay,
        factor=-factor if maximize else factor,
        **({} if skip is None else {"skip": skip}),
        **({"moved": True} if moved else {}),
        **({} if noise is None else {"noise": noise}),
    )


def _on_host(beta1: float | Tensor, beta2: float | Tensor) -> bool:
    return not any(isinstance(beta, Tensor) and not beta.is_cpu for beta in (beta1, beta2))


def _unless(skip: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if skip is None else torch.where(skip == 0, new, old)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
