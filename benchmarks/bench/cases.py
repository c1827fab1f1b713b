"""The parameters whose updates are timed: an embedding matrix, alone or with other parameters."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Case:
    """An embedding matrix and other parameters that are updated in the same optimizer step.

    Attributes:
        rows, columns: the vocabulary size V and the hidden size H of the embedding matrix.
        dtype: the dtype of parameters and gradients, by its name in torch.
        others: the number of additional [64, 64] matrices, which are not coupled.
        clip: whether a step also clips the total norm of the gradients.
    """

    rows: int
    columns: int
    dtype: str = "float32"
    others: int = 0
    clip: bool = False

    @property
    def label(self) -> str:
        """The shape V × H, followed by the attributes that differ from their defaults."""
        label = f"{self.rows:,} × {self.columns:,}"
        if self.dtype != "float32":
            label += f" {self.dtype}"
        if self.others:
            label += f" + {self.others}"
        return label + (", clip" if self.clip else "")

    @property
    def matrix_bytes(self) -> int:
        """Size of the embedding matrix in bytes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.rows * self.columns * itemsize

    def parameters(self, device: str) -> tuple[nn.Parameter, list[nn.Parameter]]:
        """Create the embedding matrix [V, H] and the others, with random values and gradients."""
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"device": device, "dtype": getattr(torch, self.dtype)}

        # Drawn in place: a large matrix should not need its memory twice before it is timed.
        def normal(rows: int, columns: int, std: float) -> Tensor:
            return torch.empty(rows, columns, **options).normal_(std=std, generator=generator)

        def parameter(rows: int, columns: int) -> nn.Parameter:
            p = nn.Parameter(normal(rows, columns, 0.02))
            p.grad = normal(rows, columns, 1e-4)
            return p

        return parameter(self.rows, self.columns), [parameter(64, 64) for _ in range(self.others)]


SHAPES = {
    "cpu": ("256x64", "4096x64", "8192x512", "50304x768", "128256x2048"),
    "cuda": ("8192x512", "50304x768", "128256x4096", "256000x2304"),
}
"""The default cases by device: small vocabularies, GPT-2's, and those of current models."""


def parse_case(shape: str, dtype: str, clip: bool) -> Case:
    """Create a case from a shape as "VxH", such as "50304x768"."""
    rows, columns = map(int, shape.split("x"))
    return Case(rows, columns, dtype, clip=clip)
