"""One coupled matrix in one step: the record that is measured, and then applied.

:meth:`CoupledAdam.step` collects an :class:`Update` for each coupled matrix, measures all of them,
adds up the sums of all ranks, and applies them. A :class:`Kernel` is an implementation of these two
verbs; :mod:`coupled_adam.optim.reference` is the one to read.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from coupled_adam.optim.rounding import Noise, noise_of


class Kernel(Protocol):
    """The two passes over a matrix. Modules implement it.

    Attributes:
        skips: ``apply`` reads ``skip`` and the number of the step on the device, where they are
            there; otherwise the step waits for ``skip``.
    """

    skips: bool

    def measure(self, update: "Update", update_moment: bool) -> None:
        """Set ``sums``; with ``update_moment`` perhaps update ``exp_avg`` in the same pass.

        The sums are of the squared gradient, over this rank's rows: [columns], in float32 or wider;
        of a parameter that is no DTensor also [parts, columns], still to be added up. A kernel that
        has updated ``exp_avg`` sets ``moment_updated``.
        """

    def apply(self, update: "Update") -> None:
        """Update nu and its maximum from ``sums``, ``exp_avg`` unless updated, and ``param``."""


@dataclass(eq=False)
class Update:
    """What is known of one matrix in one step.

    The matrices are this rank's part, transposed if ``vocab_dim`` is 1: a row is always a token.

    Attributes:
        group: the options of its param group.
        parameter: as the group has it: [V, H] or [H, V], whole or a DTensor.
        moment: nu as the state has it: [H], whole or a DTensor.
        step: the state's count of steps, a 0-dim tensor.
        param, grad, exp_avg: this rank's part, [rows, columns].
        exp_avg_sq: this rank's part of nu, [columns].
        max_exp_avg_sq: of its running maximum; None without ``amsgrad``.
        traced: autograd or a compiler follows the step, so tensors must not be read as numbers.
        lr, beta1, beta2: numbers, or 0-dim tensors that must not be read.
        kernel: measures and applies it.
        sums: see :class:`Kernel`; from :func:`sharded.all_reduce` on over the rows of all ranks.
        moment_updated: ``exp_avg`` has been updated in this step.
        memo: what the kernel keeps from ``measure`` to ``apply``.
        t: the number of this step, 1 for the first; a tensor if it is not read.
        factor: on the gradient: what clips and unscales it, negative to maximize.
        skip: a tensor of one number, on the device: unless it is 0, nothing changes.
        noise: the random numbers of stochastic rounding; None to round to nearest.
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
    sums: Tensor | None = None
    moment_updated: bool = False
    memo: Any = None
    t: float | Tensor = 0.0
    factor: float | Tensor = 1.0
    skip: Tensor | None = None
    noise: Noise | None = None

    @property
    def vocab_size(self) -> int:
        """V, over all ranks."""
        size: int = self.parameter.shape[self.group["vocab_dim"]]
        return size

    @property
    def decay(self) -> float | Tensor:
        """What AdamW multiplies the parameter with: 1 - lr x weight_decay."""
        if self.has_penalty or self.group["weight_decay"] == 0:
            return 1.0
        weight_decay: float = self.group["weight_decay"]
        return 1 - self.lr * weight_decay

    @property
    def has_penalty(self) -> bool:
        """Whether weight decay is Adam's: an L2 penalty, and so a part of the gradient."""
        return self.group["weight_decay"] != 0 and not self.group["decoupled_weight_decay"]

    def measure(self, update_moment: bool) -> None:
        """Take the sums of this rank's part; see :class:`Kernel`."""
        self.kernel.measure(self, update_moment and not self.group["maximize"])

    def add_penalty(self, factor: Tensor | None) -> None:
        """Make the gradient that of the L2 penalty, too, with the factor on its own part."""
        grad = self.grad if factor is None else self.grad * factor.to(self.grad.device)
        if self.group["maximize"]:
            grad = -grad
        self.grad = grad.add(self.param, alpha=self.group["weight_decay"])

    def apply(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Count the step and change parameter and state.

        Args:
            factor: on the gradient, unless :meth:`add_penalty` has used it; None for 1.
            found_inf: of GradScaler: unless it is 0, nothing changes.
        """
        if found_inf is not None and self.kernel.skips:
            self.skip = found_inf.to(self.param.device)  # without waiting for it
        elif found_inf is not None and found_inf.item():
            return
        self._advance()
        if not self.has_penalty:
            if factor is not None:
                self.factor = number(factor.to(self.param.device), self.traced)
            if self.group["maximize"]:
                self.factor = -self.factor
        self.noise = noise_of(self.group, self.parameter, self.t)
        self.kernel.apply(self)

    def _advance(self) -> None:
        if self.step.is_cpu and not self.traced and self.skip is None:
            self.t = self.step.item() + 1
            self.step.fill_(self.t)
            return
        self.step += 1 if self.skip is None else (self.skip == 0).to(self.step.device)
        if self.kernel.skips:
            self.t = self.step
            return
        # In float64 (which MPS lacks), as 1 - beta^t loses five digits in float32.
        wide = self.step.dtype if self.step.device.type == "mps" else torch.float64
        self.t = self.step.to(wide, copy=True)


def number(value: float | Tensor, traced: bool) -> float | Tensor:
    """A number where reading it is free; a tensor, 0-dim, where it must stay one.

    Reading a tensor on a device would wait for it; in a step that is compiled or captured it would
    cut the graph, or freeze the number into it.
    """
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu and not traced else value.reshape(())
