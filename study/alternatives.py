"""Other ways to keep the mean embedding at the origin, or the logits in bounds.

Subtracting the mean after each step, and a penalty on the mean: arXiv 2601.02031. z-loss: Chowdhery
et al., arXiv 2204.02311. Soft-capping: Gemma 2, arXiv 2408.00118.
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
"""A number from the model and its logits, [batch, length, V]."""


def subtract_mean(model: PreTrainedModel) -> None:
    """Subtract the mean embedding from each: e_i - mu."""
    with torch.no_grad():
        weight = output_embeddings(model)
        weight -= weight.mean(0)


def recenter(model: PreTrainedModel) -> None:
    """Subtract the mean embedding from each, and preserve the function of the model.

    All logits of a position change by the same mu . h, which does not affect the softmax. What the
    inputs of tied embeddings lose is added to the learned positions, one of which is added to every
    token.
    """
    assert isinstance(model, GPT2LMHeadModel)
    assert model.config.tie_word_embeddings
    with torch.no_grad():
        weight = output_embeddings(model)
        mean = weight.mean(0)
        weight -= mean
        model.transformer.wpe.weight += mean


def mean_penalty(strength: float) -> Penalty:
    """``strength`` |mu|^2."""
    return lambda model, _: strength * output_embeddings(model).mean(0).square().sum()


def z_loss(strength: float) -> Penalty:
    """``strength`` times the mean of log(sum_i exp(l_i))^2."""
    return lambda _, logits: strength * logits.logsumexp(-1).square().mean()


def penalized(penalty: Penalty) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    """The losses of sequences, in training with a penalty."""

    def losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
        logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
        found = cross_entropy_by_sequence(logits, blocks)
        return found + penalty(model, logits) if model.training else found

    return losses


class SoftCappedGPT2(GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """GPT-2 with the logits cap tanh(l / cap); ``soft_cap`` is part of its configuration."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """As of GPT-2, without a loss of its own."""
        output = super().forward(*arguments, **options)
        cap = self.config.soft_cap
        output.logits = cap * torch.tanh(output.logits / cap)
        return output


def soft_capped(cap: float) -> Callable[[Recipe], PreTrainedModel]:
    """The recipe's GPT-2, with bounded logits."""

    def build(recipe: Recipe) -> PreTrainedModel:
        config = model_config(recipe)
        assert isinstance(config, GPT2Config)
        config.soft_cap = cap
        return SoftCappedGPT2(config)

    return build


ALTERNATIVES = {
    variant.name: variant
    for variant in (
        Variant("centered_each_step", after_step=subtract_mean),
        Variant("mean_loss_0.0001", sequence_losses=penalized(mean_penalty(1e-4))),
        Variant("mean_loss_0.01", sequence_losses=penalized(mean_penalty(1e-2))),
        Variant("mean_loss_1", sequence_losses=penalized(mean_penalty(1.0))),
        Variant("z_loss", sequence_losses=penalized(z_loss(1e-4))),
        Variant("soft_cap", build_model=soft_capped(30.0)),
        Variant("centered_at_the_end", at_the_end=subtract_mean),
        Variant("recentered_at_the_end", at_the_end=recenter),
    )
}
"""By name, all trained with AdamW."""
