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
    training = recipe.training
    return CoupledAdamW(
        model,
        lr=training.lr,
        betas=training.betas,
        embeddings="lean",
        steps=recipe.training.total_steps,
        fused=True,
    )


BEFORE = Variant(build_optimizer=adamw, sequence_losses=losses)
AFTER = Variant(build_optimizer=lean, sequence_losses=losses)
