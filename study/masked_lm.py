"""A BERT trained to predict masked tokens, 15 % of all, as in Devlin et al. (arXiv 1810.04805)."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant


def build(recipe: Recipe) -> PreTrainedModel:
    """Build a BERT of the recipe's size; the last row of the embeddings is that of the mask."""
    options = recipe.model
    return BertForMaskedLM(
        BertConfig(
            vocab_size=options.vocab_size + 1,
            hidden_size=options.n_embd,
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            intermediate_size=4 * options.n_embd,
            max_position_embeddings=recipe.training.sequence_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    """The mean cross-entropy of the chosen tokens of each sequence, [batch].

    80 % of the chosen tokens are masked, 10 % are replaced by another token, and 10 % are kept. The
    choice depends only on the blocks, so that all models predict the same tokens.
    """
    ids = blocks[:, :-1]
    mask = model.config.vocab_size - 1
    generator = torch.Generator().manual_seed(int(ids.sum()))
    # The same number in each sequence, so that all sequences have the same weight.
    order = torch.rand(ids.shape, generator=generator).argsort(1)
    chosen = order < round(0.15 * ids.shape[1])
    fate = torch.rand(ids.shape, generator=generator)
    random_ids = torch.randint(mask, ids.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), mask, ids)
    inputs = torch.where(chosen & (fate >= 0.9), random_ids, inputs)
    logits = model(input_ids=inputs).logits
    by_token = nn.functional.cross_entropy(logits[chosen], ids[chosen], reduction="none")
    return by_token.view(len(ids), -1).mean(1)


MASKED_LM = Variant(build_model=build, sequence_losses=losses, is_causal=False)
