"""Gradients that jump: all of them in two steps, or those of one row now and then."""

import dataclasses
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.lab.arms import Arm
from coupled_adam.lab.models import output_embeddings
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import FAST


def _disturbed(jump: Callable[[int, Tensor, bool], None]) -> Variant:
    """A variant that calls ``jump`` with each gradient, its step, and whether it is the table's."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
        optimizer = arm.build_optimizer(model, recipe.training)
        embeddings = output_embeddings(model)

        def disturb(p: Tensor) -> None:
            assert p.grad is not None
            jump(int(optimizer.state.get(p, {}).get("step", 0)), p.grad, p is embeddings)

        # The optimizer's own hooks see the gradients of the step before, as Lightning's closure
        # computes them later.
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(disturb)
        return optimizer

    return dataclasses.replace(FAST, build_optimizer=build)


def _all(step: int, gradient: Tensor, _: bool) -> None:
    """As if the loss of steps 200 and 400 were 10^4 times as large."""
    if step in (200, 400):
        gradient *= 1e4


def _row(step: int, gradient: Tensor, is_table: bool) -> None:
    """One row's gradient is 10^5 times as large in every 97th step."""
    if is_table and step and step % 97 == 0:
        gradient[100] *= 1e5


ALL, ROW = map(_disturbed, (_all, _row))
