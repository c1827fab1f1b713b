"""The update by ``torch.compile``, for ``fused=True`` on a CPU: nothing is read twice.

The column sums are those of :mod:`coupled_adam.optim.kernels.blocked`, faster than compiled ones.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from coupled_adam.optim.kernels import blocked
from coupled_adam.optim.kernels.blocked import sums_of_squares

__all__ = ["sums_of_squares", "update_"]


def update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    step_size: Tensor,
    *,
    beta1: float,
    decay: float,
    factor: float,
) -> None:
    """As :func:`blocked.update_`, which it is where there is no working compiler."""
    # As numbers, what changes from step to step would be compiled anew each time.
    numbers = torch.tensor([1 - beta1, decay, factor], dtype=step_size.dtype)
    global _has_compiler
    if _has_compiler:
        try:
            _compiled()(param, grad, exp_avg, step_size, *numbers)
            return
        except torch._dynamo.exc.BackendCompilerFailed:  # before anything has run
            _has_compiler = False
    blocked.update_(param, grad, exp_avg, step_size, beta1=beta1, decay=decay, factor=factor)


_has_compiler = True


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_update_)


def _update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    step_size: Tensor,
    weight: Tensor,
    decay: Tensor,
    factor: Tensor,
) -> None:
    wide = step_size.dtype
    m = exp_avg.to(wide)
    m = (m + weight * (factor * grad.to(wide) - m)).to(exp_avg.dtype)
    exp_avg.copy_(m)
    param.copy_(decay * param.to(wide) - step_size * m.to(wide))
