"""Where the cloud of embeddings lies: isotropy, mean norm, condition.

All functions raise ValueError for what is not a non-empty matrix [V, H] of finite real numbers, and
TypeError for what is neither a tensor nor an array.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Embeddings = torch.Tensor | NDArray[Any]

_BLOCK_BYTES = 2**26


def isotropy(
    embeddings: Embeddings, *, convention: Literal["sign_safe", "published"] = "sign_safe"
) -> float:
    r"""Iso = min_c Z(c) / max_c Z(c) with Z(c) = sum_i exp(c . e_i), between 0 and 1 (isotropic).

    c runs over the eigenvectors of E^T E (Mu & Viswanath 2018; arXiv 2502.08441). An eigenvector's
    sign is arbitrary, and Z(c) is not Z(-c), so the definition leaves the result to the
    linear-algebra library. The default ``"sign_safe"`` evaluates both signs of every eigenvector:
    it is reproducible, and never above the published value for the same eigenvectors.
    ``"published"`` takes the signs as ``numpy.linalg.eigh`` returns them, to compare with figures
    in the literature, which spread by up to tens of percent for that reason alone.
    """
    if convention not in ("sign_safe", "published"):
        raise ValueError(f"Invalid convention: {convention!r} ('sign_safe' or 'published')")
    log_z = log_partition(embeddings, eigen(embeddings)[1])
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
    if average == 0:
        raise ValueError("embeddings: every row is zero; has the model been initialised?")
    return mean_norm(embeddings) / float(average)


def condition(embeddings: Embeddings) -> float:
    """kappa = 100 sigma_min / sigma_max, from the singular values of E: 0 to 100.

    The min(V, H) singular values come from the eigenvalues of E^T E. That squares them: a kappa
    below about 1e-6 is indistinguishable from zero.

    Raises:
        ValueError: also where every row is zero.
    """
    return condition_of(eigen(embeddings)[0], len(embeddings))


def mean_embedding(embeddings: Embeddings) -> Array:
    """mu = (1/V) sum_i e_i, [H]."""
    check(embeddings)
    total = np.zeros(embeddings.shape[1])
    for block in blocks(embeddings):
        total += block.sum(axis=0)
    return total / len(embeddings)


def row_norms(embeddings: Embeddings) -> Array:
    """||e_i|| for every row, [V]."""
    check(embeddings)
    return np.concatenate([np.linalg.norm(block, axis=1) for block in blocks(embeddings)])


def eigen(embeddings: Embeddings) -> tuple[Array, Array]:
    """Eigenvalues of E^T E, ascending [H], and its eigenvectors, the columns of [H, H]."""
    check(embeddings)
    gram = np.zeros((embeddings.shape[1], embeddings.shape[1]))
    for block in blocks(embeddings):
        gram += block.T @ block
    eigenvalues, eigenvectors = np.linalg.eigh(gram)
    return eigenvalues, eigenvectors


def log_partition(embeddings: Embeddings, directions: Array) -> Array:
    """Log Z(c) for c and for -c, [2, n], over given directions, the columns of [H, n]."""
    # A running maximum, and the sum of the exponentials relative to it: exp alone would overflow.
    highest = np.full((2, directions.shape[1]), -np.inf)
    total = np.zeros_like(highest)
    for block in blocks(embeddings):
        projections = block @ directions
        for k, sign in enumerate((1, -1)):
            exponents = sign * projections
            new = np.maximum(highest[k], exponents.max(axis=0))
            exponents -= new
            total[k] *= np.exp(highest[k] - new)
            total[k] += np.exp(exponents, out=exponents).sum(axis=0)
            highest[k] = new
    result: Array = highest + np.log(total)
    return result


def isotropy_of(log_z: Array) -> float:
    """Iso from the logarithms of Z, whatever their shape."""
    return float(np.exp(log_z.min() - log_z.max()))


def condition_of(eigenvalues: Array, rows: int) -> float:
    """Kappa of a matrix of so many rows, from the ascending eigenvalues of E^T E."""
    squares = np.clip(eigenvalues[-min(rows, len(eigenvalues)) :], 0, None)
    if squares[-1] == 0:
        raise ValueError("embeddings: every row is zero; has the model been initialised?")
    return float(100 * np.sqrt(squares[0] / squares[-1]))


def check(embeddings: Embeddings) -> None:
    """Raise TypeError or ValueError for what is not a non-empty real matrix."""
    if not isinstance(embeddings, torch.Tensor | np.ndarray):
        raise TypeError(
            f"embeddings is a {type(embeddings).__name__}: a tensor or array [V, H] is needed, "
            "such as model.lm_head.weight"
        )
    shape = list(embeddings.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"embeddings of shape {shape}: a non-empty matrix [V, H] is needed")
    is_complex = (
        embeddings.is_complex()
        if isinstance(embeddings, torch.Tensor)
        else np.iscomplexobj(embeddings)
    )
    if is_complex:
        raise ValueError(f"embeddings of dtype {embeddings.dtype}: real numbers are needed")


def blocks(embeddings: Embeddings) -> Iterator[Array]:
    """A checked matrix in float64, some rows at a time."""
    rows, columns = embeddings.shape
    size = max(1, _BLOCK_BYTES // (8 * columns))
    for start in range(0, rows, size):
        part = embeddings[start : start + size]
        if isinstance(part, torch.Tensor):
            block: Array = part.detach().to("cpu", torch.float64).numpy()
        else:
            block = np.asarray(part, dtype=np.float64)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise ValueError(f"embeddings: row {row} is not finite (NaN or infinity)")
        yield block
