"""The cross-entropy of the next token, in nats."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def sequence_losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence, [batch], of all tokens except its first one.

    Args:
        model: a causal language model.
        blocks: token ids [batch, length + 1]: each sequence, and the target of its last token.
    """
    # Not the model's own loss, which is one mean over all sequences.
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits  # [batch, length, V]
    return cross_entropy_by_sequence(logits, blocks)


def cross_entropy_by_sequence(logits: Tensor, blocks: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence, [batch], in float32 or wider.

    Args:
        logits: [batch, length, V], the outputs for all tokens except the last of each sequence.
        blocks: token ids [batch, length + 1].
    """
    # In bfloat16 a loss of 4 would have two digits.
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, blocks[:, 1:].flatten(), reduction="none")
    return losses.view(len(blocks), -1).mean(1)
