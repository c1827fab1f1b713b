"""A run that changes its optimizer half-way, with and without moving the mean to the origin."""

import functools

from torch.optim import AdamW
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.recipe import Recipe

from .alternatives import recenter
from .loop import Optimizers, Variant


def couple(
    model: PreTrainedModel, optimizers: Optimizers, recipe: Recipe, centered: bool
) -> Optimizers:
    """AdamW's state handed over to Coupled Adam, as docs/switching.md has it."""
    if centered:
        recenter(model)
    (adamw,) = optimizers
    options = recipe.training
    groups = param_groups(model, weight_decay=options.weight_decay)
    coupled = CoupledAdamW(groups, options.lr, options.betas, options.eps)
    params = [p for group in coupled.param_groups for p in group["params"]]
    state = {i: adamw.state[p] for i, p in enumerate(params) if p in adamw.state}
    own = coupled.state_dict()["param_groups"]
    coupled.load_state_dict({"state": state, "param_groups": own})
    return [coupled]


def only_recenter(model: PreTrainedModel, optimizers: Optimizers, _: Recipe) -> Optimizers:
    """On with AdamW, from the origin."""
    assert isinstance(optimizers[0], AdamW)
    recenter(model)
    return optimizers


SWITCHING = {
    "switched": Variant(half_way=functools.partial(couple, centered=False)),
    "recentered_and_switched": Variant(half_way=functools.partial(couple, centered=True)),
    "recentered": Variant(half_way=only_recenter),
}
"""Begun with AdamW."""
