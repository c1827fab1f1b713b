"""The isotropy of an embedding matrix, from the partition function Z(c) = sum_i exp(c . e_i).

Z is computed only for directions c that can have the largest or smallest, which
:func:`extreme_directions` finds. The exponents of large matrices are in float32 (see
:func:`sum_partitions`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, OnRows, as_array

_LARGE = 2**38  # multiplications, about ten seconds of a processor core in float64


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
    published = convention == "published"
    log_z = _log_partition(embeddings, published=published)
    return isotropy_of(log_z[:1] if published else log_z)


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
    return isotropy_of(_log_partition(embeddings, unit=average))


def _log_partition(embeddings: Embeddings, unit: float = 1.0, *, published: bool = False) -> Array:
    """Log Z(c) and log Z(-c), [2, n], of E / unit for the eigenvectors c that can be extreme."""
    mean, norms = geometry.mean_and_norms(embeddings)
    squares, axes = torch.linalg.eigh(geometry.gram(embeddings))
    means = mean @ axes
    longest = float(norms.max())
    variances, reach = squares / len(norms) - means**2, longest + float(mean.norm())
    extreme = extreme_directions(means, variances, reach, unit, published)
    directions = Directions(axes, longest, [(unit, extreme)])
    sum_partitions(embeddings, [directions])
    return directions.log_z(0)


def isotropy_of(log_z: Array) -> float:
    """The isotropy, from the logarithms of Z in any shape."""
    return float(np.exp(log_z.min() - log_z.max()))


def project(rows: Tensor, directions: Tensor) -> Tensor:
    """Project rows onto directions, the columns of [H, n]; the result is [rows, n]."""
    # Stored column by column, sums over the rows are about 1.5 times as fast; if the directions
    # are, too, the product in float64 is twice as fast.
    return (directions.T @ rows.T).T


def extreme_directions(
    means: Tensor, variances: Tensor, reach: float, unit: float, published: bool
) -> Tensor:
    r"""Which of n directions c can have the largest or smallest Z(c) of E / unit, [n] booleans.

    exp(t) = 1 + t + t^2 f(t), where f(t) = (exp(t) - 1 - t) / t^2 increases with t. For the
    projections c . e_i with mean m, variance v, and distances from m of at most R, this gives

    .. math:: e^m (1 + f(-R) v) \le Z(c) / V \le e^m (1 + f(R) v)

    A direction whose bounds lie between those of others can have neither the largest nor the
    smallest Z. In trained embeddings, whose variances differ a lot, those are most directions.
    Means and variances are m and v of each, [n], and reach is R or a bound on it. If ``published``,
    they are compared with one sign each, too, and not only with both.
    """
    reach, means = reach / unit, means / unit
    if reach > 300 or not len(means):
        return torch.ones_like(means, dtype=torch.bool)
    variances = variances.clamp(min=0) / unit**2
    # With room for the rounding errors of the eigenvalues, relative to the largest.
    rounding = 1e-9 * (1 + _quadratic(reach) * float(variances.max()))
    signed = means.new_tensor([[1.0], [-1.0]]) * means
    return _can_be_extreme(
        signed + torch.log1p(_quadratic(-reach) * variances) - rounding,
        signed + torch.log1p(_quadratic(reach) * variances) + rounding,
        published,
    )


def _can_be_extreme(lower: Tensor, upper: Tensor, published: bool) -> Tensor:
    """The same, given bounds on log Z for both signs, [2, n] each."""
    extreme = torch.zeros_like(lower[0], dtype=torch.bool)
    if not len(extreme):
        return extreme
    for low, high in ((lower, upper), *[(lower[:1], upper[:1])] * published):
        extreme = extreme | ((low <= high.min()) | (high >= low.max())).any(0)
    return extreme


def _quadratic(t: float) -> float:
    """f(t) = (exp(t) - 1 - t) / t^2."""
    if abs(t) < 1e-3:
        return 0.5 + t / 6 + t**2 / 24
    return (math.expm1(t) - t) / t**2


class LogPartition:
    r"""Accumulates log Z(c) of Z(c) = sum_i exp(c . e_i), for n directions c and for each -c.

    Args:
        largest: a bound on all \|c . e_i\|.
    """

    def __init__(self, largest: float) -> None:
        self._largest = largest
        self._log_sums: Tensor | None = None

    def add(self, projections: Tensor, norms: Tensor) -> None:
        """Add a block of rows, given c . e_i, [rows, n], and ||e_i||, [rows]; float32 or 64."""
        if self._largest < (80 if projections.dtype == torch.float32 else 300):
            # One exponential serves both signs, without overflow.
            z = projections.exp()
            sums = [z.sum(0, dtype=torch.float64), norms @ z]
            z.reciprocal_()
            sums += [z.sum(0, dtype=torch.float64), norms @ z]
            new = torch.stack([total.double() for total in sums]).log()
        else:
            exponents, log_norms = projections.double(), norms.double().log()[:, None]
            new = torch.stack(
                [
                    torch.logsumexp(signed + weights, 0)
                    for signed in (exponents, -exponents)
                    for weights in (torch.zeros_like(log_norms), log_norms)
                ]
            )
        self._log_sums = new if self._log_sums is None else torch.logaddexp(self._log_sums, new)

    def log_z(self) -> Array:
        """Log Z(c) and log Z(-c), [2, n]."""
        assert self._log_sums is not None
        return as_array(self._log_sums[::2])

    def mean_norms(self) -> Array:
        """The mean norms of the rows, weighted by exp(c . e_i) and exp(-c . e_i), [2, n]."""
        assert self._log_sums is not None
        return as_array((self._log_sums[1::2] - self._log_sums[::2]).exp())


@dataclasses.dataclass
class Directions:
    """Eigenvectors of a cloud of rows, and log Z of those that can have the largest or smallest.

    A view is a matrix for which Z is needed: what the rows are divided by, and which of the first m
    eigenvectors can be extreme, [m] booleans.
    """

    axes: Tensor  # [H, n], the eigenvectors
    longest: float  # the largest norm of the rows with the center subtracted
    views: list[tuple[float, Tensor]]
    center: Tensor | float = 0.0  # [H], what is subtracted from the rows

    @property
    def chosen(self) -> Tensor:
        """The eigenvectors of which Z is computed: those that any view needs, [n] booleans."""
        chosen = torch.zeros_like(self.axes[0], dtype=torch.bool)
        for _, extreme in self.views:
            chosen[: len(extreme)] |= extreme
        return chosen

    def begin(self, dtype: torch.dtype) -> None:
        """All blocks of rows follow, in this dtype."""
        self._axes = self.axes.T[self.chosen].to(dtype).T
        self._center = self.center.to(dtype) if isinstance(self.center, Tensor) else self.center
        self._partitions = {unit: LogPartition(self.longest / unit) for unit, _ in self.views}

    def add(self, rows: Tensor) -> None:
        """Add a block of rows, [rows, H]."""
        rows = rows - self._center
        projections, norms = project(rows, self._axes), rows.norm(dim=1)
        for unit, partition in self._partitions.items():
            partition.add(projections / unit, norms / unit)

    def log_z(self, view: int) -> Array:
        """Log Z(c) and log Z(-c) of a view, by its number, for each chosen c among its first m."""
        unit, extreme = self.views[view]
        return self._partitions[unit].log_z()[:, : int(self.chosen[: len(extreme)].sum())]

    def errors(self, view: int) -> Array:
        r"""A bound on the errors of log Z of a view in float32, [2, m'].

        With a unit vector c and u = 2^-24, the rounding error of c . e_i in float32 is at most
        (8 sqrt(H) + 5) u ||e_i||: 8 sqrt(H) u bounds that of H products and sums, except with
        probability 2 exp(-8^2 / 2) = 3e-14 (Higham & Mary 2019, A New Approach to Probabilistic
        Rounding Error Analysis, Theorem 3.1), and 5 u that of the two operands, of the mean and its
        subtraction, and of a division by the mean norm; for the mean, its norm is added to the
        row's. The error of log Z is the mean of these, weighted by exp(c . e_i), and 4 u more for
        the exponential.
        """
        unit, extreme = self.views[view]
        norms = self._partitions[unit].mean_norms()[:, : int(self.chosen[: len(extreme)].sum())]
        norms = norms + float(torch.as_tensor(self.center).norm()) / unit
        errors: Array = ((8 * math.sqrt(len(self.axes)) + 5) * norms + 4) * 2**-24
        return errors

    def narrow(self) -> None:
        """Choose only the eigenvectors that can be extreme, if log Z is that of float32."""
        views = []
        for view, (unit, extreme) in enumerate(self.views):
            log_z, errors = (torch.from_numpy(of(view)) for of in (self.log_z, self.errors))
            narrowed = torch.zeros_like(extreme)
            narrowed[self.chosen[: len(extreme)]] = _can_be_extreme(
                log_z - errors, log_z + errors, published=True
            ).to(extreme.device)
            views.append((unit, narrowed))
        self.views = views


def sum_partitions(
    embeddings: Embeddings,
    clouds: Sequence[Directions],
    keep: Mask | None = None,
    on_rows: OnRows = None,
) -> None:
    """Compute log Z for all clouds in a pass over the rows, or in two if the matrix is large.

    In a large matrix the exponents c . e_i are computed in float32 first. As the isotropy is a
    ratio of two Z, its relative error is at most twice that of :meth:`Directions.errors`. If that
    is below 1e-4, the fourth digit is right. Otherwise the directions that can still be extreme are
    computed once more in float64. ``on_rows`` is called for the first pass.
    """

    def add_all(dtype: torch.dtype, on_rows: Callable[[int], object] | None) -> None:
        for cloud in clouds:
            cloud.begin(dtype)
        for block in geometry.blocks(embeddings, keep, on_rows, dtype):
            for cloud in clouds:
                cloud.add(block)

    rows, columns = embeddings.shape
    if rows * columns * sum(int(cloud.chosen.sum()) for cloud in clouds) < _LARGE:
        add_all(torch.float64, on_rows)
        return
    add_all(torch.float32, on_rows)
    errors = (cloud.errors(view) for cloud in clouds for view in range(len(cloud.views)))
    if 2 * max(error.max(initial=0) for error in errors) > 1e-4:
        for cloud in clouds:
            cloud.narrow()
        add_all(torch.float64, None)
