"""One coupled matrix in one step: what is given, what the passes over it return, and the passes.

:mod:`coupled_adam.optim.update` calls the passes of a :class:`Kernel` in their order;
:mod:`coupled_adam.optim.reference` is the kernel to read first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from coupled_adam.optim.rounding import Noise
from coupled_adam.optim.sharded import Ranks

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
    """The passes over a matrix, implemented by a module.

    Attributes:
        serves: which of :data:`OPTIONS` it implements; with any other it is not chosen.
        skips: whether all passes can read ``skip`` and ``t`` on the device. If they cannot, the
            host waits for GradScaler's ``found_inf`` before it calls ``center`` and ``apply``.
    """

    serves: frozenset[str]
    skips: bool

    def measure(self, matrix: "Matrix", as_is: bool) -> "Sums":
        """Sum the squared gradient over this rank's rows, and over its columns if r is kept.

        ``as_is`` says that the step will be taken, with the gradient as it is: ``exp_avg`` may then
        be updated in the same pass. A kernel that has whole rows may also do the work of
        ``center``, and set ``weights``, for the gradient as it is. If the gradient turns out to be
        scaled, weights and updates are computed again; so without ``as_is`` no state may change.
        """

    def weigh_rows(self, matrix: "Matrix", sums: "Sums", scalars: "Scalars") -> None:
        """Where r is kept, update it, and set ``sums.weights`` and ``sums.rows``.

        :func:`reference.weigh_rows` does this for any kernel, from ``sums.row_squares``. A kernel
        that reads whole rows for it may also do the work of ``center``.
        """

    def center(self, matrix: "Matrix", sums: "Sums", scalars: "Scalars") -> None:
        """With ``zero_sum``, update ``exp_avg`` and set ``sums.updates``, if they are not set."""

    def apply(self, matrix: "Matrix", sums: "Sums", scalars: "Scalars") -> None:
        """Update ``exp_avg_sq`` and its maximum, ``exp_avg`` unless it has been, and ``param``."""


@dataclass(eq=False, slots=True)
class Matrix:
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
        exp_avg_sq_row: r, [rows]; None without ``row_exponent`` and ``zero_sum``.
        lr, beta1, beta2: Python numbers, or 0-dim tensors that must not be read as such.
        traced: whether autograd or a compiler records the step, so that no tensor may be read as a
            Python number.
        position: the matrix's number among the optimizer's, which tells its rounding noise apart.
        row_ranks, column_ranks: the ranks over which sums over rows, and over columns, are added
            (see :func:`sharded.add_up`).
        shard: where the piece of a flattened matrix lies; None for all other matrices.
        absent: whether zeros stand for a gradient that this rank does not have, while other ranks
            that share a flattened matrix may have one.
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
    exp_avg_sq_row: Tensor | None
    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    traced: bool
    position: int = 0
    row_ranks: Ranks = ()
    column_ranks: Ranks = ()
    shard: Any = None
    absent: bool = False
    kernel: Kernel = None  # type: ignore[assignment]  # set once the rest is known

    @property
    def has_penalty(self) -> bool:
        """Whether weight decay is Adam's L2 penalty, which is added to the gradient."""
        return self.group["weight_decay"] != 0 and not self.group["decoupled_weight_decay"]

    @property
    def decay(self) -> float | Tensor:
        """AdamW's factor on the parameter, 1 - lr x weight_decay; 1 with Adam's L2 penalty."""
        if self.has_penalty or self.group["weight_decay"] == 0:
            return 1.0
        weight_decay: float = self.group["weight_decay"]
        return 1 - self.lr * weight_decay

    @property
    def has_whole_rows(self) -> bool:
        """Whether the sums over a row's columns need nothing of other ranks or segments."""
        return self.shard is None and not self.column_ranks


@dataclass(eq=False)
class Sums:
    """What the passes over a matrix return.

    Attributes:
        squares: sum_i g_ij^2, [columns], in float32 or wider. For a matrix that no other rank
            shares, a kernel may also return sums over parts of the rows, [parts, columns].
        row_squares: sum_j g_ij^2, [rows]; None if r is not kept, or if ``weigh_rows`` of the
            kernel does not need them.
        weights: the factor of each row's update, r^(-a/2), or 0 where r is 0, [rows]; None if r is
            not kept.
        rows: the number of rows with r > 0 and the sum of r, [2] or [parts, 2]; None if r is not
            kept.
        updates: sum_i w_i m_i, [columns] or [parts, columns]; None without ``zero_sum``.
        moment: m, once it has been updated.
        present: on how many ranks a flattened matrix has a gradient, [1]; None for all others.
        memo: whatever a kernel keeps from ``measure`` for ``apply``.
    """

    squares: Tensor
    row_squares: Tensor | None = None
    weights: Tensor | None = None
    rows: Tensor | None = None
    updates: Tensor | None = None
    moment: Tensor | None = None
    present: Tensor | None = None
    memo: Any = None

    @property
    def active(self) -> Tensor:
        """The number of rows with r > 0, and 1 if there is none, 0-dim."""
        assert self.rows is not None
        return self.rows[0].clamp(min=1)

    @property
    def mean_row(self) -> Tensor:
        """The mean of r over the rows with r > 0, 0-dim."""
        assert self.rows is not None
        return self.rows[1] / self.active


class Scalars(NamedTuple):
    """What is known of a matrix's step once the gradients of all matrices have been measured.

    Attributes:
        t: the number of this step, starting with 1; a tensor if it must not be read.
        factor: the factor that clips and unscales the gradient, negative to maximize.
        skip: a tensor with one element, on the device; nothing is changed unless it is 0.
        noise: the random numbers for stochastic rounding; None to round to nearest.
    """

    t: float | Tensor = 1.0
    factor: float | Tensor = 1.0
    skip: Tensor | None = None
    noise: Noise | None = None


def number(value: float | Tensor, traced: bool) -> float | Tensor:
    """Convert to a Python number where this is free; otherwise return a 0-dim tensor.

    Reading a tensor on an accelerator would make the host wait for it. In a step that is compiled
    or captured, it would break the graph or bake the current value into it.
    """
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu and not traced else value.reshape(())
