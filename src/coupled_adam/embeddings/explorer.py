"""A page of HTML to explore tokens: a map, a table and the neighbours of each token."""

import base64
import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings.geometry import Progress
from coupled_adam.embeddings.maps import Layout, TokenMap, token_maps
from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.tokens import NEIGHBOURS, Comparison, Undertrainedness
from coupled_adam.embeddings.vocabulary import CATEGORIES
from coupled_adam.errors import UsageError
from coupled_adam.rendering.page import render

POINTS = 50_000
"""The most tokens on a page, over all matrices: it then has less than 10 MB."""


def explorer_page(
    matrices: Sequence[Undertrainedness],
    comparisons: Sequence[Comparison] = (),
    layout: Layout = "pca",
    progress: Progress | None = None,
) -> str:
    """Make the page; it is self-contained, and loads nothing.

    The cosines of comparisons become a column. ``progress`` is of the search for neighbours, which
    takes the most time. Raises UsageError if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise UsageError("--explore needs a package: pip install plotly") from None
    maps = token_maps(matrices, layout, POINTS)
    data = {
        "layout": {"pca": "principal component", "umap": "UMAP"}[layout],
        "categories": CATEGORIES,
        "maps": [_packed(entry, _cosines(entry, comparisons), progress) for entry in maps],
    }
    values = {
        "title": f"Tokens: {', '.join(entry.tokens.analysis.label for entry in maps)}",
        "data": data,
        "library": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    }
    return render("explorer.html", values, [], package="coupled_adam.embeddings")


def _packed(
    entry: TokenMap, cosines: NDArray[np.float32] | None, progress: Progress | None
) -> dict[str, Any]:
    """A map for the page: numbers in base64, which is a third of their size as text."""
    analysis, rows = entry.tokens.analysis, entry.rows
    vocabulary, counts, matrix = analysis.vocabulary, analysis.counts, analysis.embeddings.matrix
    indicated, asked = entry.tokens.indicated, entry.tokens.verification
    shown = np.isin(np.arange(len(matrix)), rows)
    k = min(NEIGHBOURS, len(rows) - 1)
    near = nearest(matrix, rows, k, centered=True, keep=shown, progress=progress)
    # By their numbers on the page, of which there are so few that 16 bits hold them.
    neighbours = np.searchsorted(rows, near.neighbours)
    repeated = None
    if asked is not None:
        probabilities = np.full(len(matrix), np.nan, np.float32)
        probabilities[asked.rows] = asked.probabilities
        repeated = probabilities[rows]
    kinds = [CATEGORIES.index(kind) for kind in vocabulary.categories[rows].tolist()]
    # An array is a fraction of its size as text in base64 and the smallest type that holds it.
    columns: Mapping[str, NDArray[Any] | None] = {
        "x": entry.xy[:, 0],
        "y": entry.xy[:, 1],
        "norm": indicated.indicators["norm"][rows].astype(np.float32),
        "count": None if counts is None else counts[rows].astype(np.float32),
        "indicator": indicated.indicators[indicated.order_by][rows].astype(np.float32),
        "hub": np.bincount(neighbours.reshape(-1), minlength=len(rows)).astype(np.float32),
        "change": cosines,
        "repeated": repeated,
        "id": rows.astype(np.int32),
        "category": np.array(kinds, np.uint8),
        "alike": np.isin(rows, indicated.alike).astype(np.uint8),
        "neighbours": neighbours.astype(np.uint16),
        # To less than a hundredth, which is as much as the page shows.
        "cosines": np.round(near.cosines * 127).astype(np.int8),
    }
    return {
        "label": analysis.label,
        "order_by": indicated.order_by,
        "total": len(matrix),
        "k": k,
        "tokens": [vocabulary.name(row) for row in rows.tolist()],
        "columns": {
            name: {"type": values.dtype.name, "data": base64.b64encode(values.tobytes()).decode()}
            for name, values in columns.items()
            if values is not None
        },
    }


def _cosines(entry: TokenMap, comparisons: Sequence[Comparison]) -> NDArray[np.float32] | None:
    """How far each token turned in the first comparison that ends in this matrix; NaN if new."""
    analysis = entry.tokens.analysis
    for comparison in comparisons:
        if comparison.after is analysis and comparison.changes.cosines is not None:
            cosines = np.full(len(analysis.embeddings.matrix), np.nan, np.float32)
            cosines[comparison.changes.pairs.second] = comparison.changes.cosines
            return cosines[entry.rows]
    return None
