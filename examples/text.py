"""What examples train: a small GPT-2, a hashed table, the bytes of Python's language reference."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
LENGTH = 64


def small_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Create a small GPT-2 for bytes, with tied embeddings [256, 64] and no dropout."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default; setting it avoids a message
    return model


def batch(step: int, size: int = 16) -> Tensor:
    """Token ids [size, LENGTH] of a step's batch, which is always the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH, (size,), generator=generator)
    return TEXT[starts[:, None] + torch.arange(LENGTH)]


class HashedTrigrams(nn.Module):
    """The embedding of the last three tokens, by a hash of their ids.

    Its table [rows, width] begins with zeros, so that it adds nothing before it has learned.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] to [batch, length, width], on the device of the ids."""
        padded = nn.functional.pad(ids.cpu(), (2, 0))
        first, second, third = (padded[:, i : i + ids.shape[1]] for i in range(3))
        hashes = (first * 36_313 + second * 27_191 + third * 51_647) % self.table.num_embeddings
        rows: Tensor = self.table(hashes)  # where the table is
        if ids.is_cuda:
            rows = rows.pin_memory()  # autograd brings the gradient back the same way
        return rows.to(ids.device, non_blocking=True)
