"""Runs that differ from their recipe in code: other models, optimizers, losses, interventions."""

import dataclasses
import importlib
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.errors import UsageError, one_line
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import sequence_losses


def build_optimizer(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
    """The optimizer of an arm of the recipe."""
    return arm.build_optimizer(model, recipe.training)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a run does differently from its recipe; by default nothing.

    A recipe names it, as ``variant: module:NAME``. A run with a variant is trained, logged,
    checkpointed and resumed like any other. The variant's functions must therefore depend on their
    arguments only. Interventions change the model's parameters in place under ``torch.no_grad()``;
    with FSDP2 the parameters are DTensors.

    build_model: the model with its initial weights, from the recipe.
    build_optimizer: one optimizer for the model, from the recipe and one of its arms.
    sequence_losses: the loss of each sequence, [batch], from the model and ``blocks``, [batch,
        length + 1]. Its mean is trained on (``model.training`` is true) and reported for held-out
        text (``model.training`` is false). A penalty belongs to the former only.
    after_step: called with the model after each optimizer step.
    half_way: called with the model and the optimizer after half of the steps, rounded down. Options
        of the optimizer that it changes must be those of its ``param_groups``, which are saved.
    at_the_end: called with the trained model before it is saved.
    is_causal: whether it predicts tokens from earlier ones alone; false for masked tokens.
    """

    build_model: Callable[[Recipe], PreTrainedModel] = build_model
    build_optimizer: Callable[[PreTrainedModel, Recipe, Arm], Optimizer] = build_optimizer
    sequence_losses: Callable[[PreTrainedModel, Tensor], Tensor] = sequence_losses
    after_step: Callable[[PreTrainedModel], None] | None = None
    half_way: Callable[[PreTrainedModel, Optimizer], None] | None = None
    at_the_end: Callable[[PreTrainedModel], None] | None = None
    is_causal: bool = True


def load_variant(name: str | None) -> Variant:
    """The variant ``module:name``, whose module is imported; None is the recipe as it is.

    Raises UsageError if Python cannot import it, or it is not a variant.
    """
    if name is None:
        return Variant()
    # This executes the module. Callers have asked the user, see RunOptions and trusted_run.
    module, _, attribute = name.partition(":")
    try:
        variant = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"variant={name}: {one_line(error)}") from None
    if not isinstance(variant, Variant):
        raise UsageError(f"variant={name} is a {type(variant).__name__}, not a Variant")
    return variant
