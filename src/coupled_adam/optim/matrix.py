"""One coupled matrix in one step: what is given, what a pass returns, and the passes.

:mod:`coupled_adam.optim.update` calls the passes of a :class:`Kernel` in their order;
:mod:`coupled_adam.optim.reference` is the kernel to read first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coupled_adam.optim import sharded
from coupled_adam.optim.options import is_lean
from coupled_adam.optim.rounding import Noise
from coupled_adam.optim.sharded import PLAIN, Ranks


class Kernel(Protocol):
    """The passes over a matrix, implemented by a module.

    Coupled Adam takes ``sum_squares`` and ``apply_coupled``, and LEAN takes ``lean``.

    Attributes:
        SKIPS_ON_DEVICE: whether it reads ``skip`` and ``t`` on the device. If it cannot, the host
            waits for GradScaler's ``found_inf`` before it calls ``apply_coupled`` or ``lean``.
    """

    SKIPS_ON_DEVICE: bool

    def sum_squares(self, matrix: "CoupledMatrix", unscaled: bool) -> "Sums":
        """Sum the squared gradient over this rank's rows.

        ``unscaled`` says that the step will be taken, with the gradient as it is: ``exp_avg`` may
        then be updated in the same pass.
        """

    def apply_coupled(self, matrix: "CoupledMatrix", sums: "Sums", scalars: "Scalars") -> None:
        """Update ``exp_avg`` unless it has been updated, the second moments, and ``param``.

        ``sums`` are those over all ranks.
        """

    def lean(
        self, matrix: "CoupledMatrix", weights: Tensor | None, scalars: "Scalars"
    ) -> Tensor | None:
        """Update r, ``exp_avg`` and ``param``; return the sums over the rows, [2 columns + 1].

        See :func:`coupled_adam.optim.reference.lean`. ``weights``, [rows], are given where rows are
        cut, and r is left alone then. Otherwise it may return None after
        :func:`coupled_adam.optim.reference.finish` or the like, if no other rank has rows.
        """


# All entries of a state but the step, and fields of CoupledMatrix.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_exp_avg_sq", "mean_update")


@dataclass(eq=False, slots=True, kw_only=True)
class CoupledMatrix:
    """A coupled matrix in one step: this rank's parts, and the numbers of its group.

    ``param``, ``grad`` and ``exp_avg`` are parts of the matrices, [rows, columns], transposed if
    ``vocab_dim`` is 1, so that each row belongs to one token. Of a matrix that has been flattened
    they are this rank's piece, with one dimension, and the other tensors are those of the whole
    matrix (see :mod:`coupled_adam.optim.flat`). No kernel changes the fields. What is replaced
    makes a part of it: a block of rows, a segment, the rows that are touched.
    """

    # 1. Fixed for the matrix, unless its group is changed
    group: dict[str, Any]  # for its options
    parameter: Tensor  # [V, H] or [H, V], a plain tensor or a DTensor
    index: int = 0  # its number among the optimizer's, which makes its rounding noise its own
    vocab_size: int  # V and H, over all ranks
    hidden_size: int
    is_lean: bool  # whether LEAN updates it, and there is r
    has_penalty: bool  # whether weight decay is Adam's L2 penalty, which is added to the gradient
    # Whether autograd or a compiler records the step: no tensor may be read as a Python number.
    no_host_reads: bool
    # The ranks over which sums over rows, and over columns, are added (see sharded.add_up)
    row_ranks: Ranks = ()
    column_ranks: Ranks = ()
    shard: Any = None  # where the piece of a flattened matrix lies
    kernel: Kernel = None  # type: ignore[assignment]  # set once the rest is known
    # 2. What a step reads and writes
    param: Tensor  # [rows, columns]
    exp_avg: Tensor | None  # the first moment m, [rows, columns]; None if beta1 is 0
    exp_avg_sq: Tensor  # nu, [columns]
    max_exp_avg_sq: Tensor | None  # its running maximum; None without amsgrad
    row_exp_avg_sq: Tensor | None  # LEAN's r, [rows]; None in Coupled Adam
    mean_update: Tensor | None  # LEAN's d, [columns]; None without zero_sum, and at a rate of 0
    step: Tensor  # the number of steps, []
    # Of a table with sparse gradients: the step of each row's last one, [rows] in int32, and the
    # number of rows that have had one, []
    row_step: Tensor | None
    row_count: Tensor | None
    # 3. What differs from step to step
    grad: Tensor  # [rows, columns]; zeros where only other ranks have one
    touched: Tensor | None = None  # the row that each row of grad belongs to, [n]; None: it has all
    has_gradient: bool = True  # on this rank; once the ranks have agreed, on any
    lr: float | Tensor  # Python numbers, or 0-dim tensors that must not be read as such
    beta1: float | Tensor
    beta2: float | Tensor

    @classmethod
    def of(
        cls, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor], index: int
    ) -> "CoupledMatrix":
        """This rank's parts of a parameter, its gradient and its state, with tokens as rows.

        A rank without a gradient takes zeros. A parameter that was flattened is left as it is, for
        :func:`coupled_adam.optim.flat.matrices`.
        """
        vocab_dim, (beta1, beta2) = group["vocab_dim"], group["betas"]
        no_host_reads = group["differentiable"] or torch.compiler.is_compiling()
        param, shape, grad = parameter, parameter.shape, parameter.grad
        moments = {name: state.get(name) for name in _MOMENTS}
        row_ranks: Ranks = ()  # none: this rank has all rows, as of a plain tensor
        column_ranks: Ranks = ()
        # 1. This rank's parts
        if type(parameter) not in PLAIN and sharded.is_dtensor(parameter):
            if grad is not None and not sharded.is_laid_out(grad, parameter, None):
                # as backward may leave it
                grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            param = sharded.to_local(parameter)
            grad = None if grad is None else sharded.to_local(grad)
            moments = {n: None if x is None else sharded.to_local(x) for n, x in moments.items()}
            row_ranks = sharded.ranks_over(parameter, vocab_dim)
            column_ranks = sharded.ranks_over(parameter, 1 - vocab_dim)
        if grad is None:  # another rank may have one, and waits for this rank's sums
            grad = torch.zeros_like(param)
        # 2. With tokens as rows
        assert moments["exp_avg_sq"] is not None  # fit_state has made it
        is_flat = len(shape) != 2
        if vocab_dim == 1 and not is_flat:
            param, grad = param.T, grad.T
            if moments["exp_avg"] is not None:
                moments["exp_avg"] = moments["exp_avg"].T
        # 3. Numbers, where they can be read without waiting for a device
        lr = as_python_number(group["lr"], no_host_reads)
        if not isinstance(lr, Tensor) and lr == 0:
            moments["mean_update"] = None  # nothing moves, and so nothing is given back
        return cls(
            group=group,
            parameter=parameter,
            index=index,
            vocab_size=0 if is_flat else shape[vocab_dim],
            hidden_size=0 if is_flat else shape[1 - vocab_dim],
            is_lean=is_lean(group),
            has_penalty=group["weight_decay"] != 0 and not group["decoupled_weight_decay"],
            no_host_reads=no_host_reads,
            row_ranks=row_ranks,
            column_ranks=column_ranks,
            param=param,
            **moments,  # type: ignore[arg-type]  # of which only exp_avg_sq is needed
            step=state["step"],
            row_step=state.get("row_step"),
            row_count=state.get("row_count"),
            grad=grad,
            has_gradient=parameter.grad is not None,
            lr=lr,
            beta1=as_python_number(beta1, no_host_reads),
            beta2=as_python_number(beta2, no_host_reads),
        )

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
    def changed(self) -> list[Tensor]:
        """What a step writes, for autograd: all tensors but the gradient."""
        matrices = [self.param] if self.exp_avg is None else [self.param, self.exp_avg]
        return [*matrices, *self.vectors]

    @property
    def ranks(self) -> Ranks:
        """All ranks that have parts of the matrix, or take part in its step."""
        return tuple(dict.fromkeys((*self.row_ranks, *self.column_ranks)))

    @property
    def has_whole_rows(self) -> bool:
        """Whether the sums over a row's columns need nothing of other ranks or segments."""
        return self.shard is None and not self.column_ranks


@dataclass(eq=False)
class Sums:
    """What Coupled Adam's first pass over a matrix returns, and what ``apply_coupled`` needs.

    Attributes:
        columns: sum_i g_ij^2, [columns], in float32 or wider. For a matrix that no other rank
            shares, a kernel may also return sums over parts of the rows, [parts, columns].
        kernel_state: whatever a kernel keeps from the first pass for the second.
    """

    columns: Tensor
    kernel_state: Any = None


class Scalars(NamedTuple):
    """The numbers of a matrix's step.

    Attributes:
        t: the number of this step, starting with 1; a tensor if it must not be read.
        factor: the factor that unscales the gradient, negative to maximize.
        decay: AdamW's factor on the parameter, 1 - lr x weight_decay.
        skip: a tensor with one element, on the device; nothing is changed unless it is 0.
        noise: the random numbers for stochastic rounding; None to round to nearest.
    """

    t: float | Tensor = 1.0
    factor: float | Tensor = 1.0
    decay: float | Tensor = 1.0
    skip: Tensor | None = None
    noise: Noise | None = None

    def at(self, row: Any, column: int = 0) -> "Scalars":
        """Those of a part, whose rounding noise begins at its first row and column."""
        if (noise := self.noise) is None:
            return self
        return self._replace(
            noise=noise._replace(row=noise.row + row, column=noise.column + column)
        )


def as_python_number(value: float | Tensor, no_host_reads: bool) -> float | Tensor:
    """Convert to a Python number where this is free; otherwise return a 0-dim tensor.

    Reading a tensor on an accelerator would make the host wait for it. In a step that is compiled
    or captured, it would break the graph or bake the current value into it.
    """
    if not isinstance(value, Tensor):
        return value
    # 0-dim, as it broadcasts over any shape then: torch takes rates of shape [1], too.
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
