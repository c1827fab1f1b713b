"""One coupled matrix in one step: what is given, what a pass returns, and the two passes.

:mod:`coupled_adam.optim.update` calls the passes of a :class:`Kernel` in their order;
:mod:`coupled_adam.optim.reference` is the kernel to read first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coupled_adam.optim.rounding import Noise
from coupled_adam.optim.sharded import PLAIN, Ranks

OPTIONS: dict[str, Any] = {
    "coupled": False,
    "second_moment_scale": 1.0,
    "row_exponent": 0.0,
    "zero_sum": False,
    "vocab_dim": 0,
    "stochastic_rounding": False,
}
"""The options of a param group that torch.optim.Adam does not have, with their defaults."""


class Kernel(Protocol):
    """The two passes over a matrix, implemented by a module.

    Attributes:
        SKIPS_ON_DEVICE: whether it reads ``skip`` and ``t`` on the device. If it cannot, the host
            waits for GradScaler's ``found_inf`` before it calls ``apply``.
    """

    SKIPS_ON_DEVICE: bool

    def sum_squares(self, matrix: "CoupledMatrix", unscaled: bool) -> "Sums":
        """Sum the squared gradient over this rank's rows; with LEAN over its columns instead.

        ``unscaled`` says that the step will be taken, with the gradient as it is: Coupled Adam's
        ``exp_avg`` may then be updated in the same pass.
        """

    def apply(
        self, matrix: "CoupledMatrix", sums: "Sums | None", scalars: "Scalars"
    ) -> "Tensor | None":
        """Update ``exp_avg`` unless it has been updated, the second moments, and ``param``.

        Coupled Adam needs the ``sums`` over all ranks. LEAN needs none where rows are whole, and
        returns this step's sums over the rows, [2 columns + 1], as
        :func:`coupled_adam.optim.reference.lean` describes them. It may return None after
        :func:`coupled_adam.optim.reference.finish` or the like, if no other rank has rows.
        """


@dataclass(eq=False, slots=True)
class CoupledMatrix:
    """What is given of a coupled matrix in one step. No pass changes its fields.

    ``param``, ``grad`` and ``exp_avg`` are this rank's parts of the matrices, [rows, columns],
    transposed if ``vocab_dim`` is 1, so that each row belongs to one token. Of a matrix that has
    been flattened they are this rank's piece, with one dimension, and the other tensors are those
    of the whole matrix (see :mod:`coupled_adam.optim.flat`).

    Attributes:
        group: the matrix's param group, for its options.
        parameter: the parameter itself, [V, H] or [H, V], a plain tensor or a DTensor.
        step: the state's number of steps, a 0-dim tensor.
        vocab_size, hidden_size: V and H, over all ranks.
        exp_avg: the first moment m; None if beta1 is 0.
        exp_avg_sq: nu, [columns].
        max_exp_avg_sq: nu's running maximum; None without ``amsgrad``.
        row_exp_avg_sq: LEAN's r, [rows]; None in Coupled Adam.
        mean_update: LEAN's d, [columns]; None without ``zero_sum``.
        lr, beta1, beta2: Python numbers, or 0-dim tensors that must not be read as such.
        no_host_reads: whether autograd or a compiler records the step, so that no tensor may be
            read as a Python number.
        index: the matrix's number among the optimizer's, which makes its rounding noise its own.
        row_ranks, column_ranks: the ranks over which sums over rows, and over columns, are added
            (see :func:`sharded.add_up`).
        shard: where the piece of a flattened matrix lies; None for all other matrices.
        kernel: the implementation of the passes.
    """

    group: dict[str, Any]
    parameter: Tensor
    step: Tensor
    vocab_size: int
    hidden_size: int
    param: Tensor
    grad: Tensor
    exp_avg: Tensor | None
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    row_exp_avg_sq: Tensor | None
    mean_update: Tensor | None
    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    no_host_reads: bool
    index: int = 0
    row_ranks: Ranks = ()
    column_ranks: Ranks = ()
    shard: Any = None
    kernel: Kernel = None  # type: ignore[assignment]  # set once the rest is known

    @property
    def matrices(self) -> list[Tensor]:
        """The tensors [rows, columns] that there are: ``param``, ``grad`` and ``exp_avg``."""
        return [x for x in (self.param, self.grad, self.exp_avg) if x is not None]

    @property
    def vectors(self) -> list[Tensor]:
        """The tensors [columns] and [rows] that there are, all of them second moments or means."""
        vectors = (self.exp_avg_sq, self.max_exp_avg_sq, self.row_exp_avg_sq, self.mean_update)
        return [x for x in vectors if x is not None]

    @property
    def is_lean(self) -> bool:
        """Whether rows have weights of their own or zero-sum updates, in one pass."""
        return self.row_exp_avg_sq is not None

    @property
    def has_penalty(self) -> bool:
        """Whether weight decay is Adam's L2 penalty, which is added to the gradient."""
        return self.group["weight_decay"] != 0 and not self.group["decoupled_weight_decay"]

    @property
    def has_whole_rows(self) -> bool:
        """Whether the sums over a row's columns need nothing of other ranks or segments."""
        return self.shard is None and not self.column_ranks


@dataclass(eq=False)
class Sums:
    """What a pass over a matrix returns, and what ``apply`` needs of it.

    Attributes:
        columns: sum_i g_ij^2, [columns], in float32 or wider. For a matrix that no other rank
            shares, a kernel may also return sums over parts of the rows, [parts, columns].
        rows: LEAN's sum_j g_ij^2, [rows], where rows are not whole; None otherwise.
        mean_nu: the mean of LEAN's nu over all columns, 0-dim, where rows are not whole.
        weights: LEAN's factor w of each row's update, once it is known, [rows].
        moment_is_updated: whether ``exp_avg`` has been updated with the sums.
        kernel_state: whatever a kernel keeps from ``sum_squares`` for ``apply``.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None
    mean_nu: Tensor | None = None
    weights: Tensor | None = None
    moment_is_updated: bool = False
    kernel_state: Any = None


class Scalars(NamedTuple):
    """The numbers of a matrix's step.

    Attributes:
        t: the number of this step, starting with 1; a tensor if it must not be read.
        factor: the factor that unscales the gradient, negative to maximize.
        decay: AdamW's factor on the parameter, 1 - lr x weight_decay.
        weight: 1 - beta1.
        skip: a tensor with one element, on the device; nothing is changed unless it is 0.
        noise: the random numbers for stochastic rounding; None to round to nearest.
    """

    t: float | Tensor = 1.0
    factor: float | Tensor = 1.0
    decay: float | Tensor = 1.0
    weight: float | Tensor = 1.0
    skip: Tensor | None = None
    noise: Noise | None = None


def as_python_number(value: float | Tensor, no_host_reads: bool) -> float | Tensor:
    """Convert to a Python number where this is free; otherwise return a 0-dim tensor.

    Reading a tensor on an accelerator would make the host wait for it. In a step that is compiled
    or captured, it would break the graph or bake the current value into it.
    """
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu and not no_host_reads else value.reshape(())


def is_plain_memory(x: Tensor) -> bool:
    """Whether a tensor's numbers lie in memory as its strides say, each at a place of its own.

    A subclass may have no memory of its own, autograd hands over zeros without any, and in a view
    with the negative bit the numbers in memory have the other sign.
    """
    return (
        type(x) in PLAIN
        and x.layout == torch.strided
        and not x._is_zerotensor()
        and not x.is_neg()
        and 0 not in x.stride()
    )
