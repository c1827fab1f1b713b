"""Tokens on a map: two coordinates for each row, as a page to explore or as a Parquet file."""

import base64
import dataclasses
import gzip
import importlib.util
import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Progress
from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.tokens import NEIGHBOURS, Comparison, Undertrainedness
from coupled_adam.embeddings.vocabulary import CATEGORIES
from coupled_adam.errors import UsageError
from coupled_adam.rendering.page import render

POINTS = 50_000
"""The most tokens on a page, over all matrices: it then has less than 10 MB."""

Layout = Literal["pca", "umap"]


@dataclasses.dataclass(frozen=True)
class TokenMap:
    """A map of n rows of one matrix: all that are finite and different from zero, or a sample."""

    tokens: Undertrainedness  # the matrix, its tokens, and how little they were trained
    rows: NDArray[np.int64]  # [n], ascending
    xy: NDArray[np.float32]  # [n, 2], the coordinates


def check_installed(layout: Layout, explore: bool, parquet: bool) -> None:
    """Raise UsageError unless the packages are there that a map, its page or its file needs."""
    for is_needed, option, module, package in (
        (layout == "umap", "--layout umap", "umap", "umap-learn"),
        (parquet, "--parquet", "pyarrow", "pyarrow"),
        (explore, "--explore", "plotly", "plotly"),
    ):
        if is_needed and importlib.util.find_spec(module) is None:
            raise UsageError(f"{option} needs a package: pip install {package}")


def token_maps(
    matrices: Sequence[Undertrainedness], layout: Layout = "pca", limit: int | None = None
) -> list[TokenMap]:
    """Lay out the tokens of one or several matrices, at most so many in all maps together.

    Principal components are those of the first matrix for all matrices of its width, so that
    checkpoints of one model can be compared; and each matrix's own otherwise. UMAP (McInnes et al.
    2018, arXiv 1802.03426) is computed for each matrix with the cosine metric. Above the limit a
    fixed random sample is drawn in which under-trained tokens and unused rows are kept.
    """
    share = None if limit is None else limit // len(matrices)
    maps: list[TokenMap] = []
    frames: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for entry in matrices:
        matrix = entry.analysis.embeddings.matrix
        healthy = np.ones(len(matrix), np.bool_)
        healthy[entry.indicated.dead] = False
        rows = np.flatnonzero(healthy)
        if share is not None and len(rows) > share:
            # Half of the sample at most is what the page is made for; the rest shows what is usual.
            preferred = np.concatenate([entry.rows, np.flatnonzero(entry.indicated.unused)])
            preferred = preferred[healthy[preferred]][: share // 2]
            usual = np.random.default_rng(0).permutation(np.setdiff1d(rows, preferred))
            rows = np.sort(np.concatenate([preferred, usual[: share - len(preferred)]]))
        if layout == "umap":
            import umap

            reducer = umap.UMAP(n_components=2, metric="cosine", random_state=0, n_jobs=1)
            xy = reducer.fit_transform(matrix[rows].float().cpu().numpy())
        else:
            width = matrix.shape[1]
            # The axes of the first matrix serve all others of its width: maps can then be compared.
            if width not in frames:
                mean = geometry.mean_and_norms(matrix, healthy)[0]
                axes = torch.linalg.eigh(geometry.gram(matrix, mean, healthy))[1].flip(1)[:, :2]
                # The sign of an eigenvector is arbitrary: its largest component is positive.
                largest = axes.abs().argmax(0)
                frames[width] = mean, axes * axes.gather(0, largest[None]).sign()
            mean, axes = frames[width]
            xy = np.empty((len(rows), 2), np.float32)
            for chunk in geometry.row_slices(len(rows), width):
                block = geometry.as_float64(matrix[rows[chunk]])
                xy[chunk] = geometry.as_array((block - mean) @ axes)
        maps.append(TokenMap(entry, rows, xy))
    return maps


def parquet(maps: Sequence[TokenMap]) -> bytes:
    """The maps as one Parquet file, for tools such as embedding-atlas."""
    import pyarrow
    import pyarrow.parquet

    tables = []
    for entry in maps:
        analysis, rows = entry.tokens.analysis, entry.rows
        vocabulary = analysis.vocabulary
        columns: dict[str, Any] = {
            "model": [analysis.model] * len(rows),
            "role": [analysis.embeddings.role] * len(rows),
            "id": rows,
            "token": [vocabulary.texts[row] for row in rows.tolist()],
            "category": vocabulary.categories[rows].tolist(),
            "x": entry.xy[:, 0],
            "y": entry.xy[:, 1],
        }
        if analysis.counts is not None:
            columns["count"] = analysis.counts[rows]
        columns |= {name: v[rows] for name, v in entry.tokens.indicated.indicators.items()}
        # UTF-8 cannot hold lone surrogates.
        for name in ("model", "token"):
            columns[name] = [t.encode("utf-8", "replace").decode() for t in columns[name]]
        tables.append(pyarrow.table(columns))
    table = pyarrow.concat_tables(tables, promote_options="permissive")
    table = table.replace_schema_metadata({"generator": "coupled-adam"})  # it may be replaced
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def explorer_page(
    matrices: Sequence[Undertrainedness],
    comparisons: Sequence[Comparison] = (),
    layout: Layout = "pca",
    progress: Progress | None = None,
) -> str:
    """Make the page; it is self-contained, and loads nothing.

    The cosines of comparisons become a column. ``progress`` is of the search for neighbours, which
    takes the most time.
    """
    from plotly.offline import get_plotlyjs

    maps = token_maps(matrices, layout, POINTS)
    data = {
        "layout": {"pca": "principal component", "umap": "UMAP"}[layout],
        "categories": CATEGORIES,
        "maps": [_packed(entry, comparisons, progress) for entry in maps],
    }
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    title = f"Tokens: {', '.join(entry.tokens.analysis.label for entry in maps)}"
    values = {"title": title, "data": data, "library": library}
    return render("explorer.html", values, [], package="coupled_adam.embeddings")


def _packed(
    entry: TokenMap, comparisons: Sequence[Comparison], progress: Progress | None
) -> dict[str, Any]:
    """A map for the page: numbers in base64, which is a third of their size as text."""
    analysis, rows = entry.tokens.analysis, entry.rows
    vocabulary, matrix = analysis.vocabulary, analysis.embeddings.matrix
    indicated, asked = entry.tokens.indicated, entry.tokens.verification

    def of_rows(places: NDArray[np.int64], numbers: NDArray[Any]) -> NDArray[np.float32]:
        """Numbers of some rows, for those on the map; NaN for all others."""
        whole = np.full(len(matrix), np.nan, np.float32)
        whole[places] = numbers
        return whole[rows]

    shown = np.isin(np.arange(len(matrix)), rows)
    k = min(NEIGHBOURS, len(rows) - 1)
    near = nearest(matrix, rows, k, centered=True, keep=shown, progress=progress)
    # By their numbers on the page, of which there are so few that 16 bits hold them.
    neighbours = np.searchsorted(rows, near.neighbours)
    kinds = [CATEGORIES.index(kind) for kind in vocabulary.categories[rows].tolist()]
    # An array is a fraction of its size as text in base64 and the smallest type that holds it.
    columns: dict[str, NDArray[Any]] = {
        "x": entry.xy[:, 0],
        "y": entry.xy[:, 1],
        "norm": indicated.indicators["norm"][rows].astype(np.float32),
        "indicator": indicated.indicators[indicated.order_by][rows].astype(np.float32),
        "hub": np.bincount(neighbours.reshape(-1), minlength=len(rows)).astype(np.float32),
        "id": rows.astype(np.int32),
        "category": np.array(kinds, np.uint8),
        "alike": np.isin(rows, indicated.alike).astype(np.uint8),
        "neighbours": neighbours.astype(np.uint16),
        # To less than a hundredth, which is as much as the page shows.
        "cosines": np.round(near.cosines * 127).astype(np.int8),
    }
    if analysis.counts is not None:
        columns["count"] = analysis.counts[rows].astype(np.float32)
    if asked is not None:
        columns["repeated"] = of_rows(asked.rows, asked.probabilities)
    for changes in (c.changes for c in comparisons if c.after is analysis):
        if changes.cosines is not None:
            columns.setdefault("change", of_rows(changes.pairs.second, changes.cosines))
    packed = {
        name: {"type": values.dtype.name, "data": base64.b64encode(values.tobytes()).decode()}
        for name, values in columns.items()
    }
    names = [vocabulary.name(row) for row in rows.tolist()]
    about = {"label": analysis.label, "order_by": indicated.order_by, "total": len(matrix), "k": k}
    return {**about, "tokens": names, "columns": packed}
