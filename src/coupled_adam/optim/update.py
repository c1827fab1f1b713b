"""The update of one coupled matrix in one step.

:meth:`CoupledAdam.step` creates an :class:`Update` for each coupled matrix. It then calls
``measure`` on each, which sums the squared gradient over this rank's rows, all-reduces the sums of
all ranks, and calls ``apply`` on each, which updates the state and the parameter. ``center`` comes
between the two with ``zero_sum``. A :class:`Kernel` implements these passes over a matrix;
:mod:`coupled_adam.optim.reference` is the one to read first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from coupled_adam.optim.rounding import Noise, noise_of

if TYPE_CHECKING:
    from coupled_adam.optim.flat import FlatShard


class Kernel(Protocol):
    """The passes over a matrix, implemented by a module.

    Attributes:
        skips: whether ``apply`` can read ``update.skip`` and ``update.t`` on the device. If it
            cannot, the host waits for GradScaler's ``found_inf`` before it calls ``apply``.
    """

    skips: bool

    def measure(self, update: "Update", update_moment: bool) -> None:
        """Set ``update.sums`` to the sums of the squared gradient over this rank's rows.

        They have the shape [columns] in float32 or wider. For a parameter that is not a DTensor, a
        kernel may also leave partial sums of shape [parts, columns].

        With ``row_exponent`` it also sets ``update.row_sums`` to the sums over this rank's columns,
        [rows], in the same dtype.

        With ``update_moment`` a kernel may update ``exp_avg`` in the same pass, and then sets
        ``update.moment_updated``. If it knows the whole rows, it may then do the work of ``center``
        as well, and of :func:`coupled_adam.optim.reference.weigh_rows`.
        """

    def center(self, update: "Update") -> None:
        """Update ``exp_avg``, and set ``update.moment_sums`` from ``update.weights``.

        This is called with ``zero_sum`` only, and not if ``measure`` has set ``moment_sums``.
        """

    def apply(self, update: "Update") -> None:
        """Update ``exp_avg_sq`` from ``update.sums``, then ``exp_avg``, then ``param``.

        ``max_exp_avg_sq`` is updated with ``exp_avg_sq``; ``exp_avg`` is left as it is if
        ``measure`` has already updated it.
        """


@dataclass(eq=False)
class Update:
    """All that a kernel needs to update one matrix in one step.

    ``param``, ``grad`` and ``exp_avg`` are this rank's parts of the matrices, transposed if
    ``vocab_dim`` is 1, so that each row belongs to one token. Of a matrix that has been flattened
    they are this rank's piece, with one dimension, and the vectors are those of the whole matrix.

    Attributes:
        group: the matrix's param group, for its options.
        parameter: the parameter itself, [V, H] or [H, V], a plain tensor or a DTensor.
        moment: the state's ``exp_avg_sq`` (nu in the formulas), [H], a plain tensor or a DTensor.
        step: the state's number of steps, a 0-dim tensor.
        param, grad, exp_avg: this rank's parts, [rows, columns].
        exp_avg_sq: this rank's part of nu, [columns].
        max_exp_avg_sq: this rank's part of nu's running maximum; None without ``amsgrad``.
        traced: whether autograd or a compiler records the step, so that no tensor may be read as a
            Python number.
        lr, beta1, beta2: Python numbers, or 0-dim tensors that must not be read as such.
        kernel: the implementation of the passes.
        exp_avg_sq_row: this rank's part of r, [rows]; None without ``row_exponent``.
        sums: the sums of the squared gradient (see :class:`Kernel`), over this rank's rows after
            ``measure``, and over the rows of all ranks after :func:`sharded.all_reduce`.
        row_sums: the sums of the squared gradient over this rank's columns, and then over the
            columns of all ranks, [rows]; None without ``row_exponent``.
        totals: the totals of ``sums`` and ``exp_avg_sq`` over the columns of all ranks; None if
            columns are not sharded, or without ``row_exponent``.
        weights: the factor of each row's update, r^(-a/2), [rows]; None without ``row_exponent``.
        moment_sums: the sums over the rows of ``weights * exp_avg``, [columns], in float32 or
            wider, first of this rank and then of all ranks; None without ``zero_sum``.
        moment_updated: whether ``measure`` or ``center`` has already updated ``exp_avg``.
        memo: whatever the kernel keeps from ``measure`` for ``apply``.
        t: the number of this step, starting with 1; a tensor if it must not be read.
        factor: the factor that clips and unscales the gradient, negative to maximize.
        skip: a tensor with one element, on the device; nothing is changed unless it is 0.
        noise: the random numbers for stochastic rounding; None to round to nearest.
        shard: where the piece of a flattened matrix lies; None for all other matrices.
        absent: whether zeros stand for a gradient that this rank does not have, while other ranks
            that share a flattened matrix may have one.
        present: on how many ranks a flattened matrix has a gradient, [1]; None for all others.
    """

    group: dict[str, Any]
    parameter: Tensor
    moment: Tensor
    step: Tensor
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    traced: bool
    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    kernel: Kernel
    exp_avg_sq_row: Tensor | None = None
    sums: Tensor | None = None
    row_sums: Tensor | None = None
    totals: tuple[Tensor, Tensor] | None = None
    weights: Tensor | None = None
    moment_sums: Tensor | None = None
    moment_updated: bool = False
    memo: Any = None
    t: float | Tensor = 0.0
    factor: float | Tensor = 1.0
    skip: Tensor | None = None
    noise: Noise | None = None
    shard: "FlatShard | None" = None
    absent: bool = False
    present: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens V, over all ranks."""
        size: int = self._shape[self.group["vocab_dim"]]
        return size

    @property
    def hidden_size(self) -> int:
        """The number of features H, over all ranks."""
        size: int = self._shape[1 - self.group["vocab_dim"]]
        return size

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.parameter.shape if self.shard is None else self.shard.shape

    @property
    def decay(self) -> float | Tensor:
        """AdamW's factor on the parameter, 1 - lr x weight_decay; 1 with Adam's L2 penalty."""
        if self.has_penalty or self.group["weight_decay"] == 0:
            return 1.0
        weight_decay: float = self.group["weight_decay"]
        return 1 - self.lr * weight_decay

    @property
    def has_penalty(self) -> bool:
        """Whether weight decay is Adam's L2 penalty, which is added to the gradient."""
        return self.group["weight_decay"] != 0 and not self.group["decoupled_weight_decay"]

    def measure(self, update_moment: bool) -> None:
        """Sum this rank's squared gradient; see :meth:`Kernel.measure`."""
        used_as_is = update_moment and not self.group["maximize"] and not self.absent
        self.kernel.measure(self, used_as_is)

    def add_penalty(self, factor: Tensor | None) -> None:
        """Replace the gradient by ``factor * grad + weight_decay * param``."""
        grad = self.grad
        if factor is not None:  # in the moments' dtype: what is clipped may be too small for half
            grad = grad.to(self.exp_avg_sq.dtype) * factor.to(grad.device)
        if self.group["maximize"]:
            grad = -grad
        self.grad = grad.add(self.param, alpha=self.group["weight_decay"])

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> bool:
        """Increment the step and record the numbers of ``center`` and ``apply``.

        Args:
            factor: the gradient is multiplied with it, unless :meth:`add_penalty` has already done
                so; None for 1.
            found_inf: GradScaler's flag; nothing is changed unless it is 0.

        Returns:
            Whether ``center`` and ``apply`` must be called: not if the host skips the step, or if
            no rank has a gradient.
        """
        if self.absent and self.present is not None and not self.present.item():
            return False
        if found_inf is not None and self.kernel.skips:
            self.skip = found_inf.to(self.param.device)  # the host need not wait for its value
        elif found_inf is not None and found_inf.item():
            return False
        self._increment()
        if not self.has_penalty:
            if factor is not None:
                self.factor = number(factor.to(self.param.device), self.traced)
            if self.group["maximize"]:
                self.factor = -self.factor
        self.noise = noise_of(self.group, self.parameter, self.t)
        return True

    def _increment(self) -> None:
        if self.step.is_cpu and not self.traced and self.skip is None:
            self.t = self.step.item() + 1
            self.step.fill_(self.t)
            return
        self.step += 1 if self.skip is None else (self.skip == 0).to(self.step.device)
        if self.kernel.skips:
            self.t = self.step
            return
        # In float64, except on MPS, which lacks it: in float32 1 - beta^t would lose five digits.
        wide = self.step.dtype if self.step.device.type == "mps" else torch.float64
        self.t = self.step.to(wide, copy=True)


def number(value: float | Tensor, traced: bool) -> float | Tensor:
    """Convert to a Python number where this is free; otherwise return a 0-dim tensor.

    Reading a tensor on an accelerator would make the host wait for it. In a step that is compiled
    or captured, it would break the graph or bake the current value into it.
    """
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu and not traced else value.reshape(())
