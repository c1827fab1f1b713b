"""Reports on the embeddings of several models as a page of HTML with pictures."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.embeddings import pictures
from coupled_adam.embeddings.analysis import Analysis, Answer
from coupled_adam.embeddings.analysis_tables import analyses_table, references_table
from coupled_adam.embeddings.diagnosis import NO_VERDICT
from coupled_adam.embeddings.measures import MEASURES, small_print
from coupled_adam.rendering.page import render
from coupled_adam.rendering.pictures import COLORS, Picture, single

_TOKENS = 30  # that a page names; a map has all


def analyses_page(analyses: Sequence[Analysis], answers: Sequence[Answer] = ()) -> str:
    """The diagnosis, first measures, pictures, answers and all measures as one page of HTML."""
    said = [
        [s for answer in answers if answer.analysis is a for s in answer.said] for a in analyses
    ]
    values = {
        "title": f"Embeddings: {', '.join(dict.fromkeys(a.name for a in analyses))}",
        "diagnoses": [(a.label, [*a.diagnosis, *more]) for a, more in zip(analyses, said)],
        "no_verdict": NO_VERDICT,
        "tokens": [answer.shown(_TOKENS) for answer in answers],
        "table": analyses_table(analyses),
        "all_measures": analyses_table(analyses, all_measures=True),
        "references": references_table(),
        "explanation": small_print(MEASURES.values()),
    }
    drawn = analyses_pictures(analyses)
    return render("analysis.html", values, drawn, package="coupled_adam.embeddings")


def analyses_pictures(analyses: Sequence[Analysis]) -> list[Picture]:
    """Pictures of the matrices, their spectra and norms; with counts, also of frequency."""
    # A color and a label for each; matplotlib reads text between two $ as a formula.
    labels = [analysis.label.replace("$", r"\$") for analysis in analyses]
    styles = [*zip(itertools.cycle(COLORS), labels)]

    def spectra(ax: Axes) -> None:
        for analysis, style in zip(analyses, styles):
            pictures.plot_spectrum(ax, np.array(analysis.report.singular_values), *style)

    def norms(ax: Axes) -> None:
        for analysis, style in zip(analyses, styles):
            pictures.plot_norm_histogram(ax, _measured(analysis.norms, analysis), *style)

    def frequencies(ax: Axes) -> None:
        for analysis, style in zip(analyses, styles):
            if analysis.counts is not None:
                counts = _measured(analysis.counts, analysis)
                pictures.plot_norms(ax, _measured(analysis.norms, analysis), counts, *style)

    drawn = [
        _clouds(analyses, styles),
        single(spectra, "Singular values relative to the largest."),
        single(norms, "Norms of the embeddings."),
    ]
    if any(analysis.counts is not None for analysis in analyses):
        drawn.append(single(frequencies, "Norms against how often the tokens occur."))
    return drawn


def _clouds(analyses: Sequence[Analysis], styles: Sequence[tuple[str, str]]) -> Picture:
    """A panel for each matrix, as clouds would hide each other; the rest of the grid is empty."""
    columns = min(3, len(analyses))
    rows = -(-len(analyses) // columns)  # rounded up
    figure = Figure(figsize=(max(6, 4.5 * columns), 4.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for analysis, (color, label), ax in zip(analyses, styles, panels):
        pictures.plot_cloud(ax, _measured(analysis.embeddings.matrix, analysis), color)
        pictures.finish_clouds(ax)
        ax.set_title(label)
    for ax in panels:  # zip() has left the rest in the iterator
        ax.set_axis_off()
    return Picture(
        figure,
        "The embeddings projected onto the direction of their mean (horizontal) and onto the "
        "perpendicular direction in which they vary most (vertical). X: the mean; +: the origin.",
    )


def _measured(rows: Any, analysis: Analysis) -> Any:
    """The rows that were measured, without a copy if these are all."""
    return rows if analysis.keep is None else rows[analysis.keep]
