"""Muon for the hidden matrices, the arm's optimizer for all others."""

import torch
from transformers import PreTrainedModel

from coupled_adam.lab.recipe import Recipe

from .loop import Optimizers, Variant


def optimizers(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizers:
    """Two; Muon's updates are scaled to the size of AdamW's, so that they share the rate."""
    options = recipe.training
    others = recipe.arm(arm).optimizer(model, options)
    hidden = []
    for group in others.param_groups:
        # What decays are the hidden matrices: neither embeddings, nor norms, nor biases.
        if group["weight_decay"] > 0:
            hidden += group["params"]
    others.param_groups = [g for g in others.param_groups if g["weight_decay"] == 0]
    muon = torch.optim.Muon(
        hidden,
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, others]


MUON = Variant(optimizers=optimizers)
