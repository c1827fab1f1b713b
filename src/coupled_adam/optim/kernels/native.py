"""The two passes on a CPU, written in C (``native.c``) and called through ctypes.

They read and write each matrix as rarely as the algorithm allows. The library is compiled when the
package is built; if no C compiler was available then, this kernel is not used.
"""

import ctypes
import functools
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from coupled_adam.optim import reference
from coupled_adam.optim.matrix import Matrix, Scalars, Sums
from coupled_adam.optim.sharded import PLAIN

serves = frozenset(
    {"coupled", "second_moment_scale", "row_exponent", "zero_sum", "vocab_dim"}
    | {"stochastic_rounding"}
)
skips = False
PATH = Path(__file__).with_name("libcoupled_adam.so")

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
_ELEMENTS_PER_THREAD = 2**14  # updating so many takes twice as long as waking a thread of torch's


class _Record(ctypes.Structure):
    """The struct ``Update`` of native.c, with the same fields in the same order."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("param", "grad", "exp_avg")),
        *((name, ctypes.c_void_p) for name in ("exp_avg_sq", "max_exp_avg_sq", "sums")),
        *((name, ctypes.c_void_p) for name in ("row_sums", "exp_avg_sq_row", "weights")),
        *((name, ctypes.c_double) for name in ("row_share", "exponent")),
        ("moment_sums", ctypes.c_void_p),
        ("active", ctypes.c_double),
        ("weight", ctypes.c_double),
        ("update_moment", ctypes.c_int32),
        ("beta2", ctypes.c_double),
        ("stochastic", ctypes.c_int32),
        *((name, ctypes.c_double) for name in ("share", "scale", "eps", "lr")),
        *((name, ctypes.c_double) for name in ("factor", "decay", "vocab_size")),
        *((f"noise_{name}", ctypes.c_uint32) for name in ("key", "row", "column")),
    ]


def fits(matrix: Matrix) -> bool:
    """Whether the library is built and supports these tensors.

    The matrices, on the CPU, must be plain tensors of the same dtype (float32, float64 or bfloat16)
    with contiguous rows. The second moments, nu, its maximum and r, must be contiguous, and float64
    if the matrices are float64, otherwise float32.
    """
    dtype = matrix.param.dtype
    wide = _WIDE.get(dtype)
    if wide is None or library() is None:
        return False
    # A subclass of Tensor may have no memory of its own.
    for rows in (matrix.param, matrix.grad, matrix.exp_avg):
        if rows is not None and not (
            type(rows) in PLAIN and rows.dtype == dtype and rows.stride()[1] == 1
        ):
            return False
    for moment in (matrix.exp_avg_sq, matrix.max_exp_avg_sq, matrix.exp_avg_sq_row):
        if moment is not None and not (
            type(moment) is Tensor and moment.dtype == wide and moment.is_contiguous()
        ):
            return False
    return True


def _record(matrix: Matrix) -> _Record:
    record, param, grad = _Record(), matrix.param, matrix.grad  # all zeros and NULL
    rows, columns = param.shape
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
    record.vocab_size = record.active = matrix.vocab_size
    record.weight, record.factor = 1 - matrix.beta1, 1.0
    return record


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """Sum the squared gradient in float64; with ``as_is`` also update ``exp_avg``.

    With whole rows it does the work of ``center``, too, unless that would need an ``exp_avg`` that
    cannot be updated yet.
    """
    record, rows = _record(matrix), matrix.exp_avg_sq_row
    sums = Sums(torch.empty(record.columns, dtype=torch.float64), memo=record)
    record.sums = sums.squares.data_ptr()
    updates_moment = as_is and matrix.exp_avg is not None
    record.update_moment = updates_moment
    if rows is not None:
        sums.row_squares = torch.empty_like(rows)
        record.row_sums = sums.row_squares.data_ptr()
    if rows is not None and matrix.has_whole_rows and (updates_moment or matrix.exp_avg is None):
        sums.weights = torch.empty_like(rows)
        record.exp_avg_sq_row, record.weights = rows.data_ptr(), sums.weights.data_ptr()
        record.beta2 = matrix.beta2
        record.row_share = (1 - matrix.beta2) / matrix.hidden_size
        record.exponent = matrix.group["row_exponent"] / 2
        if matrix.group["zero_sum"]:
            _new_updates(sums, record)
    _call("coupled_adam_measure", record)
    if updates_moment:
        sums.moment = matrix.exp_avg
    return sums


def weigh_rows(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Leave r to ``apply`` if ``measure`` has weighed the rows and no rank has others."""
    if sums.weights is None or matrix.row_ranks:
        reference.weigh_rows(matrix, sums, scalars)


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update ``exp_avg``, unless ``measure`` has, and sum it over the rows with their weights."""
    record: _Record = sums.memo
    _set_weights(sums, record)
    record.factor = scalars.factor
    _new_updates(sums, record)
    _call("coupled_adam_center", record)
    record.update_moment, sums.moment = True, matrix.exp_avg


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu, the first moment and the parameter, given the sums over all ranks."""
    beta1, beta2, t, group = matrix.beta1, matrix.beta2, scalars.t, matrix.group
    record, factor = sums.memo, scalars.factor
    _set_weights(sums, record)
    record.sums = sums.squares.data_ptr()  # the sums over all ranks may be other tensors
    record.moment_sums = None if sums.updates is None else sums.updates.data_ptr()
    record.beta2 = beta2
    record.share = (1 - beta2) / matrix.vocab_size * factor * factor
    record.scale = group["second_moment_scale"] / (1 - beta2**t)
    record.eps = group["eps"]
    record.lr = matrix.lr / (1 - beta1**t)
    if sums.rows is not None:
        record.exp_avg_sq_row = None  # r has been updated
        count, total = sums.rows.tolist()
        record.active = max(count, 1)
        record.lr *= (total / record.active) ** (group["row_exponent"] / 2)
    record.active = max(record.active, 1)  # no row has had a gradient
    record.scale *= matrix.vocab_size / record.active
    record.factor = factor
    record.decay = matrix.decay
    if scalars.noise is not None:
        noise = scalars.noise
        record.stochastic = True
        record.noise_key, record.noise_row, record.noise_column = noise.key, noise.row, noise.column
    _call("coupled_adam_apply", record)
    # Tell autograd about the in-place change, as torch's own operations do.
    moments = (matrix.exp_avg, matrix.exp_avg_sq, matrix.max_exp_avg_sq, matrix.exp_avg_sq_row)
    increment_version([matrix.param, *(x for x in moments if x is not None)])


def _set_weights(sums: Sums, record: _Record) -> None:
    """Let the library read the weights, wherever they have been computed."""
    record.weights = None if sums.weights is None else sums.weights.data_ptr()


def _new_updates(sums: Sums, record: _Record) -> None:
    sums.updates = torch.empty_like(sums.squares)
    record.moment_sums = sums.updates.data_ptr()


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
    except (OSError, AttributeError):  # not built, or built for another machine or version
        return None
    for function in (
        compiled.coupled_adam_measure,
        compiled.coupled_adam_center,
        compiled.coupled_adam_apply,
    ):
        function.argtypes = (ctypes.POINTER(_Record),)
    return compiled
