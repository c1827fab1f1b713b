"""Tokens -> blocks -> batches.

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
    """The training batches of one process: its share of each, [sequences, length + 1] token ids.

    The order of the blocks follows from the seed and is new in each epoch. It is the same for every
    arm, number of processes and micro-batch size. A batch is a function of its number, so the
    whole state is the number of batches handed out; a resumed run continues from there.
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
        self.tokens = tokens
        self.length = recipe.training.sequence_length
        self.batch_size = recipe.training.batch_size
        self.steps = recipe.steps
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        blocks = (len(self.tokens) - 1) // self.length
        per_epoch = blocks // self.batch_size
        share = self.batch_size // self.world_size
        shuffled = -1
        order: NDArray[Any] = np.empty(0)
        while self.position < len(self):
            epoch, batch = divmod(self.position, per_epoch)
            if epoch != shuffled:
                order = np.random.default_rng((self.seed, epoch)).permutation(blocks)
                shuffled = epoch
            first = batch * self.batch_size + self.rank * share
            starts = order[first : first + share] * self.length
            self.position += 1  # before the batch is used: the state is saved after its step
            yield torch.from_numpy(_blocks(self.tokens, starts, self.length))

    def state_dict(self) -> dict[str, int]:
        """The number of batches handed out, for Lightning's checkpoints."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that had been handed out."""
        self.position = state["position"]


def held_out_loader(
    tokens: Tokens | NDArray[Any], recipe: Recipe, *, rank: int = 0, world_size: int = 1
) -> DataLoader[Any]:
    """One process's share of a held-out split, for the evaluations during training.

    Every process gets the same number of batches, since sharded models need all processes for a
    forward pass; where the blocks do not divide evenly, some are given a block that is not counted.

    Returns:
        Batches of blocks, [batch, length + 1], each with a mask [batch] of those to be counted.
    """
    training = recipe.training
    length, batch = training.sequence_length, training.batch_size // world_size
    blocks = (len(tokens) - 1) // length
    if training.evaluation_batches is not None:
        blocks = min(blocks, training.evaluation_batches * training.batch_size)
    mine = np.arange(rank, math.ceil(blocks / world_size) * world_size, world_size)
    ids = _blocks(tokens, np.minimum(mine, blocks - 1) * length, length)
    return DataLoader(TensorDataset(torch.from_numpy(ids), torch.from_numpy(mine < blocks)), batch)


def held_out_batches(
    tokens: Tokens | NDArray[Any], batch_size: int, sequence_length: int
) -> Iterator[Tensor]:
    """All whole blocks of a held-out split, in order, in batches [batch, sequence_length + 1]."""
    starts = range(0, len(tokens) - sequence_length, sequence_length)
    for first in range(0, len(starts), batch_size):
        part = starts[first : first + batch_size]
        yield torch.from_numpy(_blocks(tokens, part, sequence_length))


def _blocks(
    tokens: Tokens | NDArray[Any], starts: range | NDArray[Any], length: int
) -> NDArray[np.int64]:
    return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
