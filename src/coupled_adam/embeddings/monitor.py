"""Measure embeddings during training; the part that both training callbacks share."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from coupled_adam.embeddings.loading import model_embeddings
from coupled_adam.embeddings.measures import logged
from coupled_adam.embeddings.report import analyze

Find = Callable[[Any], Mapping[str, Tensor]]

FIRST = ("isotropy", "mean_norm", "mean_norm_ratio", "norm_frequency_correlation", "effective_rank")
"""What is logged by default, beside the largest logit."""

LIMITS = {"mean_norm_ratio": 0.9, "largest_logit": 100.0}
"""Values that training which goes well does not reach; beyond them, a callback warns."""


class Monitor:
    """Tells a training callback when to measure, and returns the numbers to log.

    A measurement is an :func:`analyze` of each matrix and a pass over the logits (for what it
    takes, see docs/analyze.md). The arguments, and the errors, are those of the callbacks.
    """

    def __init__(
        self,
        every: int,
        counts: Tensor | NDArray[Any] | None = None,
        find: Find | None = None,
        all_measures: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        self.every = every
        self.counts = counts
        self.find = find or model_embeddings
        self.all_measures = all_measures
        self._last = -1  # the step that was measured last; a trainer may ask twice
        self._exceeded: set[str] = set()
        self._largest_logit: Tensor | None = None
        self._hook: RemovableHandle | None = None

    def is_due(self, step: int) -> bool:
        """Whether to measure after this step; True only once for each step."""
        due = step % self.every == 0 and step != self._last
        if due:
            self._last = step
        return due

    def watch(self, model: Any, step: int) -> None:
        """Prepare for the step that ends as number ``step``: note its largest logit if it is due.

        It needs a transformers model whose head computes logits; a loss that is fused with the
        head does not.
        """
        # Only for steps that are due: the hook reads all logits.
        if self._hook is not None or step % self.every:
            return
        # The outermost module that knows its head is the model, which may be wrapped.
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if hasattr(module, "get_output_embeddings"):
                head = cast(Any, module).get_output_embeddings()
                if isinstance(head, nn.Module):
                    self._largest_logit = None
                    self._hook = head.register_forward_hook(self._note)
                return

    def _note(self, module: nn.Module, inputs: Any, logits: Any) -> None:
        local: Tensor = logits.to_local() if hasattr(logits, "to_local") else logits
        low, high = local.detach().aminmax()  # without a copy of the logits
        # A step may have several forward passes, as with gradient accumulation.
        earlier = low if self._largest_logit is None else self._largest_logit
        self._largest_logit = torch.maximum(torch.maximum(-low, high).float(), earlier.float())

    def measure(self, model: Any, here: bool) -> dict[str, float]:
        """Measure a model, as ``find`` takes it; every process must call this, one with ``here``.

        There it returns those in :data:`FIRST`, or all in :data:`LOGGED`, by name, after
        ``embeddings/`` or, of input embeddings that are another matrix, ``input_embeddings/``; and
        ``embeddings/largest_logit``, the largest absolute logit of this process in the step.
        """
        # The step is over, and later passes are not of it.
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        # All processes gather, and the one that is here measures.
        matrices = self._gathered(model)
        if not here:
            return {}
        numbers: dict[str, float] = {}
        for role, matrix in matrices.items():
            prefix = "input_embeddings" if role == "input" else "embeddings"
            measured = logged(analyze(matrix, self.counts))
            chosen = measured if self.all_measures else measured.keys() & {*FIRST}
            numbers |= {f"{prefix}/{name}": measured[name] for name in measured if name in chosen}
        if self._largest_logit is not None:
            numbers["embeddings/largest_logit"] = float(self._largest_logit)
            self._largest_logit = None
        self._warn(numbers)
        return numbers

    def _gathered(self, model: Any) -> dict[str, Tensor]:
        """The whole matrices by role, on every process."""
        if torch.distributed.is_available():
            from torch.distributed.fsdp import FSDPModule

            # Gathered parameters become the shards again, which the optimizer has updated.
            for module in model.modules() if isinstance(model, nn.Module) else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
        matrices = {role: matrix.detach() for role, matrix in self.find(model).items()}
        if not matrices:
            raise ValueError(
                f"{type(model).__name__} has no clear token embeddings: pass embeddings=, such as "
                'lambda model: {"output": model.head.weight}'
            )
        for role, matrix in matrices.items():
            if hasattr(matrix, "full_tensor"):
                matrices[role] = matrix.full_tensor()
        return matrices

    def _warn(self, numbers: Mapping[str, float]) -> None:
        """Warn of numbers above their limits, unless they were so when last measured."""
        limits = {name: LIMITS.get(name.rpartition("/")[2], math.inf) for name in numbers}
        exceeded = {name for name, number in numbers.items() if number > limits[name]}
        for name in sorted(exceeded - self._exceeded):
            warnings.warn(
                f"{name} is {numbers[name]:.4g}, above the limit of {limits[name]:g}", stacklevel=3
            )
        self._exceeded = exceeded
