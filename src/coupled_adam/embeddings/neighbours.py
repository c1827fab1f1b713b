"""Nearest neighbours among embeddings, and rows that are nearly the same."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.analysis import Analysis, Answer
from coupled_adam.embeddings.geometry import Embeddings, Mask
from coupled_adam.errors import prefixed_usage_error
from coupled_adam.rendering.tables import Table

NEIGHBOURS = 10
DUPLICATE = 0.99
"""The cosine from which on two rows count as duplicates."""
_VARIANTS = {"raw": "as it is", "centered": "mean removed"}
"""The two ways in which neighbours are searched, and how they are shown."""
_QUERIES = 4096  # rows compared with all others in one pass
Nearest = tuple[NDArray[np.int64], NDArray[np.float32]]


def nearest(
    embeddings: Embeddings,
    rows: Sequence[int] | NDArray[Any],
    k: int = NEIGHBOURS,
    *,
    centered: bool = False,
    keep: Mask | None = None,
) -> Nearest:
    """The k nearest rows [n, k] of some rows [n] of a matrix [V, H], and their cosines [n, k].

    The nearest comes first; there are fewer than k columns if there are too few rows. Cosines are
    exact up to rounding in float32. The matrix is read once for every 4096 rows asked for, in
    bounded memory. Raises ValueError if a row is zero or not finite.

    Args:
        centered: whether to remove the mean of all rows first, without which a common direction
            makes all cosines alike (Mu & Viswanath 2018, arXiv 1702.01417).
        keep: [V] booleans; rows with False are neighbours of none. Rows that are zero or not finite
            never are.
    """
    alive = geometry.norms_or_nan(embeddings) > 0
    queries = np.asarray(rows, dtype=np.int64)
    if not alive[queries].all():
        raise ValueError(f"row {queries[~alive[queries]][0]} has no neighbours: zero or not finite")
    mean = geometry.mean_and_norms(embeddings, alive)[0] * centered
    candidates = alive if keep is None else alive & keep
    k = min(k, int(candidates.sum()) - 1)
    # So many at a time that the cosines of a block of the matrix with all of them stay small.
    searched = [
        _search(embeddings, queries[start : start + _QUERIES], k, mean, candidates)
        for start in range(0, max(len(queries), 1), _QUERIES)
    ]
    neighbours, cosines = zip(*searched)
    return np.concatenate(neighbours), np.concatenate(cosines)


def _search(
    embeddings: Embeddings, rows: NDArray[np.int64], k: int, mean: Tensor, candidates: Mask
) -> Nearest:
    """The k nearest [n, k] of some rows [n], and the cosines, in one pass over a matrix [V, H]."""
    queries = _directions(geometry.as_float64(embeddings[rows]), mean)
    query_rows = torch.from_numpy(rows).to(queries.device)
    best = torch.full((len(rows), k), -math.inf, device=queries.device)  # cosines so far
    where = torch.zeros((len(rows), k), dtype=torch.int64, device=queries.device)  # their rows
    places = torch.from_numpy(np.flatnonzero(candidates)).to(queries.device)
    for block in geometry.blocks(embeddings, candidates):
        here, places = places.tensor_split([len(block)])
        cosines = queries @ _directions(block, mean).T  # [n, rows of the block]
        cosines[query_rows[:, None] == here] = -math.inf  # no row is a neighbour of its own
        # The best so far compete with the best of this block, so that k of each are all it takes.
        new, index = cosines.topk(min(k, len(block)))
        best, order = torch.cat([best, new], 1).topk(k)
        where = torch.cat([where, here[index]], 1).gather(1, order)
    return where.cpu().numpy(), best.clamp(-1, 1).cpu().numpy()


def _directions(rows: Tensor, mean: Tensor) -> Tensor:
    """Rows [n, H] with the mean [H] removed, at unit norm, in float32; zero if nothing is left."""
    centered = rows - mean
    norms = centered.norm(dim=1, keepdim=True)
    # Rows equal to the mean differ from it by rounding errors only.
    used = norms > 1e-12 * rows.norm(dim=1, keepdim=True)
    return torch.where(used, centered / norms, 0).float()


def find_neighbours(analysis: Analysis, tokens: Sequence[str]) -> Answer:
    """Find the neighbours of tokens, which are as :meth:`Vocabulary.row` takes them.

    Raises UsageError if one of them is unknown, zero or not finite.
    """
    name, rows = analysis.vocabulary.name, [analysis.vocabulary.row(token) for token in tokens]
    named = [analysis.token(row) for row in rows]
    for variant in _VARIANTS:
        with prefixed_usage_error(f"{analysis.model}: "):
            near, cosines = nearest(
                analysis.embeddings.matrix, rows, centered=variant == "centered"
            )
        for token, ids, its_cosines in zip(named, near.tolist(), cosines.tolist()):
            token[variant] = [
                {"id": row, "token": name(row), "cosine": cosine}
                for row, cosine in zip(ids, its_cosines)
            ]
    # A line for each token and variant, with the token in the first.
    lines = []
    for token in named:
        for variant, shown in _VARIANTS.items():
            listed = ", ".join(f"{n['token']} {n['cosine']:.2f}" for n in token[variant])
            # With its id, since several tokens may be meant by a word.
            asked = f"{name(token['id'])} (#{token['id']})"
            lines.append([asked if variant == "raw" else "", shown, listed])
    columns = ["token", "", "neighbours and their cosines"]
    table = Table(columns, lines, f"Nearest by cosine: {analysis.label}", left=(0, 1, 2))
    return Answer(analysis, {"neighbours": named}, table, is_ranking=False)


def find_duplicates(analysis: Analysis) -> Answer:
    """Find the rows whose nearest one has a cosine of at least :data:`DUPLICATE`, in groups."""
    matrix, name = analysis.embeddings.matrix, analysis.vocabulary.name
    alive = np.setdiff1d(np.arange(len(matrix)), analysis.dead)
    neighbours, cosines = nearest(matrix, alive, 1)
    near = cosines.max(1, initial=-1.0) >= DUPLICATE  # a row that is alone has no neighbour
    rows, others = alive[near], neighbours[near].ravel()
    # Each row is linked to its nearest one, and what is linked is a group. All rows within 0.99 of
    # each other would take V x V cosines.
    links = sparse.coo_array((near[near], (rows, others)), (len(matrix), len(matrix)))
    _, labels = sparse.csgraph.connected_components(links, directed=False)
    groups: list[dict[str, Any]] = []
    for label in np.unique(labels[rows]):
        members = np.flatnonzero(labels == label)
        groups.append(
            {
                "tokens": [analysis.token(row) for row in members.tolist()],
                "cosine": float(cosines[near].ravel()[labels[rows] == label].min()),
                "identical": all(torch.equal(matrix[members[0]], matrix[row]) for row in members),
            }
        )
    # Identical rows come first, then the nearest.
    groups.sort(key=lambda group: (not group["identical"], -group["cosine"]))
    lines = []
    for group in groups:
        named = [f"{token['id']} {name(token['id'])}" for token in group["tokens"]]
        listed = ", ".join(named[:NEIGHBOURS]) + (", ..." if len(named) > NEIGHBOURS else "")
        cosine = "identical" if group["identical"] else f"{group['cosine']:.4f}"
        lines.append([str(len(named)), cosine, listed])
    note = f"no two rows have a cosine of {DUPLICATE:g} or more"
    if groups:
        identical = sum(len(group["tokens"]) for group in groups if group["identical"])
        note = (
            f"{near.sum()} rows have another with a cosine of {DUPLICATE:g} or more, in "
            f"{len(groups)} groups; {identical} are identical to all others of their group"
        )
    columns = ["rows", "cosine", "ids and tokens"] if groups else []
    table = Table(columns, lines, f"Duplicates: {analysis.label}", [note], left=(2,))
    return Answer(analysis, {"duplicates": groups}, table)
