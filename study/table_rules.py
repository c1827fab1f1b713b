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


def _lean(columns: str, timing: str, *, zero_sum: bool = True) -> Variant:
    """LEAN's first edition: "plain" columns are those of g, "weighted" of w g, "half" between."""
    weight = {"plain": 0.0, "half": 0.5, "weighted": 1.0}[columns]
    delayed = timing == "delayed"
    return table("first_lean", zero_sum=zero_sum, column_weight=weight, delayed=delayed)


PLAIN_EXACT, PLAIN_DELAYED = _lean("plain", "exact"), _lean("plain", "delayed")
HALF_DELAYED = _lean("half", "delayed")
WEIGHTED_EXACT, WEIGHTED_DELAYED = _lean("weighted", "exact"), _lean("weighted", "delayed")
PLAIN_DELAYED_FREE = _lean("plain", "delayed", zero_sum=False)
WEIGHTED_DELAYED_FREE = _lean("weighted", "delayed", zero_sum=False)
(
    LEAN_LIMIT,
    LEAN_LIMIT_LATER,
    LEAN_LIMIT_FREE,
    LEAN_RELATIVE,
    LEAN_RELATIVE_LATER,
    LEAN_RELATIVE_FREE,
) = (
    table("lean", relative=relative, zero_sum_from=start)
    for relative in (False, True)
    for start in (0.0, 1.0, math.inf)
)
EMBER_FREE, EMBER_ZERO_SUM = (table("ember", zero_sum=z) for z in (False, True))
ADAM_ZERO_SUM = table("adam", zero_sum=True)
ADAFACTOR_FREE, BALANCED_FREE = table("adafactor"), table("balanced")
BALANCED_0_FREE = BALANCED_FREE  # the momentum is the arm's beta1
