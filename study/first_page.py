"""The two lines of the README, as they stand there: torch's AdamW, and the line that replaces it.

Nothing is tuned for either: both have the recipe's learning rate and betas for all parameters, and
torch's weight decay. The embeddings' rate of the second follows from the number of steps.
"""

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import losses


def adamw(model: PreTrainedModel, recipe: Recipe, _: Arm) -> Optimizer:
    """The line before: one group, in which everything decays."""
    lr, betas = recipe.training.lr, recipe.training.betas
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, fused=True)


def lean(model: PreTrainedModel, recipe: Recipe, _: Arm) -> Optimizer:
    """The line after."""
    return _lean(model, recipe, recipe.steps)


def lean_15000(model: PreTrainedModel, recipe: Recipe, _: Arm) -> Optimizer:
    """The line after as it was when `steps=` chose 15,000 / steps, which is half of today's."""
    return _lean(model, recipe, 2 * recipe.steps)


def _lean(model: PreTrainedModel, recipe: Recipe, steps: int) -> Optimizer:
    lr, betas = recipe.training.lr, recipe.training.betas
    return CoupledAdamW(model, lr=lr, betas=betas, embeddings="lean", steps=steps, fused=True)


BEFORE = Variant(build_optimizer=adamw, sequence_losses=losses)
AFTER = Variant(build_optimizer=lean, sequence_losses=losses)
AFTER_15000 = Variant(build_optimizer=lean_15000, sequence_losses=losses)
