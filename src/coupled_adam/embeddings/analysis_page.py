"""Reports on the embeddings of several models as a page of HTML with pictures."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.embeddings import pictures
from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.analysis_tables import analyses_table, references_table
from coupled_adam.embeddings.measures import MEASURES, small_print
from coupled_adam.embeddings.undertrained import UndertrainedReport
from coupled_adam.rendering.page import render
from coupled_adam.rendering.pictures import Picture, single
from coupled_adam.rendering.tables import Table

_TOKENS = 200  # that a page names; a map has all


def analyses_page(
    analyses: Sequence[Analysis],
    undertrained: Sequence[UndertrainedReport] = (),
    tables: Sequence[Table] = (),
) -> str:
    """The diagnosis, the first measures, the pictures, and all measures as one page of HTML.

    If the under-trained tokens of each matrix are given, they are named, too; so is what the other
    tables say of tokens.
    """
    labels = [analysis.label for analysis in analyses]
    values = {
        "title": f"Embeddings: {', '.join(dict.fromkeys(a.name for a in analyses))}",
        "diagnoses": list(zip(labels, [entry.diagnosis for entry in undertrained or analyses])),
        "tokens": [*(named.table(_TOKENS) for named in undertrained), *tables],
        "table": analyses_table(analyses),
        "all_measures": analyses_table(analyses, all_measures=True),
        "references": references_table(),
        "explanation": small_print(MEASURES.values()),
    }
    drawn = analyses_pictures(analyses)
    return render("analysis.html", values, drawn, package="coupled_adam.embeddings")


def analyses_pictures(analyses: Sequence[Analysis]) -> list[Picture]:
    """Pictures of the matrices, their spectra and norms; with counts, also of frequency."""
    number = len(analyses)
    # matplotlib reads text between two $ as a formula.
    styles = [(f"C{i % 10}", a.label.replace("$", r"\$")) for i, a in enumerate(analyses)]
    matrices = [_measured(analysis.embeddings.matrix, analysis) for analysis in analyses]
    # A panel for each matrix, as clouds would hide each other; the rest of the grid stays empty.
    columns = min(3, number)
    rows = -(-number // columns)
    clouds = Figure(figsize=(max(6, 4.5 * columns), 4.5 * rows), layout="constrained")
    panels = clouds.subplots(rows, columns, squeeze=False).flat
    for matrix, (color, label), ax in zip(matrices, styles, panels):
        pictures.plot_cloud(ax, matrix, color)
        pictures.finish_clouds(ax)
        ax.set_title(label)
    for ax in panels:
        ax.set_axis_off()
    caption = (
        "The embeddings projected onto the direction of their mean (horizontal) and onto the "
        "perpendicular direction in which they vary most (vertical). X: the mean; +: the origin."
    )

    def each(plot: Any, data: Sequence[Any]) -> Callable[[Axes], None]:
        """A function that draws what there is of each matrix."""

        def draw(ax: Axes) -> None:
            for entry, style in zip(data, styles):
                if entry is not None:
                    plot(ax, entry, *style)

        return draw

    norms = [_measured(analysis.norms, analysis) for analysis in analyses]
    spectra = [np.array(analysis.report.singular_values) for analysis in analyses]
    drawn = [
        Picture(clouds, caption),
        single(each(pictures.plot_spectrum, spectra), "Singular values relative to the largest."),
        single(each(pictures.plot_norm_histogram, norms), "Norms of the embeddings."),
    ]
    counted = [
        None if a.counts is None else (rows, _measured(a.counts, a))
        for a, rows in zip(analyses, norms)
    ]
    if any(counted):
        plot = each(lambda ax, pair, *style: pictures.plot_norms(ax, *pair, *style), counted)
        drawn.append(single(plot, "Norms against how often the tokens occur."))
    return drawn


def _measured(rows: Any, analysis: Analysis) -> Any:
    """The rows that were measured, without a copy if these are all."""
    return rows if analysis.keep is None else rows[analysis.keep]
