"""Fast implementations of the passes over a matrix.

Each is a module that implements :class:`coupled_adam.optim.matrix.Kernel`: ``native`` is written in
C, for CPUs; ``triton`` is for GPUs; ``blocks`` is the reference, block by block, for everything
else. All are tested against :mod:`coupled_adam.optim.reference`, which is itself used where
autograd or a compiler records the step.
"""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import blocks, native
from coupled_adam.optim.matrix import CoupledMatrix, Kernel, is_plain_memory
from coupled_adam.optim.sharded import PLAIN
from coupled_adam.optim.warn import warn

_WIDEST = 8192  # features that a program of the Triton kernel can hold
_works: dict[tuple[torch.device, torch.dtype], bool] = {}  # whether Triton compiles


def kernels() -> dict[str, str]:
    """Which of Coupled Adam's fast kernels can be used on this machine.

    The optimizer chooses by itself, and warns once where torch's operations do the work instead:
    the numbers are the same up to rounding, and only the speed differs.

    Returns:
        For ``"C"`` (CPUs) and ``"Triton"`` (CUDA and XPU) ``"available"``, or why it is not used.
        Triton may still turn out not to compile, which gives a warning at the first step.

    Examples:
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


def choose(matrix: CoupledMatrix) -> Kernel:
    """Choose the kernel for a matrix with whole rows or a segment; ranks may choose different ones.

    The fast kernels take plain, strided memory that is there; everything else is the reference's,
    in blocks where slices of the parameter are views: those of a subclass may be copies.
    """
    if matrix.no_host_reads or type(matrix.param) not in PLAIN:
        return reference
    if matrix.group["fused"] is False or isinstance(matrix.beta1, Tensor):
        return blocks
    if native.supports(matrix):
        return native
    if _supported_by_triton(matrix) and _triton_works(matrix):
        from coupled_adam.optim.kernels import triton

        return triton
    if matrix.param.is_cpu and native.library() is None:
        _warn_of_no_library()
    return blocks


@functools.cache
def _warn_of_no_library() -> None:
    """Say once in a process why a step on a CPU is slow."""
    warn(
        f"the kernel in C is {kernels()['C']}, so torch's operations, which are slower, update the "
        "embeddings: where there is a C compiler, install the package again"
    )


def _supported_by_triton(matrix: CoupledMatrix) -> bool:
    """Whether the Triton kernel supports these tensors, whose matrices may have any strides."""
    param = matrix.param
    if not (param.is_cuda or param.is_xpu):
        return False
    tensors = [*matrix.matrices, *matrix.vectors]
    # LEAN needs whole rows in one program, with an address for each element that has no neighbour.
    is_strided = any(x.stride(1) != 1 for x in matrix.matrices)
    if matrix.is_lean and param.shape[1] > (_WIDEST // 4 if is_strided else _WIDEST):
        return False
    return (
        param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(is_plain_memory(x) and x.device == param.device for x in tensors)
        and all(x.dtype == torch.float32 and x.stride() == (1,) for x in matrix.vectors)
    )


def _triton_works(matrix: CoupledMatrix) -> bool:
    """Whether Triton is installed and compiles for a matrix's device; warns once if not.

    Raises:
        RuntimeError: if a CUDA graph is captured, in which this cannot be tried.
    """
    device, dtype = matrix.param.device, matrix.param.dtype
    if (device, dtype) in _works:
        return _works[device, dtype]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a step is captured in a CUDA graph before Triton's kernels were compiled for "
            f"{dtype} on {device}: take a step before the capture"
        )
    try:
        from coupled_adam.optim.kernels import triton

        triton.check(matrix)
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
