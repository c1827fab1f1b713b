"""The two passes over a matrix, fast.

Each kernel is a module with the two verbs of :class:`coupled_adam.optim.update.Kernel`. ``native``
is in C, for CPUs; ``triton`` is for GPUs; ``operations`` is for everything else, with torch's
operations and without a temporary of the matrix's size. They are tested against
:mod:`coupled_adam.optim.reference`, which does what is rare or must be traced.
"""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import native, operations
from coupled_adam.optim.sharded import PLAIN
from coupled_adam.optim.update import Kernel, Update


def choose(update: Update) -> Kernel:
    """The kernel for a matrix. Ranks may differ in theirs."""
    group, param = update.group, update.param
    if group["fused"] is False or update.traced or isinstance(update.beta1, Tensor):
        return reference
    if param.is_cpu:
        return native if native.fits(update) else operations
    if (param.is_cuda or param.is_xpu) and param.dtype != torch.float64:
        plain = all(type(x) in PLAIN for x in (param, update.grad, update.exp_avg))
        if plain and _triton_works(param.device):
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
