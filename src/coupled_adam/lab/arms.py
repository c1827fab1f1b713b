"""What is compared: the optimizers of the arms. All else in a run is the same."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from coupled_adam import CoupledAdamW, param_groups

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Training


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm: its name in tables, and its optimizer for a model."""

    label: str
    optimizer: Callable[[nn.Module, "Training"], torch.optim.Optimizer]


def adamw(model: nn.Module, training: "Training") -> torch.optim.Optimizer:
    """AdamW for all parameters."""
    groups = param_groups(model, weight_decay=training.weight_decay)
    for group in groups:
        del group["coupled"]
    return torch.optim.AdamW(groups, training.lr, training.betas, training.eps)


def coupled_adam(model: nn.Module, training: "Training") -> torch.optim.Optimizer:
    """Coupled Adam for the token embeddings, AdamW for the rest."""
    groups = param_groups(model, weight_decay=training.weight_decay)
    return CoupledAdamW(groups, training.lr, training.betas, training.eps)


ARMS = {"adamw": Arm("Standard", adamw), "coupled_adam": Arm("Coupled", coupled_adam)}
"""The arms by name; the labels are the paper's."""
