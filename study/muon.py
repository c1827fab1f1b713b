"""Muon for the hidden matrices, and the arm's optimizer for all other parameters.

As the arm ``muon`` of a recipe, except that learned positions have the embeddings' learning rate,
and that the head of an untied model has one of its own.
"""

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.lab.arms import Arm, CoupledAdamArm, MuonArm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


def with_rates(embeddings: float = 1.0, head: float = 1.0) -> Variant:
    """Muon at the recipe's learning rate, for which its updates are scaled to the size of AdamW's.

    Args:
        embeddings: the learning rate of the embeddings, of positions too, relative to Muon's.
        head: that of the output embeddings, for a model that does not tie them.
    """

    def build(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
        training = recipe.training
        muon = MuonArm(coupled=False, lr_factor=embeddings)
        if isinstance(arm, CoupledAdamArm):
            muon = MuonArm(
                lr_factor=embeddings, row_exponent=arm.row_exponent, zero_sum=arm.zero_sum
            )
        rates = {} if recipe.model.tied else {"head_lr": head * training.lr}
        optimizer = muon.build_optimizer(model, training, **rates)
        (*_, positions) = optimizer.param_groups
        positions["lr"] = embeddings * training.lr
        return optimizer

    return Variant(build_optimizer=build)


MUON_025, MUON_1, MUON_4, MUON_16 = map(with_rates, (0.25, 1, 4, 16))
MUON_1_025, MUON_1_1 = with_rates(1, 0.25), with_rates(1, 1)
MUON_4_025, MUON_4_1 = with_rates(4, 0.25), with_rates(4, 1)
