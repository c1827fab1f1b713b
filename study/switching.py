"""A run that changes its optimizer half-way, with and without moving the mean to the origin."""

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .alternatives import recenter


def not_yet_coupled(model: PreTrainedModel, recipe: Recipe, _: str) -> Optimizer:
    """AdamW, as what :func:`couple` can switch: Coupled Adam without a coupled group is AdamW."""
    options = recipe.training
    groups = param_groups(model, weight_decay=options.weight_decay)
    optimizer = CoupledAdamW(groups, options.lr, options.betas, options.eps)
    for group in optimizer.param_groups:
        group["coupled"] = False
    return optimizer


def couple(model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Switch the embeddings to Coupled Adam, with the state as docs/switching.md hands it over.

    ``coupled`` is saved with the groups, so that a checkpoint is resumed on the side it is on.
    """
    coupled = {id(p) for g in param_groups(model) if g["coupled"] for p in g["params"]}
    for group in optimizer.param_groups:
        group["coupled"] = id(group["params"][0]) in coupled
    optimizer.load_state_dict(optimizer.state_dict())


def recenter_and_couple(model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Move the mean to the origin, then switch."""
    recenter(model)
    couple(model, optimizer)


def only_recenter(model: PreTrainedModel, _: Optimizer) -> None:
    """Continue with AdamW, from the origin."""
    recenter(model)


SWITCHING = {
    "switched": Variant("switched", build_optimizer=not_yet_coupled, half_way=couple),
    "recentered_and_switched": Variant(
        "recentered_and_switched", build_optimizer=not_yet_coupled, half_way=recenter_and_couple
    ),
    "recentered": Variant("recentered", half_way=only_recenter),
}
"""By name, all started with AdamW."""
