"""Muon for the hidden matrices, and the arm's optimizer for all other parameters."""

from typing import Any

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam import MuonWithCoupledAdam
from coupled_adam.lab.arms import AdamWArm, CoupledAdamArm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


def with_rates(name: str, embeddings: float = 1.0, head: float = 1.0) -> Variant:
    """Muon at the recipe's learning rate, for which its updates are scaled to the size of AdamW's.

    Args:
        name: the variant's name.
        embeddings: the learning rate of the embeddings, of positions too, relative to Muon's.
        head: that of the output embeddings, for a model that does not tie them.
    """

    def build(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizer:
        training, options = recipe.training, recipe.arm(arm)
        between: dict[str, Any] = {}
        if isinstance(options, CoupledAdamArm):
            between = {"row_exponent": options.row_exponent, "zero_sum": options.zero_sum}
        positions = [name for name, _ in model.named_parameters() if name.endswith("wpe.weight")]
        optimizer = MuonWithCoupledAdam(
            model,
            training.lr,
            groups={
                "lr_factor": embeddings,
                "head_lr": None if recipe.model.tied else head * training.lr,
                "exclude": positions,
            },
            weight_decay=training.weight_decay,
            betas=training.betas,
            eps=training.eps,
            **between,
        )
        if positions:
            group = {"lr": embeddings * training.lr, "weight_decay": 0.0}
            parameters = [model.get_parameter(name) for name in positions]
            optimizer.add_param_group({"params": parameters, "param_names": positions, **group})
        if isinstance(options, AdamWArm):
            for group in optimizer.param_groups:
                group["coupled"] = False  # which makes CoupledAdamW torch's AdamW
        return optimizer

    return Variant(name, build_optimizer=build)


MUON = with_rates("muon")
