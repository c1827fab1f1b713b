"""Stochastic rounding of float32 to bfloat16: up or down, so that the mean is the number itself.

An update smaller than half the distance of two bfloat16 numbers is lost when it is rounded to
nearest, at every step; rounded stochastically it arrives in the mean. The random numbers are a
function of the step and of the element's place in the whole matrix: no state has to be saved, and
every rank, copy and kernel rounds alike.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coupled_adam.optim.sharded import global_offset

_MASK = 2**32 - 1


class Noise(NamedTuple):
    """The random numbers of a part [rows, columns] of a matrix [V, H] at a step.

    Attributes:
        step: t, 1 for the first; a 0-dim tensor where it is not to be read.
        row, column: of the part's first element in the whole matrix.
    """

    step: float | Tensor
    row: int = 0
    column: int = 0

    @property
    def key(self) -> int | Tensor:
        """:func:`mix` of the step, int64 below 2^32; a tensor if the step is one."""
        step = self.step
        return mix(step.long() if isinstance(step, Tensor) else int(step))


def rounds_stochastically(group: dict[str, Any], p: Tensor) -> bool:
    """Whether the option concerns a parameter of a coupled group."""
    return bool(group["stochastic_rounding"]) and p.dtype == torch.bfloat16


def mix(number: int | Tensor) -> int | Tensor:
    """A hash of 32 bits, the finalizer of MurmurHash3; int64 tensors, all below 2^32."""
    number = number ^ (number >> 16)
    number = (number * 0x85EBCA6B) & _MASK
    number = number ^ (number >> 13)
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)


def noise_of(group: dict[str, Any], p: Tensor, step: float | Tensor) -> Noise | None:
    """The noise for this rank's part of a parameter at step t, a number or a 0-dim tensor."""
    if not rounds_stochastically(group, p):
        return None
    row, column = global_offset(p) if group["vocab_dim"] == 0 else reversed(global_offset(p))
    return Noise(step, row, column)


def round_(target: Tensor, values: Tensor, noise: Noise) -> None:
    """Write values [rows, columns], float32, into a bfloat16 matrix, rounded stochastically."""
    rows, columns = values.shape
    row = torch.arange(rows, device=values.device) + noise.row
    column = torch.arange(columns, device=values.device) + noise.column
    keys = mix(mix(row) ^ noise.key)
    assert isinstance(keys, Tensor)
    random = mix(keys[:, None] ^ column)
    assert isinstance(random, Tensor)
    # A float32 is a bfloat16 with 16 bits more; a number of 16 bits added carries over with the
    # probability that they say. Not to be added to NaN, whose bits it would carry to others.
    bits = (values.view(torch.int32) + (random >> 16).int()) & -(2**16)
    target.copy_(torch.where(values.isnan(), values, bits.view(torch.float32)))
