"""An 8-bit core beside the embeddings' optimizer, as one optimizer (``core=``)."""

import importlib

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.arms import AdamWArm, Arm, CoupledAdamArm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import losses


def eight_bit(embeddings_too: bool) -> Variant:
    """bitsandbytes' AdamW8bit with the recipe's rate and betas, for all or all but the embeddings.

    Args:
        embeddings_too: whether it updates the embeddings as well, with the arm's rate and betas.
    """

    def build(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
        bitsandbytes = importlib.import_module("bitsandbytes")  # installed for this question alone

        training = recipe.training
        assert isinstance(arm, AdamWArm | CoupledAdamArm)
        embeddings = arm.for_embeddings(training, training.betas)
        if isinstance(arm, CoupledAdamArm):
            embeddings |= {"row_exponent": arm.row_exponent, "zero_sum": arm.zero_sum}
        else:
            embeddings["coupled"] = False
        rate, decay = training.lr, training.weight_decay

        def core(groups: list[dict[str, object]]) -> Optimizer:
            optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(
                groups, rate, training.betas, training.eps, weight_decay=decay
            )
            return optimizer

        groups = param_groups(model, embeddings, weight_decay=decay)
        if embeddings_too:
            own = ("params", "lr", "betas", "weight_decay")
            return core([{k: v for k, v in g.items() if k in own} for g in groups])
        return CoupledAdamW(groups, rate, training.betas, training.eps, core=core)

    return Variant(build_optimizer=build, sequence_losses=losses)


EIGHT_BIT_CORE, EIGHT_BIT_ALL = eight_bit(False), eight_bit(True)
