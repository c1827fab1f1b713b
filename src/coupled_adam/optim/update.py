"""The order of the passes over all coupled matrices in one step.

:func:`measure` sums the squared gradients, and :func:`update` does the rest, once the factor that
clips or unscales them is known. Both walk through the matrices with the passes of their kernels,
and add the sums of all ranks between two passes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from coupled_adam.optim import sharded
from coupled_adam.optim.kernels import choose
from coupled_adam.optim.matrix import Matrix, Scalars, Sums, number
from coupled_adam.optim.rounding import noise_of


def measure(matrices: Sequence[Matrix], as_is: bool) -> list[Sums]:
    """Sum the squared gradients, over all ranks; see :meth:`Kernel.measure`."""
    results = [
        matrix.kernel.measure(matrix, as_is and not matrix.absent and not matrix.group["maximize"])
        for matrix in matrices
    ]
    vectors = []
    for matrix, sums in zip(matrices, results):
        if matrix.row_ranks or matrix.column_ranks:
            vectors += [(sums, "squares", matrix.row_ranks), (sums, "present", matrix.row_ranks)]
            vectors.append((sums, "row_squares", matrix.column_ranks))
    sharded.all_reduce(vectors)
    return results


def update(
    matrices: Sequence[Matrix],
    results: Sequence[Sums],
    factor: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update the states and parameters of matrices that have been measured.

    Args:
        matrices: the matrices. With Adam's L2 penalty their gradients contain it.
        results: what :func:`measure` has returned.
        factor: the gradients are multiplied with it; None for 1.
        found_inf: GradScaler's flag; nothing is changed unless it is 0.
    """
    stepping: list[tuple[Matrix, Sums, Scalars]] = []
    for matrix, sums in zip(matrices, results):
        if (scalars := advance(matrix, sums, factor, found_inf)) is not None:
            stepping.append((matrix, sums, scalars))
    vectors = []
    for matrix, sums, scalars in stepping:
        if matrix.exp_avg_sq_row is None:
            continue
        # What `measure` has computed holds for the gradient as it was.
        if isinstance(scalars.factor, Tensor) or scalars.factor != 1:
            sums.weights = sums.updates = None
        matrix.kernel.weigh_rows(matrix, sums, scalars)
        if matrix.group["zero_sum"] and sums.updates is None:
            matrix.kernel.center(matrix, sums, scalars)
        vectors.append((sums, "updates", matrix.row_ranks))
        if matrix.shard is None:  # of a flattened matrix each rank has all of r
            vectors.append((sums, "rows", matrix.row_ranks))
    sharded.all_reduce(vectors)
    for matrix, sums, scalars in reversed(stepping):  # the last gradient may still be in the cache
        matrix.kernel.apply(matrix, sums, scalars)


def with_penalty(matrix: Matrix, factor: Tensor | None) -> Matrix:
    """The matrix with ``factor * grad + weight_decay * param`` in place of the gradient."""
    grad = matrix.grad
    if factor is not None:  # in the moments' dtype: what is clipped may be too small for half
        grad = grad.to(matrix.exp_avg_sq.dtype) * factor.to(grad.device)
    if matrix.group["maximize"]:
        grad = -grad
    grad = grad.add(matrix.param, alpha=matrix.group["weight_decay"])
    penalized = dataclasses.replace(matrix, grad=grad)
    if matrix.shard is None:  # otherwise its segments' kernels are chosen when they are made
        penalized.kernel = choose(penalized)  # the matrix's own may not serve another dtype
    return penalized


def advance(
    matrix: Matrix, sums: Sums, factor: Tensor | None, found_inf: Tensor | None
) -> Scalars | None:
    """Count the step; None if the host skips it, or if no rank has a gradient."""
    if matrix.absent and sums.present is not None and not sums.present.item():
        return None
    skip = None
    if found_inf is not None and matrix.kernel.skips:
        skip = found_inf.to(matrix.param.device)  # the host need not wait for its value
    elif found_inf is not None and found_inf.item():
        return None
    t = _count(matrix, skip)
    scale: float | Tensor = 1.0
    if not matrix.has_penalty:
        if factor is not None:
            scale = number(factor.to(matrix.param.device), matrix.traced)
        if matrix.group["maximize"]:
            scale = -scale
    noise = noise_of(matrix.group, matrix.parameter, t, matrix.position)
    return Scalars(t, scale, skip, noise)


def _count(matrix: Matrix, skip: Tensor | None) -> float | Tensor:
    """Increment the step, unless it is skipped, and return it."""
    step = matrix.step
    if step.is_cpu and not matrix.traced and skip is None:
        t: float = step.item() + 1
        step.fill_(t)
        return t
    step += 1 if skip is None else (skip == 0).to(step.device)
    if matrix.kernel.skips:
        return step
    # In float64, except on MPS, which lacks it: in float32 1 - beta^t would lose five digits.
    wide = step.dtype if step.device.type == "mps" else torch.float64
    return step.to(wide, copy=True)
