"""The geometry of an embedding matrix: isotropy, mean, spectrum, norms and angles.

Matrices are measured in float64, a block of rows at a time, on their own device (on the CPU if that
is an MPS device, which lacks float64). Only the exponents of the isotropy of a large matrix are
computed in float32, if the error is small (see :func:`sum_partitions`). All functions raise
ValueError unless they are given a non-empty matrix [V, H] of finite real numbers, and TypeError
unless this is a tensor or an array.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from scipy.linalg import blas
from torch import Tensor

Array = NDArray[np.float64]
Embeddings = Tensor | NDArray[Any]
Progress = Callable[[int, int], None]
"""Called with what is done and what is to do, in any unit."""

_BLOCK_BYTES = 2**23  # larger blocks would not stay in the caches
_LARGE = 2**38  # multiplications, about ten seconds of a processor core in float64
_LARGEST = 1e140  # the square is still a float64, and so is that of its inverse
_OUT_OF_RANGE = (
    "embeddings are too {} for float64, which must hold the squares of their numbers (up to {}): "
    "scale the matrix first"
)


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
    average = float(row_norms(embeddings).mean())
    check_not_zero(average)
    return isotropy_of(_log_partition(embeddings, unit=average))


def _log_partition(embeddings: Embeddings, unit: float = 1.0, *, published: bool = False) -> Array:
    """Log Z(c) and log Z(-c), [2, n], of E / unit for the eigenvectors c that can be extreme."""
    mean, norms = mean_and_norms(embeddings)
    squares, axes = torch.linalg.eigh(gram(embeddings))
    means = mean @ axes
    longest = float(norms.max())
    moments = Moments(means, squares / len(norms) - means**2, longest + float(mean.norm()))
    views = [(unit, moments.can_be_extreme(unit, published))]
    directions = Directions(axes, longest, views, published=published)
    sum_partitions(embeddings, [directions])
    return directions.log_z(0)


def mean_norm(embeddings: Embeddings) -> float:
    """||mu||, the norm of the mean embedding mu = (1/V) sum_i e_i, in the embeddings' units."""
    return float(np.linalg.norm(mean_embedding(embeddings)))


def mean_norm_ratio(embeddings: Embeddings) -> float:
    """||mu||^r = ||mu|| / mean_i ||e_i||: 0 for centred embeddings, 1 if all rows are equal.

    Raises:
        ValueError: also if every row is zero, as in an uninitialised matrix.
    """
    average = row_norms(embeddings).mean()
    check_not_zero(average)
    return mean_norm(embeddings) / float(average)


def mean_cosine_similarity(embeddings: Embeddings) -> float:
    """The mean of cos(e_i, e_j) over all pairs i != j, from -1/(V-1) to 1; near 0 if centred.

    Zero rows have no direction and are left out. The result is NaN if fewer than two are left.
    """
    angles = Angles()
    for block in blocks(embeddings):
        angles.add(block, block.norm(dim=1))
    return angles.mean_cosine()


def singular_values(embeddings: Embeddings) -> Array:
    """The min(V, H) singular values of E, descending.

    They are computed from the eigenvalues of E^T E, which are their squares. Singular values below
    about 1e-8 of the largest are therefore indistinguishable from zero.
    """
    return singular_values_of(torch.linalg.eigvalsh(gram(embeddings)), len(embeddings))


def condition(embeddings: Embeddings) -> float:
    """kappa = 100 sigma_min / sigma_max of the :func:`singular_values`, from 0 to 100.

    Raises:
        ValueError: also if every row is zero.
    """
    return condition_of(_checked_singular_values(embeddings))


def effective_rank(embeddings: Embeddings) -> float:
    """The effective rank of Roy & Vetterli (EUSIPCO 2007), from 1 to min(V, H).

    It is the exponential of the entropy of the normalised singular values, exp(-sum_k q_k log q_k)
    with q_k = sigma_k / sum_j sigma_j: min(V, H) if all are equal, 1 if all but one are zero. A
    factor on E does not change it.

    Raises:
        ValueError: also if every row is zero.
    """
    return effective_rank_of(_checked_singular_values(embeddings))


def participation_ratio(embeddings: Embeddings) -> float:
    """(sum_k sigma_k^2)^2 / sum_k sigma_k^4, from 1 to min(V, H).

    This can be read as the number of directions among which the variance is spread.

    Raises:
        ValueError: also if every row is zero.
    """
    return participation_ratio_of(_checked_singular_values(embeddings))


def iso_score(embeddings: Embeddings) -> float:
    """IsoScore (Rudman et al. 2022, arXiv 2108.07344), from 0 to 1 (isotropic).

    It is (P - 1) / (H - 1) with the :func:`participation_ratio` P of the centred embeddings, to
    which the steps of its definition reduce. Neither the mean nor a factor on E changes it.

    Raises:
        ValueError: also if all rows are equal, or H is 1.
    """
    mean, _ = mean_and_norms(embeddings)
    values = singular_values_of(torch.linalg.eigvalsh(gram(embeddings, mean)), len(embeddings))
    if embeddings.shape[1] == 1 or values[0] == 0:
        raise ValueError("IsoScore is not defined for equal rows, or for a single column")
    return iso_score_of(participation_ratio_of(values), embeddings.shape[1])


def mean_embedding(embeddings: Embeddings) -> Array:
    """mu = (1/V) sum_i e_i, [H]."""
    return as_array(mean_and_norms(embeddings)[0])


def row_norms(embeddings: Embeddings) -> Array:
    """The norms ||e_i|| of all rows, [V]."""
    return as_array(mean_and_norms(embeddings)[1])


def mean_and_norms(
    embeddings: Embeddings,
    keep: NDArray[np.bool_] | None = None,
    on_rows: Callable[[int], object] | None = None,
) -> tuple[Any, Any]:
    """The mean [H] and the norms [V] of all rows, or of the rows to keep; see :func:`blocks`."""
    check(embeddings)
    total: Tensor | float = 0.0
    norms = torch.empty(len(embeddings) if keep is None else int(keep.sum()), dtype=torch.float64)
    start = 0
    for block in blocks(embeddings, keep, on_rows):
        total = total + block.sum(0)
        # Not a list of small tensors: allocated between the blocks, they would fragment memory.
        norms[start : start + len(block)] = block.norm(dim=1)
        start += len(block)
    return torch.as_tensor(total) / len(norms), norms


def gram(
    embeddings: Embeddings,
    mean: Tensor | float = 0.0,
    keep: NDArray[np.bool_] | None = None,
    on_rows: Callable[[int], object] | None = None,
) -> Tensor:
    """E^T E [H, H] over all rows or the rows to keep, each with ``mean`` [H] subtracted."""
    lower: Tensor | None = None  # the upper triangle is its mirror image
    for block in blocks(embeddings, keep, on_rows):
        columns = block.shape[1]
        if lower is None:  # column by column, as BLAS has it
            lower = block.new_zeros(columns, columns).T
        rows = block - mean
        if rows.device.type == "cpu":
            # Only the lower triangle is computed, and it is added in place.
            blas.dsyrk(1.0, rows.numpy().T, 1.0, lower.numpy(), lower=1, overwrite_c=1)
        else:
            lower.addmm_(rows.T, rows)
    assert lower is not None
    lower.tril_()
    return lower.add_(lower.tril(-1).T)


def project(rows: Tensor, directions: Tensor) -> Tensor:
    """Project rows onto directions, the columns of [H, n]; the result is [rows, n].

    The result is stored column by column, which makes sums over the rows about 1.5 times as fast.
    If the directions are, too, the product in float64 is twice as fast.
    """
    return (directions.T @ rows.T).T


@dataclasses.dataclass(frozen=True)
class Moments:
    r"""What the first two moments say of Z(c) = sum_i exp(c . e_i), for n directions c.

    exp(t) = 1 + t + t^2 f(t), where f(t) = (exp(t) - 1 - t) / t^2 increases with t. For the
    projections c . e_i with mean m, variance v, and distances from m of at most R, this gives

    .. math:: e^m (1 + f(-R) v) \le Z(c) / V \le e^m (1 + f(R) v)

    A direction whose bounds lie between those of others can have neither the largest nor the
    smallest Z. In trained embeddings, whose variances differ a lot, those are most directions.

    Attributes:
        means, variances: m and v of each direction, [n].
        reach: R, or a bound on it.
    """

    means: Tensor
    variances: Tensor
    reach: float

    def can_be_extreme(self, unit: float, published: bool) -> Tensor:
        """Which directions can have the largest or smallest Z of E / unit, [n] booleans.

        Args:
            published: whether they are compared with one sign each, too, and not only with both.
        """
        reach, means = self.reach / unit, self.means / unit
        if reach > 300 or not len(means):
            return torch.ones_like(means, dtype=torch.bool)
        variances = self.variances.clamp(min=0) / unit**2
        # With room for the rounding errors of the eigenvalues, relative to the largest.
        rounding = 1e-9 * (1 + _quadratic(reach) * float(variances.max()))
        signed = means.new_tensor([[1.0], [-1.0]]) * means
        return _can_be_extreme(
            signed + torch.log1p(_quadratic(-reach) * variances) - rounding,
            signed + torch.log1p(_quadratic(reach) * variances) + rounding,
            published,
        )


def _can_be_extreme(lower: Tensor, upper: Tensor, published: bool) -> Tensor:
    """Which directions can be extreme, [n] booleans, given bounds on log Z for both signs, [2, n].

    Args:
        published: whether they are compared with one sign each, too, and not only with both.
    """
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


class Directions:
    """Eigenvectors of a cloud of rows, and log Z of those that can have the largest or smallest.

    Attributes:
        axes: [H, n], the eigenvectors.
        longest: the largest norm of the rows with the center subtracted.
        views: for which matrices Z is needed: what the rows are divided by, and which of the first
            m eigenvectors can be extreme, [m] booleans.
        center: [H], what is subtracted from the rows.
        published: whether a direction can be extreme by one of its signs alone.
    """

    def __init__(
        self,
        axes: Tensor,
        longest: float,
        views: Sequence[tuple[float, Tensor]],
        center: Tensor | float = 0.0,
        published: bool = True,
    ) -> None:
        self.axes, self.longest, self.center = axes, longest, center
        self.views, self.published = views, published
        self._partitions: dict[float, LogPartition] = {}

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
        for number, (unit, extreme) in enumerate(self.views):
            log_z, errors = self.log_z(number), self.errors(number)
            lower, upper = (torch.from_numpy(log_z + side * errors) for side in (-1, 1))
            narrowed = torch.zeros_like(extreme)
            narrowed[self.chosen[: len(extreme)]] = _can_be_extreme(
                lower, upper, self.published
            ).to(extreme.device)
            views.append((unit, narrowed))
        self.views = views


def sum_partitions(
    embeddings: Embeddings,
    clouds: Sequence[Directions],
    keep: NDArray[np.bool_] | None = None,
    on_rows: Callable[[int], object] | None = None,
) -> None:
    """Compute log Z for all clouds in a pass over the rows, or in two if the matrix is large.

    In a large matrix the exponents c . e_i are computed in float32 first. As the isotropy is a
    ratio of two Z, its relative error is at most twice that of :meth:`Directions.errors`. If that
    is below 1e-4, the fourth digit is right. Otherwise the directions that can still be extreme are
    computed once more in float64.

    Args:
        embeddings: [V, H].
        clouds: what is to be computed, of the same rows.
        keep, on_rows: as for :func:`blocks`; ``on_rows`` is called for the first pass.
    """

    def add_all(dtype: torch.dtype, on_rows: Callable[[int], object] | None) -> None:
        for cloud in clouds:
            cloud.begin(dtype)
        for block in blocks(embeddings, keep, on_rows, dtype):
            for cloud in clouds:
                cloud.add(block)

    rows, columns = embeddings.shape
    if rows * columns * sum(int(cloud.chosen.sum()) for cloud in clouds) < _LARGE:
        add_all(torch.float64, on_rows)
        return
    add_all(torch.float32, on_rows)
    errors = [cloud.errors(view) for cloud in clouds for view in range(len(cloud.views))]
    if 2 * max(error.max(initial=0) for error in errors) > 1e-4:
        for cloud in clouds:
            cloud.narrow()
        add_all(torch.float64, None)


class Angles:
    """Accumulates the mean cosine over all pairs of rows, from the sum of their unit vectors."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._rows = 0

    def add(self, vectors: Tensor, norms: Tensor, floor: float = 0.0) -> None:
        """Add a block of rows [rows, H] with their norms; leave out those with norms <= floor."""
        used = norms > floor
        weights = torch.where(used, 1 / norms, 0)
        self._total = self._total + weights @ vectors
        self._rows += int(used.sum())

    def mean_cosine(self) -> float:
        """The mean cosine; NaN for fewer than two rows."""
        if self._rows < 2:
            return float("nan")
        # The squared sum contains every pair twice, and each row paired with itself.
        pairs = self._rows * (self._rows - 1)
        return (float(torch.sum(torch.as_tensor(self._total) ** 2)) - self._rows) / pairs


def isotropy_of(log_z: Array) -> float:
    """The isotropy, from the logarithms of Z in any shape."""
    return float(np.exp(log_z.min() - log_z.max()))


def singular_values_of(eigenvalues: Tensor, rows: int) -> Array:
    """The min(V, H) singular values, descending, from the ascending eigenvalues of E^T E."""
    values: Array = np.sqrt(np.clip(as_array(eigenvalues), 0, None))[::-1]
    return values[:rows]


def condition_of(values: Array) -> float:
    """Kappa from singular values."""
    return float(100 * values[-1] / values[0])


def effective_rank_of(values: Array) -> float:
    """The effective rank from singular values."""
    return float(np.exp(special.entr(values / values.sum()).sum()))


def participation_ratio_of(values: Array) -> float:
    """The participation ratio from singular values."""
    shares = (values / values[0]) ** 2
    return float(shares.sum() ** 2 / (shares**2).sum())


def iso_score_of(participation: float, columns: int) -> float:
    """IsoScore from the participation ratio of the centred embeddings."""
    return (participation - 1) / (columns - 1)


def check_not_zero(number: float) -> None:
    """Raise ValueError if the mean norm is zero."""
    if number == 0:
        raise ValueError("every row of embeddings is zero: has the model been initialised?")


def check(embeddings: Embeddings) -> None:
    """Raise TypeError or ValueError unless this is a non-empty real matrix."""
    if not isinstance(embeddings, Tensor | np.ndarray):
        raise TypeError(
            f"embeddings must be a tensor or array [V, H], such as model.lm_head.weight, not a "
            f"{type(embeddings).__name__}"
        )
    if hasattr(embeddings, "full_tensor"):
        raise TypeError("embeddings is sharded (a DTensor): pass embeddings.full_tensor()")
    shape = list(embeddings.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"embeddings must be a non-empty matrix [V, H], but has the shape {shape}")
    is_complex = (
        embeddings.is_complex() if isinstance(embeddings, Tensor) else np.iscomplexobj(embeddings)
    )
    if is_complex:
        raise ValueError(f"embeddings must be real, but has the dtype {embeddings.dtype}")


def blocks(
    embeddings: Embeddings,
    keep: NDArray[np.bool_] | None = None,
    on_rows: Callable[[int], object] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Tensor]:
    """Yield a matrix's rows (all, or those to keep) block by block, by default in float64.

    They are checked, too.
    ``on_rows`` is called with the number of rows of each block once that has been dealt with.
    """
    check(embeddings)
    rows, columns = embeddings.shape
    size = max(1, _BLOCK_BYTES // (8 * columns))
    largest = tiny = 0.0
    for start in range(0, rows, size):
        block = _converted(embeddings[start : start + size], dtype)
        if keep is not None:
            block = block[torch.from_numpy(keep[start : start + size]).to(block.device)]
        if not len(block):
            continue
        size_of_block = float(torch.linalg.vector_norm(block))  # quick, and NaN if anything is
        if not size_of_block < _LARGEST:
            finite = block.isfinite().all(1)
            if finite.all():
                raise ValueError(_OUT_OF_RANGE.format("large", f"{float(block.abs().max()):.0e}"))
            here = np.arange(start, min(start + size, rows))
            row = (here if keep is None else here[keep[here]])[int(finite.int().argmin())]
            raise ValueError(f"embeddings: row {row} is not finite (NaN or infinity)")
        largest = max(largest, size_of_block)
        if size_of_block < 1 / _LARGEST:
            tiny = max(tiny, float(block.abs().max()))
        yield block
        if on_rows is not None:
            on_rows(len(block))
    if largest < 1 / _LARGEST and tiny > 0:
        raise ValueError(_OUT_OF_RANGE.format("small", f"{tiny:.0e}"))


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices of some thousand rows each, for work whose memory should not grow with the matrix."""
    size = max(1, 2**20 // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class RowsDone:
    """Counts the rows that several passes have dealt with, and reports them.

    Args:
        progress: called with the rows done and the rows to do, over all passes.
        total: the rows to do; the last passes may turn out to be unnecessary.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    def __call__(self, rows: int) -> None:
        """Count the rows of a block."""
        self.done = min(self.done + rows, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)


def as_float64(values: Embeddings) -> Tensor:
    """A tensor in float64, on its own device, or on the CPU if that does not support float64."""
    return _converted(values, torch.float64)


def _converted(values: Embeddings, dtype: torch.dtype) -> Tensor:
    if not isinstance(values, Tensor):
        return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)
    device = "cpu" if values.device.type == "mps" else values.device
    return values.detach().to(device, dtype).contiguous()


def as_array(values: Tensor) -> Array:
    """A float64 tensor as an array."""
    array: Array = values.cpu().numpy()
    return array


def _checked_singular_values(embeddings: Embeddings) -> Array:
    values = singular_values(embeddings)
    check_not_zero(values[0])
    return values
