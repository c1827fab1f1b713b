"""The update on a CPU, in C: ``native.c``, which is compiled when the package is built.

It moves no more memory than must be moved, and costs one call, or two where something has to be
known of all gradients between the passes. A package that was built where there was no C compiler is
without it.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from coupled_adam.optim.rounding import Noise
from coupled_adam.optim.sharded import PLAIN

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_WORTH_A_THREAD = 2**17  # elements: about as long as it takes to start one


def fits(param: Tensor, grad: Tensor, exp_avg: Tensor, moments: Sequence[Tensor]) -> bool:
    """Whether it is built, and these are what it takes for granted.

    The matrices are plain tensors of one dtype, float32, float64 or bfloat16, whose rows lie
    together; the moments [H], nu and its maximum, are float32, or float64 with the matrices.
    """
    dtype = param.dtype
    if _library() is None or dtype not in _DTYPES:
        return False
    wide = torch.promote_types(dtype, torch.float32)
    return all(
        # Not a subclass, such as one that has no memory.
        type(x) in PLAIN and x.is_cpu and x.dtype == dtype and x.stride(1) == 1
        for x in (param, grad, exp_avg)
    ) and all(
        type(x) is Tensor and x.is_cpu and x.dtype == wide and x.stride(0) == 1 for x in moments
    )


def sums_of_squares(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_i g_i^2 over the rows of [V, H], [H], in float64 whatever the dtype asked for."""
    return _sums(grad, None, 0.0)


def sums_and_moment_(grad: Tensor, dtype: torch.dtype, exp_avg: Tensor, weight: float) -> Tensor:
    """:func:`sums_of_squares`, and m <- m + weight (g - m) in the same pass."""
    return _sums(grad, exp_avg, weight)


def coupled_adam_(
    param: Tensor,
    grad: Tensor,
    sums: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    share: float,
    scale: float,
    eps: float,
    lr: float,
    factor: float,
    decay: float,
    moved: bool,
    noise: Noise | None,
) -> None:
    """All that follows the sums: nu, its maximum, m unless it has been ``moved``, and e.

    Args:
        param, grad, exp_avg: [V, H].
        sums: of :func:`sums_of_squares`, [H]; None where they are to be taken here, of a gradient
            that is not scaled.
        exp_avg_sq, max_exp_avg_sq: nu and its maximum, [H].
        share: nu <- beta2 nu + share sums.
        scale: on nu below the root: second_moment_scale / (1 - beta2^t).
        lr: divided by 1 - beta1^t.
        factor: on the gradient, in the first moment.
        decay: on the parameter.
        noise: to round a bfloat16 parameter stochastically.
    """
    rows, columns = param.shape
    library = _library()
    assert library is not None
    failed = library.coupled_adam_update(
        _DTYPES[param.dtype],
        param.data_ptr(),
        param.stride(0),
        None if moved else grad.data_ptr(),
        grad.stride(0),
        exp_avg.data_ptr(),
        exp_avg.stride(0),
        rows,
        columns,
        exp_avg_sq.data_ptr(),
        None if max_exp_avg_sq is None else max_exp_avg_sq.data_ptr(),
        None if sums is None else sums.data_ptr(),
        *(beta2, share, scale, eps, lr, 1 - beta1, factor, decay),
        None if noise is None else (ctypes.c_uint32 * 3)(*map(int, noise)),
        _threads(rows * columns),
    )
    if failed:
        raise MemoryError(f"no memory for {columns} numbers")
    # As torch's operations tell autograd.
    torch.autograd.graph.increment_version((param, exp_avg, exp_avg_sq))


def _sums(grad: Tensor, exp_avg: Tensor | None, weight: float) -> Tensor:
    rows, columns = grad.shape
    sums = torch.empty(columns, dtype=torch.float64)
    library = _library()
    assert library is not None
    failed = library.coupled_adam_sums(
        _DTYPES[grad.dtype],
        grad.data_ptr(),
        grad.stride(0),
        None if exp_avg is None else exp_avg.data_ptr(),
        0 if exp_avg is None else exp_avg.stride(0),
        rows,
        columns,
        weight,
        sums.data_ptr(),
        _threads(rows * columns),
    )
    if failed:
        raise MemoryError(f"no memory for {columns} numbers")
    return sums


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // _WORTH_A_THREAD))


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("libcoupled_adam.so")
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # of another machine
        return None
    i32, i64, number, address = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    matrix = (address, i64)
    library.coupled_adam_sums.argtypes = (*(i32, *matrix, *matrix, i64, i64, number, address, i32),)
    library.coupled_adam_update.argtypes = (
        *(i32, *matrix, *matrix, *matrix, i64, i64, address, address, address),
        *(number,) * 8,
        *(address, i32),
    )
    return library
