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

from coupled_adam.optim.reference import row_scale
from coupled_adam.optim.sharded import PLAIN, splits_columns
from coupled_adam.optim.update import Update

skips = False

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
_ELEMENTS_PER_THREAD = 2**17  # updating so many takes about as long as starting a thread


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
        ("weight", ctypes.c_double),
        ("update_moment", ctypes.c_int32),
        ("beta2", ctypes.c_double),
        ("stochastic", ctypes.c_int32),
        *((name, ctypes.c_double) for name in ("share", "scale", "eps", "lr")),
        *((name, ctypes.c_double) for name in ("factor", "decay", "vocab_size")),
        *((f"noise_{name}", ctypes.c_uint32) for name in ("key", "row", "column")),
    ]


def fits(update: Update) -> bool:
    """Whether the library is built and supports these tensors; if so, fill ``update.memo``.

    The matrices, on the CPU, must be plain tensors of the same dtype (float32, float64 or bfloat16)
    with contiguous rows. The second moments, nu, its maximum and r, must be contiguous, and float64
    if the matrices are float64, otherwise float32.
    """
    param, maximum = update.param, update.max_exp_avg_sq
    dtype = param.dtype
    if dtype not in _DTYPES or library() is None:
        return False
    pointers: list[int | None] = []
    strides = []
    for matrix in (param, update.grad, update.exp_avg):
        row, column = matrix.stride()
        # A subclass of Tensor may have no memory of its own.
        if type(matrix) not in PLAIN or matrix.dtype != dtype or column != 1:
            return False
        pointers.append(matrix.data_ptr())
        strides.append(row)
    for moment in (update.exp_avg_sq, maximum, update.exp_avg_sq_row):
        if moment is None:
            pointers.append(None)
            continue
        if type(moment) is not Tensor or moment.dtype != _WIDE[dtype] or moment.stride() != (1,):
            return False
        pointers.append(moment.data_ptr())
    rows, columns = param.shape
    threads = max(1, min(torch.get_num_threads(), rows * columns // _ELEMENTS_PER_THREAD))
    update.memo = _Record(_DTYPES[dtype], threads, rows, columns, *pointers[:3], *strides)
    update.memo.exp_avg_sq, update.memo.max_exp_avg_sq = pointers[3:5]
    return True


def measure(update: Update, update_moment: bool) -> None:
    """Sum the squared gradient in float64; with ``update_moment`` also update ``exp_avg``.

    Then, with ``zero_sum``, it also does the work of ``center``, unless rows are sharded.
    """
    record: _Record = update.memo
    update.sums = torch.empty(record.columns, dtype=torch.float64)
    record.sums = update.sums.data_ptr()
    record.weight = 1 - update.beta1
    record.update_moment = update.moment_updated = update_moment
    rows = update.exp_avg_sq_row
    if rows is not None:
        update.row_sums = torch.empty_like(rows)
        record.row_sums = update.row_sums.data_ptr()
    if update_moment and (rows is None or not splits_columns(update)):
        if rows is not None:
            update.weights = torch.empty_like(rows)
            record.exp_avg_sq_row, record.weights = rows.data_ptr(), update.weights.data_ptr()
            record.beta2 = update.beta2
            record.row_share = (1 - update.beta2) / update.hidden_size
            record.exponent = update.group["row_exponent"] / 2
        if update.group["zero_sum"]:
            _new_moment_sums(update)
    _call("coupled_adam_measure", record)


def center(update: Update) -> None:
    """Update ``exp_avg``, unless ``measure`` has, and sum it over the rows with their weights."""
    record: _Record = update.memo
    record.factor = update.factor
    if update.weights is not None:
        record.weights = update.weights.data_ptr()
    _new_moment_sums(update)
    _call("coupled_adam_center", record)
    record.update_moment = update.moment_updated = True


def _new_moment_sums(update: Update) -> None:
    assert update.sums is not None
    update.moment_sums = torch.empty_like(update.sums)
    update.memo.moment_sums = update.moment_sums.data_ptr()


def apply(update: Update) -> None:
    """Update nu, the first moment and the parameter, given the sums over all ranks."""
    assert update.sums is not None
    beta1, beta2, t, group = update.beta1, update.beta2, update.t, update.group
    record, factor = update.memo, update.factor
    record.sums = update.sums.data_ptr()  # all_reduce may have replaced them
    if update.weights is not None:
        record.weights = update.weights.data_ptr()
    if update.moment_sums is not None:
        record.moment_sums = update.moment_sums.data_ptr()
    record.vocab_size = update.vocab_size
    record.beta2 = beta2
    record.share = (1 - beta2) / update.vocab_size * factor * factor
    record.scale = group["second_moment_scale"] / (1 - beta2**t)
    record.eps = group["eps"]
    record.lr = update.lr / (1 - beta1**t)
    if update.totals is not None:
        record.lr *= float(row_scale(update))
    elif update.exp_avg_sq_row is not None:
        record.exponent = group["row_exponent"] / 2
    record.factor = factor
    record.decay = update.decay
    if update.noise is not None:
        noise = update.noise
        record.stochastic = True
        record.noise_key, record.noise_row, record.noise_column = noise.key, noise.row, noise.column
    _call("coupled_adam_apply", record)
    # Tell autograd about the in-place change, as torch's own operations do.
    changed = [update.param, update.exp_avg, update.exp_avg_sq]
    if update.exp_avg_sq_row is not None:
        changed.append(update.exp_avg_sq_row)
    torch.autograd.graph.increment_version(changed)


def _call(function: str, record: _Record) -> None:
    if getattr(library(), function)(record):
        raise MemoryError(f"cannot allocate memory for vectors of {record.columns} numbers")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None if it was not built for this machine."""
    path = Path(__file__).with_name("libcoupled_adam.so")
    try:
        found = ctypes.CDLL(str(path))
        if found.coupled_adam_update_size() != ctypes.sizeof(_Record):
            return None  # built from another version of native.c
    except (OSError, AttributeError):  # not built, or built for another machine or version
        return None
    for function in (
        found.coupled_adam_measure,
        found.coupled_adam_center,
        found.coupled_adam_apply,
    ):
        function.argtypes = (ctypes.POINTER(_Record),)
    return found
