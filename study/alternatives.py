"""Alternatives that keep the mean embedding at the origin, or the logits bounded.

Subtracting the mean after each step and a penalty on the mean are from arXiv 2601.02031, z-loss is
from PaLM (arXiv 2204.02311), and soft-capping of the logits is from Gemma 2 (arXiv 2408.00118).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from coupled_adam.lab.models import model_config, output_embeddings
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import cross_entropy_by_sequence
from coupled_adam.lab.training.variant import Variant

Penalty = Callable[[PreTrainedModel, Tensor], Tensor]
"""A function from the model and its logits [batch, length, V] to a scalar."""


def subtract_mean(model: PreTrainedModel) -> None:
    """Subtract the mean embedding mu from each embedding e_i, in place."""
    with torch.no_grad():
        weight = output_embeddings(model)
        weight -= weight.mean(0)


def recenter(model: PreTrainedModel) -> None:
    """Subtract the mean embedding mu from each embedding without changing the model's predictions.

    As output embeddings: all logits of a position decrease by the same mu . h, which does not
    affect the softmax. As input embeddings: every token's embedding decreases by mu, and mu is
    added to all position embeddings instead, so that their sum does not change.
    """
    assert isinstance(model, GPT2LMHeadModel)
    assert model.config.tie_word_embeddings
    with torch.no_grad():
        weight = output_embeddings(model)
        mean = weight.mean(0)
        weight -= mean
        model.transformer.wpe.weight += mean


def mean_penalty(strength: float) -> Penalty:
    """The penalty ``strength`` * |mu|^2 on the mean of the output embeddings."""
    return lambda model, _: strength * output_embeddings(model).mean(0).square().sum()


def z_loss(strength: float) -> Penalty:
    """The penalty ``strength`` * mean((log sum_i exp(l_i))^2) on the logits l_i."""
    return lambda _, logits: strength * logits.logsumexp(-1).square().mean()


def penalized(penalty: Penalty) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    """The loss of each sequence, to which the penalty is added in training."""

    def losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
        logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
        by_sequence = cross_entropy_by_sequence(logits, blocks)
        return by_sequence + penalty(model, logits) if model.training else by_sequence

    return losses


class SoftCappedGPT2(GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """GPT-2 with logits cap * tanh(l / cap), where cap is the configuration's ``soft_cap``."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Same as for GPT-2, but without computing a loss."""
        output = super().forward(*arguments, **options)
        cap = self.config.soft_cap
        output.logits = cap * torch.tanh(output.logits / cap)
        return output


def soft_capped(cap: float) -> Callable[[Recipe], PreTrainedModel]:
    """A function that builds the recipe's GPT-2 with logits between -cap and cap."""

    def build(recipe: Recipe) -> PreTrainedModel:
        config = model_config(recipe)
        assert isinstance(config, GPT2Config)
        config.soft_cap = cap
        return SoftCappedGPT2(config)

    return build


# All are trained with AdamW.
CENTERED_EACH_STEP = Variant(after_step=subtract_mean)
MEAN_LOSS_00001 = Variant(sequence_losses=penalized(mean_penalty(1e-4)))
MEAN_LOSS_001 = Variant(sequence_losses=penalized(mean_penalty(1e-2)))
MEAN_LOSS_1 = Variant(sequence_losses=penalized(mean_penalty(1.0)))
Z_LOSS = Variant(sequence_losses=penalized(z_loss(1e-4)))
SOFT_CAP = Variant(build_model=soft_capped(30.0))
CENTERED_AT_THE_END = Variant(at_the_end=subtract_mean)
RECENTERED_AT_THE_END = Variant(at_the_end=recenter)
