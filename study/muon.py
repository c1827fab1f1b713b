"""Muon for the hidden matrices, and the arm's optimizer for all other parameters."""

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import MuonWithCoupledAdam
from coupled_adam.lab.arms import AdamWArm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


def with_rates(name: str, embeddings: float = 1.0, head: float | None = None) -> Variant:
    """Muon at the recipe's learning rate, for which its updates are scaled to the size of AdamW's.

    Args:
        name: the variant's name.
        embeddings: the learning rate of the embeddings, of positions too, relative to Muon's.
        head: that of the output embeddings, for a model that does not tie them.
    """

    def build(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
        options = recipe.training
        optimizer = MuonWithCoupledAdam(
            model,
            options.lr,
            embedding_lr=embeddings * options.lr,
            head_lr=None if head is None else head * options.lr,
            weight_decay=options.weight_decay,
            betas=options.betas,
            eps=options.eps,
        )
        if isinstance(recipe.arm(arm), AdamWArm):
            for group in optimizer.param_groups:
                group["coupled"] = False  # which makes CoupledAdamW torch's AdamW
        return optimizer

    return Variant(name, build_optimizer=build)


MUON = with_rates("muon")
