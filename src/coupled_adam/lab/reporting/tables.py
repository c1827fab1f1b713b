"""The table of results for the terminal and in Markdown, LaTeX and CSV."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.runs import (
    COLUMNS,
    MORE_COLUMNS,
    Run,
    setting_text,
    short,
    short_key,
)
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    sample_deviation,
    shorthand,
)
from coupled_adam.rendering.tables import csv_text, terminal_table

Bold = Literal["adamw", "all"]
"""Which arms a value must be significantly better than to be bold."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A metric of an arm over its seeds.

    ``p`` and ``p_paired`` are those of the tests against the baseline, if any; the second is of the
    differences between runs with the same seed.
    """

    values: list[float]
    text: str
    p: float | None = None
    p_paired: float | None = None
    bold: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table, which shows one arm of an experiment.

    ``settings`` are the values by which the experiment differs from the others, by short keys.
    """

    experiment: str
    name: str
    settings: dict[str, str]
    tokens: int
    parameters: int
    arm: str
    label: str
    is_baseline: bool
    seeds: list[int]
    cells: dict[str, Cell]


def table_rows(runs: Sequence[Run], bold: Bold = "adamw") -> list[Row]:
    """Create a row for each arm of each experiment, with significantly better values in bold.

    Arms of an experiment are compared by a one-sided Student t-test at 95 % (App. F).

    Args:
        runs: the runs of all experiments.
        bold: ``"adamw"``: an arm is bold where it is better than plain AdamW. AdamW is bold if
            there is only one other arm and that arm is significantly worse. ``"all"``: an arm is
            bold where it is better than each other arm of the experiment, as in Table 7.
    """
    experiments: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        experiments.setdefault(run.experiment, {}).setdefault(run.setup, []).append(run)
    rows = []
    for experiment, arms in experiments.items():
        baseline = next((arm for arm in arms.values() if arm[0].is_baseline), None)
        others = [arm for arm in arms.values() if arm is not baseline]
        for arm in arms.values():
            if bold == "all":
                rivals = [other for other in arms.values() if other is not arm]
            elif arm is not baseline:
                rivals = [] if baseline is None else [baseline]
            else:
                rivals = others if len(others) == 1 else []
            # Without a p in the baseline's row, which readers would take for that of another row.
            against = None if arm is baseline else baseline
            cells = {
                key: _cell(column, arm, against, rivals)
                for key, column in (COLUMNS | MORE_COLUMNS).items()
            }
            first = arm[0]
            rows.append(
                Row(
                    experiment=experiment,
                    name=experiment.partition(" ")[0],
                    settings={
                        short_key(key, [*first.settings]): setting_text(value)
                        for key, value in first.settings.items()
                    },
                    tokens=first.recipe.tokens,
                    parameters=first.parameters,
                    arm=first.arm,
                    label=first.label,
                    is_baseline=first.is_baseline,
                    seeds=[run.seed for run in arm],
                    cells=cells,
                )
            )
    return rows


def _cell(
    column: Measure, arm: list[Run], against: list[Run] | None, rivals: Sequence[list[Run]]
) -> Cell:
    """A cell with its tests against one arm, bold if it is better than each of the rivals."""
    assert column.better is not None
    better = column.better
    by_seed = _values(column, arm)
    values = [*by_seed.values()]

    def p(other: list[Run]) -> float | None:
        return one_sided_t_test(values, [*_values(column, other).values()], better)

    against_rivals = [p(rival) for rival in rivals]
    paired = None if against is None else paired_t_test(by_seed, _values(column, against))
    return Cell(
        values,
        shorthand(values, column.digits),
        None if against is None else p(against),
        None if paired is None else paired.one_sided(better),
        bool(rivals) and all(p is not None and p < SIGNIFICANCE for p in against_rivals),
    )


def _values(column: Measure, runs: list[Run]) -> dict[int, float]:
    """A metric of the runs that have it, by seed."""
    values = {run.seed: run.value(column) for run in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def shown_columns(rows: Sequence[Row]) -> list[Measure]:
    """The columns to show: all except accuracy and word similarity if no run has these."""
    optional = ("accuracy", "word_similarity")
    return [
        column
        for column in COLUMNS.values()
        if column.key not in optional or any(row.cells[column.key].values for row in rows)
    ]


def more_columns(rows: Sequence[Row]) -> list[Measure]:
    """The :data:`MORE_COLUMNS` that any run has."""
    return [
        column
        for column in MORE_COLUMNS.values()
        if any(row.cells[column.key].values for row in rows)
    ]


_BOLD = {
    "adamw": "Bold: better than AdamW, or AdamW better than the only other optimizer",
    "all": "Bold: better than each of the others",
}


def footnotes(rows: Sequence[Row], bold: Bold = "adamw") -> list[str]:
    """The notes below the table, which explain its statistics."""
    counts = {len(row.seeds) for row in rows}
    notes = []
    if max(counts) > 1:
        notes.append(
            f"Mean (standard deviation in the last digit) over seeds. {_BOLD[bold]}, by a "
            "one-sided Student t-test at 95 %, as in the paper; the sentences use two-sided tests "
            "over pairs of runs with equal seeds."
        )
    if min(counts) == 1:
        single = ", ".join(f"{r.experiment} {r.label}" for r in rows if len(r.seeds) == 1)
        notes.append(f"One seed, so neither deviation nor test: {single}.")
    for experiment in dict.fromkeys(row.experiment for row in rows):
        mine = [row for row in rows if row.experiment == experiment]
        if len({tuple(row.seeds) for row in mine}) > 1:
            notes.append(f"{experiment}: the arms were run with different seeds.")
        if not any(row.is_baseline for row in mine):
            notes.append(f"{experiment}: no run with AdamW to compare with.")
    return notes


def markdown(rows: Sequence[Row], columns: Sequence[Measure], bold: Bold = "adamw") -> str:
    """Format the table in Markdown."""
    keys = [*rows[0].settings]
    header = ["D", "N", *map(_escaped, keys), "Optimizer", *(column.title for column in columns)]
    lines = [header, ["---:", "---:", *("---" for _ in keys), "---", *("---:" for _ in columns)]]
    for row in rows:
        cells = [row.cells[column.key] for column in columns]
        texts = [f"**{cell.text}**" if cell.bold else cell.text for cell in cells]
        label = row.label.replace("|", "\\|")
        settings = map(_escaped, row.settings.values())
        lines.append([short(row.tokens), short(row.parameters), *settings, label, *texts])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return table + "".join(f"\n{_escaped(note)}\n" for note in footnotes(rows, bold))


def _escaped(text: str) -> str:
    """Text without a meaning in Markdown."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text)


def latex(rows: Sequence[Row], columns: Sequence[Measure]) -> str:
    """Format the table in LaTeX, for the package booktabs."""
    keys = [*rows[0].settings]
    header = ["$D$", "$N$", *map(_latex_text, keys), "Optimizer"]
    header += [_latex_symbols(column.title) for column in columns]
    lines = [
        "\\begin{tabular}{rrl" + "l" * len(keys) + "r" * len(columns) + "}",
        "\\toprule",
        " & ".join(header) + r" \\",
    ]
    group = None
    for row in rows:
        if row.experiment != group:
            lines.append("\\midrule")
            group = row.experiment
        cells = [row.cells[column.key] for column in columns]
        texts = [_latex_cell(cell) for cell in cells]
        settings = [*row.settings.values(), row.label]
        lead = [short(row.tokens), short(row.parameters), *map(_latex_text, settings)]
        lines.append(" & ".join([*lead, *texts]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "–": "--",
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


_SYMBOLS = {
    "‖": r"\|",
    "μ": r"\mu",
    "ʳ": "^r",
    "ρ": r"\rho",
    "κ": r"\kappa",
    "r̄": r"\bar{r}",
    "↑": r"\uparrow",
    "↓": r"\downarrow",
}


def _latex_symbols(text: str) -> str:
    """Escape a header, with its symbols as formulas."""
    symbol = "|".join(_SYMBOLS)
    parts = re.split(f"((?:{symbol})+)", text)
    formulas = [
        "$" + re.sub(symbol, lambda match: _SYMBOLS[match[0]], part) + "$" for part in parts[1::2]
    ]
    words = [_latex_text(part) for part in parts[::2]]
    return "".join(word + formula for word, formula in zip(words, [*formulas, ""]))


def _latex_cell(cell: Cell) -> str:
    text = "--" if cell.text == "–" else cell.text.replace("-", "$-$")
    return f"\\textbf{{{text}}}" if cell.bold else text


def summary_csv(rows: Sequence[Row], columns: Sequence[Measure]) -> str:
    """Write a line for each arm: mean, deviation, number of seeds and both p of each metric."""
    statistics = ("mean", "std", "n", "p", "p_paired")
    header = ["experiment", "tokens", "parameters", *rows[0].settings, "arm"]
    header += [f"{column.key}_{name}" for column in columns for name in statistics]
    lines = []
    for row in rows:
        line: list[Any] = [row.experiment, row.tokens, row.parameters]
        line += [*row.settings.values(), row.arm]
        for column in columns:
            cell = row.cells[column.key]
            mean = float(np.mean(cell.values)) if cell.values else None
            line += [mean, sample_deviation(cell.values), len(cell.values), cell.p, cell.p_paired]
        lines.append(line)
    return csv_text([header, *lines])


def runs_csv(runs: Sequence[Run]) -> str:
    """Write a line for each run, in full precision."""
    header = [
        "experiment",
        "arm",
        "seed",
        "tokens",
        "parameters",
        *runs[0].settings,
        *COLUMNS,
        *MORE_COLUMNS,
        "folder",
    ]
    lines = [
        [run.experiment, run.arm, run.seed, run.recipe.tokens, run.parameters]
        + [setting_text(value) for value in run.settings.values()]
        + [run.value(column) for column in (COLUMNS | MORE_COLUMNS).values()]
        + [str(run.folder)]
        for run in runs
    ]
    return csv_text([header, *lines])


def terminal(rows: Sequence[Row], columns: Sequence[Measure], width: int) -> list[Table]:
    """Create the table for the terminal: in several parts if it is wider than ``width``."""
    # If all rows have the same D and N, the title shows them, so that more columns fit.
    first = rows[0]
    one = all((row.tokens, row.parameters) == (first.tokens, first.parameters) for row in rows)
    names = ", ".join(dict.fromkeys(row.name for row in rows))
    size = f": D = {short(first.tokens)} tokens, N = {short(first.parameters)} parameters"
    title = names + (size if one else "")
    ruler = Console(width=1000)
    parts: list[Table] = []
    left = list(columns)
    while left:
        number = len(left)
        part = _terminal_part(rows, left, title, not one)
        while number > 1 and ruler.measure(part).maximum > width:
            number -= 1
            part = _terminal_part(rows, left[:number], title, not one)
        parts.append(part)
        left, title = left[number:], ""
    return parts


def _terminal_part(
    rows: Sequence[Row], columns: Sequence[Measure], title: str, with_sizes: bool
) -> Table:
    shown = terminal_table(title)
    sizes = ["D", "N"] if with_sizes else []
    keys = [*rows[0].settings]
    header = [*sizes, *keys, "Optimizer", *(column.title for column in columns)]
    for name in header:
        left = name in ("Optimizer", *keys)
        shown.add_column(Text(name), justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cells = [row.cells[column.key] for column in columns]
        texts = [Text(cell.text, "bold" if cell.bold else "") for cell in cells]
        sizes = [short(row.tokens), short(row.parameters)] if with_sizes else []
        settings = map(Text, row.settings.values())
        shown.add_row(*sizes, *settings, Text(row.label), *texts)
    return shown
