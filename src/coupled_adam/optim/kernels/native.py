"""The passes on a CPU, written in C (``native.c``) and called through ctypes.

They read and write each matrix as rarely as the algorithm allows. The library is compiled when the
package is built; if no C compiler was available then, this kernel is not used.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from coupled_adam.optim import reference
from coupled_adam.optim.lean import LARGEST_STEP, LOG_LIMIT
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums, is_plain_memory

SKIPS_ON_DEVICE = False
PATH = Path(__file__).with_name("libcoupled_adam.so")

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_ELEMENTS_PER_THREAD = 2**14  # updating so many takes twice as long as waking a thread of torch's


class _Record(ctypes.Structure):
    """The struct ``Update`` of native.c, with the same fields in the same order."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("param", "grad", "exp_avg")),
        *((name, ctypes.c_void_p) for name in ("exp_avg_sq", "max_exp_avg_sq")),
        *((name, ctypes.c_double) for name in ("weight", "beta2", "scale", "eps", "lr")),
        *((name, ctypes.c_double) for name in ("factor", "decay")),
        ("stochastic", ctypes.c_int32),
        *((f"noise_{name}", ctypes.c_uint32) for name in ("key", "row", "column")),
        ("update_moment", ctypes.c_int32),
        ("share", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sums", "row_exp_avg_sq", "weights", "mean_update")),
        *((name, ctypes.c_double) for name in ("row_share", "row_correction")),
        *((f"{name}_correction", ctypes.c_double) for name in ("moment", "nu")),
        *((name, ctypes.c_double) for name in ("limit_scale", "exponent")),
        *((name, ctypes.c_double) for name in ("log_limit", "largest_step")),
        ("finish", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("touched", "row_step", "row_count")),
        ("step", ctypes.c_int32),
        ("log_beta2", ctypes.c_double),
    ]


def supports(matrix: CoupledMatrix) -> bool:
    """Whether the library is built and can read and write these tensors.

    The matrices, on the CPU, must have the same dtype (float32, float64 or bfloat16) and contiguous
    rows. The vectors must be contiguous, and float64 if the matrices are, otherwise float32.
    """
    param = matrix.param
    if param.dtype not in _DTYPES or library() is None:
        return False
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    for x in matrix.matrices:
        if not (is_plain_memory(x) and x.is_cpu and x.dtype == param.dtype and x.stride()[1] == 1):
            return False
    for x in matrix.vectors:
        if not (is_plain_memory(x) and x.is_cpu and x.dtype == wide and x.is_contiguous()):
            return False
    return True


class _Duplicates(ctypes.Structure):
    """The struct ``Duplicates`` of native.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_int64) for name in ("sums", "columns")),
        *((name, ctypes.c_void_p) for name in ("order", "first", "values", "out")),
    ]


def add_duplicates(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Add up the values [n, H] of equal rows [n]; the rows, each once, and the sums.

    They are added in their order, so that the result is the same bits at every call. None if the
    library is not built, or cannot read these tensors.
    """
    is_plain = is_plain_memory(values) and values.is_contiguous()
    if library() is None or values.dtype not in _DTYPES or not is_plain or not values.numel():
        return None
    compiled = library()
    assert compiled is not None
    rows, n = rows.contiguous(), len(rows)
    order, unique, first = (torch.empty(n + 1, dtype=torch.int64, device="cpu") for _ in range(3))
    pointers = (x.data_ptr() for x in (order, unique, first))
    number = compiled.coupled_adam_sort_rows(rows.data_ptr(), n, *pointers)
    if number < 0:
        raise MemoryError(f"cannot allocate memory for {n} numbers of rows")
    sums = values.new_empty(number, values.shape[1])
    record = _Duplicates(dtype=_DTYPES[values.dtype], sums=number, columns=values.shape[1])
    record.threads = min(torch.get_num_threads(), values.numel() // _ELEMENTS_PER_THREAD) or 1
    record.order, record.first = order.data_ptr(), first.data_ptr()
    record.values, record.out = values.data_ptr(), sums.data_ptr()
    compiled.coupled_adam_add_duplicates(record)
    return unique[:number], sums


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """Sum the squared gradient, over the rows in float64; ``unscaled`` also update ``exp_avg``."""
    record = _record(matrix)
    columns = torch.empty(record.columns, dtype=torch.float64, device="cpu")
    record.sums = columns.data_ptr()
    record.update_moment = unscaled and matrix.exp_avg is not None
    _call("coupled_adam_sum_squares", record)
    return Sums(columns, kernel_state=record)


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update the matrix by Coupled Adam, given the sums over all ranks."""
    record, beta2 = sums.kernel_state, matrix.beta2
    record.sums = sums.columns.data_ptr()  # the sums over all ranks may be another tensor
    record.share = (1 - beta2) / matrix.vocab_size * scalars.factor**2
    _set_scalars(record, matrix, scalars, 1 - beta2**scalars.t)
    _call("coupled_adam_apply", record)
    increment_version(matrix.changed)  # tell autograd, as torch's own operations do


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor | None:
    """Update the matrix by LEAN; the sums over this rank's rows, or None if no other has rows."""
    record, t, beta2 = _record(matrix), scalars.t, matrix.beta2
    total = torch.empty(2 * record.columns + 1, dtype=torch.float64, device="cpu")
    record.sums = total.data_ptr()
    seen = reference.seen(beta2, t)
    if weights is not None:
        weights = weights.contiguous()
        record.weights = weights.data_ptr()
    else:
        assert matrix.row_exp_avg_sq is not None
        record.row_exp_avg_sq = matrix.row_exp_avg_sq.data_ptr()
        record.row_share = (1 - beta2) / matrix.hidden_size * scalars.factor**2
        record.row_correction, record.moment_correction = 1 - beta2**t, 1 - matrix.beta1**t
        record.nu_correction = seen
        record.limit_scale = matrix.group["second_moment_scale"]
        record.exponent = matrix.group["row_exponent"] / 2
        record.log_limit, record.largest_step = LOG_LIMIT, LARGEST_STEP
        record.finish = matrix.touched is not None or not matrix.row_ranks
        if matrix.touched is not None:
            assert matrix.row_step is not None
            assert matrix.row_count is not None
            record.touched, record.row_step = matrix.touched.data_ptr(), matrix.row_step.data_ptr()
            record.row_count = matrix.row_count.data_ptr()
            record.step, record.log_beta2 = int(t), math.log(beta2) if beta2 else -math.inf
    if matrix.mean_update is not None:
        record.mean_update = matrix.mean_update.data_ptr()
    _set_scalars(record, matrix, scalars, seen)
    _call("coupled_adam_lean", record)
    if record.finish:
        reference.begin_zero_sum(matrix, t)
    increment_version(matrix.changed)
    return None if record.finish else total


def _record(matrix: CoupledMatrix) -> _Record:
    """What does not depend on the step's numbers; all else is zeros and NULL."""
    record, param, grad = _Record(), matrix.param, matrix.grad
    rows, columns = grad.shape
    record.dtype, record.rows, record.columns = _DTYPES[param.dtype], rows, columns
    record.threads = min(torch.get_num_threads(), rows * columns // _ELEMENTS_PER_THREAD) or 1
    record.param, record.param_stride = param.data_ptr(), param.stride()[0]
    record.grad, record.grad_stride = grad.data_ptr(), grad.stride()[0]
    if matrix.exp_avg is not None:
        record.exp_avg = matrix.exp_avg.data_ptr()
        record.exp_avg_stride = matrix.exp_avg.stride()[0]
    record.exp_avg_sq = matrix.exp_avg_sq.data_ptr()
    if matrix.max_exp_avg_sq is not None:
        record.max_exp_avg_sq = matrix.max_exp_avg_sq.data_ptr()
    record.weight, record.beta2, record.eps = 1 - matrix.beta1, matrix.beta2, matrix.group["eps"]
    return record


def _set_scalars(record: Any, matrix: CoupledMatrix, scalars: Scalars, seen: Any) -> None:
    """The step's numbers; ``seen`` is the weight of all gradients in nu, 1 - beta2^t of them."""
    record.lr = matrix.lr / (1 - matrix.beta1**scalars.t)
    record.scale = matrix.group["second_moment_scale"] / seen
    record.factor, record.decay = scalars.factor, scalars.decay
    if (noise := scalars.noise) is not None:
        record.stochastic = True
        record.noise_key, record.noise_row, record.noise_column = noise.key, noise.row, noise.column


def _call(function: str, record: _Record) -> None:
    if getattr(library(), function)(record):
        raise MemoryError(f"cannot allocate memory for vectors of {record.columns} numbers")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None if it was not built for this machine."""
    try:
        compiled = ctypes.CDLL(str(PATH))
        if compiled.coupled_adam_update_size() != ctypes.sizeof(_Record):
            return None  # built from another version of native.c
        for verb in ("sum_squares", "apply", "lean"):
            getattr(compiled, f"coupled_adam_{verb}").argtypes = (ctypes.POINTER(_Record),)
        compiled.coupled_adam_add_duplicates.argtypes = (ctypes.POINTER(_Duplicates),)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        compiled.coupled_adam_sort_rows.argtypes = (pointer, number, pointer, pointer, pointer)
        compiled.coupled_adam_sort_rows.restype = number
    except (OSError, AttributeError):  # not built, or built for another machine or version
        return None
    return compiled
