"""Runs that change half-way: a switch to Coupled Adam, recentered embeddings, or both."""

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .alternatives import recenter


def not_yet_coupled(model: PreTrainedModel, recipe: Recipe, _: Arm) -> Optimizer:
    """AdamW, as a CoupledAdamW without coupled groups, which :func:`couple` can switch."""
    options = recipe.training
    groups = param_groups(model, weight_decay=options.weight_decay)
    optimizer = CoupledAdamW(groups, options.lr, options.betas, options.eps)
    for group in optimizer.param_groups:
        group["coupled"] = False
    return optimizer


def couple(model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Switch the embeddings to Coupled Adam, and convert the state as in docs/switching.md.

    Checkpoints contain the groups' ``coupled``, so a resumed run knows whether it has switched.
    """
    coupled = {id(p) for g in param_groups(model) if g["coupled"] for p in g["params"]}
    for group in optimizer.param_groups:
        group["coupled"] = id(group["params"][0]) in coupled
    optimizer.load_state_dict(optimizer.state_dict())


def recenter_and_couple(model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Move the mean embedding to the origin, then switch to Coupled Adam."""
    recenter(model)
    couple(model, optimizer)


def only_recenter(model: PreTrainedModel, _: Optimizer) -> None:
    """Move the mean embedding to the origin, and continue with AdamW."""
    recenter(model)


# All are started with AdamW.
SWITCHED = Variant(build_optimizer=not_yet_coupled, half_way=couple)
RECENTERED_AND_SWITCHED = Variant(build_optimizer=not_yet_coupled, half_way=recenter_and_couple)
RECENTERED = Variant(half_way=only_recenter)
