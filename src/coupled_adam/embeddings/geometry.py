"""The geometry of an embedding matrix: its mean, its norms and E^T E, in passes over the rows.

Matrices are measured in float64, a block of rows at a time, on their own device (on the CPU if that
is an MPS device, which lacks float64). All functions raise ValueError unless they are given a
non-empty matrix [V, H] of finite real numbers, and TypeError unless this is a tensor or an array.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import blas
from torch import Tensor

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Embeddings = Tensor | NDArray[Any]

_BLOCK_BYTES = 2**23  # larger blocks would not stay in the caches


def mean_embedding(embeddings: Embeddings) -> Array:
    """mu = (1/V) sum_i e_i, [H]."""
    return as_array(mean_and_norms(embeddings)[0])


def row_norms(embeddings: Embeddings) -> Array:
    """The norms ||e_i|| of all rows, [V]."""
    return as_array(mean_and_norms(embeddings)[1])


def mean_norm_ratio(embeddings: Embeddings) -> float:
    """||mu||^r = ||mu|| / mean_i ||e_i|| of [V, H]: 0 if it is centered, 1 if all rows are equal.

    Raises:
        ValueError: also if every row is zero, as in an uninitialised matrix.
    """
    mean, norms = mean_and_norms(embeddings)
    check_not_zero(norms)
    return float(mean.norm()) / float(norms.mean())


def subtract_mean(embeddings: Embeddings) -> Tensor:
    """Subtract the mean embedding mu from every row of a matrix [V, H].

    The result is a new tensor like the given one; for an array, in float64 on the CPU.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers.
    """
    return all_but_the_top(embeddings, 0)


def all_but_the_top(embeddings: Embeddings, directions: int | None = None) -> Tensor:
    """Subtract the mean from [V, H], then the components along the top principal directions.

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


def mean_and_norms(embeddings: Embeddings, keep: Mask | None = None) -> tuple[Tensor, Tensor]:
    """The mean [H] and the norms [V] of all rows, or of the rows to keep; see :func:`blocks`."""
    check(embeddings)
    total: Tensor | float = 0.0
    norms = torch.empty(len(embeddings) if keep is None else int(keep.sum()), dtype=torch.float64)
    start = 0
    for block in blocks(embeddings, keep):
        total = total + block.sum(0)
        # Not a list of small tensors: allocated between the blocks, they would fragment memory.
        norms[start : start + len(block)] = block.norm(dim=1)
        start += len(block)
    return torch.as_tensor(total) / len(norms), norms  # on the matrix's device, on the CPU


def gram(embeddings: Embeddings, mean: Tensor | float = 0.0, keep: Mask | None = None) -> Tensor:
    """E^T E [H, H] over all rows or the rows to keep, each with ``mean`` [H] subtracted."""
    lower: Tensor | None = None  # the upper triangle is its mirror image
    for block in blocks(embeddings, keep):
        columns = block.shape[1]
        if lower is None:  # column by column, as BLAS has it; [H, H]
            lower = block.new_zeros(columns, columns).T
        rows = block - mean
        if rows.device.type == "cpu":
            # Only the lower triangle is computed, and it is added in place.
            blas.dsyrk(1.0, rows.numpy().T, 1.0, lower.numpy(), lower=1, overwrite_c=1)
        else:
            lower.addmm_(rows.T, rows)
    assert lower is not None
    lower.tril_()  # on a GPU both triangles were computed
    return lower.add_(lower.tril(-1).T)


def check_not_zero(norms: Tensor | Array) -> None:
    """Raise ValueError if all norms [V] are zero."""
    if norms.max() == 0:
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


def blocks(
    embeddings: Embeddings, keep: Mask | None = None, dtype: torch.dtype = torch.float64
) -> Iterator[Tensor]:
    """Yield the rows of [V, H] (all, or those to keep, [V]) in blocks [n, H], and check them."""
    check(embeddings)
    for chunk in row_slices(*embeddings.shape):
        block = as_float64(embeddings[chunk], dtype)
        rows = np.arange(chunk.start, chunk.stop)
        if keep is not None:
            rows = rows[keep[chunk]]
            block = block[torch.from_numpy(keep[chunk]).to(block.device)]
        if not len(block):
            continue
        if not torch.linalg.vector_norm(block).isfinite():  # quick, and NaN if anything is
            finite = block.isfinite().all(1)
            what = "too large: scale the matrix" if finite.all() else "not finite (NaN or infinity)"
            raise ValueError(f"embeddings: row {rows[int(finite.int().argmin())]} is {what}")
        yield block


def norms_or_nan(embeddings: Embeddings) -> Array:
    """The norms of all rows, [V]; NaN for those that are not finite."""
    norms = np.empty(len(embeddings))
    for chunk in row_slices(*embeddings.shape):
        norms[chunk] = as_array(as_float64(embeddings[chunk]).norm(dim=1))
    norms[~np.isfinite(norms)] = np.nan
    return norms


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices of some thousand rows each, for work whose memory should not grow with the matrix."""
    size = max(1, _BLOCK_BYTES // (8 * columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def as_float64(values: Embeddings, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor in float64, on its own device, or on the CPU if that does not support float64."""
    # A copy: torch warns of arrays that are read-only, and refuses those in another byte order.
    if not isinstance(values, Tensor):
        return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)
    device = "cpu" if values.device.type == "mps" else values.device
    return values.detach().to(device, dtype).contiguous()


def as_array(values: Tensor) -> Array:
    """A float64 tensor as an array."""
    array: Array = values.cpu().numpy()
    return array
