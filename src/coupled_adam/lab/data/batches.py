"""Blocks of tokens, and batches of blocks.

A block is a sequence and the token that follows its last one: ``length + 1`` token ids.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from coupled_adam.lab.recipe import Recipe
from coupled_adam.text.token_files import Tokens


class Batches:
    """One process's share of each training batch, as token ids [sequences, length + 1].

    The order of the blocks is determined by the seed and differs between epochs. It does not depend
    on the arm, the number of processes or the micro-batch size. Each batch is a function of its
    number, so the number of batches returned so far is all the state that a resumed run needs.
    """

    def __init__(
        self,
        tokens: Tokens | NDArray[Any],
        recipe: Recipe,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.tokens = tokens  # [tokens], which may be a file of many gigabytes
        self.length = recipe.training.sequence_length
        self.batch_size = recipe.training.batch_size
        self.steps = recipe.training.total_steps
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.position = 0  # how many batches have been returned

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        # Blocks share their last token with the next; an epoch leaves out what fills no batch.
        blocks = (len(self.tokens) - 1) // self.length
        per_epoch = blocks // self.batch_size
        share = self.batch_size // self.world_size
        shuffled = -1
        order: NDArray[Any] = np.empty(0)
        while self.position < len(self):
            epoch, batch = divmod(self.position, per_epoch)
            # From seed and epoch alone: all processes agree on the order without a message.
            if epoch != shuffled:
                order = np.random.default_rng((self.seed, epoch)).permutation(blocks)
                shuffled = epoch
            first = batch * self.batch_size + self.rank * share
            starts = order[first : first + share] * self.length
            self.position += 1  # before yield: the state is saved after this batch's step
            yield _blocks(self.tokens, starts, self.length)

    def state_dict(self) -> dict[str, int]:
        """The number of batches returned so far, for Lightning's checkpoints."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that were returned before the checkpoint."""
        self.position = state["position"]


def held_out_loader(
    tokens: Tokens | NDArray[Any], recipe: Recipe, *, rank: int = 0, world_size: int = 1
) -> DataLoader[Any]:
    """A loader of one process's share of a held-out split, to evaluate during training.

    Every process gets the same number of batches, since a forward pass of a sharded model needs all
    processes. Each is blocks [batch, length + 1] with a mask [batch] of the blocks to count: if
    they do not divide evenly, some processes get a block that is not counted.
    """
    training = recipe.training
    length, batch = training.sequence_length, training.batch_size // world_size
    blocks = (len(tokens) - 1) // length
    if training.evaluation_batches is not None:
        blocks = min(blocks, training.evaluation_batches * training.batch_size)
    # Past the last block each process repeats it, and the mask says that it does not count.
    numbers = np.arange(rank, math.ceil(blocks / world_size) * world_size, world_size)
    ids = _blocks(tokens, np.minimum(numbers, blocks - 1) * length, length)
    return DataLoader(TensorDataset(ids, torch.from_numpy(numbers < blocks)), batch)


def held_out_batches(
    tokens: Tokens | NDArray[Any], batch_size: int, sequence_length: int
) -> Iterator[Tensor]:
    """Yield all complete blocks of a split in order, in batches [batch, sequence_length + 1]."""
    starts = range(0, len(tokens) - sequence_length, sequence_length)
    for first in range(0, len(starts), batch_size):
        yield _blocks(tokens, starts[first : first + batch_size], sequence_length)


def _blocks(tokens: Tokens | NDArray[Any], starts: range | NDArray[Any], length: int) -> Tensor:
    """The blocks [n, length + 1] that begin at some places [n] of the tokens."""
    blocks = np.stack([tokens[start : start + length + 1] for start in starts])
    return torch.from_numpy(blocks.astype(np.int64))
