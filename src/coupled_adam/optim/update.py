"""One step of all coupled matrices: the order of the passes, and the sums over ranks between them.

:func:`update_coupled` is the paper's algorithm, in two passes over memory: sums, which all ranks
add up, then the update. :func:`update_lean` is one pass, whose sums the next step needs; see
:mod:`coupled_adam.optim.reference`.

With its sums each rank says whether it has a gradient of the matrix, so that ranks may have
different sets of gradients: where one has none, it takes part with zeros if any other has one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coupled_adam.optim import flat, reference
from coupled_adam.optim.kernels import blocks, choose
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, as_python_number
from coupled_adam.optim.rounding import noise_of
from coupled_adam.optim.sharded import Ranks, Reduction


class Pending:
    """Sums of LEAN's last step that ranks are adding up, which the next step needs."""

    def __init__(self) -> None:
        # Pairs as `add` takes them, their sums, and whether a CUDA graph was captured meanwhile.
        self._sums: list[tuple[list[tuple[CoupledMatrix, CoupledMatrix]], Reduction, bool]] = []

    def add(
        self, matrices: Sequence[tuple[CoupledMatrix, CoupledMatrix]], reduction: Reduction
    ) -> None:
        """Remember sums that are on their way; but no gradients, which may be freed meanwhile.

        Args:
            matrices: each matrix, and the one that has been updated: itself, or its copy.
            reduction: the sums.
        """
        without_grads = []
        for matrix, updated in matrices:
            rest = replace(matrix, grad=matrix.exp_avg_sq.new_empty(0))
            without_grads.append((rest, rest if updated is matrix else updated))
        self._sums.append((without_grads, reduction, _is_capturing(matrices[0][0].param)))

    def finish(self) -> None:
        """Wait for all sums, and update nu and d with them.

        Raises:
            RuntimeError: if a CUDA graph is captured, which could not wait for what began before.
        """
        while self._sums:
            matrices, reduction, is_captured = self._sums[-1]
            if _is_capturing(matrices[0][0].param) and not is_captured:
                raise RuntimeError(
                    "a CUDA graph is captured while ranks add up the sums of LEAN's last step: "
                    "set capturable=True before that step, or call state_dict() before the capture"
                )
            self._sums.pop()  # only now: after the error above the sums are still to be finished
            for (matrix, updated), total in zip(matrices, reduction.result()):
                if _is_stepping(matrix, total):
                    _take_over(matrix, updated)
                    reference.finish(matrix, total[:-1])


def update(
    matrices: Sequence[CoupledMatrix],
    factor: Tensor | None,
    found_inf: Tensor | None,
    pending: Pending,
) -> None:
    """Update the states and parameters of coupled matrices.

    Args:
        matrices: the matrices.
        factor: the gradients are multiplied with it, 0-dim or [1]; None for 1.
        found_inf: GradScaler's flag, likewise; nothing is changed unless it is 0.
        pending: takes the sums that the next step needs.
    """
    coupled: list[CoupledMatrix] = []
    lean: list[CoupledMatrix] = []
    for matrix in matrices:
        # The L2 penalty of Adam is part of the gradient, and comes after unscaling.
        penalized = with_penalty(matrix, factor) if matrix.has_penalty else matrix
        (lean if matrix.is_lean else coupled).append(penalized)
    if coupled:
        update_coupled(coupled, factor, found_inf)
    if lean:
        update_lean(lean, factor, found_inf, pending)


def update_coupled(
    matrices: Sequence[CoupledMatrix], factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """Algorithm 1 of arXiv 2502.08441: sum the squared gradients over all rows, then update."""
    # Ranks that have the columns of the same rows need nothing of each other but whether to step.
    by_columns = [matrix for matrix in matrices if matrix.column_ranks and matrix.shard is None]
    if by_columns:
        nothing = [(m, m.exp_avg_sq.new_empty(0), m.column_ranks) for m in by_columns]
        for matrix, total in zip(by_columns, _add_up(nothing).result()):
            matrix.has_gradient = _is_stepping(matrix, total)
    # 1. Sum the squares of this rank's rows, [columns] for each matrix
    stepping = []
    for matrix in matrices:
        if not (matrix.has_gradient or matrix.row_ranks):
            continue
        # The kernel may update exp_avg in this pass if nothing can follow that changes the gradient
        # (a penalty came after unscaling) or that skips the step.
        is_scaled = not matrix.has_penalty and (factor is not None or matrix.group["maximize"])
        is_certain = found_inf is None and matrix.has_gradient
        sums = matrix.kernel.sum_squares(matrix, is_certain and not is_scaled)
        stepping.append((matrix, sums))
    # 2. Add up those of all ranks
    if shared := [(m, sums) for m, sums in stepping if m.row_ranks]:
        reduction = _add_up([(m, sums.columns, m.row_ranks) for m, sums in shared])
        for (matrix, sums), total in zip(shared, reduction.result()):
            sums.columns = total[:-1]
            if not _is_stepping(matrix, total):
                stepping.remove((matrix, sums))
    # 3. Update, the last matrix first: its gradient may still be in the cache
    for matrix, sums in reversed(stepping):
        if (scalars := _advance(matrix, factor, found_inf)) is not None:
            matrix.kernel.apply_coupled(matrix, sums, scalars)


def update_lean(
    matrices: Sequence[CoupledMatrix],
    factor: Tensor | None,
    found_inf: Tensor | None,
    pending: Pending,
) -> None:
    """LEAN: update with the sums of the step before, and sum for the next one."""
    # 1. Where ranks or segments have parts of rows: the sums over whole rows, [rows], and log rho
    by_columns = [matrix for matrix in matrices if not matrix.has_whole_rows]
    whole_rows = _sum_rows(by_columns) if by_columns else {}
    # 2. The pass; with zeros on a copy as long as no rank is known to have a gradient
    shared, is_waiting = [], False
    for matrix in matrices:
        if not (matrix.has_gradient or matrix.row_ranks):
            continue
        updated = matrix if matrix.has_gradient else _copy(matrix)
        if (scalars := _advance(updated, factor, found_inf)) is None:
            continue
        weights = None
        if matrix in whole_rows:
            squares, log_nu = whole_rows[matrix]
            squares = reference.scaled(squares, scalars.factor)
            weights = reference.row_weights(updated, squares, log_nu, scalars)
        total = matrix.kernel.lean(updated, weights, scalars)
        # What records a step must see all of it; DeepSpeed's wrapper may read the state itself.
        is_recorded = matrix.no_host_reads or matrix.group["capturable"]
        is_waiting |= is_recorded or matrix.shard is not None or updated is not matrix
        if matrix.row_ranks:
            assert total is not None
            shared.append((matrix, updated, total))
        elif total is not None:
            reference.finish(matrix, total)
    # 3. Start to add up what ranks have summed, [2 columns + 1] for each matrix
    if shared:
        reduction = _add_up([(matrix, total, matrix.row_ranks) for matrix, _, total in shared])
        pending.add([(matrix, updated) for matrix, updated, _ in shared], reduction)
    if is_waiting:
        pending.finish()


def _sum_rows(
    matrices: Sequence[CoupledMatrix],
) -> dict[CoupledMatrix, tuple[Tensor, Tensor]]:
    """The sums over whole rows of the squared gradient, [rows], and log rho over all columns.

    A matrix then has a gradient if any rank has one.
    """
    # 1. The mean of log nu over all columns. Of a flattened matrix each rank has all of nu, which
    # does not change the mean.
    logs = [reference.known_logs(matrix.exp_avg_sq) for matrix in matrices]
    sums = [torch.stack([x.sum(), known.sum().to(x)]) for x, known in logs]
    by_column = [(m, x, m.column_ranks) for m, x in zip(matrices, sums)]
    totals = [(total[0], total[1].clamp(min=1)) for total in _add_up(by_column).result()]
    # 2. The rows' sums and, behind them, how far all columns are from this mean, [rows + 1] each
    vectors = []
    for matrix, of_columns, (total, number) in zip(matrices, logs, totals):
        rows = _squares_of_rows(matrix)
        distance = reference.distances(*of_columns, total / number).sum()
        vectors.append((matrix, torch.cat([rows, distance[None].to(rows)]), matrix.column_ranks))
    whole_rows = {}
    for matrix, (total, number), rows in zip(matrices, totals, _add_up(vectors).result()):
        matrix.has_gradient = _is_stepping(matrix, rows)
        # The last number, which _add_up has appended, counts the ranks with a gradient.
        whole_rows[matrix] = rows[:-2], (total + rows[-2]) / number
    return whole_rows


def _squares_of_rows(matrix: CoupledMatrix) -> Tensor:
    """The sums of g^2 over this rank's columns, [rows]."""
    if matrix.shard is not None:
        return flat.sum_rows(matrix)
    if matrix.no_host_reads:  # what records the step sees no blocks
        return matrix.grad.to(matrix.exp_avg_sq.dtype).square().sum(1)
    return blocks.sum_rows(matrix)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _add_up(vectors: Sequence[tuple[CoupledMatrix, Tensor, Ranks]]) -> Reduction:
    """Start to add vectors [n] over ranks, each with one number more: how many have a gradient."""
    return Reduction(
        [(pad(vector, (0, 1), value=float(m.has_gradient)), ranks) for m, vector, ranks in vectors]
    )


def _is_stepping(matrix: CoupledMatrix, total: Tensor) -> bool:
    """Whether any rank has a gradient, by what :func:`_add_up` has counted, the last number.

    The host only waits for the number where this rank has none.
    """
    return matrix.has_gradient or bool(total[-1] != 0)


_CHANGED = ("param", "exp_avg", "row_exp_avg_sq", "step")  # by LEAN's pass


def _copy(matrix: CoupledMatrix) -> CoupledMatrix:
    """The matrix with copies of what LEAN's pass changes."""
    tensors = {name: getattr(matrix, name) for name in _CHANGED}
    copies = {name: x.clone() for name, x in tensors.items() if x is not None}
    return replace(matrix, **copies)


def _take_over(matrix: CoupledMatrix, updated: CoupledMatrix) -> None:
    """Change a matrix to its copy after the pass."""
    if updated is matrix:
        return
    for name in _CHANGED:
        if (value := getattr(matrix, name)) is not None:
            value.copy_(getattr(updated, name))


def with_penalty(matrix: CoupledMatrix, factor: Tensor | None) -> CoupledMatrix:
    """The matrix with ``factor * grad + weight_decay * param`` in place of the gradient."""
    grad = matrix.grad
    if factor is not None:  # in the moments' dtype: what is unscaled may be too small for half
        grad = grad.to(matrix.exp_avg_sq.dtype) * factor.to(grad.device)
    if matrix.group["maximize"]:
        grad = -grad
    grad = grad.add(matrix.param, alpha=matrix.group["weight_decay"])
    penalized = replace(matrix, grad=grad)
    penalized.kernel = choose(penalized)  # the matrix's own may not serve another dtype
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
