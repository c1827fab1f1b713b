"""The table of results, and its CSV files."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.frame import COLUMNS, baseline_of, by_seed, groups
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
    differences between runs with the same seed; ``p_shown`` is that of the test behind ``bold``.
    """

    values: list[float]
    text: str
    p: float | None
    p_paired: float | None
    p_shown: float | None
    bold: bool

    @property
    def cell(self) -> Cell:
        """What a table shows of it; a page also shows the p that makes it bold."""
        p = self.p_shown if self.bold else None
        return Cell(self.text, self.bold, note="" if p is None else shown_p(p))


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


def arm_results(frame: pd.DataFrame, bold: Bold = "adamw", paired: bool = False) -> list[ArmResult]:
    """Create a row for each arm of each experiment, with significantly better values in bold.

    Arms of an experiment are compared by a one-sided Student t-test at 95 % (App. F).

    Args:
        paired: use a two-sided t-test over pairs of runs with equal seeds instead, as the sentences
            of a report do.
        bold: ``"adamw"``: an arm is bold where it is better than the baseline. AdamW is bold if
            there is only one other arm and that arm is significantly worse. ``"all"``: an arm is
            bold where it is better than each other arm of the experiment, as in Table 7.
            ``"value"``: an arm is bold where its mean is the best, without a test, as the single
            runs of Table 2 are.
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
            level = None if bold == "value" else SIGNIFICANCE
            metrics = {
                key: _metric(m, arm, against, rivals, level, paired) for key, m in COLUMNS.items()
            }
            rows.append(ArmResult(arm.run.iloc[0], len(arm), metrics))
    return rows


def _metric(
    column: Measure,
    arm: pd.DataFrame,
    against: pd.DataFrame | None,
    rivals: Sequence[pd.DataFrame],
    level: float | None,
    paired: bool,
) -> Metric:
    """A metric with its tests against one arm, bold if it is better than each of the rivals.

    It is better if p is below the level or, if that is None, if its mean is.
    """
    assert column.better is not None
    better, seeds = column.better, by_seed(arm, column)
    values = [*seeds.values()]
    compared = [*rivals, *([] if against is None else [against])]
    theirs = {id(rival): by_seed(rival, column) for rival in compared}
    # Unpaired, as in the paper, and over pairs
    p = {key: one_sided_t_test(values, [*x.values()], better) for key, x in theirs.items()}
    pairs = {key: paired_t_test(seeds, x) for key, x in theirs.items()}

    def decisive_p(rival: pd.DataFrame) -> float | None:
        test = pairs[id(rival)]
        if not paired:
            return p[id(rival)]
        return None if test is None else test.p if test.direction == better else 1.0

    def is_better(rival: pd.DataFrame) -> bool:
        if level is not None:
            return (x := decisive_p(rival)) is not None and x < level
        sign = 1 if better == "higher" else -1
        # NaN where either side has no value, which is not greater than anything.
        difference: float = arm[column.key].mean() - rival[column.key].mean()
        return sign * difference > 0

    test = None if against is None else pairs[id(against)]
    return Metric(
        values,
        shorthand(values, column.digits),
        None if against is None else p[id(against)],
        None if test is None else test.one_sided(better),
        None if against is None else decisive_p(against),
        bool(rivals) and all(map(is_better, rivals)),
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


def footnotes(frame: pd.DataFrame, bold: Bold = "adamw", paired: bool = False) -> list[str]:
    """The notes below the table of some runs, which explain its statistics."""
    experiments = groups(frame, "experiment")
    best = "the best mean, without a test"
    if all(experiment.setup.value_counts().max() == 1 for experiment in experiments):
        bold_note = " Bold: the best value." if bold == "value" else ""
        return [f"One seed, so neither deviation nor test.{bold_note}"]
    than = "each of the others"
    if bold == "adamw":
        baselines = frame.label[frame.is_baseline].unique()
        than = "the best AdamW in validation"
        if len(baselines) == 1:  # a name of its own suffices, as its row has the options, too
            than = baselines[0].partition(":")[0]
        if any(experiment.setup.nunique() == 2 for experiment in experiments):
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
    titled: bool = False,
    seeds: bool = False,
) -> Table:
    """The table of results, a row for each arm, on request with the number of seeds.

    If it is titled, the title names the experiments, and D and N where all rows have the same.
    """
    experiments = [*dict.fromkeys(row.run.recipe.name for row in rows)]
    sizes = {(short(row.run.recipe.tokens), short(row.parameters)) for row in rows}
    title = ", ".join(experiments) if titled else ""
    has_sizes = not titled or len(sizes) > 1
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
        cells = [row.metrics[column.key].cell for column in columns]
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
    columns = ["experiment", "arm", "seed", "tokens", "parameters", *COLUMNS]
    # None, which is an empty field, for what has not been measured.
    values = frame[columns].astype(object).where(frame[columns].notna(), None)
    fits = [_second_moment_fit(run) for run in frame.run]
    lines = [
        [*line, *fit, str(run.folder)]
        for line, fit, run in zip(values.to_numpy().tolist(), fits, frame.run)
    ]
    fitted = [f"second_moment_{field.name}" for field in dataclasses.fields(SecondMomentFit)]
    return csv_text([[*columns, *fitted, "folder"], *lines])


def _second_moment_fit(run: Run) -> list[float | None]:
    """The numbers of Fig. 4 after the last evaluation, or None for each: only AdamW's has them."""
    moments = run.second_moments()
    if not moments:
        return [None] * len(dataclasses.fields(SecondMomentFit))
    return [*dataclasses.astuple(second_moment_fit(run.probabilities(), moments[max(moments)]))]
