"""Muon for the hidden matrices, and the arm's optimizer for all other parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


class ChainedOptimizer(Optimizer):
    """Combines optimizers of different parameters, so that they share a schedule and a checkpoint.

    Its param groups and its state are those of the combined optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all optimizers, as returned by :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        first = 0
        for optimizer in self.optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups = self.param_groups[first:last]
            optimizer.state = self.state
            first = last


def optimizers(model: PreTrainedModel, recipe: Recipe, arm: str) -> list[Optimizer]:
    """Create Muon and the arm's optimizer, which use the same learning rate.

    For this, Muon's updates are scaled to the size of AdamW's.
    """
    options = recipe.training
    others = recipe.arm(arm).optimizer(model, options)
    hidden: list[tuple[str, Tensor]] = []
    for group in others.param_groups:
        # Only hidden matrices have weight decay, not embeddings, norms or biases.
        if group["weight_decay"] > 0:
            hidden += zip(group["param_names"], group["params"])
    others.param_groups = [g for g in others.param_groups if g["weight_decay"] == 0]
    muon = torch.optim.Muon(
        hidden,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, others]


def chained(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
    """Both :func:`optimizers`, combined into one."""
    return ChainedOptimizer(optimizers(model, recipe, arm))


MUON = Variant("muon", build_optimizer=chained)
