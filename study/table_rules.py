"""The rules of :mod:`coupled_adam.lab.table_rules` as variants of the arm adamw.

The runs of the study were made and are recorded so, with the arm's betas and rate; a recipe can
have the arm ``{optimizer: table_rule, rule: ember}`` instead.
"""

import dataclasses
import math

from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.lab.arms import AdamWArm, Arm, TableRuleArm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant

from .head import FAST


def table(rule: str, **options: bool | float) -> Variant:
    """The variant of an AdamW arm whose tables are updated by a rule, with the arm's betas."""

    def build(model: PreTrainedModel, recipe: Recipe, arm: Arm) -> Optimizer:
        assert isinstance(arm, AdamWArm)
        beta1, beta2 = recipe.training.betas
        by_rule = TableRuleArm(
            rule=rule,
            rule_options=options,
            lr_factor=arm.lr_factor,
            lr=arm.lr,
            beta1=beta1 if arm.beta1 is None else arm.beta1,
            beta2=beta2 if arm.beta2 is None else arm.beta2,
        )
        return by_rule.build_optimizer(model, recipe.training)

    return dataclasses.replace(FAST, build_optimizer=build)


PLAIN_DELAYED = table("first_lean")
"""LEAN's first edition."""
WEIGHTED_DELAYED = table("first_lean", column_weight=1.0)
"""The same with the columns' second moments weighted by the rows, which the screening tried."""
LEAN_LIMIT, LEAN_LIMIT_LATER, LEAN_LIMIT_FREE = (
    table("lean", zero_sum_from=start) for start in (0.0, 1.0, math.inf)
)
EMBER_FREE, ADAFACTOR_FREE, BALANCED_FREE = map(table, ("ember", "adafactor", "balanced"))
BALANCED_0_FREE = BALANCED_FREE  # the momentum is the arm's beta1
