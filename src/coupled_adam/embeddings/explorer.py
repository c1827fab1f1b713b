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
from markupsafe import Markup
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.changes import ChangesReport
from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.undertrained import INDICATORS, UndertrainedReport
from coupled_adam.errors import UsageError
from coupled_adam.rendering.page import render

if TYPE_CHECKING:
    import pandas

POINTS = 50_000
"""The most tokens on a page, over all matrices: it then has about 20 MB."""
_HOVERED = 5  # neighbours that the map names
_LEGEND = (
    "‖e‖: the norm of the token's row. cos: the cosine to the mean of the rows that are known to "
    "be unused. category: ok (some text contains the token), undecodable (not whole UTF-8), "
    "unreachable (in no text), special, byte, or none (no token). count: how often it occurs. "
    "like_unused: it cannot be told from unused rows. repeated: the model's probability of "
    "repeating it. change: the cosine to its row before. nearest: its neighbours by cosine, with "
    "the mean removed."
)


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
    changes: Sequence[ChangesReport] = (),
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

    # Neighbours are named by their place in the whole frame, so each matrix needs where it begins.
    frames: list[pandas.DataFrame] = []
    for entry in matrices:
        rows = _chosen(entry, None if limit is None else limit // len(matrices))
        columns = _columns(entry, changes, rows, first=sum(map(len, frames)))
        frames.append(pandas.DataFrame(columns))
    return pandas.concat(frames, ignore_index=True)


def export(matrices: Sequence[UndertrainedReport], changes: Sequence[ChangesReport]) -> bytes:
    """A file of Parquet with the columns of :func:`token_frame`, for all tokens."""
    file = io.BytesIO()
    token_frame(matrices, changes).to_parquet(file)
    return file.getvalue()


def explorer_page(
    matrices: Sequence[UndertrainedReport], changes: Sequence[ChangesReport] = ()
) -> str:
    """A map of the tokens as one page of HTML that loads nothing, with a field to search in it."""
    from plotly.offline import get_plotlyjs

    # A map for each matrix.
    figures = []
    for entry in matrices:
        frame = token_frame([entry], changes, limit=POINTS // len(matrices))
        # What a point says when the mouse is on it; plotly takes text for HTML.
        frame["name"] = [html.escape(repr(t) if t else "–", quote=False) for t in frame["token"]]
        frame["nearest"] = [
            ", ".join(frame["name"][near["ids"][:_HOVERED]]) for near in frame["neighbors"]
        ]
        drawn = _map(frame, entry.indicated.order_by)
        figures.append((entry.analysis.label, Markup(drawn)))
    labels = [label for label, _ in figures]
    shown = {entry.indicated.order_by for entry in matrices}
    page = render(
        "map.html",
        {
            "title": f"Tokens: {', '.join(labels)}",
            "figures": figures,
            "indicator": " or ".join(INDICATORS[name] for name in sorted(shown)),
            "legend": _LEGEND,
        },
        [],
        package="coupled_adam.embeddings",
    )
    # Once for all maps, and not through the template, which would escape four megabytes.
    return page.replace("<body>", f"<body>\n<script>{get_plotlyjs()}</script>", 1)


def _map(frame: pandas.DataFrame, color: str) -> str:
    """The points of one matrix, as a part of a page."""
    import plotly.express

    unseen = ("x", "y", "token", "tensor", "role", "neighbors", "model", "name")
    figure = plotly.express.scatter(
        frame,
        x="x",
        y="y",
        color=color,
        hover_name="name",
        hover_data={str(column): column not in unseen for column in frame.columns},
        labels={"x": "PC 1", "y": "PC 2"} | {str(n): label for n, label in INDICATORS.items()},
        render_mode="webgl",
        color_continuous_scale="Viridis",
    )
    figure.update_traces(marker={"size": 4})
    # On any background, and in windows as narrow as a phone's.
    figure.update_layout(
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888"},
        coloraxis_colorbar={"orientation": "h", "y": -0.15, "yanchor": "top", "thickness": 12},
    )
    grid = {"gridcolor": "rgba(128,128,128,.3)", "zerolinecolor": "#888", "automargin": True}
    figure.update_xaxes(**grid)
    figure.update_yaxes(**grid)
    options = {"full_html": False, "include_plotlyjs": False, "default_height": "calc(100% - 4rem)"}
    return str(figure.to_html(config={"responsive": True, "displaylogo": False}, **options))


def _chosen(entry: UndertrainedReport, share: int | None) -> NDArray[np.int64]:
    """The rows of a matrix that are finite and different from zero, or a sample of them."""
    rows = np.setdiff1d(np.arange(len(entry.analysis.embeddings.matrix)), entry.analysis.dead)
    if share is None or len(rows) <= share:
        return rows
    # Under-trained tokens come first, and the rest is random.
    usual = np.random.default_rng(0).permutation(np.setdiff1d(rows, entry.rows))
    return np.sort(np.concatenate([np.intersect1d(entry.rows, rows), usual])[:share])


def _principal_components(matrix: torch.Tensor, keep: geometry.Mask) -> NDArray[np.float32]:
    """The first two of the rows to keep, [2, n]; zero where the matrix has only one."""
    mean = geometry.mean_and_norms(matrix, keep)[0]
    axes = torch.linalg.eigh(geometry.gram(matrix, mean, keep))[1].flip(1)[:, :2]  # [H, 2]
    # The sign of an eigenvector is arbitrary: its largest component is positive.
    axes = axes * axes.gather(0, axes.abs().argmax(0)[None]).sign()
    components = np.zeros((2, keep.sum()), np.float32)
    projected = torch.cat([(block - mean) @ axes for block in geometry.blocks(matrix, keep)])
    components[: axes.shape[1]] = geometry.as_array(projected).T
    return components


def _columns(
    entry: UndertrainedReport,
    changes: Sequence[ChangesReport],
    rows: NDArray[np.int64],
    *,
    first: int,
) -> dict[str, Any]:
    """What is known of some rows [n] of a matrix, a column [n] each.

    ``first`` is the number of the first of them in the frame.
    """
    analysis, vocabulary = entry.analysis, entry.analysis.vocabulary

    def placed(values: NDArray[Any], known: NDArray[np.int64]) -> NDArray[np.float32]:
        """Values [m] of the rows [m] that are known, and NaN for the others."""
        column = np.full(len(vocabulary), np.nan, np.float32)
        column[known] = values
        return column[rows]

    columns: dict[str, Any] = {
        "model": _utf8(analysis.model),
        "role": analysis.embeddings.role,
        "tensor": _utf8(analysis.embeddings.tensor),
        "id": rows,
        "token": [_utf8(vocabulary.texts[row]) for row in rows],
        "category": vocabulary.categories[rows],
        "like_unused": np.isin(rows, entry.indicated.alike),
    }
    columns |= {name: v[rows] for name, v in entry.indicated.indicators.items()}
    if analysis.counts is not None:
        columns["count"] = analysis.counts[rows]
    if entry.verification is not None:
        columns["repeated"] = placed(entry.verification.probabilities, entry.verification.rows)
    for report in changes:
        if report.analysis is analysis and report.changes.cosines is not None:
            columns["change"] = placed(report.changes.cosines, report.rows)
    # Neighbours are sought among the rows that are shown, which numbers of the frame's rows name.
    matrix = analysis.embeddings.matrix
    shown = np.isin(np.arange(len(matrix)), rows)
    columns["x"], columns["y"] = _principal_components(matrix, shown)
    near, cosines = nearest(matrix, rows, centered=True, keep=shown)  # [n, k] each
    # rows are ascending, so that searchsorted finds the place of each.
    columns["neighbors"] = [
        {"ids": ids.tolist(), "distances": distances.tolist()}
        for ids, distances in zip(np.searchsorted(rows, near) + first, 1 - cosines)
    ]
    return columns


def _utf8(text: str) -> str:
    """A text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
