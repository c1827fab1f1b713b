"""Gradients that jump after clipping: all of them in two steps, or one row's now and then."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.lab.arms import Arm
from coupled_adam.lab.models import output_embeddings
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import FAST


def _disturbed(jump: Callable[[int, Optimizer, Tensor], None]) -> Variant:
    """A variant that calls ``jump`` before each step with its number and the embeddings."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
        optimizer = arm.build_optimizer(model, recipe.training)
        embeddings = output_embeddings(model)

        def before(optimizer: Optimizer, *_: Any) -> None:
            jump(int(optimizer.state.get(embeddings, {}).get("step", 0)), optimizer, embeddings)

        optimizer.register_step_pre_hook(before)
        return optimizer

    return dataclasses.replace(FAST, build_optimizer=build)


def _all(step: int, optimizer: Optimizer, _: Tensor) -> None:
    """As if the loss of steps 200 and 400 were 10^4 times as large."""
    if step in (200, 400):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad *= 1e4


def _row(step: int, _: Optimizer, embeddings: Tensor) -> None:
    """One row's gradient is 10^5 times as large in every 97th step."""
    if step and step % 97 == 0:
        assert embeddings.grad is not None
        embeddings.grad[100] *= 1e5


ALL, ROW = map(_disturbed, (_all, _row))
