"""The geometry of an embedding matrix: mean, spectrum, norms and angles.

Matrices are measured in float64, a block of rows at a time, on their own device (on the CPU if that
is an MPS device, which lacks float64). All functions raise ValueError unless they are given a
non-empty matrix [V, H] of finite real numbers, and TypeError unless this is a tensor or an array.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from scipy.linalg import blas
from torch import Tensor

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Embeddings = Tensor | NDArray[Any]
OnRows = Callable[[int], object] | None
"""Called with the number of rows of each block, once that has been dealt with."""
Progress = Callable[[int, int], None]
"""Called with what is done and what is to do, in any unit."""

_BLOCK_BYTES = 2**23  # larger blocks would not stay in the caches


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


def explained_variance(embeddings: Embeddings) -> float:
    """The share of the variance that lies along the first principal direction, from 1/H to 1.

    Raises:
        ValueError: also if all rows are equal.
    """
    values = _centered_singular_values(embeddings)
    if values[0] == 0:
        raise ValueError("all rows of embeddings are equal: they have no variance to explain")
    return explained_variance_of(values)


def iso_score(embeddings: Embeddings) -> float:
    """IsoScore (Rudman et al. 2022, arXiv 2108.07344), from 0 to 1 (isotropic).

    It is (P - 1) / (H - 1) with the :func:`participation_ratio` P of the centred embeddings, to
    which the steps of its definition reduce. Neither the mean nor a factor on E changes it.

    Raises:
        ValueError: also if all rows are equal, or H is 1.
    """
    values = _centered_singular_values(embeddings)
    if embeddings.shape[1] == 1 or values[0] == 0:
        raise ValueError("IsoScore is not defined for equal rows, or for a single column")
    return iso_score_of(participation_ratio_of(values), embeddings.shape[1])


def mean_embedding(embeddings: Embeddings) -> Array:
    """mu = (1/V) sum_i e_i, [H]."""
    return as_array(mean_and_norms(embeddings)[0])


def row_norms(embeddings: Embeddings) -> Array:
    """The norms ||e_i|| of all rows, [V]."""
    return as_array(mean_and_norms(embeddings)[1])


def subtract_mean(embeddings: Embeddings) -> Tensor:
    """Subtract the mean embedding mu from every row of a matrix [V, H].

    The result is a new tensor like the given one; for an array, in float64 on the CPU.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers.
    """
    return all_but_the_top(embeddings, 0)


def all_but_the_top(embeddings: Embeddings, directions: int | None = None) -> Tensor:
    """Subtract the mean, then the components along the top principal directions.

    This is Algorithm 1 of Mu & Viswanath (2018), arXiv 1702.01417. By default H / 100 directions,
    rounded up, are removed, as its authors suggest. The result is as for :func:`subtract_mean`.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers, or
            ``directions`` is not between 0 and H.
    """
    check(embeddings)
    top = top_directions(embeddings.shape[1], directions)
    mean, _ = mean_and_norms(embeddings)
    _, vectors = torch.linalg.eigh(gram(embeddings, mean))
    # The eigenvalues ascend, so that the last vectors are the top directions.
    vectors = vectors[:, vectors.shape[1] - top :]
    if isinstance(embeddings, Tensor):
        result = torch.empty_like(embeddings.detach())
    else:
        result = torch.empty(embeddings.shape, dtype=torch.float64)
    start = 0
    for block in blocks(embeddings):
        block = block - mean
        block -= block @ vectors @ vectors.T
        result[start : start + len(block)] = block
        start += len(block)
    return result


def top_directions(hidden_size: int, directions: int | None) -> int:
    """How many principal directions :func:`all_but_the_top` removes."""
    if directions is None:
        return math.ceil(hidden_size / 100)
    if not 0 <= directions <= hidden_size:
        raise ValueError(f"directions={directions} must be from 0 to H = {hidden_size}")
    return directions


def mean_and_norms(
    embeddings: Embeddings, keep: Mask | None = None, on_rows: OnRows = None
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
    keep: Mask | None = None,
    on_rows: OnRows = None,
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


def explained_variance_of(values: Array) -> float:
    """The share of the first of the singular values of the centred embeddings."""
    return float(values[0] ** 2 / (values**2).sum())


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
    if "complex" in str(embeddings.dtype):
        raise ValueError(f"embeddings must be real, but has the dtype {embeddings.dtype}")


def as_mask(name: str, mask: Tensor | NDArray[Any], rows: int) -> Mask:
    """Booleans as an array; ValueError unless there is one for each row."""
    array = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if array.shape != (rows,) or array.dtype != np.bool_:
        raise ValueError(
            f"{name} must hold a boolean for each of the {rows} embeddings, but has the shape "
            f"{list(array.shape)} and the dtype {array.dtype}"
        )
    return array


def blocks(
    embeddings: Embeddings,
    keep: Mask | None = None,
    on_rows: OnRows = None,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Tensor]:
    """Yield a matrix's rows (all, or those to keep) block by block, and check them.

    ``on_rows`` is called with the number of rows of each block once that has been dealt with.
    """
    check(embeddings)
    rows, columns = embeddings.shape
    size = max(1, _BLOCK_BYTES // (8 * columns))
    for start in range(0, rows, size):
        block = as_float64(embeddings[start : start + size], dtype)
        if keep is not None:
            block = block[torch.from_numpy(keep[start : start + size]).to(block.device)]
        if not len(block):
            continue
        if not torch.linalg.vector_norm(block).isfinite():  # quick, and NaN if anything is
            finite = block.isfinite().all(1)
            here = np.arange(start, min(start + size, rows))
            row = (here if keep is None else here[keep[here]])[int(finite.int().argmin())]
            what = "too large: scale the matrix" if finite.all() else "not finite (NaN or infinity)"
            raise ValueError(f"embeddings: row {row} is {what}")
        yield block
        if on_rows is not None:
            on_rows(len(block))


def finite_rows(embeddings: Embeddings, on_rows: OnRows = None) -> tuple[Mask, Array]:
    """Which rows are finite, [V] booleans, and the norms of all rows, [V]; NaN if not finite."""
    norms = np.empty(len(embeddings))
    for chunk in row_slices(*embeddings.shape):
        block = as_float64(embeddings[chunk])
        norms[chunk] = as_array(block.norm(dim=1))
        if on_rows is not None:
            on_rows(len(block))
    finite = np.isfinite(norms)
    norms[~finite] = np.nan
    return finite, norms


def alive_rows(embeddings: Embeddings) -> Mask:
    """Which rows are finite and different from zero, [V] booleans."""
    finite, norms = finite_rows(embeddings)
    alive: Mask = finite & (norms > 0)
    return alive


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices of some thousand rows each, for work whose memory should not grow with the matrix."""
    size = max(1, 2**20 // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def rows_done(progress: Progress | None, total: int) -> Callable[[int], object]:
    """Count the rows that several passes have dealt with, and report them and the rows to do.

    The last passes may turn out to be unnecessary.
    """
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done = min(done + rows, total)
        if progress is not None:
            progress(done, total)

    return count


def as_float64(values: Embeddings, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor in float64, on its own device, or on the CPU if that does not support float64."""
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


def _centered_singular_values(embeddings: Embeddings) -> Array:
    """Those of the rows with their mean removed."""
    squares = gram(embeddings, mean_and_norms(embeddings)[0])
    return singular_values_of(torch.linalg.eigvalsh(squares), len(embeddings))
