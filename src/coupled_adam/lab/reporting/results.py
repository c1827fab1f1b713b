"""The table of results, and its CSV files."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.experiments import (
    experiments,
    setting_text,
    short_key,
    values_by_seed,
)
from coupled_adam.lab.reporting.finished_run import COLUMNS, Run, short
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    sample_deviation,
    shorthand,
    shown_p,
)
from coupled_adam.rendering.tables import Cell, Table, csv_text

Bold = Literal["adamw", "all"]
"""Which arms a value must be significantly better than to be bold."""


@dataclasses.dataclass(frozen=True)
class Metric:
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
class ArmResult:
    """The results of one arm of an experiment, over its runs: a row of the table."""

    runs: list[Run]
    is_baseline: bool
    metrics: dict[str, Metric]

    @property
    def run(self) -> Run:
        """Any of the runs, for what they have in common."""
        return self.runs[0]

    @property
    def settings(self) -> dict[str, str]:
        """The values by which the experiment differs from the others, by short keys."""
        settings = self.run.settings
        return {short_key(key, [*settings]): setting_text(v) for key, v in settings.items()}


def arm_results(runs: Sequence[Run], bold: Bold = "adamw") -> list[ArmResult]:
    """Create a row for each arm of each experiment, with significantly better values in bold.

    Arms of an experiment are compared by a one-sided Student t-test at 95 % (App. F).

    Args:
        bold: ``"adamw"``: an arm is bold where it is better than plain AdamW. AdamW is bold if
            there is only one other arm and that arm is significantly worse. ``"all"``: an arm is
            bold where it is better than each other arm of the experiment, as in Table 7.
    """
    rows = []
    for experiment in experiments(runs):
        baseline = experiment.baseline
        for arm in experiment.arms:
            # An arm is bold where it is better than each of its rivals.
            if bold == "all":
                rivals = [rival for rival in experiment.arms if rival is not arm]
            elif arm is not baseline:
                rivals = [] if baseline is None else [baseline]
            else:
                rivals = experiment.rivals if len(experiment.rivals) == 1 else []
            # Without a p in the baseline's row, which readers would take for that of another row.
            against = None if arm is baseline else baseline
            metrics = {
                key: _metric(column, arm, against, rivals) for key, column in COLUMNS.items()
            }
            rows.append(ArmResult(arm, arm is baseline, metrics))
    return rows


def _metric(
    column: Measure, arm: list[Run], against: list[Run] | None, rivals: Sequence[list[Run]]
) -> Metric:
    """A metric with its tests against one arm, bold if it is better than each of the rivals."""
    assert column.better is not None
    better = column.better
    by_seed = values_by_seed(arm, column)
    values = [*by_seed.values()]

    def p(rival_runs: list[Run]) -> float | None:
        return one_sided_t_test(values, [*values_by_seed(rival_runs, column).values()], better)

    # The paper's tests are unpaired; the paired one is for the CSV file alone.
    against_rivals = [p(rival) for rival in rivals]
    paired = None if against is None else paired_t_test(by_seed, values_by_seed(against, column))
    return Metric(
        values,
        shorthand(values, column.digits),
        None if against is None else p(against),
        None if paired is None else paired.one_sided(better),
        bool(rivals) and all(p is not None and p < SIGNIFICANCE for p in against_rivals),
    )


def shown_columns(rows: Sequence[ArmResult], more: bool = False) -> list[Measure]:
    """The columns to show, those of the paper's table or more; some only if they were measured."""
    optional = ("accuracy", "word_similarity")
    return [
        column
        for key, column in COLUMNS.items()
        if (column.column and key not in optional)
        or ((more or column.column) and any(row.metrics[key].values for row in rows))
    ]


_BOLD = {
    "adamw": "Bold: better than AdamW, or AdamW better than the only other optimizer",
    "all": "Bold: better than each of the others",
}


def footnotes(rows: Sequence[ArmResult], bold: Bold = "adamw") -> list[str]:
    """The notes below the table, which explain its statistics."""
    counts = {len(row.runs) for row in rows}
    notes = []
    if max(counts) > 1:
        notes.append(
            f"Mean (standard deviation in the last digit) over seeds. {_BOLD[bold]}, by a "
            "one-sided Student t-test at 95 %, as in the paper; the sentences use two-sided tests "
            "over pairs of runs with equal seeds."
        )
    if min(counts) == 1:
        single = ", ".join(
            f"{row.run.experiment} {row.run.label}" for row in rows if len(row.runs) == 1
        )
        notes.append(f"One seed, so neither deviation nor test: {single}.")
    notes += [
        f"{run.experiment} {run.label}, seed {run.seed}: the test loss is over "
        f"{run.other_tokens:,} tokens, and those of the other runs over another number. It is "
        "left out until the run is evaluated over the same tokens (coupled-adam evaluate)."
        for row in rows
        for run in row.runs
        if run.other_tokens is not None
    ]
    # Seeds that only one arm has are no pairs, which readers of the table cannot see.
    for experiment in dict.fromkeys(row.run.experiment for row in rows):
        members = [row for row in rows if row.run.experiment == experiment]
        if len({tuple(run.seed for run in row.runs) for row in members}) > 1:
            notes.append(f"{experiment}: the arms were run with different seeds.")
        if not any(row.is_baseline for row in members):
            notes.append(f"{experiment}: no run with AdamW to compare with.")
    return notes


def results_table(
    rows: Sequence[ArmResult],
    columns: Sequence[Measure],
    *,
    title: str = "",
    sizes: bool = True,
    seeds: bool = False,
    notes: Sequence[str] = (),
) -> Table:
    """The table of results, a row for each arm, with or without D, N and the number of seeds."""
    size_columns, seed_columns = ["D", "N"] if sizes else [], ["seeds"] if seeds else []
    lines: list[list[str | Cell] | str] = []
    experiment = rows[0].run.experiment
    for row in rows:
        # An empty line sets experiments apart.
        if row.run.experiment != experiment:
            lines.append("")
            experiment = row.run.experiment
        size = map(short, row.run.size) if sizes else ()
        cells = []
        for metric in (row.metrics[column.key] for column in columns):
            # The p of a metric's test is a note that a page shows.
            note = "" if metric.p is None else shown_p(metric.p)
            cells.append(Cell(metric.text, metric.bold, note=note))
        seed_cells = [str(len(row.runs))] if seeds else []
        lines.append([*size, *row.settings.values(), row.run.label, *cells, *seed_cells])
    # All rows have the same settings, those by which experiments of one name differ.
    lead = [*size_columns, *rows[0].settings, "Optimizer"]
    header = [*lead, *(column.title for column in columns), *seed_columns]
    left = range(len(size_columns), len(lead))
    return Table(header, lines, title, notes, left=left, lead=len(lead))


def terminal_table(
    rows: Sequence[ArmResult], columns: Sequence[Measure], notes: Sequence[str]
) -> Table:
    """The table for the terminal; if all rows have the same D and N, its title shows them."""
    # The experiments' names, without the settings by which some of the same name differ.
    title = ", ".join(dict.fromkeys(row.run.experiment.partition(" ")[0] for row in rows))
    sizes = {row.run.size for row in rows}
    if len(sizes) == 1:
        tokens, parameters = map(short, sizes.pop())
        title += f": D = {tokens} tokens, N = {parameters} parameters"
        return results_table(rows, columns, title=title, sizes=False, notes=notes)
    return results_table(rows, columns, title=title, notes=notes)


def summary_csv(rows: Sequence[ArmResult], columns: Sequence[Measure]) -> str:
    """Write a line for each arm: mean, deviation, number of seeds and both p of each metric."""
    statistics = ("mean", "std", "n", "p", "p_paired")
    header = ["experiment", "tokens", "parameters", *rows[0].settings, "arm"]
    header += [f"{column.key}_{name}" for column in columns for name in statistics]
    lines = []
    for row in rows:
        line: list[Any] = [row.run.experiment, *row.run.size, *row.settings.values(), row.run.arm]
        for metric in (row.metrics[column.key] for column in columns):
            values = metric.values
            mean = float(np.mean(values)) if values else None
            line += [mean, sample_deviation(values), len(values), metric.p, metric.p_paired]
        lines.append(line)
    return csv_text([header, *lines])


def runs_csv(runs: Sequence[Run]) -> str:
    """Write a line for each run, in full precision."""
    header = ["experiment", "arm", "seed", "tokens", "parameters", *runs[0].settings]
    lines = [
        [run.experiment, run.arm, run.seed, *run.size]
        + [setting_text(value) for value in run.settings.values()]
        + [run.value(column) for column in COLUMNS.values()]
        + [str(run.folder)]
        for run in runs
    ]
    return csv_text([[*header, *COLUMNS, "folder"], *lines])
