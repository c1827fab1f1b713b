"""Other ways to keep the mean embedding at the origin, or the logits in bounds.

Mean subtraction after each step and the mean's penalty: arXiv 2601.02031. z-loss: Chowdhery et al.,
arXiv 2204.02311. Soft-capping: Gemma 2, arXiv 2408.00118.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedModel

from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.run import output_embeddings

from .loop import Variant


def subtract_mean(model: PreTrainedModel) -> None:
    """e_i - mu for all i."""
    with torch.no_grad():
        weight = output_embeddings(model)
        weight -= weight.mean(0)


def recenter(model: PreTrainedModel) -> None:
    """The same, and the model computes what it did before.

    The logits of a position all change by mu . h, which the softmax does not see. What the input
    side of tied embeddings loses is added to the learned positions, each of which is added once to
    every token.
    """
    assert isinstance(model, GPT2LMHeadModel)
    assert model.config.tie_word_embeddings
    with torch.no_grad():
        weight = output_embeddings(model)
        mean = weight.mean(0)
        weight -= mean
        model.transformer.wpe.weight += mean


def mean_penalty(strength: float) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    """``strength`` |mu|^2."""
    return lambda model, _: strength * output_embeddings(model).mean(0).square().sum()


def z_loss(strength: float) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    """``strength`` times the mean of log(sum_i exp(l_i))^2."""
    return lambda _, logits: strength * logits.logsumexp(-1).square().mean()


class SoftCap(nn.Module):
    """cap tanh(l / cap), behind the head."""

    def __init__(self, head: nn.Linear, cap: float) -> None:
        super().__init__()
        self.head, self.cap = head, cap

    @property
    def weight(self) -> Tensor:
        """The head's."""
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(hidden)
        return self.cap * torch.tanh(logits / self.cap)


def soft_capped(cap: float) -> Callable[[Recipe], PreTrainedModel]:
    """The recipe's model, with bounded logits."""

    def build(recipe: Recipe) -> PreTrainedModel:
        model = build_model(recipe)
        model.lm_head = SoftCap(model.lm_head, cap)
        return model

    return build


ALTERNATIVES = {
    "centered_each_step": Variant(after_step=subtract_mean),
    **{f"mean_loss_{s:g}": Variant(penalty=mean_penalty(s)) for s in (1e-4, 1e-2, 1.0)},
    "z_loss": Variant(penalty=z_loss(1e-4)),
    "soft_cap": Variant(build=soft_capped(30.0)),
    "centered_at_the_end": Variant(at_the_end=subtract_mean),
    "recentered_at_the_end": Variant(at_the_end=recenter),
}
"""With AdamW."""
