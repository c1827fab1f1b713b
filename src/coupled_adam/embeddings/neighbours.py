"""Nearest neighbours among embeddings, and hubs: rows that are neighbours of unusually many."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, Progress
from coupled_adam.embeddings.undertrained import alive_rows

_QUERIES = 4096  # rows compared with all others in one pass
_ALL = 2**16  # rows of a matrix in which hubs are counted exactly


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The nearest neighbours of n rows, nearest first."""

    rows: NDArray[np.int64]  # [n], whose neighbours these are
    neighbours: NDArray[np.int64]  # [n, k], rows
    cosines: NDArray[np.float32]  # [n, k], -1 to 1


@dataclasses.dataclass(frozen=True)
class Hubness:
    """How unevenly the rows are distributed among each other's nearest neighbours."""

    # Of N_k over the rows; about 0 without hubs, 10 and more with strong ones.
    skewness: float | None  # None if all N_k are equal
    # N_k: for how many rows this row is among the k nearest; estimated if not all were asked.
    occurrences: Array  # [V]; the mean is k over the rows that have a direction
    k: int  # the number of neighbours
    queries: int  # the number of rows whose neighbours were searched
    exact: bool  # whether these were all rows, so that nothing is estimated

    def largest(self, number: int) -> NDArray[np.int64]:
        """The rows with the largest N_k, the largest first."""
        return np.argsort(-self.occurrences, kind="stable")[:number]


def nearest(
    embeddings: Embeddings,
    rows: Sequence[int] | NDArray[Any],
    k: int = 10,
    *,
    centered: bool = False,
    keep: Mask | None = None,
    progress: Progress | None = None,
) -> Neighbours:
    """Find the k nearest neighbours of some rows [n] of a matrix [V, H] by cosine similarity.

    Cosines are exact up to rounding in float32. The matrix is read once for every 4096 rows asked
    for, in bounded memory.

    Args:
        k: how many neighbours, at least 1 and fewer than there are rows to choose from.
        centered: whether to remove the mean of all rows first, without which a common direction
            makes all cosines alike (Mu & Viswanath 2018, arXiv 1702.01417).
        keep: [V] booleans; rows with False are neighbours of none. Rows that are zero or not finite
            never are.

    Raises:
        ValueError: if a row is not between 0 and V - 1 or has no direction, or k is out of range.
    """
    usable = alive_rows(embeddings)
    total = len(usable)
    queries = np.asarray(rows, dtype=np.int64)
    outside = queries[(queries < 0) | (queries >= total)]
    if len(outside):
        raise ValueError(f"rows must be between 0 and {total - 1}, but one is {outside[0]}")
    if not usable[queries].all():
        row = queries[~usable[queries]][0]
        raise ValueError(f"row {row} has no neighbours: zero or not finite")
    mean, _ = geometry.mean_and_norms(embeddings, usable)
    shift = mean if centered else torch.zeros_like(mean)
    candidates = usable if keep is None else usable & keep
    if not 1 <= k < candidates.sum():
        raise ValueError(f"k={k} must be from 1 to {int(candidates.sum()) - 1}")
    neighbours = np.empty((len(queries), k), np.int64)
    cosines = np.empty((len(queries), k), np.float32)
    # So many at a time that the cosines of a block of the matrix with all of them stay small.
    for start in range(0, len(queries), _QUERIES):
        chunk = slice(start, start + _QUERIES)

        def report(share: float, first: int = start, size: int = len(queries[chunk])) -> None:
            if progress is not None:
                progress(int(first + share * size), len(queries))

        neighbours[chunk], cosines[chunk] = _search(
            embeddings, queries[chunk], k, shift, candidates, report
        )
    return Neighbours(queries, neighbours, cosines)


def hubness(
    embeddings: Embeddings,
    k: int = 10,
    *,
    centered: bool = False,
    sample: int | None = None,
    progress: Progress | None = None,
) -> Hubness:
    """Measure hubness: the skewness of N_k (Radovanovic et al. 2010, JMLR 11).

    All of 65,536 rows or fewer are asked, and of more a sample of 4,096, drawn at random with a
    fixed seed; or a sample of another size. The moments of N_k are estimated without bias: a row
    that is a neighbour of N of V rows is found by n of Q of these, and the mean of n (n - 1) ...
    (n - r + 1) is N (N - 1) ... (N - r + 1) times the same fraction of Q and V. For the other
    arguments see :func:`nearest`.
    """
    queried = rows = np.flatnonzero(alive_rows(embeddings))
    if sample is None:
        sample = len(rows) if len(rows) <= _ALL else _QUERIES
    if sample < len(rows):
        queried = np.sort(np.random.default_rng(0).choice(rows, sample, replace=False))
    neighbours = nearest(embeddings, queried, k, centered=centered, progress=progress).neighbours
    counts = np.bincount(neighbours.reshape(-1), minlength=len(embeddings)).astype(np.float64)
    asked, total = len(queried), len(rows)
    skewness = _skewness(counts[rows], asked, total)
    return Hubness(skewness, counts * (total / asked), k, asked, exact=asked == total)


def _skewness(counts: Array, queries: int, total: int) -> float | None:
    """The skewness of N_k, from its factorial moments in a sample of the rows."""
    factorial, thinning = np.ones_like(counts), 1.0
    moments = []
    for order in range(3):
        factorial = factorial * (counts - order)
        thinning *= (queries - order) / (total - order)
        moments.append(float(factorial.mean()) / thinning)
    first, second, third = moments
    second += first  # from here on, the mean of N^2
    third += 3 * second - 2 * first  # and of N^3
    variance = second - first**2
    if variance <= 1e-9 * first**2:
        return None
    central: float = third - 3 * first * second + 2 * first**3
    return central / math.pow(variance, 1.5)


def _search(
    embeddings: Embeddings,
    rows: NDArray[np.int64],
    k: int,
    mean: torch.Tensor,
    candidates: Mask,
    report: Callable[[float], None],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k nearest of some rows, and the cosines, in one pass over the matrix."""
    queries = _directions(geometry.as_float64(embeddings[rows]), mean)
    query_rows = torch.from_numpy(rows).to(queries.device)
    best = torch.full((len(rows), k), -math.inf, device=queries.device)
    where = torch.zeros((len(rows), k), dtype=torch.int64, device=queries.device)
    places = torch.from_numpy(np.flatnonzero(candidates)).to(queries.device)
    total = len(places)
    for block in geometry.blocks(embeddings, candidates):
        here, places = places.tensor_split([len(block)])
        cosines = queries @ _directions(block, mean).T
        inside = torch.isin(query_rows, here)
        if inside.any():  # no row is a neighbour of its own
            column = torch.searchsorted(here, query_rows[inside])
            cosines[inside.nonzero().squeeze(1), column] = -math.inf
        # The best so far compete with the best of this block, so that k of each are all it takes.
        new, index = cosines.topk(min(k, len(block)))
        best, order = torch.cat([best, new], 1).topk(k)
        where = torch.cat([where, here[index]], 1).gather(1, order)
        report(1 - len(places) / total)
    return where.cpu().numpy(), best.clamp(-1, 1).cpu().numpy()


def _directions(rows: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The rows with the mean subtracted, at unit norm, in float32; zero if nothing is left."""
    centred = rows - mean
    norms = centred.norm(dim=1, keepdim=True)
    # Rows equal to the mean differ from it by rounding errors only.
    used = norms > 1e-12 * rows.norm(dim=1, keepdim=True)
    return torch.where(used, centred / norms, 0).float()
