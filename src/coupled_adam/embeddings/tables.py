"""Reports on the embeddings of several models as a table for the terminal, as CSV and as JSON."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.measures import MEASURES, Measures
from coupled_adam.embeddings.tokens import Comparison, Neighbourhood, Undertrainedness
from coupled_adam.rendering.tables import csv_text, terminal_table

T = TypeVar("T")

_SOURCES = list(dict.fromkeys(m.healthy.source for m in MEASURES.values() if m.healthy is not None))


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        label, symbol: what is measured.
        values: a value for each matrix.
        healthy: the healthy range with the number of its source, such as ``"≥ 0.8 [1]"``, or empty.
        outside: for each matrix whether its value is outside the healthy range; empty if there is
            no range.
    """

    label: str
    symbol: str
    values: list[str]
    healthy: str = ""
    outside: list[bool] = dataclasses.field(default_factory=list)

    def marked(self, wrap: Callable[[str], T], plain: Callable[[str], T]) -> list[T]:
        """The values; those outside of the healthy range go through ``wrap``, others ``plain``."""
        outside = self.outside or [False] * len(self.values)
        return [(wrap if out else plain)(text) for text, out in zip(self.values, outside)]


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
        rows = measure_rows(parts, as_is=field is None)
        rows += _word_similarity_rows(parts)
        sections.append((title, rows))
    return sections


def measure_rows(parts: Sequence[Measures | Mapping[str, Any]], *, as_is: bool = True) -> list[Row]:
    """A row for each measure that one of some reports, or of their dicts, has.

    Args:
        parts: the reports, or one variant of each.
        as_is: whether they are of the embeddings as they are. Otherwise there are no measures of
            the mean itself, which say nothing once it is removed, and no healthy ranges.
    """
    rows = []
    for measure in MEASURES.values():
        values = [measure.of(part) for part in parts]
        if not any(values) or (measure.of_the_mean and not as_is):
            continue
        row = Row(measure.label, measure.symbol, [*map(measure.text, values)])
        if measure.healthy is not None and as_is:
            source = _SOURCES.index(measure.healthy.source) + 1
            row = dataclasses.replace(
                row,
                healthy=f"{measure.healthy} [{source}]",
                outside=[value is not None and value not in measure.healthy for value in values],
            )
        rows.append(row)
    return rows


def sources(sections: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """The sources of the healthy ranges that a table shows, each after its number."""
    shown_ranges = [row.healthy for _, rows in sections for row in rows if row.healthy]
    numbered = [(f"[{number}]", source) for number, source in enumerate(_SOURCES, 1)]
    return [
        f"{tag} {source}."
        for tag, source in numbered
        if any(text.endswith(tag) for text in shown_ranges)
    ]


def _facts(analyses: Sequence[Analysis]) -> list[Row]:
    """What was measured, and what was left out."""
    sizes = [f"{a.report.vocab_size} x {a.report.hidden_size}" for a in analyses]
    rows = [
        Row("tensor", "", [a.embeddings.tensor or "–" for a in analyses]),
        Row("embeddings", "E", sizes),
    ]
    for label, numbers in (
        ("rows that are no token", [a.padding_rows for a in analyses]),
        ("tokens never seen", [a.report.unseen_tokens for a in analyses]),
        ("rows left out of all measures", [a.report.excluded_rows or None for a in analyses]),
    ):
        if any(value is not None for value in numbers):
            texts = ["–" if value is None else str(value) for value in numbers]
            rows.append(Row(label, "", texts))
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
        rows.append(Row(f"  {name}", "r", texts))
    return rows


def analyses_table(analyses: Sequence[Analysis]) -> Table:
    """The table for the terminal: a column for each matrix, and a row for each measure.

    Its three sections show the embeddings as they are, with their mean removed, and with their mean
    and their top principal directions removed. Values outside of the healthy range are yellow.
    """
    sections = table_rows(analyses)
    table = terminal_table(caption="\n".join(["Healthy ranges:", *sources(sections)]))
    table.caption_justify = "left"
    # Only the titles of sections are longer than the labels; they wrap.
    longest = max(len(row.label) for _, rows in sections for row in rows)
    table.add_column("", max_width=longest)
    table.add_column("", no_wrap=True)
    for analysis in analyses:
        table.add_column(Text(analysis.label), justify="right", no_wrap=True)
    table.add_column("healthy", no_wrap=True)
    for title, rows in sections:
        if title:
            table.add_row()
            table.add_row(Text(title, "bold"))
        for row in rows:
            values = row.marked(lambda text: Text(text, "yellow"), Text)
            table.add_row(Text(row.label), Text(row.symbol), *values, Text(row.healthy))
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
