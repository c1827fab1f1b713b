"""Nearest neighbours among embeddings, and hubs: rows that are neighbours of unusually many."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, alive_rows
from coupled_adam.errors import refused
from coupled_adam.rendering.tables import Table

if TYPE_CHECKING:
    from coupled_adam.embeddings.analysis import Analysis

NEIGHBOURS = 10
DUPLICATE = 0.99
"""The cosine from which on two rows count as duplicates."""
_VARIANTS = {"raw": "as it is", "centered": "mean removed"}
"""The two ways in which neighbours are searched, and how they are shown."""

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
    skewness: float | None  # None if all N_k are equal, or only a sample was asked
    # N_k: for how many rows this row is among the k nearest; estimated if not all were asked.
    occurrences: Array  # [V]; the mean is k over the rows that have a direction
    k: int  # the number of neighbours
    queries: int  # the number of rows whose neighbours were searched

    def largest(self, number: int) -> NDArray[np.int64]:
        """The rows with the largest N_k, the largest first."""
        return np.argsort(-self.occurrences, kind="stable")[:number]


def nearest(
    embeddings: Embeddings,
    rows: Sequence[int] | NDArray[Any],
    k: int = NEIGHBOURS,
    *,
    centered: bool = False,
    keep: Mask | None = None,
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
    queries = np.asarray(rows, dtype=np.int64)
    outside = queries[(queries < 0) | (queries >= len(usable))]
    if len(outside):
        raise ValueError(f"rows must be between 0 and {len(usable) - 1}, but one is {outside[0]}")
    if not usable[queries].all():
        row = queries[~usable[queries]][0]
        raise ValueError(f"row {row} has no neighbours: zero or not finite")
    candidates = usable if keep is None else usable & keep
    if not 1 <= k < candidates.sum():
        raise ValueError(f"k={k} must be from 1 to {int(candidates.sum()) - 1}")
    mean, _ = geometry.mean_and_norms(embeddings, usable)
    shift = mean if centered else torch.zeros_like(mean)
    neighbours = np.empty((len(queries), k), np.int64)
    cosines = np.empty((len(queries), k), np.float32)
    # So many at a time that the cosines of a block of the matrix with all of them stay small.
    for start in range(0, len(queries), _QUERIES):
        chunk = slice(start, start + _QUERIES)
        neighbours[chunk], cosines[chunk] = _search(
            embeddings, queries[chunk], k, shift, candidates
        )
    return Neighbours(queries, neighbours, cosines)


def _search(
    embeddings: Embeddings,
    rows: NDArray[np.int64],
    k: int,
    mean: torch.Tensor,
    candidates: Mask,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k nearest of some rows, and the cosines, in one pass over the matrix."""
    queries = _directions(geometry.as_float64(embeddings[rows]), mean)
    query_rows = torch.from_numpy(rows).to(queries.device)
    best = torch.full((len(rows), k), -math.inf, device=queries.device)
    where = torch.zeros((len(rows), k), dtype=torch.int64, device=queries.device)
    places = torch.from_numpy(np.flatnonzero(candidates)).to(queries.device)
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
    return where.cpu().numpy(), best.clamp(-1, 1).cpu().numpy()


def _directions(rows: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The rows with the mean subtracted, at unit norm, in float32; zero if nothing is left."""
    centered = rows - mean
    norms = centered.norm(dim=1, keepdim=True)
    # Rows equal to the mean differ from it by rounding errors only.
    used = norms > 1e-12 * rows.norm(dim=1, keepdim=True)
    return torch.where(used, centered / norms, 0).float()


def hubness(embeddings: Embeddings, k: int = NEIGHBOURS, *, centered: bool = False) -> Hubness:
    """Measure hubness: the skewness of N_k (Radovanovic et al. 2010, JMLR 11).

    All of 65,536 rows or fewer are asked, and of more a sample of 4,096, drawn at random with a
    fixed seed. For the arguments see :func:`nearest`.
    """
    queried = rows = np.flatnonzero(alive_rows(embeddings))
    if len(rows) > _ALL:
        queried = np.sort(np.random.default_rng(0).choice(rows, _QUERIES, replace=False))
    neighbours = nearest(embeddings, queried, k, centered=centered).neighbours
    counts = np.bincount(neighbours.reshape(-1), minlength=len(embeddings)).astype(np.float64)
    # That of a sample would be that of its own noise.
    is_exact = len(queried) == len(rows)
    skewness = float(stats.skew(counts[rows])) if is_exact and np.ptp(counts[rows]) else None
    return Hubness(skewness, counts * (len(rows) / len(queried)), k, len(queried))


@dataclasses.dataclass(frozen=True)
class NeighbourReport:
    """The neighbours of some tokens of one analysis, and the hubs among all, for each variant."""

    analysis: Analysis
    nearest: dict[str, Neighbours]
    hubs: dict[str, Hubness]

    def to_dict(self) -> dict[str, Any]:
        """The neighbours of each token, and the hubs, as plain values."""
        analysis = self.analysis
        tokens = [analysis.token(row) for row in self.nearest["raw"].rows.tolist()]
        for variant, near in self.nearest.items():
            for token, rows, cosines in zip(tokens, near.neighbours.tolist(), near.cosines):
                token[variant] = [
                    {"id": row, "token": analysis.vocabulary.name(row), "cosine": float(cosine)}
                    for row, cosine in zip(rows, cosines)
                ]
        hubness = {
            variant: {
                "k": hubs.k,
                "skewness": hubs.skewness,
                "rows_asked": hubs.queries,
                "largest": [
                    {**analysis.token(row), "occurrences": hubs.occurrences[row]}
                    for row in hubs.largest(NEIGHBOURS).tolist()
                ],
            }
            for variant, hubs in self.hubs.items()
        }
        return {"neighbours": tokens, "hubness": hubness}

    def tables(self, number: int) -> list[Table]:
        """The neighbours of all tokens that were asked for, if any, and the hubs."""
        name, numbers = self.analysis.vocabulary.name, self.to_dict()
        lines, hubs = [], []
        for entry in numbers["neighbours"]:
            for variant, shown in _VARIANTS.items():
                listed = ", ".join(f"{n['token']} {n['cosine']:.2f}" for n in entry[variant])
                lines.append([name(entry["id"]) if variant == "raw" else "", shown, listed])
        for variant, entry in numbers["hubness"].items():
            skewness = "–" if entry["skewness"] is None else f"{entry['skewness']:.2f}"
            largest = (f"{name(hub['id'])} {hub['occurrences']:.0f}" for hub in entry["largest"])
            hubs.append([_VARIANTS[variant], skewness, ", ".join(largest)])
        label = self.analysis.label
        columns = ["token", "", "neighbours and their cosines"]
        nearest = Table(columns, lines, f"Nearest by cosine: {label}", left=(0, 1, 2))
        columns = ["", "skewness of N_k", f"largest hubs and their N_k (k = {NEIGHBOURS})"]
        return [*[nearest] * bool(lines), Table(columns, hubs, f"Hubs: {label}", left=(0, 2))]


def find_neighbours(analysis: Analysis, tokens: Sequence[str] = ()) -> NeighbourReport:
    """Find the neighbours of tokens, or of the ten most frequent ones, and the hubs.

    Tokens are as :meth:`Vocabulary.row` takes them. Raises UsageError if one of them is
    unknown, or there are too few rows.
    """
    matrix, counts = analysis.embeddings.matrix, analysis.counts
    rows = [analysis.vocabulary.row(token) for token in tokens]
    if not tokens and counts is not None:
        order = np.argsort(-counts, kind="stable")
        rows = order[~np.isin(order, analysis.dead)][:NEIGHBOURS].tolist()
    near, hubs = {}, {}
    with refused(f"{analysis.model}: "):
        for variant in _VARIANTS:
            centered = variant == "centered"
            near[variant] = nearest(matrix, rows, centered=centered)
            hubs[variant] = hubness(matrix, centered=centered)
    return NeighbourReport(analysis, near, hubs)


@dataclasses.dataclass(frozen=True)
class DuplicateReport:
    """The pairs of rows of one analysis that are nearly equal in direction, the nearest first."""

    analysis: Analysis
    pairs: NDArray[np.int64]  # [n, 2], rows; each row is with its nearest one
    cosines: NDArray[np.float32]  # [n]
    identical: Mask  # [n], whether the two have the same numbers

    def to_dict(self) -> dict[str, Any]:
        """The pairs as plain values."""
        found = zip(self.pairs.tolist(), self.cosines.tolist(), self.identical.tolist())
        token = self.analysis.token
        return {
            "duplicates": [
                {"tokens": [token(a), token(b)], "cosine": cosine, "identical": identical}
                for (a, b), cosine, identical in found
            ]
        }

    def tables(self, number: int) -> list[Table]:
        """The first of the pairs, for the terminal."""
        name = self.analysis.vocabulary.name
        rows = [
            [str(a), name(a), str(b), name(b), "identical" if same else f"{cosine:.4f}"]
            for (a, b), cosine, same in zip(self.pairs.tolist(), self.cosines, self.identical)
        ][:number]
        note = (
            f"{len(self.pairs)} pairs with a cosine of at least {DUPLICATE:g}, of which "
            f"{self.identical.sum()} are identical"
        )
        columns = ["id", "token", "id", "token", "cosine"]
        return [Table(columns, rows, f"Duplicates: {self.analysis.label}", [note], left=(1, 3))]


def find_duplicates(analysis: Analysis) -> DuplicateReport:
    """Find the rows whose nearest one has a cosine of at least :data:`DUPLICATE`."""
    matrix = analysis.embeddings.matrix
    alive = np.setdiff1d(np.arange(len(matrix)), analysis.dead)
    with refused(f"{analysis.model}: "):
        near = nearest(matrix, alive, 1)
    chosen = near.cosines[:, 0] >= DUPLICATE
    # Two rows that are nearest to each other are one pair.
    pairs = np.sort(np.stack([alive, near.neighbours[:, 0]], 1)[chosen], axis=1)
    pairs, first = np.unique(pairs, axis=0, return_index=True)
    cosines = near.cosines[chosen, 0][first]
    identical = np.array([torch.equal(matrix[a], matrix[b]) for a, b in pairs.tolist()], np.bool_)
    order = np.lexsort((-cosines, ~identical))
    return DuplicateReport(analysis, pairs[order], cosines[order], identical[order])
