"""Stochastic rounding of float32 to bfloat16: at random up or down, exact in expectation.

With rounding to nearest, an update smaller than half the distance between neighbouring bfloat16
numbers is lost at every step. With stochastic rounding it is applied on average. The random numbers
are a function of the step, the matrix and the element's position in it. So no random state has
to be saved, and all ranks, replicas and kernels round in the same way.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coupled_adam.optim.sharded import global_offset

_MASK = 2**32 - 1


class Noise(NamedTuple):
    """What determines the random numbers of a part [rows, columns] of a matrix [V, H] at a step.

    Attributes:
        step: the number of the step, starting with 1; a 0-dim tensor if it must not be read.
        row, column: the position of the part's first element in the full matrix.
        salt: a number below 2^32 that differs from matrix to matrix.
    """

    step: float | Tensor
    row: int = 0
    column: int = 0
    salt: int = 0

    @property
    def key(self) -> int | Tensor:
        """The hash of the step and the salt, int64 below 2^32; a tensor if the step is one."""
        step = self.step
        return mix((step.long() if isinstance(step, Tensor) else int(step)) ^ self.salt)


def mix(number: int | Tensor) -> int | Tensor:
    """A 32-bit hash, the finalizer of MurmurHash3, of numbers or int64 tensors below 2^32."""
    number = number ^ (number >> 16)
    number = (number * 0x85EBCA6B) & _MASK
    number = number ^ (number >> 13)
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)


def noise_of(group: dict[str, Any], p: Tensor, step: float | Tensor, index: int) -> Noise | None:
    """The noise for this rank's part of a parameter, or None to round to nearest.

    Args:
        group: the parameter's param group.
        p: the parameter, a plain tensor or a DTensor.
        step: the number of the step, or a 0-dim tensor.
        index: the matrix's number among the optimizer's.
    """
    if not group["stochastic_rounding"] or p.dtype != torch.bfloat16:
        return None
    row, column = global_offset(p) if group["vocab_dim"] == 0 else reversed(global_offset(p))
    # Spread over the upper bits, as steps are small numbers: no two pairs of both are the same.
    return Noise(step, row, column, salt=(index * 0x9E3779B1) & _MASK)


def round_(target: Tensor, values: Tensor, noise: Noise) -> None:
    """Round ``values`` [rows, columns], float32, stochastically into the bfloat16 ``target``."""
    rows, columns = values.shape
    row = torch.arange(rows, device=values.device) + noise.row  # [rows]
    column = torch.arange(columns, device=values.device) + noise.column  # [columns]
    # A key for each row first, so that the hash of an element takes one more call of mix.
    keys = mix(mix(row) ^ noise.key)
    assert isinstance(keys, Tensor)
    random = mix(keys[:, None] ^ column)  # [rows, columns]
    assert isinstance(random, Tensor)
    # A bfloat16 is the upper half of a float32. Adding 16 random bits to the lower half carries
    # into the upper half with a probability equal to the fraction that rounding down would cut off.
    # NaN is left out, as a carry could turn it into another number.
    bits = (values.view(torch.int32) + (random >> 16).int()) & -(2**16)
    target.copy_(torch.where(values.isnan(), values, bits.view(torch.float32)))
