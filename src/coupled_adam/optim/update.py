"""One step of all coupled matrices: the order of the passes, and the sums over ranks between them.

:func:`update_coupled` is the paper's algorithm, in two passes over memory: sums, which all ranks
add up, then the update. :func:`update_lean` is one pass, whose sums the next step needs; see
:mod:`coupled_adam.optim.reference`. A state is whole after each step.

Ranks may have different sets of gradients: all first say for which matrices they have one, and a
rank without takes part with zeros if any other has one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coupled_adam.optim import flat, reference, row_sparse
from coupled_adam.optim.kernels import blocks, choose
from coupled_adam.optim.matrix import CoupledMatrix, Kernel, Scalars, as_python_number
from coupled_adam.optim.rounding import noise_of
from coupled_adam.optim.sharded import Ranks, add_up


def update(
    matrices: Sequence[CoupledMatrix], factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """Update the states and parameters of coupled matrices.

    Args:
        matrices: the matrices.
        factor: the gradients are multiplied with it, 0-dim or [1]; None for 1.
        found_inf: GradScaler's flag, likewise; nothing is changed unless it is 0.
    """
    coupled: list[CoupledMatrix] = []
    lean: list[CoupledMatrix] = []
    _agree_on_gradients(matrices)
    for matrix in matrices:
        if not matrix.has_gradient:
            continue
        # The L2 penalty of Adam is part of the gradient, and comes after unscaling.
        penalized = with_penalty(matrix, factor) if matrix.has_penalty else matrix
        (lean if matrix.is_lean else coupled).append(penalized)
    if coupled:
        update_coupled(coupled, factor, found_inf)
    if lean:
        update_lean(lean, factor, found_inf)


def _agree_on_gradients(matrices: Sequence[CoupledMatrix]) -> None:
    """Set ``has_gradient`` where any rank has one: the others then take part with zeros."""
    shared = [m for m in matrices if m.row_ranks or m.column_ranks]
    if not shared:
        return
    flags = [(m.exp_avg_sq.new_full((1,), float(m.has_gradient)), m.ranks) for m in shared]
    for matrix, number in zip(shared, add_up(flags)):
        # The host only waits for the number where this rank has no gradient.
        matrix.has_gradient = matrix.has_gradient or bool(number != 0)


def update_coupled(
    matrices: Sequence[CoupledMatrix], factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """Algorithm 1 of arXiv 2502.08441: sum the squared gradients over all rows, then update."""
    # 1. Sum the squares of this rank's rows, [columns] for each matrix
    sums, vectors = [], []
    for matrix in matrices:
        # The kernel may update exp_avg in this pass if nothing can follow that changes the gradient
        # (a penalty came after unscaling) or that skips the step.
        is_scaled = not matrix.has_penalty and (factor is not None or matrix.group["maximize"])
        sums.append(matrix.kernel.sum_squares(matrix, found_inf is None and not is_scaled))
        vectors.append((sums[-1].columns, matrix.row_ranks))
    # 2. Add up those of all ranks
    for own, total in zip(sums, add_up(vectors)):
        own.columns = total
    # 3. Update, the last matrix first: its gradient may still be in the cache
    for matrix, own in reversed([*zip(matrices, sums)]):
        if (scalars := _advance(matrix, factor, found_inf)) is not None:
            matrix.kernel.apply_coupled(matrix, own, scalars)


def update_lean(
    matrices: Sequence[CoupledMatrix], factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """LEAN: update with the sums of the step before, and add up those for the next one."""
    stepping, cut = [], []
    for matrix in matrices:
        if (scalars := _advance(matrix, factor, found_inf)) is not None:
            stepping.append((matrix, scalars))
            if not matrix.has_whole_rows:
                cut.append((matrix, scalars))
    # 1. Where ranks or segments have parts of rows: the weights of whole rows, [rows]
    weights = _weights(cut) if cut else {}
    # 2. The pass, and its sums over this rank's rows, [2 columns + 1] for each matrix
    summed, vectors = [], []
    for matrix, scalars in stepping:
        total = matrix.kernel.lean(matrix, weights.get(matrix), scalars)
        if total is not None:  # otherwise the kernel has finished the step
            summed.append((matrix, scalars.t))
            vectors.append((total, matrix.row_ranks))
    # 3. nu and d, by the sums over all ranks
    for (matrix, t), total in zip(summed, add_up(vectors)):
        reference.finish(matrix, total, t)


class _Cut:
    """A matrix whose rows are cut, while their weights are found."""

    def __init__(self, matrix: CoupledMatrix, scalars: Scalars, nu_ranks: Ranks) -> None:
        self.matrix, self.scalars, self.nu_ranks = matrix, scalars, nu_ranks
        self.logs, self.known = reference.known_logs(matrix.exp_avg_sq)
        self.number = self.center = matrix.exp_avg_sq  # of known columns; their mean of log nu


def _weights(matrices: Sequence[tuple[CoupledMatrix, Scalars]]) -> dict[CoupledMatrix, Tensor]:
    """Update r of matrices whose rows are cut; the weights of their rows, [rows]."""
    # Of a piece of a flattened matrix each rank has all of nu.
    cut = [_Cut(m, x, () if m.shard is not None else m.column_ranks) for m, x in matrices]
    # 1. The mean of log nu over all columns
    logs = [torch.stack([x.logs.sum(), x.known.sum().to(x.logs)]) for x in cut]
    for x, total in zip(cut, add_up([(own, x.nu_ranks) for own, x in zip(logs, cut)])):
        x.number = total[1].clamp(min=1)
        x.center = total[0] / x.number
    # 2. The rows' sums, [2 rows] each, and how far all columns are from this mean
    vectors = []
    for x in cut:
        of_rows = flat if x.matrix.shard is not None else blocks
        scales = reference.column_scales(x.matrix, x.scalars)
        squares = of_rows.row_squares(x.matrix, scales, x.scalars).flatten()
        distance = reference.distances(x.logs, x.known, x.center).sum()[None].to(squares)
        vectors += [(squares, x.matrix.column_ranks), (distance, x.nu_ranks)]
    sums = iter(add_up(vectors))
    # 3. The weights, by log rho
    weights = {}
    for x in cut:
        rows, log_nu = next(sums).view(2, -1), x.center + next(sums)[0] / x.number
        weights[x.matrix] = reference.row_weights(x.matrix, rows, x.number, log_nu, x.scalars)
    return weights


def kernel_of(matrix: CoupledMatrix) -> Kernel:
    """What makes the passes over a matrix; pieces and sparse rows have modules that call others."""
    if matrix.shard is not None:
        return flat
    # Which has no passes of Coupled Adam
    return row_sparse if matrix.row_step is not None else choose(matrix)  # type: ignore[return-value]


def with_penalty(matrix: CoupledMatrix, factor: Tensor | None) -> CoupledMatrix:
    """The matrix with ``factor * grad + weight_decay * param`` in place of the gradient."""
    grad = matrix.grad
    if factor is not None:  # in the moments' dtype: what is unscaled may be too small for half
        grad = grad.to(matrix.exp_avg_sq.dtype) * factor.to(grad.device)
    if matrix.group["maximize"]:
        grad = -grad
    grad = grad.add(matrix.param, alpha=matrix.group["weight_decay"])
    penalized = replace(matrix, grad=grad)
    penalized.kernel = kernel_of(penalized)  # the matrix's own may not serve another dtype
    return penalized


def _advance(
    matrix: CoupledMatrix, factor: Tensor | None, found_inf: Tensor | None
) -> Scalars | None:
    """Count the step, and return its numbers; None if the host skips it."""
    skip = None
    if found_inf is not None:
        # The weights of rows that are cut come from the reference, which cannot skip.
        if matrix.kernel.SKIPS_ON_DEVICE and (matrix.has_whole_rows or not matrix.is_lean):
            skip = found_inf.to(matrix.param.device)  # the host need not wait for its value
        elif found_inf.item():
            return None
    t = _count(matrix, skip)
    # With a penalty, the gradient has been scaled, and weight decay is part of it.
    scale: float | Tensor = 1.0
    decay: float | Tensor = 1.0
    if not matrix.has_penalty:
        if factor is not None:
            scale = as_python_number(factor.to(matrix.param.device), matrix.no_host_reads)
        if matrix.group["maximize"]:
            scale = -scale
        if weight_decay := matrix.group["weight_decay"]:
            decay = 1 - matrix.lr * weight_decay
    noise = noise_of(matrix.group, matrix.parameter, t, matrix.index)
    return Scalars(t, scale, decay, skip, noise)


def _count(matrix: CoupledMatrix, skip: Tensor | None) -> float | Tensor:
    """Increment the step, unless it is skipped, and return it."""
    step = matrix.step
    if step.is_cpu and not matrix.no_host_reads and skip is None:
        t: float = step.item() + 1
        step.fill_(t)
        return t
    step += 1 if skip is None else (skip == 0).to(step.device)
    if matrix.kernel.SKIPS_ON_DEVICE:
        return step
    # In float32 1 - beta^t would lose five digits.
    return step.to(reference.wide(step), copy=True)
