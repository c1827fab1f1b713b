"""The isotropy of an embedding matrix, from the partition function Z(c) = sum_i exp(c . e_i)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, as_array

_LARGE = 2**34  # multiplications, about a second of a processor core in float64
_LONG = 40.0  # exponents up to this have errors of about 1e-6 in float32


def isotropy(embeddings: Embeddings) -> float:
    r"""Isotropy, min_c Z(c) / max_c Z(c) with Z(c) = sum_i exp(c . e_i), from 0 to 1 (isotropic).

    c runs over the eigenvectors of E^T E [V, H] and their negatives (Mu & Viswanath 2018; arXiv
    2502.08441). As the sign of an eigenvector is arbitrary and Z(c) differs from Z(-c), the
    published definition, ``analyze(E).isotropy_published``, depends on the signs that the
    linear-algebra library happens to return; this one is never above it.
    """
    longest = float(geometry.mean_and_norms(embeddings)[1].max())
    axes = torch.linalg.eigh(geometry.gram(embeddings))[1]
    return isotropy_of(log_partitions(embeddings, [Directions(axes, longest, [1.0])])[0][0])


def isotropy_of(log_z: Array) -> float:
    """The isotropy, from the logarithms of Z in any shape, such as [2, n]."""
    # By the difference of logarithms, as Z itself may overflow.
    return float(np.exp(log_z.min() - log_z.max()))


@dataclasses.dataclass(frozen=True)
class Directions:
    """The eigenvectors c of a cloud of rows for which Z(c) and Z(-c) are to be computed."""

    axes: Tensor  # [H, n]
    longest: float  # a bound on the norms of the rows
    units: Sequence[float]  # Z is computed for the rows divided by each of these
    center: Tensor | float = 0.0  # [H], subtracted from the rows first


def log_partitions(
    embeddings: Embeddings, clouds: Sequence[Directions], keep: Mask | None = None
) -> list[list[Array]]:
    """Log Z(c) and log Z(-c), [2, n], for each unit of each cloud, in one pass over the rows.

    The exponents c . e_i of a large matrix are computed in float32, unless its rows are long: the
    isotropy then changes by about 1e-6 of its value.
    """
    products = math.prod(embeddings.shape) * sum(cloud.axes.shape[1] for cloud in clouds)
    longest = max(cloud.longest / unit for cloud in clouds for unit in cloud.units)
    dtype = torch.float32 if products >= _LARGE and longest < _LONG else torch.float64
    # Stored column by column, the directions make the product in float64 twice as fast.
    axes = [cloud.axes.T.to(dtype).contiguous() for cloud in clouds]  # [n, H] each
    centers = [torch.as_tensor(cloud.center).to(axes[0]) for cloud in clouds]
    logs: list[list[Tensor | float]] = [[-math.inf] * len(cloud.units) for cloud in clouds]
    for block in geometry.blocks(embeddings, keep, dtype):
        for cloud, directions, center, totals in zip(clouds, axes, centers, logs):
            exponents = directions @ (block - center).T  # [n, rows]
            for index, unit in enumerate(cloud.units):
                new = _log_sums(exponents / unit, longest)  # [2, n]
                totals[index] = torch.logaddexp(new, torch.as_tensor(totals[index]).to(new))
    return [[as_array(torch.as_tensor(total)) for total in totals] for totals in logs]


def _log_sums(exponents: Tensor, longest: float) -> Tensor:
    """The logarithms, in float64, of the sums of exp(t) and of exp(-t) over each row, [2, n]."""
    if longest > 300:  # the exponentials themselves would overflow
        return torch.stack([torch.logsumexp(sign * exponents, 1) for sign in (1, -1)])
    # One exponential serves both signs.
    z = exponents.exp()
    positive = z.sum(1, dtype=torch.float64)
    return torch.stack([positive, z.reciprocal_().sum(1, dtype=torch.float64)]).log()
