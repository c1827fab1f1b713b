"""A table with a row for each token: as a map to explore, and as files for other tools."""

from __future__ import annotations

import html
import importlib.util
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.changes import Comparison
from coupled_adam.embeddings.neighbours import NEIGHBOURS, nearest
from coupled_adam.embeddings.undertrained import INDICATORS, UndertrainedReport
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    import pandas

POINTS = 50_000
"""The most tokens on a page, over all matrices: it then has about 20 MB."""
EXPORTS = (".parquet", ".tsv")
_HOVERED = 5  # neighbours that the map names
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def check_installed(explore: bool, export: str | None) -> None:
    """Raise UsageError unless the export has a known suffix, and the packages are there."""
    if export is not None and not export.endswith(EXPORTS):
        raise UsageError(f"--export {export} must end in {' or '.join(EXPORTS)}")
    is_parquet = export is not None and export.endswith(".parquet")
    for is_needed, option, package in (
        (is_parquet, f"--export {export}", "pyarrow"),
        (explore, "--explore", "plotly"),
        (explore or export is not None, "--explore or --export", "pandas"),
    ):
        if is_needed and importlib.util.find_spec(package) is None:
            raise UsageError(f"{option} needs a package: pip install {package}")


def token_frame(
    matrices: Sequence[UndertrainedReport],
    comparisons: Sequence[Comparison] = (),
    *,
    limit: int | None = None,
) -> pandas.DataFrame:
    """One row for each token of one or several matrices: where it lies, and all that is known.

    ``x`` and ``y`` are its first two principal components: those of the first matrix for all
    matrices of its width, so that checkpoints of one model can be compared. ``neighbors`` has the
    numbers of the rows of the frame that are its nearest by cosine, with the mean removed, and
    their distances, 1 - cosine, as embedding-atlas reads them. Rows that are zero or not finite are
    left out. Above a limit (over all matrices) a fixed random sample is drawn, in which
    under-trained tokens and unused rows are kept.
    """
    import pandas

    share = None if limit is None else limit // len(matrices)
    axes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    frames: list[pandas.DataFrame] = []
    for entry in matrices:
        matrix = entry.analysis.embeddings.matrix
        rows, width = _chosen(entry, share), matrix.shape[1]
        if width not in axes:
            axes[width] = _principal_axes(matrix, _chosen(entry, None))
        mean, directions = axes[width]
        frame = pandas.DataFrame(_columns(entry, comparisons, rows))
        xy = np.zeros((len(rows), 2), np.float32)  # a matrix of one column has no second direction
        for chunk in geometry.row_slices(len(rows), width):
            block = geometry.as_float64(matrix[rows[chunk]]) - mean
            xy[chunk, : directions.shape[1]] = geometry.as_array(block @ directions)
        frame["x"], frame["y"] = xy.T
        # Among themselves, so that the numbers of the frame's rows name them.
        shown = np.isin(np.arange(len(matrix)), rows)
        near = nearest(matrix, rows, min(NEIGHBOURS, len(rows) - 1), centered=True, keep=shown)
        numbers = np.searchsorted(rows, near.neighbours) + sum(map(len, frames))
        frame["neighbors"] = [
            {"ids": ids.tolist(), "distances": distances.tolist()}
            for ids, distances in zip(numbers, 1 - near.cosines)
        ]
        frames.append(frame)
    return pandas.concat(frames, ignore_index=True)


def export(
    matrices: Sequence[UndertrainedReport], comparisons: Sequence[Comparison], name: str
) -> dict[str, bytes]:
    """The files that ``name`` stands for, by name, with all tokens.

    Parquet, for tools such as embedding-atlas, has the columns of :func:`token_frame`. TSV, for the
    embedding projector, has the vectors, and in a second file ``-metadata`` all columns but the
    neighbours.

    Raises:
        UsageError: if the matrices have different widths, which TSV cannot hold.
    """
    frame = token_frame(matrices, comparisons)
    if name.endswith(".parquet"):
        file = io.BytesIO()
        frame.to_parquet(file)
        return {name: file.getvalue()}
    widths = {entry.analysis.embeddings.matrix.shape[1] for entry in matrices}
    if len(widths) > 1:
        raise UsageError(f"--export {name}: the matrices have different widths; export one of them")
    vectors = io.StringIO()
    for entry in matrices:
        matrix, rows = entry.analysis.embeddings.matrix, _chosen(entry, None)
        for chunk in geometry.row_slices(len(rows), matrix.shape[1]):
            block = geometry.as_array(geometry.as_float64(matrix[rows[chunk]]))
            np.savetxt(vectors, block, fmt="%.6g", delimiter="\t")
    # A token may be a tab or the end of a line.
    frame["token"] = [json.dumps(token, ensure_ascii=False)[1:-1] for token in frame["token"]]
    metadata = frame.drop(columns="neighbors").to_csv(sep="\t", index=False, quoting=3)
    return {name: vectors.getvalue().encode(), metadata_file(name): metadata.encode()}


def explorer_page(
    matrices: Sequence[UndertrainedReport], comparisons: Sequence[Comparison] = ()
) -> str:
    """A map of the tokens as one page of HTML that loads nothing; hovering shows what is known."""
    import plotly.express

    frame = token_frame(matrices, comparisons, limit=POINTS)
    names = [html.escape(repr(token) if token else "–", quote=False) for token in frame["token"]]
    frame["nearest"] = [
        ", ".join(names[row] for row in near["ids"][:_HOVERED]) for near in frame["neighbors"]
    ]
    frame["name"] = names
    labels = [entry.analysis.label for entry in matrices]
    frame["matrix"] = np.repeat(labels, [len(_chosen(m, POINTS // len(labels))) for m in matrices])
    indicator = matrices[0].indicated.order_by
    shown = {"x": "principal component 1", "y": "principal component 2"}
    shown |= {str(name): label for name, label in INDICATORS.items()}
    unseen = ("x", "y", "matrix", "token", "neighbors", "model", "name")
    figure = plotly.express.scatter(
        frame,
        x="x",
        y="y",
        color=indicator,
        facet_col="matrix" if len(matrices) > 1 else None,
        hover_name="name",
        hover_data={str(column): column not in unseen for column in frame.columns},
        labels=shown,
        title="Tokens, colored by how much they resemble unused ones (lower: more)",
        render_mode="webgl",
        color_continuous_scale="Viridis",
    )
    figure.update_traces(marker={"size": 4})
    drawn = figure.to_html(full_html=False, include_plotlyjs=True, default_height="92vh")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>Tokens: {html.escape(', '.join(labels))}</title></head>\n"
        f"<body>{drawn}</body></html>\n"
    )


def metadata_file(name: str) -> str:
    """The file beside a TSV of vectors that says what each of them is."""
    return f"{name.removesuffix('.tsv')}-metadata.tsv"


def _chosen(entry: UndertrainedReport, share: int | None) -> NDArray[np.int64]:
    """The rows of a matrix that are finite and different from zero, or a sample of them."""
    rows = np.setdiff1d(np.arange(len(entry.analysis.embeddings.matrix)), entry.indicated.dead)
    if share is None or len(rows) <= share:
        return rows
    # Up to half of the sample are under-trained or unused rows, and the rest is random.
    preferred = np.concatenate([entry.rows, np.flatnonzero(entry.indicated.unused)])
    preferred = preferred[np.isin(preferred, rows)][: share // 2]
    usual = np.random.default_rng(0).permutation(np.setdiff1d(rows, preferred))
    return np.sort(np.concatenate([preferred, usual[: share - len(preferred)]]))


def _principal_axes(
    matrix: torch.Tensor, rows: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean [H] of some rows, and their first two principal directions [H, 2]."""
    keep = np.isin(np.arange(len(matrix)), rows)
    mean = geometry.mean_and_norms(matrix, keep)[0]
    axes = torch.linalg.eigh(geometry.gram(matrix, mean, keep))[1].flip(1)[:, :2]
    # The sign of an eigenvector is arbitrary: its largest component is positive.
    largest = axes.abs().argmax(0)
    return mean, axes * axes.gather(0, largest[None]).sign()


def _columns(
    entry: UndertrainedReport, comparisons: Sequence[Comparison], rows: NDArray[np.int64]
) -> dict[str, Any]:
    """What is known of some rows of a matrix."""
    analysis, vocabulary = entry.analysis, entry.analysis.vocabulary
    # UTF-8 cannot hold lone surrogates.
    texts = [vocabulary.texts[row].encode("utf-8", "replace").decode() for row in rows.tolist()]

    def spread(places: NDArray[np.int64], numbers: NDArray[Any]) -> NDArray[np.float32]:
        """Numbers of some rows of the matrix, for those of the frame; NaN for all others."""
        whole = np.full(len(analysis.embeddings.matrix), np.nan, np.float32)
        whole[places] = numbers
        return whole[rows]

    columns: dict[str, Any] = {
        "model": analysis.model.encode("utf-8", "replace").decode(),
        "role": analysis.embeddings.role,
        "id": rows,
        "token": texts,
        "category": vocabulary.categories[rows],
        "like_unused": np.isin(rows, entry.indicated.alike),
    }
    columns |= {name: v[rows] for name, v in entry.indicated.indicators.items()}
    if analysis.counts is not None:
        columns["count"] = analysis.counts[rows]
    if entry.verification is not None:
        columns["repeated"] = spread(entry.verification.rows, entry.verification.probabilities)
    for changes in (c.changes for c in comparisons if c.after is analysis):
        if changes.cosines is not None:
            columns.setdefault("change", spread(changes.pairs.second, changes.cosines))
    return columns
