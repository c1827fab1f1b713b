"""One step of all coupled matrices: the order of the passes, and the sums over ranks between them.

:func:`update_coupled` is the paper's algorithm, in two passes over memory: sums, which all ranks
add up, then the update. :func:`update_lean` is one pass, whose sums the next step needs; see
:mod:`coupled_adam.optim.reference`.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from coupled_adam.optim import reference
from coupled_adam.optim.kernels import choose
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums, as_python_number
from coupled_adam.optim.rounding import noise_of
from coupled_adam.optim.sharded import Reduction

Stepping = list[tuple[CoupledMatrix, Scalars]]


class Pending:
    """Sums of LEAN's last step that ranks are adding up, which the next step needs."""

    def __init__(self) -> None:
        self._sums: list[tuple[list[CoupledMatrix], Reduction, bool]] = []

    def add(self, matrices: list[CoupledMatrix], reduction: Reduction) -> None:
        """Remember sums that are on their way; but no gradients, which may be freed meanwhile."""
        without_grads = [dataclasses.replace(m, grad=m.exp_avg_sq.new_empty(0)) for m in matrices]
        self._sums.append((without_grads, reduction, _is_capturing(matrices[0].param)))

    def finish(self) -> None:
        """Wait for all sums, and update nu and d with them.

        Raises:
            RuntimeError: if a CUDA graph is captured, which could not wait for what began before.
        """
        while self._sums:
            matrices, reduction, is_captured = self._sums[-1]
            if _is_capturing(matrices[0].param) and not is_captured:
                raise RuntimeError(
                    "a CUDA graph is captured while ranks add up the sums of LEAN's last step: "
                    "set capturable=True before that step, or call state_dict() before the capture"
                )
            self._sums.pop()
            for matrix, total in zip(matrices, reduction.result()):
                reference.finish(matrix, total)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def update(
    matrices: Sequence[CoupledMatrix],
    factor: Tensor | None,
    found_inf: Tensor | None,
    pending: Pending,
) -> None:
    """Update the states and parameters of coupled matrices.

    Args:
        matrices: the matrices.
        factor: the gradients are multiplied with it; None for 1.
        found_inf: GradScaler's flag; nothing is changed unless it is 0.
        pending: takes the sums that the next step needs.
    """
    # The L2 penalty of Adam is part of the gradient, and comes after unscaling.
    matrices = [with_penalty(m, factor) if m.has_penalty else m for m in matrices]
    if coupled := [m for m in matrices if not m.is_lean]:
        update_coupled(coupled, factor, found_inf)
    if lean := [m for m in matrices if m.is_lean]:
        update_lean(lean, factor, found_inf, pending)


def update_coupled(
    matrices: Sequence[CoupledMatrix], factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """Algorithm 1 of arXiv 2502.08441: sum the squared gradients over all rows, then update."""
    all_sums, vectors = [], []
    for matrix in matrices:
        is_scaled = not matrix.has_penalty and (factor is not None or matrix.group["maximize"])
        sums = matrix.kernel.sum_squares(matrix, found_inf is None and not is_scaled)
        assert sums.columns is not None
        all_sums.append(sums)
        vectors.append((sums.columns, matrix.row_ranks))
    for sums, total in zip(all_sums, Reduction(vectors).result()):
        sums.columns = total
    # The last gradient may still be in the cache.
    for matrix, sums in reversed([*zip(matrices, all_sums)]):
        if (scalars := _advance(matrix, factor, found_inf)) is not None:
            matrix.kernel.apply(matrix, sums, scalars)


def update_lean(
    matrices: Sequence[CoupledMatrix],
    factor: Tensor | None,
    found_inf: Tensor | None,
    pending: Pending,
) -> None:
    """LEAN: update with the sums of the step before, and sum for the next one."""
    stepping = [(m, scalars) for m in matrices if (scalars := _advance(m, factor, found_inf))]
    _lean_pass(stepping, pending)
    # What records a step must see all of it, and DeepSpeed's wrapper may read the state itself.
    if any(m.no_host_reads or m.group["capturable"] or m.shard is not None for m in matrices):
        pending.finish()


def _lean_pass(stepping: Stepping, pending: Pending) -> None:
    """Pass over the matrices, and start to add up what the ranks have summed."""
    row_sums = _sum_rows([matrix for matrix, _ in stepping if not matrix.has_whole_rows])
    waiting = []
    for matrix, scalars in stepping:
        if (sums := row_sums.get(matrix)) is not None:
            assert sums.rows is not None
            assert sums.mean_nu is not None
            squares = reference.scaled(sums.rows, scalars.factor)
            weights = reference.update_rows(matrix, squares, scalars)
            sums.weights = weights * reference.relative(matrix, sums.mean_nu, scalars)
        total = matrix.kernel.apply(matrix, sums, scalars)
        if total is not None and matrix.row_ranks:
            waiting.append((matrix, total))
        elif total is not None:
            reference.finish(matrix, total)
    if waiting:
        reduction = Reduction([(total, matrix.row_ranks) for matrix, total in waiting])
        pending.add([matrix for matrix, _ in waiting], reduction)


def _sum_rows(matrices: Sequence[CoupledMatrix]) -> dict[CoupledMatrix, Sums]:
    """The sums over whole rows of the squared gradient, and the mean of nu, over all ranks."""
    all_sums = {matrix: matrix.kernel.sum_squares(matrix, False) for matrix in matrices}
    vectors = []
    for matrix, sums in all_sums.items():
        assert sums.rows is not None
        parts = [sums.rows]
        if matrix.shard is None:  # of a flattened matrix each rank has all of nu
            parts.append(matrix.exp_avg_sq.sum()[None].to(sums.rows.dtype))
        vectors.append((torch.cat(parts), matrix.column_ranks))
    for (matrix, sums), total in zip(all_sums.items(), Reduction(vectors).result()):
        is_whole = matrix.shard is None
        sums.rows, nu = (total[:-1], total[-1]) if is_whole else (total, matrix.exp_avg_sq.sum())
        sums.mean_nu = nu / matrix.hidden_size
    return all_sums


def with_penalty(matrix: CoupledMatrix, factor: Tensor | None) -> CoupledMatrix:
    """The matrix with ``factor * grad + weight_decay * param`` in place of the gradient."""
    grad = matrix.grad
    if factor is not None:  # in the moments' dtype: what is unscaled may be too small for half
        grad = grad.to(matrix.exp_avg_sq.dtype) * factor.to(grad.device)
    if matrix.group["maximize"]:
        grad = -grad
    grad = grad.add(matrix.param, alpha=matrix.group["weight_decay"])
    penalized = dataclasses.replace(matrix, grad=grad)
    if matrix.shard is None:  # otherwise its segments' kernels are chosen when they are made
        penalized.kernel = choose(penalized)  # the matrix's own may not serve another dtype
    return penalized


def _advance(
    matrix: CoupledMatrix, factor: Tensor | None, found_inf: Tensor | None
) -> Scalars | None:
    """Count the step, and return its numbers; None if the host skips it."""
    skip = None
    # The weights of rows that are cut come from the reference, which cannot skip.
    is_cut = matrix.is_lean and not matrix.has_whole_rows
    if found_inf is not None and matrix.kernel.SKIPS_ON_DEVICE and not is_cut:
        skip = found_inf.to(matrix.param.device)  # the host need not wait for its value
    elif found_inf is not None and found_inf.item():
        return None
    t = _count(matrix, skip)
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
    return Scalars(t, scale, decay, 1 - matrix.beta1, skip, noise)


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
    # In float64, except on MPS, which lacks it: in float32 1 - beta^t would lose five digits.
    wide = step.dtype if step.device.type == "mps" else torch.float64
    return step.to(wide, copy=True)
