"""The table of results, and its CSV files."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.frame import COLUMNS, by_seed, groups
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    SecondMomentFit,
    one_sided_t_test,
    paired_t_test,
    sample_deviation,
    second_moment_fit,
    shorthand,
    shown_p,
)
from coupled_adam.lab.run import Run
from coupled_adam.rendering.tables import Cell, Table, csv_text, short

Bold = Literal["adamw", "all", "value"]
"""What makes a value bold: see :func:`arm_results`."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of an arm over its seeds.

    ``p`` is that of the paper's test against the baseline, if any, and ``p_paired`` that over the
    differences between runs with the same seed. The cell of a table is bold by the paper's test,
    and that of a page by the test of its sentences.
    """

    values: list[float]
    p: float | None
    p_paired: float | None
    cell: Cell
    page_cell: Cell


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """A row of the table: one of an arm's runs, their number, and their results by metric."""

    run: Run
    seeds: int
    metrics: dict[str, Metric]

    @property
    def parameters(self) -> int:
        """N, which all runs of an arm have."""
        return int(self.run.evaluation["parameters"])


def arm_results(frame: pd.DataFrame, bold: Bold = "adamw") -> list[ArmResult]:
    """Create a row for each arm of each experiment, with significantly better values in bold.

    Arms of an experiment are compared by a one-sided Student t-test at 95 % (App. F) and, as in the
    sentences of a report, by a two-sided t-test over pairs of runs with equal seeds.

    Args:
        bold: ``"adamw"``: better than the baseline; AdamW is bold if there is only one other arm
            and that is significantly worse. ``"all"``: better than each other arm of the
            experiment, as in Table 7. ``"value"``: the best mean, without a test, as the single
            runs of Table 2.
    """
    rows = []
    for experiment in groups(frame, "experiment"):
        arms = groups(experiment, "arm")
        by_column = {key: _metrics(column, arms, bold) for key, column in COLUMNS.items()}
        for number, arm in enumerate(arms):
            metrics = {key: of_arms[number] for key, of_arms in by_column.items()}
            rows.append(ArmResult(arm.run.iloc[0], len(arm), metrics))
    return rows


def _metrics(column: Measure, arms: Sequence[pd.DataFrame], bold: Bold) -> list[Metric]:
    """A metric of each arm of an experiment, with its tests against the baseline and its rivals."""
    assert column.better is not None
    better, sign = column.better, 1 if column.better == "higher" else -1
    baseline = next((number for number, arm in enumerate(arms) if arm.is_baseline.all()), None)
    seeds = [by_seed(arm, column) for arm in arms]
    means = [sign * arm[column.key].mean() for arm in arms]
    metrics = []
    for number, own in enumerate(seeds):
        # No p in the baseline's row: readers would take it for that of another row.
        against = None if number == baseline else baseline
        # An arm is bold where it is better than each of its rivals.
        rivals = [rival for rival in range(len(arms)) if rival != number]
        if bold == "adamw" and (number != baseline or len(rivals) > 1):
            rivals = [] if against is None else [against]
        text, values = shorthand([*own.values()], column.digits), [*own.values()]
        p: dict[int | None, float | None] = {}
        p_pairs: dict[int | None, float | None] = {}
        p_paired = None
        for rival in {*rivals, *([] if against is None else [against])}:
            test = paired_t_test(own, seeds[rival])
            p[rival] = one_sided_t_test(values, [*seeds[rival].values()], better)
            p_pairs[rival] = None if test is None else test.p if test.direction == better else 1.0
            if rival == against and test is not None:
                p_paired = test.one_sided(better)
        cells = []
        for tests in (p, p_pairs):
            # Without a value a mean is NaN, which is not greater than anything.
            is_better = [
                means[number] > means[rival]
                if bold == "value"
                else (x := tests[rival]) is not None and x < SIGNIFICANCE
                for rival in rivals
            ]
            is_bold = bool(rivals) and all(is_better)
            shown = tests.get(against) if is_bold else None
            cells.append(Cell(text, is_bold, note="" if shown is None else shown_p(shown)))
        metrics.append(Metric(values, p.get(against), p_paired, *cells))
    return metrics


def shown_columns(frame: pd.DataFrame, more: bool = False) -> list[Measure]:
    """The columns to show, those of the paper's table or more; some only if they were measured."""
    optional = ("accuracy", "word_similarity")
    return [
        column
        for key, column in COLUMNS.items()
        if (column.column and key not in optional)
        or ((more or column.column) and frame[key].notna().any())
    ]


def footnotes(frame: pd.DataFrame, bold: Bold = "adamw", paired: bool = False) -> list[str]:
    """The notes below the table of some runs, which explain its statistics."""
    experiments = groups(frame, "experiment")
    best = "the best mean, without a test"
    if all(experiment.arm.value_counts().max() == 1 for experiment in experiments):
        bold_note = " Bold: the best value." if bold == "value" else ""
        return [f"One seed, so neither deviation nor test.{bold_note}"]
    than = "each of the others"
    if bold == "adamw":
        baselines = frame.label[frame.is_baseline].unique()
        than = "the best AdamW in validation"
        if len(baselines) == 1:  # a name of its own suffices, as its row has the options, too
            than = baselines[0].partition(":")[0]
        if any(experiment.arm.nunique() == 2 for experiment in experiments):
            than += ", or AdamW better than the only other optimizer"
    if bold != "value":
        test = "a one-sided Student t-test at 95 %, as in the paper"
        if paired:
            test = "a two-sided t-test at 95 % over pairs of runs with equal seeds"
        best = f"better than {than}, by {test}"
    return [f"Mean (standard deviation in the last digit) over seeds. Bold: {best}."]


def results_table(
    rows: Sequence[ArmResult],
    columns: Sequence[Measure],
    notes: Sequence[str],
    *,
    on_page: bool = False,
    seeds: bool = False,
) -> Table:
    """The table of results, a row for each arm, on request with the number of seeds.

    That of a page has a title, which names the experiments, and D and N where all rows have the
    same.
    """
    experiments = [*dict.fromkeys(row.run.recipe.name for row in rows)]
    sizes = {(short(row.run.recipe.tokens), short(row.parameters)) for row in rows}
    title = ", ".join(experiments) if on_page else ""
    has_sizes = not on_page or len(sizes) > 1
    if not has_sizes:
        title += ": D = {} tokens, N = {} parameters".format(*next(iter(sizes)))
    # What a row is about stands to the left of its metrics.
    about: dict[str, Callable[[ArmResult], str]] = {}
    if has_sizes:
        about["D"] = lambda row: short(row.run.recipe.tokens)
        about["N"] = lambda row: short(row.parameters)
    if len(experiments) > len(sizes):  # those of one size are told apart by their names
        about["recipe"] = lambda row: row.run.recipe.name
    about["Optimizer"] = lambda row: row.run.label
    lines: list[list[str | Cell] | str] = []
    for row, before in zip(rows, [rows[0], *rows]):
        # An empty line sets experiments apart.
        if row.run.recipe.name != before.run.recipe.name:
            lines.append("")
        metrics = [row.metrics[column.key] for column in columns]
        cells = [metric.page_cell if on_page else metric.cell for metric in metrics]
        number = [str(row.seeds)] if seeds else []
        lines.append([*(text(row) for text in about.values()), *cells, *number])
    header = [*about, *(column.header for column in columns), *["seeds"] * seeds]
    words = [index for index, name in enumerate(about) if name in ("recipe", "Optimizer")]
    return Table(header, lines, title, notes, left=words)


def summary_csv(rows: Sequence[ArmResult], columns: Sequence[Measure]) -> str:
    """Write a line for each arm: mean, deviation, number of seeds and both p of each metric."""
    header = ["experiment", "tokens", "parameters", "arm"]
    for column in columns:
        header += [f"{column.key}_{name}" for name in ("mean", "std", "n", "p", "p_paired")]
    lines: list[list[Any]] = []
    for row in rows:
        lines.append([row.run.recipe.name, row.run.recipe.tokens, row.parameters, row.run.arm_name])
        # n is that of the metric, which not all runs may have.
        for metric in (row.metrics[column.key] for column in columns):
            values = metric.values
            mean = float(np.mean(values)) if values else None
            lines[-1] += [mean, sample_deviation(values), len(values), metric.p, metric.p_paired]
    return csv_text([header, *lines])


def runs_csv(frame: pd.DataFrame) -> str:
    """Write a line for each run, in full precision."""
    columns = ["experiment", "arm_name", "seed", "tokens", "parameters", *COLUMNS]
    # None, which is an empty field, for what has not been measured.
    values = frame[columns].astype(object).where(frame[columns].notna(), None)
    fits = [_second_moment_fit(run) for run in frame.run]
    lines = [
        [*line, *fit, str(run.folder)]
        for line, fit, run in zip(values.to_numpy().tolist(), fits, frame.run)
    ]
    fitted = [f"second_moment_{field.name}" for field in dataclasses.fields(SecondMomentFit)]
    header = [*columns, *fitted, "folder"]
    header[1] = "arm"  # as in a recipe, and in the other files
    return csv_text([header, *lines])


def _second_moment_fit(run: Run) -> list[float | None]:
    """The numbers of Fig. 4 after the last evaluation, or None for each: only AdamW's has them."""
    moments = run.second_moments()
    if not moments:
        return [None] * len(dataclasses.fields(SecondMomentFit))
    return [*dataclasses.astuple(second_moment_fit(run.probabilities(), moments[max(moments)]))]
