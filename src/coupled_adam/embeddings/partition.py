"""The isotropy of an embedding matrix, from the partition function Z(c) = sum_i exp(c . e_i)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, OnRows, as_array

_LARGE = 2**34  # multiplications, about a second of a processor core in float64
_LONG = 40.0  # exponents up to this have errors of about 1e-6 in float32


def isotropy(
    embeddings: Embeddings, *, convention: Literal["sign_safe", "published"] = "sign_safe"
) -> float:
    r"""Isotropy, min_c Z(c) / max_c Z(c) with Z(c) = sum_i exp(c . e_i), from 0 to 1 (isotropic).

    c runs over the eigenvectors of E^T E (Mu & Viswanath 2018; arXiv 2502.08441). As the sign of an
    eigenvector is arbitrary and Z(c) differs from Z(-c), the published definition depends on the
    signs that the linear-algebra library happens to return.

    Args:
        embeddings: [V, H].
        convention: ``"sign_safe"`` evaluates both signs of every eigenvector. The result is
            reproducible, and never above the published value for the same eigenvectors.
            ``"published"`` uses the signs that ``torch.linalg.eigh`` returns, for comparison with
            values in the literature, which can vary by tens of percent for this reason alone.
    """
    if convention not in ("sign_safe", "published"):
        raise ValueError(f"Invalid convention: {convention!r} ('sign_safe' or 'published')")
    log_z = _log_partition(embeddings)
    return isotropy_of(log_z[:1] if convention == "published" else log_z)


def isotropy_unit(embeddings: Embeddings) -> float:
    """The :func:`isotropy` of E divided by its mean row norm, from 0 to 1 (isotropic).

    Z is exponential in the norms, so that of two clouds of the same shape the larger one has the
    lower :func:`isotropy`. At unit mean norm only the shape counts. Both signs of every eigenvector
    are evaluated.

    Raises:
        ValueError: also if every row is zero.
    """
    average = float(geometry.row_norms(embeddings).mean())
    geometry.check_not_zero(average)
    return isotropy_of(_log_partition(embeddings, average))


def isotropy_of(log_z: Array) -> float:
    """The isotropy, from the logarithms of Z in any shape."""
    return float(np.exp(log_z.min() - log_z.max()))


@dataclasses.dataclass(frozen=True)
class Directions:
    """The eigenvectors c of a cloud of rows for which Z(c) and Z(-c) are to be computed."""

    axes: Tensor  # [H, n]
    longest: float  # a bound on the norms of the rows
    units: Sequence[float]  # Z is computed for the rows divided by each of these
    center: Tensor | float = 0.0  # [H], subtracted from the rows first


def log_partitions(
    embeddings: Embeddings,
    clouds: Sequence[Directions],
    keep: Mask | None = None,
    on_rows: OnRows = None,
) -> list[list[Array]]:
    """Log Z(c) and log Z(-c), [2, n], for each unit of each cloud, in one pass over the rows.

    The exponents c . e_i of a large matrix are computed in float32, unless its rows are long: the
    isotropy then changes by about 1e-6 of its value.
    """
    products = math.prod(embeddings.shape) * sum(cloud.axes.shape[1] for cloud in clouds)
    longest = max(cloud.longest / unit for cloud in clouds for unit in cloud.units)
    dtype = torch.float32 if products >= _LARGE and longest < _LONG else torch.float64
    # Stored column by column, the directions make the product in float64 twice as fast.
    axes = [cloud.axes.T.to(dtype).contiguous() for cloud in clouds]
    centers = [torch.as_tensor(cloud.center).to(axes[0]) for cloud in clouds]
    logs: list[list[Tensor | float]] = [[-math.inf] * len(cloud.units) for cloud in clouds]
    for block in geometry.blocks(embeddings, keep, on_rows, dtype):
        for cloud, directions, center, totals in zip(clouds, axes, centers, logs):
            exponents = directions @ (block - center).T  # [n, rows]
            for index, unit in enumerate(cloud.units):
                new = _log_sums(exponents / unit, longest)
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


def _log_partition(embeddings: Embeddings, unit: float = 1.0) -> Array:
    """Log Z(c) and log Z(-c), [2, H], of E / unit for its eigenvectors c."""
    _, norms = geometry.mean_and_norms(embeddings)
    axes = torch.linalg.eigh(geometry.gram(embeddings))[1]
    return log_partitions(embeddings, [Directions(axes, float(norms.max()), [unit])])[0][0]
