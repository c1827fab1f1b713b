"""LEAN of a table with sparse gradients: a step reads and writes the rows that have one, no others.

Without momentum, zero-sum updates and weight decay LEAN moves only rows that have a gradient. So a
step on these rows alone is exact, for a table of any size, if the r of the others decays later, all
at once, when they have a gradient again. With t_i the step of row i's last gradient::

    r_i <- beta2^(t - t_i) r_i + (1 - beta2) (1/H) sum_j g_ij^2     (rows with a gradient)
    t_i <- t
    nu  <- beta2 nu + (1 - beta2) (1/k) sum_i g_i^2

and w_i, u_i as in :mod:`coupled_adam.optim.reference`; k counts the rows with r_i > 0, also those
whose r would have underflowed by now. As Adam's bias correction does, the decay takes today's beta2
for all steps, also for those that a schedule took with another.
The state of a table [V, H] is ``row_exp_avg_sq`` [V], ``row_step`` [V] in int32, ``exp_avg_sq``
[H], ``row_count`` and ``step``: 8 bytes a row in single precision. A row begins anew where its r_i
is set to 0, as for a new id; the next step then counts all rows once.

This module is the :class:`~coupled_adam.optim.matrix.Kernel` of such a table. Each kernel that can
address rows by number takes them where they lie; the reference takes a copy of them and puts it
back. A dense gradient of the same table means the same, and takes a pass over all rows.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import blocks, choose, native
from coupled_adam.optim.matrix import CoupledMatrix, Scalars

SKIPS_ON_DEVICE = False
# The version of each r in which its rows have been counted, so that nobody counts them in each step
_counted = WeakTensorKeyDictionary()


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor | None:
    """Update a table, its r, t_i, k and nu; the sums of a dense gradient, if others have rows."""
    assert weights is None
    assert matrix.row_count is not None
    r = matrix.row_exp_avg_sq
    assert r is not None
    if matrix.touched is None:
        _dense(matrix, r, scalars)
    else:
        if _counted.get(r) != r._version:  # it is new, or somebody has written it
            matrix.row_count.copy_(count_of(r))
        kernel = choose(matrix)
        takes_rows = kernel not in (blocks, reference)
        total = kernel.lean(matrix, None, scalars) if takes_rows else _copied(matrix, r, scalars)
        if total is not None:  # otherwise the kernel has counted the rows and finished the step
            matrix.row_count.add_(total[-1].to(matrix.row_count))
            total = torch.cat([total[:-1], matrix.row_count[None].to(total)])
            reference.finish(matrix, total, scalars.t)
    _counted[r] = r._version
    return None


def touched(matrix: CoupledMatrix) -> CoupledMatrix:
    """The table with the rows of its sparse gradient, [n, H], each once, and their numbers [n].

    Raises:
        RuntimeError: on a CPU, if a number is no row of the table. On a GPU, where the host would
            have to wait for the answer, such a row of the gradient is left out.
    """
    grad = coalesced(matrix.grad)
    (rows,), values = grad.indices(), grad.values()
    # As wide as the table, for the kernel in C; what is wider is not rounded.
    values = values.to(torch.promote_types(values.dtype, matrix.param.dtype))
    return replace(matrix, grad=values.contiguous(), touched=rows.contiguous())


def coalesced(gradient: Tensor) -> Tensor:
    """A sparse gradient [V, H] with each row once: equal ones are added up, in a fixed order.

    Raises:
        RuntimeError: on a CPU, if a number is no row of the table.
    """
    (rows,), values = gradient._indices(), gradient._values()
    check_rows(rows, len(gradient))
    if gradient.is_coalesced():
        return gradient
    added = native.add_duplicates(rows, values) if rows.is_cpu else None
    if added is None:
        return gradient.coalesce()
    rows, values = added
    return torch.sparse_coo_tensor(
        rows[None], values, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _norm(
    x: Tensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of a sparse tensor, as that of the dense one: equal rows are added up before."""
    if dim is not None or order < 0 or x.sparse_dim() != 1 or x.dense_dim() != 1:
        values = x.to_dense()
    else:
        # torch does not know that the largest of no numbers is 0 here.
        values = coalesced(x).values() if x._nnz() else x._values().new_zeros(1)
    norm: Tensor = torch.linalg.vector_norm(values, order, dim, keepdim, dtype=dtype)
    return norm


# All that clips gradients by their norm asks torch for it; before 2.14 it has none of sparse ones.
_TORCH = torch.library.Library("aten", "IMPL")
for _key in ("SparseCPU", "SparseCUDA"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", _key):
        _TORCH.impl("linalg_vector_norm", _norm, _key)


def _copied(table: CoupledMatrix, all_r: Tensor, scalars: Scalars) -> Tensor:
    """The reference's pass over a copy of the touched rows."""
    assert table.touched is not None
    assert table.row_step is not None
    rows, t = table.touched, scalars.t
    # 1. The rows, with r as it would be after the step before
    before = all_r[rows]
    r = decayed(before, table.row_step[rows], t, table.beta2)
    part = replace(table, param=table.param[rows], row_exp_avg_sq=r, touched=None, row_step=None)
    # Each row has its own noise, wherever it lies.
    scalars = scalars.at(rows - torch.arange(len(rows), device=rows.device))
    # 2. The pass, and what it has changed
    total = reference.lean(part, None, scalars)
    table.param.index_copy_(0, rows, part.param)
    all_r.index_copy_(0, rows, r)
    now = t.to(torch.int32) if isinstance(t, Tensor) else int(t)
    table.row_step.index_fill_(0, rows, now)
    # 3. The rows that began to move, less those that stopped for more than this step
    total[-1] = count_of(r) - count_of(before)
    return total


def _dense(matrix: CoupledMatrix, r: Tensor, scalars: Scalars) -> None:
    """A step with a gradient of all rows, by the kernel that the matrix would have otherwise."""
    assert matrix.row_step is not None
    assert matrix.row_count is not None
    r.copy_(decayed(r, matrix.row_step, scalars.t, matrix.beta2))
    plain = replace(matrix, row_step=None, row_count=None)
    total = choose(plain).lean(plain, None, scalars)
    matrix.row_step.fill_(scalars.t)
    matrix.row_count.copy_(count_of(r))
    if total is not None:
        reference.finish(plain, total, scalars.t)


def forget(r: Tensor, row_count: Tensor, rows: Tensor) -> None:
    """Let rows, each given once, be as those that never had a gradient."""
    is_counted = _counted.get(r) == r._version
    row_count.sub_(count_of(r[rows]))
    r.index_fill_(0, rows, 0)
    if is_counted:
        _counted[r] = r._version


def check_rows(rows: Tensor, vocab_size: int) -> None:
    """Raise RuntimeError if a number on the CPU is no row of the table."""
    if not rows.is_cpu or not len(rows):
        return
    least, most = (int(x) for x in rows.aminmax())
    if least < 0 or most >= vocab_size:
        raise RuntimeError(
            f"a sparse gradient has rows from {least} to {most}, but its table has {vocab_size}"
        )


def decayed(r: Tensor, row_step: Tensor, t: float | Tensor, beta2: float | Tensor) -> Tensor:
    """r [rows] after the step before t, given the step of each row's last gradient, [rows]."""
    steps = (t - 1 - row_step).to(reference.wide(r)).clamp(min=0)
    # What has overflowed stays, also where the power has underflowed.
    return torch.where(r.isinf(), r, (r.to(steps) * beta2**steps).to(r.dtype))


def count_of(r: Tensor) -> Tensor:
    """The number of rows that move, 0-dim: those that have had a gradient without overflow."""
    return ((r != 0) & (r != torch.inf)).sum()
