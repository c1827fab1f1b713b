"""Reports on the embeddings of several models as a page of HTML with pictures."""

from collections.abc import Callable, Sequence
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.embeddings import pictures, row_norms
from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.analysis_tables import analyses_table
from coupled_adam.embeddings.measures import MEASURES, small_print
from coupled_adam.embeddings.tokens import Undertrainedness
from coupled_adam.rendering.page import render
from coupled_adam.rendering.pictures import Picture, single

_TOKENS = 200  # that a page names; a map has all


def analyses_page(
    analyses: Sequence[Analysis], undertrained: Sequence[Undertrainedness] = ()
) -> str:
    """The diagnosis, the first measures, the pictures, and all measures as one page of HTML.

    If the under-trained tokens of each matrix are given, they are named, too.
    """
    labels = [analysis.label for analysis in analyses]
    values = {
        "title": f"Embeddings: {', '.join(labels)}",
        "diagnoses": list(zip(labels, [entry.diagnosis for entry in undertrained or analyses])),
        "tokens": [named.table(_TOKENS) for named in undertrained],
        "table": analyses_table(analyses),
        "all_measures": analyses_table(analyses, all_measures=True),
        "explanation": small_print(MEASURES.values()),
    }
    drawn = analyses_pictures(analyses)
    return render("analysis.html", values, drawn, package="coupled_adam.embeddings")


def analyses_pictures(analyses: Sequence[Analysis]) -> list[Picture]:
    """Pictures of the matrices, their spectra, angles and norms; with counts, also of frequency."""
    colors = _colors(len(analyses))
    columns = min(3, len(analyses))
    rows = -(-len(analyses) // columns)
    clouds = Figure(figsize=(max(6, 4.5 * columns), 4.5 * rows), layout="constrained")
    panels = clouds.subplots(rows, columns, squeeze=False).flat
    matrices = [
        a.embeddings.matrix if a.keep is None else a.embeddings.matrix[a.keep] for a in analyses
    ]
    # A panel for each matrix, as clouds would hide each other; the rest of the grid stays empty.
    for ax, analysis, matrix, color in zip(panels, analyses, matrices, colors):
        pictures.plot_cloud(ax, matrix, color)
        pictures.finish_clouds(ax)
        ax.set_title(_plain(analysis.label))
    for ax in panels:
        ax.set_axis_off()
    labels = [_plain(analysis.label) for analysis in analyses]
    norms = [row_norms(matrix) for matrix in matrices]

    def draw_norms(ax: Axes, i: int) -> None:
        counts, keep = analyses[i].counts, analyses[i].keep
        if counts is not None:
            used = counts if keep is None else counts[keep]
            pictures.plot_norms(ax, norms[i], used, colors[i], labels[i])

    plots: dict[str, Callable[[Axes, int], None]] = {
        "Singular values relative to the largest.": lambda ax, i: pictures.plot_spectrum(
            ax, np.array(analyses[i].report.singular_values), colors[i], labels[i]
        ),
        "Cosine similarities of pairs of rows drawn at random.": (
            lambda ax, i: pictures.plot_similarities(ax, matrices[i], colors[i], labels[i])
        ),
        "Norms of the embeddings.": lambda ax, i: pictures.plot_norm_histogram(
            ax, norms[i], colors[i], labels[i]
        ),
    }
    if any(analysis.counts is not None for analysis in analyses):
        plots["Norms against how often the tokens occur."] = draw_norms
    drawn = [
        Picture(
            clouds,
            "The embeddings projected onto the direction of their mean (horizontal) and onto the "
            "perpendicular direction in which they vary most (vertical). X: the mean; +: the "
            "origin.",
        )
    ]

    def draw_each(plot: Callable[[Axes, int], None], ax: Axes) -> None:
        for i in range(len(analyses)):
            plot(ax, i)

    drawn += [single(partial(draw_each, plot), caption) for caption, plot in plots.items()]
    return drawn


def _plain(label: str) -> str:
    """Escape a label for matplotlib, which reads text between two $ as a formula."""
    return label.replace("$", r"\$")


def _colors(number: int) -> list[str]:
    few = number <= 10
    places = np.arange(number) if few else np.linspace(0, 1, number)
    colors = matplotlib.colormaps["tab10" if few else "turbo"](places)
    return [matplotlib.colors.to_hex(color) for color in colors.tolist()]
