"""The two passes on a CPU, in C: ``native.c``, which is compiled when the package is built.

They move no more memory than must be moved. A package that was built where there was no C compiler
is without them.
"""

import ctypes
import functools
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from coupled_adam.optim.sharded import PLAIN
from coupled_adam.optim.update import Update

skips = False

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
_ELEMENTS_FOR_A_THREAD = 2**17  # take about as long as a thread to start


class _Record(ctypes.Structure):
    """``Update`` in native.c, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("param", "grad", "exp_avg")),
        *((name, ctypes.c_void_p) for name in ("exp_avg_sq", "max_exp_avg_sq", "sums")),
        ("weight", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("update_moment", "stochastic")),
        *((name, ctypes.c_double) for name in ("beta2", "share", "scale", "eps", "lr")),
        *((name, ctypes.c_double) for name in ("factor", "decay")),
        *((f"noise_{name}", ctypes.c_uint32) for name in ("key", "row", "column")),
    ]


def fits(param: Tensor, others: list[Tensor]) -> bool:
    """Whether it is built, and the tensors are what it takes for granted.

    The matrices are plain tensors of one dtype, float32, float64 or bfloat16, whose rows are
    contiguous; the moments [H], nu and its maximum, are float32, or float64 with the matrices.
    """
    dtype = param.dtype
    if dtype not in _DTYPES or library() is None:
        return False
    wide = _WIDE[dtype]
    grad, exp_avg, *moments = others
    return all(
        # Not a subclass, which may have no memory of its own.
        type(x) in PLAIN and x.dtype == dtype and x.stride(1) == 1 and x.is_cpu
        for x in (param, grad, exp_avg)
    ) and all(
        type(x) is Tensor and x.dtype == wide and x.stride(0) == 1 and x.is_cpu for x in moments
    )


def measure(update: Update, update_moment: bool) -> None:
    """The sums, in float64, and with ``update_moment`` the first moment."""
    param, grad, exp_avg = update.param, update.grad, update.exp_avg
    rows, columns = param.shape
    maximum = update.max_exp_avg_sq
    update.sums = torch.empty(columns, dtype=torch.float64)
    update.memo = _Record(
        _DTYPES[param.dtype],
        max(1, min(torch.get_num_threads(), rows * columns // _ELEMENTS_FOR_A_THREAD)),
        rows,
        columns,
        param.data_ptr(),
        grad.data_ptr(),
        exp_avg.data_ptr(),
        param.stride(0),
        grad.stride(0),
        exp_avg.stride(0),
        update.exp_avg_sq.data_ptr(),
        None if maximum is None else maximum.data_ptr(),
        update.sums.data_ptr(),
        1 - update.betas[0],
        update_moment,
    )
    _call("coupled_adam_measure", update.memo)
    update.moment_updated = update_moment


def apply(update: Update) -> None:
    """All that follows the sums, the arithmetic with vectors [H] included."""
    assert update.sums is not None
    (beta1, beta2), t, group = update.betas, update.t, update.group
    record, factor = update.memo, update.factor
    record.sums = update.sums.data_ptr()  # those over all ranks
    record.beta2 = beta2
    record.share = (1 - beta2) / update.vocab_size * factor * factor
    record.scale = group["second_moment_scale"] / (1 - beta2**t)
    record.eps = group["eps"]
    record.lr = update.lr / (1 - beta1**t)
    record.factor = factor
    record.decay = update.decay
    if update.noise is not None:
        record.stochastic = True
        record.noise_key, record.noise_row, record.noise_column = update.noise
    _call("coupled_adam_apply", record)
    # As torch's operations tell autograd.
    changed = (update.param, update.exp_avg, update.exp_avg_sq)
    torch.autograd.graph.increment_version(changed)


def _call(function: str, record: _Record) -> None:
    if getattr(library(), function)(record):
        raise MemoryError(f"no memory for vectors of {record.columns} numbers")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where there is none for this machine."""
    path = Path(__file__).with_name("libcoupled_adam.so")
    try:
        found = ctypes.CDLL(str(path))
        if found.coupled_adam_update_size() != ctypes.sizeof(_Record):
            return None  # built from another version's native.c
    except (OSError, AttributeError):  # not built; of another machine; of another version
        return None
    for function in (found.coupled_adam_measure, found.coupled_adam_apply):
        function.argtypes = (ctypes.POINTER(_Record),)
    return found
