"""Reports on the embeddings of several models as a table for the terminal, as CSV and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.report import MEASURES, Measures, number, shown
from coupled_adam.embeddings.tokens import Comparison, Neighbourhood, Undertrainedness
from coupled_adam.rendering.tables import csv_text, terminal_table

Row = tuple[str, str, list[str]]
"""Label, symbol, and a value for each matrix."""

_OF_THE_MEAN = ("mean_norm", "mean_norm_ratio", "mean_frequency_correlation", "isotropy_published")


def table_rows(analyses: Sequence[Analysis]) -> list[tuple[str, list[Row]]]:
    """The sections of the table, each with its title."""
    tops = sorted({analysis.report.top_directions for analysis in analyses})
    removed = f"top {' or '.join(map(str, tops))} principal directions"
    if tops == [1]:
        removed = "top principal direction"
    sections: list[tuple[str, list[Row]]] = [("", _facts(analyses))]
    for title, field in (
        ("", None),
        ("with the mean removed", "centered"),
        (f"with the mean and the {removed} removed", "all_but_the_top"),
    ):
        parts = [a.report if field is None else getattr(a.report, field) for a in analyses]
        rows = []
        for label, symbol, path, digits in MEASURES:
            values = [number(part, path) for part in parts]
            # With the mean removed, measures of the mean itself say nothing.
            if any(values) and (field is None or path[0] not in _OF_THE_MEAN):
                rows.append((label, symbol, [shown(value, digits) for value in values]))
        rows += _word_similarity_rows(parts)
        sections.append((title, rows))
    return sections


def _facts(analyses: Sequence[Analysis]) -> list[Row]:
    """What was measured, and what was left out."""
    rows: list[Row] = [
        ("tensor", "", [a.embeddings.tensor or "–" for a in analyses]),
        ("embeddings", "E", [f"{a.report.vocab_size} x {a.report.hidden_size}" for a in analyses]),
    ]
    for label, numbers in (
        ("rows that are no token", [a.padding_rows for a in analyses]),
        ("tokens never seen", [a.report.unseen_tokens for a in analyses]),
        ("rows left out of all measures", [a.report.excluded_rows or None for a in analyses]),
    ):
        if any(value is not None for value in numbers):
            rows.append((label, "", ["–" if value is None else str(value) for value in numbers]))
    return rows


def _word_similarity_rows(parts: Sequence[Measures]) -> list[Row]:
    """A row for each set: r, its confidence interval, and how many pairs were usable."""
    reports = [part.word_similarity for part in parts]
    rows = []
    for name in dict.fromkeys(name for report in reports if report for name in report.sets):
        texts = []
        for report in reports:
            score = report.sets.get(name) if report else None
            text = "–"
            if score is not None and score.r is not None:
                low_high = (
                    "" if score.interval is None else " [{:.0f}, {:.0f}]".format(*score.interval)
                )
                text = f"{score.r:.1f}{low_high} {score.pairs}/{score.total}"
            elif score is not None:
                text = f"– {score.pairs}/{score.total}"
            texts.append(text)
        rows.append((f"  {name}", "r", texts))
    return rows


def analyses_table(analyses: Sequence[Analysis]) -> Table:
    """The table for the terminal: a column for each matrix, and a row for each measure.

    Its three sections show the embeddings as they are, with their mean removed, and with their mean
    and their top principal directions removed.
    """
    table = terminal_table()
    table.add_column("")
    table.add_column("")
    for analysis in analyses:
        table.add_column(Text(analysis.label), justify="right", no_wrap=True)
    for title, rows in table_rows(analyses):
        if title:
            table.add_row()
            table.add_row(Text(title, "bold"))
        for label, symbol, values in rows:
            table.add_row(*map(Text, (label, symbol, *values)))
    return table


def analyses_csv(analyses: Sequence[Analysis]) -> str:
    """CSV with a line for each matrix and variant, in full precision; missing numbers are empty."""
    lines = []
    for analysis in analyses:
        whole = analysis.to_dict()
        for variant in ("as is", "centered", "all_but_the_top"):
            measures = whole if variant == "as is" else whole[variant]
            line = {name: whole[name] for name in ("model", "role", "tensor")}
            line["variant"] = variant
            line |= {
                name: value
                for name, value in measures.items()
                if not isinstance(value, dict | list)
            }
            similarity = measures["word_similarity"]
            if similarity is not None:
                line |= {"word_similarity": similarity["mean"]}
                line |= {"word_similarity_dot": similarity["dot_mean"]}
                for name, score in similarity["sets"].items():
                    line |= {f"{name} {key}": score[key] for key in ("r", "dot", "pairs", "total")}
                    low, high = score["interval"] or (None, None)
                    line |= {f"{name} low": low, f"{name} high": high}
            lines.append(line)
    names = list(dict.fromkeys(name for line in lines for name in line))
    return csv_text([names, *([line.get(name) for name in names] for line in lines)])


def analyses_json(
    analyses: Sequence[Analysis],
    undertrained: Sequence[Undertrainedness] = (),
    neighbours: Sequence[Neighbourhood] = (),
    comparisons: Sequence[Comparison] = (),
) -> str:
    """A JSON object for one matrix, or a list of objects for several.

    What is said of a matrix's tokens is part of its object. With comparisons, the result is an
    object of ``models``, the list, and ``changes``.
    """
    entries = [analysis.to_dict() for analysis in analyses]
    for entry, found in zip(entries, undertrained):
        entry["undertrained"] = found.to_dict()
    for entry, near in zip(entries, neighbours):
        entry |= near.to_dict()
    content: Any = entries[0] if len(entries) == 1 else entries
    if comparisons:
        content = {"models": entries, "changes": [found.to_dict() for found in comparisons]}
    return json.dumps(content, indent=2, allow_nan=False)
