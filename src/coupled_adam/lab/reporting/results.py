"""The table of results, and its CSV files."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.frame import COLUMNS, baseline_of, by_seed, groups
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    sample_deviation,
    shorthand,
    shown_p,
)
from coupled_adam.rendering.tables import Cell, Table, csv_text, short

Bold = Literal["adamw", "all"]
"""Which arms a value must be significantly better than to be bold."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of an arm over its seeds.

    ``p`` is that of the paper's test against the baseline, if any, and ``p_paired`` that over the
    differences between runs with the same seed, for the CSV file alone.
    """

    values: list[float]
    text: str
    p: float | None
    p_paired: float | None
    bold: bool

    @property
    def cell(self) -> Cell:
        """What a table shows of it; a page also shows the p of the test."""
        return Cell(self.text, self.bold, note="" if self.p is None else shown_p(self.p))


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """The results of one arm of an experiment over its runs: a row of the table."""

    runs: pd.DataFrame
    metrics: dict[str, Metric]

    @property
    def run(self) -> Any:
        """The row of one of the runs, for what they have in common."""
        return self.runs.iloc[0]


def arm_results(frame: pd.DataFrame, bold: Bold = "adamw") -> list[ArmResult]:
    """Create a row for each arm of each experiment, with significantly better values in bold.

    Arms of an experiment are compared by a one-sided Student t-test at 95 % (App. F).

    Args:
        bold: ``"adamw"``: an arm is bold where it is better than the baseline. AdamW is bold if
            there is only one other arm and that arm is significantly worse. ``"all"``: an arm is
            bold where it is better than each other arm of the experiment, as in Table 7.
    """
    rows = []
    for experiment in groups(frame, "experiment"):
        arms = groups(experiment, "setup")
        baseline = baseline_of(arms)
        for arm in arms:
            # Without a p in the baseline's row, which readers would take for that of another row.
            against = None if arm is baseline else baseline
            # An arm is bold where it is better than each of its rivals.
            rivals = [rival for rival in arms if rival is not arm]
            if bold == "adamw" and (arm is not baseline or len(rivals) > 1):
                rivals = [] if against is None else [against]
            metrics = {key: _metric(m, arm, against, rivals) for key, m in COLUMNS.items()}
            rows.append(ArmResult(arm, metrics))
    return rows


def _metric(
    column: Measure, arm: pd.DataFrame, against: pd.DataFrame | None, rivals: Sequence[pd.DataFrame]
) -> Metric:
    """A metric with its tests against one arm, bold if it is better than each of the rivals."""
    assert column.better is not None
    better, seeds = column.better, by_seed(arm, column)
    values = [*seeds.values()]

    def p(rival: pd.DataFrame) -> float | None:
        return one_sided_t_test(values, [*by_seed(rival, column).values()], better)

    paired = None if against is None else paired_t_test(seeds, by_seed(against, column))
    return Metric(
        values,
        shorthand(values, column.digits),
        None if against is None else p(against),
        None if paired is None else paired.one_sided(better),
        bool(rivals) and all((x := p(rival)) is not None and x < SIGNIFICANCE for rival in rivals),
    )


def shown_columns(frame: pd.DataFrame, more: bool = False) -> list[Measure]:
    """The columns to show, those of the paper's table or more; some only if they were measured."""
    optional = ("accuracy", "word_similarity")
    return [
        column
        for key, column in COLUMNS.items()
        if (column.column and key not in optional)
        or ((more or column.column) and frame[key].notna().any())
    ]


def footnotes(rows: Sequence[ArmResult], bold: Bold = "adamw") -> list[str]:
    """The notes below the table, which explain its statistics."""
    than = "each of the others"
    if bold == "adamw":
        baselines = {row.run.label for row in rows if row.run.is_baseline}
        than = baselines.pop() if len(baselines) == 1 else "the best AdamW in validation"
        than += ", or this better than the only other optimizer"
    if max(len(row.runs) for row in rows) == 1:
        return ["One seed, so neither deviation nor test."]
    return [
        f"Mean (standard deviation in the last digit) over seeds. Bold: better than {than}, by a "
        "one-sided Student t-test at 95 %, as in the paper; the sentences use two-sided tests over "
        "pairs of runs with equal seeds."
    ]


def results_table(
    rows: Sequence[ArmResult],
    columns: Sequence[Measure],
    notes: Sequence[str],
    *,
    titled: bool = False,
    seeds: bool = False,
) -> Table:
    """The table of results, a row for each arm, with the number of seeds if this is asked for.

    If it is titled, the title names the experiments, and D and N where all rows have the same.
    """
    experiments = [*dict.fromkeys(row.run.experiment for row in rows)]
    sizes = {(short(row.run.tokens), short(row.run.parameters)) for row in rows}
    title = ", ".join(experiments) if titled else ""
    has_sizes = not titled or len(sizes) > 1
    if not has_sizes:
        title += ": D = {} tokens, N = {} parameters".format(*next(iter(sizes)))
    # Experiments of one size are told apart by their names.
    has_names = len(experiments) > len(sizes)
    before = [*["D", "N"] * has_sizes, *["recipe"] * has_names, "Optimizer"]
    names = range(2 * has_sizes, len(before))  # the columns of words, which are set to the left
    lines: list[list[str | Cell] | str] = []
    experiment = experiments[0]
    for row in rows:
        # An empty line sets experiments apart.
        if row.run.experiment != experiment:
            experiment = row.run.experiment
            lines.append("")
        size = [short(row.run.tokens), short(row.run.parameters)] if has_sizes else []
        name = [row.run.experiment] if has_names else []
        number = [str(len(row.runs))] if seeds else []
        cells = [row.metrics[column.key].cell for column in columns]
        lines.append([*size, *name, row.run.label, *cells, *number])
    header = [*before, *(column.header for column in columns), *["seeds"] * seeds]
    return Table(header, lines, title, notes, left=names)


def summary_csv(rows: Sequence[ArmResult], columns: Sequence[Measure]) -> str:
    """Write a line for each arm: mean, deviation, number of seeds and both p of each metric."""
    own = ["experiment", "tokens", "parameters", "arm"]
    lines = [[*own]]
    for column in columns:
        lines[0] += [f"{column.key}_{name}" for name in ("mean", "std", "n", "p", "p_paired")]
    for row in rows:
        line: list[Any] = [*row.run[own]]
        for metric in (row.metrics[column.key] for column in columns):
            values = metric.values
            mean = float(np.mean(values)) if values else None
            line += [mean, sample_deviation(values), len(values), metric.p, metric.p_paired]
        lines.append(line)
    return csv_text(lines)


def runs_csv(frame: pd.DataFrame) -> str:
    """Write a line for each run, in full precision."""
    columns = ["experiment", "arm", "seed", "tokens", "parameters", *COLUMNS]
    values = frame[columns].astype(object).where(frame[columns].notna(), None)
    lines = [[*line, str(run.folder)] for line, run in zip(values.to_numpy().tolist(), frame.run)]
    return csv_text([[*columns, "folder"], *lines])
