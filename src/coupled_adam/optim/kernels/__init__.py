"""The two passes over a matrix, fast.

Each kernel is a module with the two verbs of :class:`coupled_adam.optim.update.Kernel`: ``native`` is in
C, for CPUs; ``triton`` is for GPUs; ``operations`` is for everything else, with torch's operations and
without a temporary of the matrix's size. :mod:`coupled_adam.optim.reference` is the text that they are
tested against, and does what is rare or must be traced.
"""

import functools
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import native, operations
from coupled_adam.optim.sharded import PLAIN
from coupled_adam.optim.update import Kernel


def choose(group: dict[str, Any], param: Tensor, others: list[Tensor]) -> Kernel:
    """The kernel for a matrix of a coupled group.

    Args:
        param: this rank's part of the parameter, [rows, columns]. Ranks may differ in their kernel.
        others: gradient, first moment, nu and, with ``amsgrad``, its maximum.
    """
    if (
        group["fused"] is False
        or group["differentiable"]
        or torch.compiler.is_compiling()
        or any(isinstance(beta, Tensor) and not beta.is_cpu for beta in group["betas"])
    ):
        return reference
    if param.is_cpu:
        return native if native.fits(param, others) else operations
    if param.is_cuda or param.is_xpu:
        plain = all(type(x) in PLAIN for x in (param, *others))
        if plain and param.dtype != torch.float64 and _triton_works(param.device):
            from coupled_adam.optim.kernels import triton

            return triton
    return operations


@functools.cache
def _triton_works(device: torch.device) -> bool:
    """Whether Triton is there and can compile for this device; says once if it cannot."""
    if importlib.util.find_spec("triton") is None:
        return False
    from coupled_adam.optim.kernels import triton

    try:
        triton.check(device)
    except Exception as error:  # of Triton, a C compiler, ptxas, the driver
        warnings.warn(
            f"Triton cannot compile for {device} ({type(error).__name__}: {error}). Coupled Adam "
            "goes on with torch's operations, which are slower. Triton needs a C compiler, such as "
            "gcc, at run time",
            stacklevel=2,
        )
        return False
    return True
