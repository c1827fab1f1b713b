"""Fast implementations of the passes over a matrix, ``measure``, ``center`` and ``apply``.

Each is a module that implements :class:`coupled_adam.optim.matrix.Kernel`: ``native`` is written in
C, for CPUs; ``triton`` is for GPUs; ``operations`` uses torch's operations, for everything else.
All are tested against :mod:`coupled_adam.optim.reference`, which is itself used where autograd or a
compiler records the step, and for rare options.
"""

import importlib.util
import warnings

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import native, operations
from coupled_adam.optim.matrix import OPTIONS, Kernel, Matrix
from coupled_adam.optim.sharded import PLAIN


def kernels() -> dict[str, str]:
    """Which of Coupled Adam's fast kernels can be used on this machine.

    The optimizer chooses by itself, and says nothing where torch's operations do the work instead:
    the numbers are the same up to rounding, and only the speed differs.

    Returns:
        For the kernel in C (CPUs) and the one in Triton (CUDA and XPU), ``"C"`` and ``"Triton"``:
        ``"available"``, or why it is not used. Triton may still turn out not to compile for a GPU,
        which gives a warning at the first step.

    Example:
        >>> coupled_adam.kernels()
        {'C': 'available', 'Triton': 'not used (there is no GPU)'}
    """
    status = {"C": "available", "Triton": "available"}
    if native.library() is None:
        built = native.PATH.exists()
        reason = "its library cannot be used here" if built else "this package was built without it"
        status["C"] = f"not available ({reason})"
    if importlib.util.find_spec("triton") is None:
        status["Triton"] = "not used (triton is not installed)"
    elif not (torch.cuda.is_available() or torch.xpu.is_available()):
        status["Triton"] = "not used (there is no GPU)"
    return status


def choose(matrix: Matrix) -> Kernel:
    """Choose the kernel for a matrix, or a segment. Ranks of one matrix may choose different ones.

    What a fast kernel does not serve goes to the reference: its ``serves`` names the options of
    Coupled Adam that it implements, and all others must have their default.
    """
    group, param = matrix.group, matrix.param
    if group["fused"] is False or matrix.traced or isinstance(matrix.beta1, Tensor):
        return reference
    kernel: Kernel = operations
    if param.is_cpu:
        kernel = native if native.fits(matrix) else operations
    elif (
        (param.is_cuda or param.is_xpu)
        and _fits_triton(matrix)
        and _triton_works(param.device, param.dtype)
    ):
        from coupled_adam.optim.kernels import triton

        kernel = triton
    for name, default in OPTIONS.items():
        if group[name] != default and name not in kernel.serves:
            return reference
    return kernel


def _fits_triton(matrix: Matrix) -> bool:
    """Whether the Triton kernel supports these tensors.

    It needs plain tensors, as a subclass may have no memory of its own, and contiguous float32
    second moments. The matrices may have any strides.
    """
    second = (matrix.exp_avg_sq, matrix.max_exp_avg_sq, matrix.exp_avg_sq_row)
    moments = [moment for moment in second if moment is not None]
    matrices = [x for x in (matrix.param, matrix.grad, matrix.exp_avg) if x is not None]
    return (
        matrix.param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(type(x) in PLAIN and x.device == matrix.param.device for x in matrices + moments)
        and all(x.dtype == torch.float32 and x.stride() == (1,) for x in moments)
    )


_works: dict[tuple[torch.device, torch.dtype], bool] = {}


def _triton_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and compiles for this device; warns once if not."""
    if (device, dtype) in _works:
        return _works[device, dtype]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compiled during a capture; try again at the next step
    try:
        from coupled_adam.optim.kernels import triton

        triton.check(device, dtype)
    except Exception as error:  # from Triton, the C compiler, ptxas or the driver
        _works[device, dtype] = False
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            problem = "Triton is not installed"
        else:
            problem = (
                f"Triton, which needs a C compiler such as gcc at run time, cannot compile for "
                f"{device} ({type(error).__name__}: {error})"
            )
        warnings.warn(
            f"{problem}. Coupled Adam uses torch's operations instead, which are slower",
            stacklevel=2,
        )
    else:
        _works[device, dtype] = True
    return _works[device, dtype]
