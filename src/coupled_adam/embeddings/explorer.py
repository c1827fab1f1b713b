"""A table with a row for each token: as a map to explore, and as a file for other tools."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.changes import Comparison
from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.undertrained import INDICATORS, UndertrainedReport
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    import pandas

POINTS = 50_000
"""The most tokens on a page, over all matrices: it then has about 20 MB."""
_HOVERED = 5  # neighbours that the map names


def check_installed(explore: bool, export: Path | None) -> None:
    """Raise UsageError unless the packages for a map, or for an export, are there."""
    if export is not None and export.suffix != ".parquet":
        raise UsageError(f"--export {export} must end in .parquet")
    needed = ["pandas", *["plotly"] * explore, *["pyarrow"] * (export is not None)]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"--explore and --export need packages: pip install {' '.join(missing)}")


def token_frame(
    matrices: Sequence[UndertrainedReport],
    comparisons: Sequence[Comparison] = (),
    *,
    limit: int | None = None,
) -> pandas.DataFrame:
    """One row for each token of one or several matrices: where it lies, and all that is known.

    ``x`` and ``y`` are its first two principal components. ``neighbors`` has the numbers of the
    rows of the frame that are its nearest by cosine, with the mean removed, and their distances,
    1 - cosine, as embedding-atlas reads them. Rows that are zero or not finite are left out. Above
    a limit (over all matrices) a fixed random sample is drawn, in which under-trained tokens are
    kept.
    """
    import pandas

    frames: list[pandas.DataFrame] = []
    for entry in matrices:
        matrix = entry.analysis.embeddings.matrix
        rows = _chosen(entry, None if limit is None else limit // len(matrices))
        frame = pandas.DataFrame(_columns(entry, comparisons, rows))
        # Among themselves, so that the numbers of the frame's rows name them.
        shown = np.isin(np.arange(len(matrix)), rows)
        frame["x"], frame["y"] = _principal_components(matrix, shown)
        near, cosines = nearest(matrix, rows, centered=True, keep=shown)
        numbers = np.searchsorted(rows, near) + sum(map(len, frames))
        frame["neighbors"] = [
            {"ids": ids.tolist(), "distances": distances.tolist()}
            for ids, distances in zip(numbers, 1 - cosines)
        ]
        frames.append(frame)
    return pandas.concat(frames, ignore_index=True)


def export(matrices: Sequence[UndertrainedReport], comparisons: Sequence[Comparison]) -> bytes:
    """A file of Parquet with the columns of :func:`token_frame`, for all tokens."""
    file = io.BytesIO()
    token_frame(matrices, comparisons).to_parquet(file)
    return file.getvalue()


def explorer_page(
    matrices: Sequence[UndertrainedReport], comparisons: Sequence[Comparison] = ()
) -> str:
    """A map of the tokens as one page of HTML that loads nothing; hovering shows what is known."""
    import plotly.express

    frame = token_frame(matrices, comparisons, limit=POINTS)
    # plotly takes text for HTML.
    frame["name"] = [html.escape(repr(t) if t else "–", quote=False) for t in frame["token"]]
    frame["nearest"] = [
        ", ".join(frame["name"][near["ids"][:_HOVERED]]) for near in frame["neighbors"]
    ]
    frame["matrix"] = [html.escape(f"{m}, {r}") for m, r in zip(frame["model"], frame["role"])]
    labels = {"x": "principal component 1", "y": "principal component 2"}
    labels |= {str(name): label for name, label in INDICATORS.items()}
    unseen = ("x", "y", "matrix", "token", "neighbors", "model", "name")
    figure = plotly.express.scatter(
        frame,
        x="x",
        y="y",
        color=matrices[0].indicated.order_by,
        facet_col="matrix" if len(matrices) > 1 else None,
        hover_name="name",
        hover_data={str(column): column not in unseen for column in frame.columns},
        labels=labels,
        title="Tokens, colored by how much they resemble unused ones (lower: more)",
        render_mode="webgl",
        color_continuous_scale="Viridis",
    )
    figure.update_traces(marker={"size": 4})
    page: str = figure.to_html(default_height="92vh")
    return page


def _chosen(entry: UndertrainedReport, share: int | None) -> NDArray[np.int64]:
    """The rows of a matrix that are finite and different from zero, or a sample of them."""
    rows = np.setdiff1d(np.arange(len(entry.analysis.embeddings.matrix)), entry.indicated.dead)
    if share is None or len(rows) <= share:
        return rows
    # Under-trained tokens come first, and the rest is random.
    usual = np.random.default_rng(0).permutation(np.setdiff1d(rows, entry.rows))
    return np.sort(np.concatenate([np.intersect1d(entry.rows, rows), usual])[:share])


def _principal_components(matrix: torch.Tensor, keep: geometry.Mask) -> NDArray[np.float32]:
    """The first two of the rows to keep, [2, n]; zero where the matrix has only one."""
    mean = geometry.mean_and_norms(matrix, keep)[0]
    axes = torch.linalg.eigh(geometry.gram(matrix, mean, keep))[1].flip(1)[:, :2]
    # The sign of an eigenvector is arbitrary: its largest component is positive.
    axes = axes * axes.gather(0, axes.abs().argmax(0)[None]).sign()
    found = np.zeros((2, keep.sum()), np.float32)
    places = torch.cat([(block - mean) @ axes for block in geometry.blocks(matrix, keep)])
    found[: axes.shape[1]] = geometry.as_array(places).T
    return found


def _columns(
    entry: UndertrainedReport, comparisons: Sequence[Comparison], rows: NDArray[np.int64]
) -> dict[str, Any]:
    """What is known of some rows of a matrix."""
    import pandas

    analysis, vocabulary = entry.analysis, entry.analysis.vocabulary

    columns: dict[str, Any] = {
        # UTF-8 cannot hold lone surrogates.
        "model": analysis.model.encode("utf-8", "replace").decode(),
        "role": analysis.embeddings.role,
        "id": rows,
        "token": [vocabulary.texts[row].encode("utf-8", "replace").decode() for row in rows],
        "category": vocabulary.categories[rows],
        "like_unused": np.isin(rows, entry.indicated.alike),
    }
    columns |= {name: v[rows] for name, v in entry.indicated.indicators.items()}
    if analysis.counts is not None:
        columns["count"] = analysis.counts[rows]
    if entry.verification is not None:
        asked = pandas.Series(entry.verification.probabilities, entry.verification.rows)
        columns["repeated"] = asked.reindex(rows).to_numpy(np.float32)
    for comparison in comparisons:
        if comparison.after is analysis and comparison.changes.cosines is not None:
            change = pandas.Series(comparison.changes.cosines, comparison.rows)
            columns["change"] = change.reindex(rows).to_numpy(np.float32)
    return columns
