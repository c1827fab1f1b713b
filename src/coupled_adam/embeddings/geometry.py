"""Where the cloud of embeddings lies: isotropy, mean, spectrum, norms, angles.

Matrices are measured where they are, on a CPU or a GPU, in float64 (those on an MPS device on the
CPU), some rows at a time. All functions raise ValueError for what is not a non-empty matrix [V, H]
of finite real numbers, and TypeError for what is neither a tensor nor an array.
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

Array = NDArray[np.float64]
Embeddings = Tensor | NDArray[Any]

_BLOCK_BYTES = 2**23  # more fall out of the caches


def isotropy(
    embeddings: Embeddings, *, convention: Literal["sign_safe", "published"] = "sign_safe"
) -> float:
    r"""Iso = min_c Z(c) / max_c Z(c) with Z(c) = sum_i exp(c . e_i), between 0 and 1 (isotropic).

    c runs over the eigenvectors of E^T E (Mu & Viswanath 2018; arXiv 2502.08441). An eigenvector's
    sign is arbitrary, and Z(c) is not Z(-c), so the definition leaves the result to the
    linear-algebra library. The default ``"sign_safe"`` evaluates both signs of every eigenvector:
    it is reproducible, and never above the published value for the same eigenvectors.
    ``"published"`` takes the signs as ``torch.linalg.eigh`` returns them, to compare with figures
    in the literature, which spread by up to tens of percent for that reason alone.
    """
    if convention not in ("sign_safe", "published"):
        raise ValueError(f"Invalid convention: {convention!r} ('sign_safe' or 'published')")
    _, directions = torch.linalg.eigh(gram(embeddings))
    partition = LogPartition()
    for block in blocks(embeddings):
        partition.add(project(block, directions))
    log_z = partition.log_z()
    return isotropy_of(log_z if convention == "sign_safe" else log_z[:1])


def mean_norm(embeddings: Embeddings) -> float:
    """||mu||, the norm of the mean embedding mu = (1/V) sum_i e_i, in the embeddings' units."""
    return float(np.linalg.norm(mean_embedding(embeddings)))


def mean_norm_ratio(embeddings: Embeddings) -> float:
    """||mu||^r = ||mu|| / mean_i ||e_i||: 0 for a centred cloud, 1 where all rows are equal.

    Raises:
        ValueError: also where every row is zero, as an uninitialised matrix is.
    """
    average = row_norms(embeddings).mean()
    check_not_zero(average)
    return mean_norm(embeddings) / float(average)


def mean_cosine_similarity(embeddings: Embeddings) -> float:
    """The mean of cos(e_i, e_j) over all pairs i != j: -1/(V-1) to 1; near 0 for a centred cloud.

    Rows that are zero have no direction and are left out; NaN where fewer than two are left.
    """
    angles = Angles()
    for block in blocks(embeddings):
        angles.add(block, block.norm(dim=1))
    return angles.mean_cosine()


def singular_values(embeddings: Embeddings) -> Array:
    """The min(V, H) singular values of E, descending.

    They come from the eigenvalues of E^T E. That squares them: those below about 1e-8 of the
    largest are indistinguishable from zero.
    """
    return singular_values_of(torch.linalg.eigvalsh(gram(embeddings)), len(embeddings))


def condition(embeddings: Embeddings) -> float:
    """kappa = 100 sigma_min / sigma_max of the :func:`singular_values`: 0 to 100.

    Raises:
        ValueError: also where every row is zero.
    """
    return condition_of(_checked_singular_values(embeddings))


def effective_rank(embeddings: Embeddings) -> float:
    """exp(-sum_k q_k log q_k) with q_k = sigma_k / sum sigma: 1 to min(V, H) (Roy, Vetterli 2007).

    Raises:
        ValueError: also where every row is zero.
    """
    return effective_rank_of(_checked_singular_values(embeddings))


def participation_ratio(embeddings: Embeddings) -> float:
    """(sum_k sigma_k^2)^2 / sum_k sigma_k^4: the number of directions that share the variance.

    It is between 1 and min(V, H).

    Raises:
        ValueError: also where every row is zero.
    """
    return participation_ratio_of(_checked_singular_values(embeddings))


def mean_embedding(embeddings: Embeddings) -> Array:
    """mu = (1/V) sum_i e_i, [H]."""
    return as_array(mean_and_norms(embeddings)[0])


def row_norms(embeddings: Embeddings) -> Array:
    """||e_i|| for every row, [V]."""
    return as_array(mean_and_norms(embeddings)[1])


def mean_and_norms(
    embeddings: Embeddings, keep: NDArray[np.bool_] | None = None
) -> tuple[Any, Any]:
    """The mean [H] and the norms [V] of all rows, or of those to keep."""
    check(embeddings)
    total: Tensor | float = 0.0
    norms = torch.empty(len(embeddings) if keep is None else int(keep.sum()), dtype=torch.float64)
    start = 0
    for block in blocks(embeddings, keep):
        total = total + block.sum(0)
        # Kept as many small tensors, they would lie between the blocks and pin the memory of all.
        norms[start : start + len(block)] = block.norm(dim=1)
        start += len(block)
    return torch.as_tensor(total) / len(norms), norms


def gram(
    embeddings: Embeddings, mean: Tensor | float = 0.0, keep: NDArray[np.bool_] | None = None
) -> Tensor:
    """E^T E [H, H], of all rows or those to keep, with a mean [H] removed from each."""
    centred = (block - mean for block in blocks(embeddings, keep))
    return functools.reduce(Tensor.add_, map(_square, centred))


def project(rows: Tensor, directions: Tensor) -> Tensor:
    """Each row's components along some directions, the columns of [H, n].

    They lie in memory direction by direction, which makes both the product and sums over the rows
    about half again as fast.
    """
    return (directions.T @ rows.T).T


def _square(block: Tensor) -> Tensor:
    """E^T E of some rows; numpy sees that the result is symmetric, and computes half of it."""
    if block.device.type != "cpu":
        return block.T @ block
    rows = block.numpy()
    return torch.from_numpy(rows.T @ rows)


class LogPartition:
    """Z(c) = sum_i exp(c . e_i) for n directions c and for their opposites, as logarithms."""

    def __init__(self) -> None:
        self._log_z: Tensor | None = None

    def add(self, projections: Tensor) -> None:
        """Add c . e_i of some more rows, [rows, n]."""
        new = torch.stack([torch.logsumexp(projections, 0), torch.logsumexp(-projections, 0)])
        self._log_z = new if self._log_z is None else torch.logaddexp(self._log_z, new)

    def log_z(self) -> Array:
        """Log Z(c) and log Z(-c), [2, n]."""
        assert self._log_z is not None
        return as_array(self._log_z)


class Angles:
    """The mean of the cosine over all pairs of rows, from the sum of their unit vectors."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._rows = 0

    def add(self, vectors: Tensor, norms: Tensor, floor: float = 0.0) -> None:
        """Add some more rows [rows, H], with their norms; rows not above the floor are left out."""
        used = norms > floor
        weights = torch.where(used, 1 / norms, 0)
        self._total = self._total + weights @ vectors
        self._rows += int(used.sum())

    def mean_cosine(self) -> float:
        """NaN for fewer than two rows."""
        if self._rows < 2:
            return float("nan")
        # The squared sum counts every pair twice, and each row with itself.
        pairs = self._rows * (self._rows - 1)
        return (float(torch.sum(torch.as_tensor(self._total) ** 2)) - self._rows) / pairs


def isotropy_of(log_z: Array) -> float:
    """Iso from the logarithms of Z, whatever their shape."""
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


def check_not_zero(number: float) -> None:
    """Raise ValueError where the mean norm is zero."""
    if number == 0:
        raise ValueError("embeddings: every row is zero; has the model been initialised?")


def check(embeddings: Embeddings) -> None:
    """Raise TypeError or ValueError for what is not a non-empty real matrix."""
    if not isinstance(embeddings, Tensor | np.ndarray):
        raise TypeError(
            f"embeddings is a {type(embeddings).__name__}: a tensor or array [V, H] is needed, "
            "such as model.lm_head.weight"
        )
    if hasattr(embeddings, "full_tensor"):
        raise TypeError("embeddings are sharded (a DTensor): give embeddings.full_tensor()")
    shape = list(embeddings.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"embeddings of shape {shape}: a non-empty matrix [V, H] is needed")
    is_complex = (
        embeddings.is_complex() if isinstance(embeddings, Tensor) else np.iscomplexobj(embeddings)
    )
    if is_complex:
        raise ValueError(f"embeddings of dtype {embeddings.dtype}: real numbers are needed")


def blocks(embeddings: Embeddings, keep: NDArray[np.bool_] | None = None) -> Iterator[Tensor]:
    """A matrix's rows (all, or those to keep) in float64, some at a time, checked."""
    check(embeddings)
    rows, columns = embeddings.shape
    size = max(1, _BLOCK_BYTES // (8 * columns))
    for start in range(0, rows, size):
        block = as_float64(embeddings[start : start + size])
        if keep is not None:
            block = block[torch.from_numpy(keep[start : start + size]).to(block.device)]
        if not len(block):
            continue
        # The sum is quick to look at; an overflow of finite numbers is none of our business.
        if not torch.isfinite(block.sum()) and not (finite := block.isfinite().all(1)).all():
            here = np.arange(start, min(start + size, rows))
            row = (here if keep is None else here[keep[here]])[int(finite.int().argmin())]
            raise ValueError(f"embeddings: row {row} is not finite (NaN or infinity)")
        yield block


def as_float64(values: Embeddings) -> Tensor:
    """A tensor in float64, on its device where that has float64."""
    if not isinstance(values, Tensor):
        return torch.from_numpy(np.array(values, dtype=np.float64))
    device = "cpu" if values.device.type == "mps" else values.device
    return values.detach().to(device, torch.float64).contiguous()


def as_array(values: Tensor) -> Array:
    """A tensor as an array in float64."""
    array: Array = values.cpu().numpy()
    return array


def _checked_singular_values(embeddings: Embeddings) -> Array:
    values = singular_values(embeddings)
    check_not_zero(values[0])
    return values
