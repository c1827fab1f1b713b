"""Reports on the embeddings of several models: the table of their measures, and JSON."""

import json
from collections.abc import Sequence
from typing import Any

from coupled_adam.embeddings.analysis import Analysis, Answer
from coupled_adam.embeddings.measures import MEASURES, Measures
from coupled_adam.embeddings.references import references
from coupled_adam.embeddings.report import Row, measure_rows
from coupled_adam.rendering.tables import Table


def analyses_table(analyses: Sequence[Analysis], all_measures: bool = False) -> Table:
    """A table with a column for each matrix, and a row for each of the first measures.

    Or for all measures, also with the mean removed, and with the mean and the top principal
    directions removed.
    """
    reports = [analysis.report for analysis in analyses]
    # What was measured, then the measures of the matrices as they are. A text in place of a row is
    # the title of the rows below it.
    rows: list[Row | str] = [*_facts(analyses), *measure_rows(reports, all_measures=all_measures)]
    if all_measures:
        rows += _word_similarity_rows(reports)
        for title, variants in (
            ("with the mean removed", [report.centered for report in reports]),
            ("without mean and top principal directions", [r.all_but_the_top for r in reports]),
        ):
            rows += [title, *measure_rows(variants, all_measures=True, as_is=False)]
            rows += _word_similarity_rows(variants)
    # Label, symbol and references are text, and the values between them are numbers.
    labels = [analysis.label for analysis in analyses]
    return Table(["", "", *labels, "references"], rows, "", left=(0, 1, len(labels) + 2))


def references_table() -> Table:
    """The measures of the references: medians, and what there is of which sizes."""
    rows: list[Row | str] = [
        ["matrices", "", *(str(reference.matrices) for reference in references())],
        ["V x H", "", *(reference.sizes for reference in references())],
    ]
    for measure in MEASURES.values():
        values = [reference.medians.get(measure.key) for reference in references()]
        if any(value is not None for value in values):
            rows.append([measure.label, measure.symbol, *measure.texts(values)])
    names = [reference.name for reference in references()]
    return Table(["", "", *names], rows, "References, medians", left=(0, 1))


def _facts(analyses: Sequence[Analysis]) -> list[Row]:
    """What was measured, and what was left out."""
    facts: list[tuple[str, str, list[Any]]] = [
        ("tensor", "", [a.embeddings.tensor or None for a in analyses]),
        ("embeddings", "E", [f"{a.report.vocab_size} x {a.report.hidden_size}" for a in analyses]),
        ("rows that are no token", "", [a.padding_rows for a in analyses]),
        ("tokens never seen", "", [a.report.unseen_tokens for a in analyses]),
        ("rows that are zero or not finite", "", [len(a.dead) or None for a in analyses]),
        ("rows left out of all measures", "", [a.report.excluded_rows or None for a in analyses]),
    ]
    # What is None for all matrices is left out. The last cell is empty: references have no facts.
    return [
        [label, symbol, *("–" if value is None else str(value) for value in values), ""]
        for label, symbol, values in facts
        if any(value is not None for value in values)
    ]


def _word_similarity_rows(variants: Sequence[Measures]) -> list[Row]:
    """A row for each set: r with the usable pairs."""
    reports = [variant.word_similarity for variant in variants]
    rows: list[Row] = []
    for name in dict.fromkeys(name for report in reports if report for name in report.sets):
        scores = [report.sets.get(name) if report else None for report in reports]
        texts = [
            "–" if s is None or s.r is None else f"{s.r:.1f} {s.pairs}/{s.total}" for s in scores
        ]
        rows.append([f"word similarity, {name}", "r", *texts, ""])
    return rows


def analyses_json(
    analyses: Sequence[Analysis], answers: Sequence[Answer] = (), changes: Sequence[Answer] = ()
) -> str:
    """A JSON object for one matrix and its tokens, or a list of objects for several.

    With changes, the result is an object of ``models``, the list, and ``changes``.
    """
    # What was found out about the tokens of a matrix is added to the numbers of that matrix.
    entries = [analysis.to_dict() for analysis in analyses]
    for analysis, entry in zip(analyses, entries):
        for answer in answers:
            if answer.analysis is analysis:
                entry |= {"diagnosis": [*entry["diagnosis"], *answer.said], **answer.numbers}
    content: Any = entries[0] if len(entries) == 1 else entries
    if changes:
        content = {"models": entries, "changes": [entry.numbers for entry in changes]}
    return json.dumps(content, indent=2, allow_nan=False)
