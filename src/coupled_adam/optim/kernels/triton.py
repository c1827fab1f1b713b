"""The update on a GPU, in Triton.

Coupled Adam takes three kernels: ``_sums`` adds up the squared gradient, in parts of the rows;
``_finish`` does all arithmetic with vectors [H], which is
:func:`coupled_adam.optim.reference.step_size` once more; ``_update`` changes the first moment and
the parameter. LEAN takes two: ``_lean`` passes over whole rows once, and ``_finish_lean`` adds up
what its programs have summed. All sums have a fixed order, so that results are the same bits at
every call, and nothing waits for the device, so that a step can be captured in a CUDA graph.
"""

# Triton has no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import core  # by its own name, as the interpreter looks for it

from coupled_adam.optim.lean import LARGEST_STEP, LOG_LIMIT
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums

SKIPS_ON_DEVICE = True

_SUMS_BLOCK = (16, 128)  # tokens and features that a program takes at a time; swapped for [H, V]
_FINISH_BLOCK = (128, 16)  # of the sums of all programs
_FINISH_LEAN_BLOCK = (128, 32)
_UPDATE_BLOCK = (8, 256)
_LEAN_ELEMENTS = 2048  # of whole rows
_PROGRAMS = 4  # of the kernels that add up, for each unit of the GPU: it runs them all at once
# Multiplications and additions are rounded one by one: from the same step size every GPU computes
# the same bits, and they are a CPU's.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def check(matrix: CoupledMatrix) -> None:
    """Raise what Triton raises where it cannot compile for this matrix's device and dtype."""
    # Aligned as most matrices are: what is compiled here is then used for them.
    param, grad, exp_avg = matrix.param.new_zeros(3, 16, 16)
    nu, r, d = torch.zeros(3, 16, device=matrix.param.device)
    of_lean = replace(
        matrix,
        param=param,
        grad=grad,
        exp_avg=None,
        exp_avg_sq=nu,
        max_exp_avg_sq=None,
        row_exp_avg_sq=r,
        mean_update=d,
        row_ranks=(),
        column_ranks=(),
    )
    coupled = replace(of_lean, exp_avg=exp_avg, row_exp_avg_sq=None, mean_update=None)
    apply_coupled(coupled, sum_squares(coupled, False), Scalars())
    lean(of_lean, None, Scalars())


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """The sums over the rows, [parts, columns] where no rank has others.

    The first moment is left to ``apply_coupled``, as to update it here would move as many bytes.
    """
    grad, (across, parts, block) = matrix.grad, _grid(matrix.grad)
    rows, columns = grad.shape
    sums = _empty(grad, parts, columns)
    if columns:
        _launch(_sums, (across, parts), block, grad, *grad.stride(), sums, rows, columns)
    return Sums(sums.sum(0) if matrix.row_ranks else sums)


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update the matrix by Coupled Adam, given the sums over all ranks."""
    param, grad, exp_avg = matrix.param, matrix.grad, matrix.exp_avg
    rows, columns = param.shape
    rates = torch.empty_like(matrix.exp_avg_sq)
    block = _block(param, _UPDATE_BLOCK)
    # fmt: off
    if columns:
        _launch(
            _finish, (_cdiv(columns, _FINISH_BLOCK[1]),), _FINISH_BLOCK,
            sums.columns, sums.columns.numel() // columns,
            matrix.exp_avg_sq, matrix.max_exp_avg_sq, rates, columns,
            share=1 - matrix.beta2, vocab_size=float(matrix.vocab_size),
            factor=_on(param.device, scalars.factor), skip=scalars.skip,
            **_of_step_size(matrix, scalars),
        )
    if columns and rows:
        _launch(
            _update, (_cdiv(rows, block[0]) * _cdiv(columns, block[1]),), block,
            param, *param.stride(), grad, *grad.stride(), exp_avg, *_strides(exp_avg),
            rates, rows, columns,
            **_of_parameter(matrix, scalars),
        )
    # fmt: on
    torch.autograd.graph.increment_version(matrix.changed)  # as torch's operations tell autograd


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor | None:
    """Update the matrix by LEAN; return its sums if others are added to them."""
    param, grad, exp_avg = matrix.param, matrix.grad, matrix.exp_avg
    nu, mean, share = matrix.exp_avg_sq, matrix.mean_update, 1 - matrix.beta2
    of_step_size = _of_step_size(matrix, scalars)
    rows, columns = grad.shape
    parts, block, options = _lean_shape(matrix, is_rounded=scalars.noise is not None)
    sums = _empty(grad, parts, 2 * columns + 1)
    # fmt: off
    _launch(
        _lean, (parts,), block,
        param, *param.stride(), grad, *grad.stride(), exp_avg, *_strides(exp_avg),
        nu, mean, None if weights is not None else matrix.row_exp_avg_sq, weights, sums,
        matrix.touched, matrix.row_step if matrix.touched is not None else None, param.shape[0],
        rows, columns,
        share=share, exponent=matrix.group["row_exponent"] / 2,
        log_limit=LOG_LIMIT / math.log(2), log_largest_step=math.log2(LARGEST_STEP),
        **of_step_size, **_of_parameter(matrix, scalars), **options,
    )
    are_complete = not matrix.row_ranks and weights is None and matrix.touched is None
    if are_complete and columns:
        _launch(
            _finish_lean, (_cdiv(columns, _FINISH_LEAN_BLOCK[1]),), _FINISH_LEAN_BLOCK,
            sums, parts, nu, mean, columns, share, of_step_size["lr"], of_step_size["t"],
            num_warps=8,
        )
    # fmt: on
    torch.autograd.graph.increment_version(matrix.changed)
    return None if are_complete else sums.sum(0)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, int],
    x: Tensor,
    *args: Any,
    **options: Any,
) -> None:
    """Launch a kernel on the device of its first argument; Triton takes the current one."""
    with torch.xpu.device_of(x) if x.is_xpu else torch.cuda.device_of(x):
        rows, columns = block
        kernel[grid](x, *args, ROWS=rows, COLUMNS=columns, **{**_OPTIONS, **options})


def _of_step_size(matrix: CoupledMatrix, scalars: Scalars) -> dict[str, Any]:
    """The arguments that make a step size of a second moment."""
    device, beta1, beta2 = matrix.param.device, matrix.beta1, matrix.beta2
    assert not isinstance(beta1, Tensor)
    assert not isinstance(beta2, Tensor)
    t = _on(device, scalars.t)
    return {
        "t": t if isinstance(t, Tensor) else int(t),
        "lr": _on(device, matrix.lr),
        # beta^t is computed from the logarithm, which single precision spoils least.
        "log_beta1": math.log(beta1) if beta1 else -math.inf,
        "log_beta2": math.log(beta2) if beta2 else -math.inf,
        "scale": matrix.group["second_moment_scale"],
        "eps": matrix.group["eps"],
    }


def _of_parameter(matrix: CoupledMatrix, scalars: Scalars) -> dict[str, Any]:
    """The arguments that change a parameter."""
    device, noise = matrix.param.device, scalars.noise
    t = _on(device, scalars.t)
    return {
        "weight": 1 - matrix.beta1,
        "decay": _on(device, scalars.decay),
        "factor": _on(device, scalars.factor),
        "skip": scalars.skip,
        "noise_t": None if noise is None else t if isinstance(t, Tensor) else int(t),
        "first_row": 0 if noise is None else noise.row,
        "first_column": 0 if noise is None else noise.column,
        "salt": 0 if noise is None else _signed(noise.salt),
    }


def _lean_shape(
    matrix: CoupledMatrix, is_rounded: bool
) -> tuple[int, tuple[int, int], dict[str, int]]:
    """The number of programs that take whole rows, their block, and their warps and stages.

    With 32 elements a thread and three stages it is at most 13 % slower than ``e - c g`` on an
    H200. ``benchmarks/gpu_compile.py`` prints what this means for each GPU.
    """
    param, matrices, mean = matrix.param, matrix.matrices, matrix.mean_update
    (rows, columns), (units, shared_memory) = matrix.grad.shape, _device(param.device)
    wide = max(16, 1 << (columns - 1).bit_length())  # a power of two
    tall = max(1, _LEAN_ELEMENTS // wide)
    most = _PROGRAMS * units * _LEAN_ELEMENTS // (tall * wide)
    parts = max(1, min(most, _cdiv(rows, tall)))
    is_aligned = all(x.stride(1) == 1 and x.stride(0) % 16 == 0 for x in matrices)
    lanes = 64 if torch.version.hip else 32
    if torch.version.hip:
        threads, elements, stages = 1024, 16 // param.itemsize, 2
    elif is_aligned:
        # So few threads can have 255 registers each. Moments take some, too, and so do random
        # numbers of several rows; a thread that has more elements nevertheless reads less ahead.
        crowded = (matrix.exp_avg is not None) + (is_rounded and tall > 1)
        threads, elements = 256, 32 >> crowded
        stages = 3 if tall * wide <= threads * elements else 2
    else:
        threads, elements, stages = 512, 8, 1
    # Elements that are not read 16 bytes at a time have addresses of their own, in registers: none
    # are read ahead. Otherwise the blocks that are must fit into the shared memory.
    ahead = tall * wide * sum(x.itemsize for x in matrices) + (0 if mean is None else 4 * wide)
    stages = min(stages, 1 + (shared_memory - 1024) // ahead) if is_aligned else 1
    warps = max(1, min(threads, tall * wide // elements) // lanes)
    return parts, (tall, wide), {"num_warps": warps, "STAGES": stages}


def _grid(matrix: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The numbers of programs that sum over columns and over rows, and the block of each."""
    rows, columns = matrix.shape
    tall, wide = _block(matrix, _SUMS_BLOCK)
    across = _cdiv(columns, wide)
    most = _PROGRAMS * _device(matrix.device)[0] // max(1, across)
    return across, max(1, min(most, _cdiv(rows, tall))), (tall, wide)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """How many multiprocessors a GPU has, and the bytes of shared memory for a program."""
    if device.type != "cuda":
        return 128, 64 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(matrix: Tensor | None) -> tuple[int, int]:
    return (0, 0) if matrix is None else matrix.stride()  # type: ignore[return-value]


def _on(device: torch.device, value: float | Tensor) -> float | Tensor:
    return value.to(device) if isinstance(value, Tensor) else value


def _cdiv(x: int, y: int) -> int:
    """``triton.cdiv``, whose call takes the host far longer than the division."""
    return -(-x // y)


def _signed(number: int) -> int:
    """The same 32 bits as a signed number, so that one binary serves all."""
    return number - 2**32 if number >= 2**31 else number


def _block(matrix: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a program's block, longest where elements are neighbours in memory."""
    return block if matrix.stride(1) == 1 else (block[1], block[0])


@triton.jit
def _sums(
    grad, row_stride, column_stride,
    sums, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    # Each program takes every parts-th block of rows: programs that run together read what lies
    # side by side.
    for first in tl.range(part * ROWS, rows, parts * ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        place = _place(row, row_stride, column, column_stride)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        total += g * g
    tl.store(sums + part * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["parts", "t"])
def _finish(
    sums, parts, exp_avg_sq, max_exp_avg_sq, rates, columns,
    share, vocab_size, factor, skip,
    t, lr, log_beta1, log_beta2, scale, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Coupled Adam's nu, and each column's rate."""
    if skip is not None:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if tl.load(skip) != 0:
            return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & inside[None, :]
        total += tl.load(sums + part[:, None] * columns + column[None, :], mask=mask, other=0.0)
    factor = _number(factor).to(tl.float32)
    # Clipped to nothing, even a square that overflowed is nothing.
    square = tl.where(factor == 0, 0.0, tl.sum(total, axis=0) * factor * factor)
    old = tl.load(exp_avg_sq + column, mask=inside, other=0.0)
    nu = _average(old, tl.div_rn(square, vocab_size), share)
    tl.store(exp_avg_sq + column, nu, mask=inside)
    if max_exp_avg_sq is not None:
        maximum = tl.load(max_exp_avg_sq + column, mask=inside, other=0.0)
        nu = tl.maximum(maximum, nu, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq + column, nu, mask=inside)
    rate = tl.div_rn(_number(lr).to(tl.float32), _correction(t, log_beta1))
    rate = tl.div_rn(rate, _denominator(nu, t, log_beta2, scale, eps))
    tl.store(rates + column, rate, mask=inside)


@triton.jit(do_not_specialize=["noise_t", "first_row", "first_column", "salt"])
def _update(
    param, param_row_stride, param_column_stride,
    grad, grad_row_stride, grad_column_stride,
    exp_avg, exp_avg_row_stride, exp_avg_column_stride,
    rates, rows, columns,
    weight, decay, factor, skip, noise_t, first_row, first_column, salt,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Coupled Adam's m and e."""
    if skip is not None:  # noqa: SIM102
        if tl.load(skip) != 0:
            return
    # The last rows first: of the gradient, they are what the sums have left in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    row = block // across * ROWS + tl.arange(0, ROWS)
    column = block % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    rate = tl.load(rates + column, mask=inside, other=0.0)[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    param += _place(row, param_row_stride, column, param_column_stride)
    p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
    grad += _place(row, grad_row_stride, column, grad_column_stride)
    m = _number(factor).to(tl.float32) * tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    if exp_avg is not None:
        place = _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
        m = _moment(tl.load(exp_avg + place, mask=mask, other=0.0), m, weight)
        tl.store(exp_avg + place, m, mask=mask)
        m = m.to(tl.float32)
    p = _number(decay).to(tl.float32) * p - rate * m
    if noise_t is not None:
        p = _rounded(p, row + first_row, column + first_column, noise_t, salt)
    tl.store(param, p.to(param.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t", "noise_t", "first_row", "first_column", "salt"])
def _lean(
    param, param_row_stride, param_column_stride,
    grad, grad_row_stride, grad_column_stride,
    exp_avg, exp_avg_row_stride, exp_avg_column_stride,
    nu, mean, r, weights, sums,  # r is None if the weights are given
    touched, row_step, table_rows,  # of a sparse gradient; otherwise the first two are None
    rows, columns,
    share, exponent, log_limit, log_largest_step, t, lr, log_beta1, log_beta2, scale, eps,
    weight, decay, factor, skip, noise_t, first_row, first_column, salt,
    STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """LEAN's pass over whole rows; of each program's rows the sums, [parts, 2 columns + 1]."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    sums += part * (2 * columns + 1)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    if skip is not None:  # noqa: SIM102
        if tl.load(skip) != 0:  # other ranks may add these sums to theirs
            tl.store(sums + column, 0.0, mask=inside)
            tl.store(sums + columns + column, 0.0, mask=inside)
            tl.store(sums + 2 * columns, 0.0)
            return

    second = tl.load(nu + column, mask=inside, other=0.0)
    t = _number(t)
    # Columns of which nothing is known, or whose squares have overflowed, do not move.
    is_known = (second != 0) & (second != float("inf"))
    second = tl.where(is_known, second, 1.0)
    scales = tl.div_rn(1.0, _denominator(second, t - 1, log_beta2, scale, eps))
    scales = tl.where(is_known, scales, 0.0)
    # rho, of the others, with the bias of r, which has seen one gradient more
    known = tl.maximum(tl.sum(is_known.to(tl.float32), axis=0), 1.0)
    logs = tl.log2(second)
    center = tl.sum(logs, axis=0) / known
    distance = tl.where(is_known, logs - center, 0.0)
    distance = tl.minimum(tl.maximum(distance, -log_limit), log_limit)
    bias = tl.div_rn(_correction(t, log_beta2), _correction(t - 1, log_beta2))
    log_rho = center + tl.sum(distance, axis=0) / known + tl.log2(bias)
    log_largest_step -= 0.5 * tl.log2(scale / known)

    factor, decay = _number(factor).to(tl.float32), _number(decay).to(tl.float32)
    rate = _number(lr).to(tl.float32)
    if exp_avg is not None:
        moment_correction = _correction(t, log_beta1)
        rate = tl.div_rn(rate, moment_correction)
        log_largest_step += tl.log2(moment_correction)
    update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    for first in tl.range(part * ROWS, rows, parts * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        is_row = row < rows
        at = row  # in the table
        if touched is not None:
            at = tl.load(touched + row, mask=is_row, other=0)
            is_row = is_row & (at >= 0) & (at < table_rows)  # as nobody else has checked on a GPU
        mask = is_row[:, None] & inside[None, :]
        place = _place(row, grad_row_stride, column, grad_column_stride)
        g = factor * tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if exp_avg is not None:
            place = _place(row, exp_avg_row_stride, column, exp_avg_column_stride)
            before = tl.load(exp_avg + place, mask=mask, other=0.0)

        # Each row's weight: 0 if it never had a gradient, or if its squares overflow.
        if r is not None:
            old = tl.load(r + at, mask=is_row, other=0.0)
            if row_step is not None:  # r has not decayed since the row's last gradient
                is_finite = old != float("inf")
                count -= tl.where((old != 0) & is_finite, 1.0, 0.0)
                steps = t.to(tl.int32) - 1 - tl.load(row_step + at, mask=is_row, other=0)
                decay_of_r = tl.exp(tl.maximum(steps, 0).to(tl.float32) * log_beta2)
                old = tl.where((steps > 0) & is_finite, old * decay_of_r, old)
                tl.store(row_step + at, t.to(tl.int32), mask=is_row)
            new = _average(old, tl.sum(g * g, axis=1) / columns, share)
            tl.store(r + at, new, mask=is_row)
            stops = (new == 0) | (new == float("inf"))
            # In logarithms, which take fewer operations than a root and a division.
            relative = tl.log2(tl.where(stops, 1.0, new)) - log_rho
            power = tl.where(exponent == 0, 0.0, -exponent * relative)  # also of no number
            moment = g
            if exp_avg is not None:
                moment = _moment(before, g, weight).to(tl.float32)
            limit = log_largest_step - 0.5 * tl.log2(_squares(moment, scales))
            power = tl.where(limit < power, limit, power)
            w = tl.where(stops, 0.0, tl.exp2(power))
        else:
            w = tl.load(weights + row, mask=is_row, other=0.0)
        active = (w != 0)[:, None]

        g = tl.where(active, g, 0.0)
        m = g
        if exp_avg is not None:
            m = _moment(before, g, weight)
            tl.store(exp_avg + place, m, mask=mask)
            m = m.to(tl.float32)
        step = tl.where(active, (rate * w)[:, None] * m, 0.0)
        update += step
        square += g * g
        # Of a table with sparse gradients also rows count that are left out of this step alone.
        counts = w != 0 if row_step is None else (new != 0) & (new != float("inf"))
        count += tl.where(counts, 1.0, 0.0)

        change = scales[None, :] * step
        if mean is not None:
            d = tl.load(mean + column, mask=column < _moving(columns, lr), other=0.0)
            change -= active.to(tl.float32) * d[None, :]
        place = _place(at, param_row_stride, column, param_column_stride)
        p = decay * tl.load(param + place, mask=mask, other=0.0).to(tl.float32) - change
        if noise_t is not None:
            # This adds 0, which the compiler does not know: otherwise a thread would keep the
            # numbers of all its columns in registers from one row to the next.
            number = column + (first_column + (first >> 31))
            p = _rounded(p, at.to(tl.int32) + first_row, number, noise_t, salt)
        tl.store(param + place, p.to(param.dtype.element_ty), mask=mask)
    tl.store(sums + column, tl.sum(scales[None, :] * update, axis=0), mask=inside)
    tl.store(sums + columns + column, tl.sum(square, axis=0), mask=inside)
    tl.store(sums + 2 * columns, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["parts", "t"])
def _finish_lean(
    sums, parts, nu, mean, columns, share, lr, t,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``reference.finish``, from the sums of all programs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    # The three are read in one loop: what takes time is to wait for memory.
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & inside[None, :]
        place = sums + part[:, None] * (2 * columns + 1) + column[None, :]
        if mean is not None:
            update += tl.load(place, mask=mask, other=0.0)
        square += tl.load(place + columns, mask=mask, other=0.0)
        of_part = sums + part * (2 * columns + 1) + 2 * columns
        count += tl.load(of_part, mask=part < parts, other=0.0)
    k = tl.sum(count, axis=0)
    if k != 0:  # otherwise the step was skipped, or no token has had a gradient
        old = tl.load(nu + column, mask=inside, other=0.0)
        new = _average(old, tl.div_rn(tl.sum(square, axis=0), k), share)
        tl.store(nu + column, new, mask=inside)
        if mean is not None:
            # At a rate of 0 d is kept for a later step, and before step 1 / (1 - beta2) it is 0.
            begun = _number(t).to(tl.float32) * share >= 1.0
            new = tl.where(begun, tl.div_rn(tl.sum(update, axis=0), k), 0.0)
            tl.store(mean + column, new, mask=column < _moving(columns, lr))


@triton.jit
def _average(old, new, share):
    """Move an average on by ``share`` of what is new; once it has overflowed, it stays.

    1 - beta2 comes from the host as it is: in float32, 1 - float32(beta2) would be another number.
    """
    has_overflowed = (old == float("inf")) | (new == float("inf"))
    return tl.where(has_overflowed, float("inf"), _mean(old, new, share))


@triton.jit
def _mean(old, new, share):
    """old + share (new - old); as torch.lerp, exact at both ends."""
    is_small = share < 0.5
    start = tl.where(is_small, old, new)
    return start + tl.where(is_small, share, share - 1) * (new - old)


@triton.jit
def _denominator(nu, seen, log_beta2, scale, eps):
    """sqrt(scale nu / (1 - beta2^seen)) + eps; nu has seen so many gradients."""
    return tl.sqrt_rn(tl.div_rn(scale * nu, _correction(seen, log_beta2))) + eps


@triton.jit
def _correction(t, log_beta):
    """1 - beta^t, but 1 at t = 0; in float64, as it loses five digits in float32."""
    t = _number(t).to(tl.float64)
    return tl.where(t == 0, 1.0, 1 - tl.exp(t * log_beta)).to(tl.float32)


@triton.jit
def _rounded(p, row, column, t, salt):
    """Round stochastically to bfloat16, as :mod:`coupled_adam.optim.rounding` does."""
    key = _mix(_number(t).to(tl.uint32) ^ salt.to(tl.uint32))
    random = _mix(_mix(_mix(row.to(tl.uint32)) ^ key)[:, None] ^ column.to(tl.uint32)[None, :])
    bits = tl.where(p == p, p.to(tl.uint32, bitcast=True) + (random >> 16), 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _moment(m, g, weight):
    """A block of the first moment one step on, as it is stored.

    This, also in half precision, is what moves the parameter. A large weight loses nothing of a
    small gradient after a large one.
    """
    return _mean(m.to(tl.float32), g, weight).to(m.dtype)


@triton.jit
def _squares(block, scales):
    """The sums of squares of a block's rows, in the columns' units."""
    block *= scales[None, :]
    return tl.sum(block * block, axis=1)


@triton.jit
def _place(row, row_stride, column, column_stride):
    """Where elements are; a matrix may have more of them than int32 counts."""
    return (row.to(tl.int64) * row_stride)[:, None] + (column.to(tl.int64) * column_stride)[None, :]


@triton.jit
def _number(value):
    """A number that is passed, or read where it lies on the device."""
    value = core.to_tensor(value)
    return tl.load(value) if value.dtype.is_ptr() else value


@triton.jit
def _moving(columns, lr):
    """How many columns move: none at a rate of 0.

    A mask by this number, other than one by the rate itself, lets a thread read 16 bytes at a time.
    """
    return tl.where(_number(lr).to(tl.float32) != 0.0, columns, 0)


@triton.jit
def _mix(x):
    """``rounding.mix``."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
