"""The rows of the study's tables: which runs they are, their measures, and the tests among them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from coupled_adam.lab.reporting.frame import COLUMNS
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    shorthand,
    shown_p,
)
from coupled_adam.rendering.tables import Cell, Table

from .run import results as read_results

results = functools.cache(read_results)  # needed by each cell of a table
Run = Mapping[str, Any]
Arm = Literal["adamw", "coupled"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column: its number in a run, the digits to show, and which values are better."""

    header: str
    of: Callable[[Run], float | None]
    digits: int
    better: Literal["lower", "higher"]


def _at(*keys: str) -> Callable[[Run], float | None]:
    """A function that looks a number up in a run; None if it was not recorded."""

    def value(run: Run) -> float | None:
        entry: Any = run
        for key in keys:
            entry = (entry or {}).get(key)
        return entry  # type: ignore[no-any-return]

    return value


def _at_the_end(key: str, times: float = 1.0) -> Callable[[Run], float | None]:
    """A function that returns a number of the last fit of a run's second moments."""
    return lambda run: times * run["second_moment"][-1][key]


MEASURES = {
    key: Measure(
        column.header,
        _at(key),
        column.digits,
        column.better or "higher",
    )
    for key, column in COLUMNS.items()
} | {
    "valid_loss": Measure("L (validation) ↓", _at("valid_loss"), 3, "lower"),
    "valid_documents": Measure("", _at("documents", "valid", "loss"), 3, "lower"),
    "test_documents": Measure(
        "L of test documents ↓", _at("documents", "test", "loss"), 3, "lower"
    ),
    "men": Measure("r of MEN ↑", _at("word_similarity", "MEN", "r"), 0, "higher"),
    "isotropy_centered": Measure("Iso, centered ↑", _at("isotropy_centered"), 2, "higher"),
    "frequent_norm": Measure(
        "norm, 16 most frequent", lambda run: run.get("band_norms", [None])[0], 2, "higher"
    ),
    "rare_norm": Measure(
        "norm, rarer half", lambda run: run.get("band_norms", [None])[-1], 2, "higher"
    ),
    "input_mean_norm_ratio": Measure("‖μ‖ʳ of input ↓", _at("input_mean_norm_ratio"), 3, "lower"),
    "input_isotropy": Measure("Iso of input ↑", _at("input_isotropy"), 2, "higher"),
    "A": Measure("1000 A", _at_the_end("A", 1000), 2, "higher"),
    "r_squared": Measure("R²", _at_the_end("r_squared"), 3, "higher"),
    "exponent": Measure("exponent", _at_the_end("exponent"), 2, "higher"),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table: its label, and the question and name of its runs."""

    label: str
    question: str
    name: str


Group = Sequence[Line]
"""Rows that are compared with the first row among them."""


def by_seed(line: Line, measure: str) -> dict[int, float]:
    """A measure of the runs that have it, by seed; the loss of a run that diverged is infinite."""
    measured = {}
    for seed, run in runs(line).items():
        value = MEASURES[measure].of(run)
        if "diverged_at" in run and measure in ("test_loss", "valid_loss"):
            value = math.inf
        if value is not None:
            measured[seed] = value
    return measured


def values(line: Line, measure: str) -> list[float]:
    """A measure of the runs that have it, in the order of their seeds."""
    return [*by_seed(line, measure).values()]


def runs(line: Line) -> dict[int, Run]:
    """The runs that have a result, by seed, in order."""
    seeds = results(line.question).get(line.name, {}).get("seeds", {})
    return {int(seed): seeds[seed] for seed in sorted(seeds, key=int)}


def is_committed(run: Run) -> bool:
    """Whether the code that made a run was a commit without changes."""
    commit = run["environment"]["git_commit"]
    return commit is not None and not commit.endswith("-dirty")


def table(
    groups: Sequence[Group],
    measures: Sequence[str],
    first: str = "",
) -> Table:
    """Create one table of all groups, one below the other, and its footnote.

    Args:
        groups: the rows.
        measures: the columns.
        first: the header of the first column.
    """
    lines = [line for group in groups for line in group]
    header = [first, *(MEASURES[name].header for name in measures), "p", "p, paired", "seeds"]
    tested = "test_loss" if "test_loss" in measures else measures[0]
    rows = []
    for group in groups:
        for line in group:
            rivals = [group[0]] if line is not group[0] else [*group[1:]] * (len(group) == 2)
            cells = [cell(line, rivals, name) for name in measures]
            rows.append([line.label, *cells, *_p(line, group[0], tested), _seeds(line)])
    marked = not all(is_committed(run) for line in lines for run in runs(line).values())
    return Table(header, rows, notes=[UNCOMMITTED] if marked else [])


def side_by_side(settings: Mapping[str, Group], measures: Sequence[str], first: str = "") -> Table:
    """Create a table with a row for each setting, and for each measure a column for each optimizer.

    A setting without an optimizer's row has an empty cell. Numbers are marked as in :func:`table`,
    in comparison with the first optimizer of the same setting. The last column has the number of
    runs of each, and a dagger if some were made by code that was not committed.
    """
    labels = [*dict.fromkeys(line.label for group in settings.values() for line in group)]
    header = [first, *(f"{label}: {MEASURES[m].header}" for m in measures for label in labels)]
    rows: list[list[str | Cell]] = []
    for setting, group in settings.items():
        lines = {line.label: line for line in group}
        cells: list[str | Cell] = [setting]
        for name in measures:
            for label in labels:
                line = lines.get(label)
                rivals = [group[0]] if line is not group[0] else [*group[1:]] * (len(group) == 2)
                cells.append("" if line is None else cell(line, rivals, name))
        numbers = [*dict.fromkeys(str(len(runs(line))) for line in group)]
        rows.append([*cells, ", ".join(numbers) + dagger(*group)])
    return Table([*header, "seeds"], rows)


def dagger(*lines: Line) -> str:
    """A mark of rows of which some runs were made by code that was not committed."""
    committed = [is_committed(run) for line in lines for run in runs(line).values()]
    return "" if all(committed) else " †"


def _p(line: Line, baseline: Line, measure: str) -> list[str]:
    """The p-values, unpaired and paired, that a measure is lower than in another row."""
    if line is baseline:
        return ["", ""]
    unpaired = one_sided_t_test(values(line, measure), values(baseline, measure), "lower")
    paired = paired_t_test(by_seed(line, measure), by_seed(baseline, measure))
    both = (unpaired, None if paired is None else paired.one_sided("lower"))
    return ["" if p is None else shown_p(p).removeprefix("p ").removeprefix("= ") for p in both]


def _seeds(line: Line) -> str:
    """The number of runs; or their seeds, with a dagger for each whose code was not committed."""
    seeds = runs(line)
    if all(map(is_committed, seeds.values())):
        return str(len(seeds))
    return ", ".join(f"{seed}" if is_committed(run) else f"{seed} †" for seed, run in seeds.items())


UNCOMMITTED = "†: the run with this seed was made by code with changes that were not committed."


def cell(line: Line, rivals: Sequence[Line], name: str) -> str | Cell:
    """Mean and deviation, bold if significantly better than each rival, italic if worse."""
    measured, measure = values(line, name), MEASURES[name]
    diverged = sum(map(math.isinf, measured))
    if diverged:
        return f"{diverged} of {len(measured)} diverged"
    is_tiny = measured and 0 < np.mean(measured) < 1e-6
    text = "< 1e-6" if is_tiny else shorthand(measured, measure.digits)
    tests = [one_sided_t_test(measured, values(rival, name), measure.better) for rival in rivals]
    if tests and all(p is not None and p < SIGNIFICANCE for p in tests):
        return Cell(text, bold=True)
    if tests and all(p is not None and 1 - p < SIGNIFICANCE for p in tests):
        return f"_{text}_"
    return text


LABELS: dict[Arm, str] = {"adamw": "AdamW", "coupled": "Coupled Adam"}


def with_rates(question: str, name: str) -> Line:
    """A row of a question whose embeddings have rates, and perhaps betas, of their own."""
    arm, _, n = name.rpartition(" n=")
    kind, *betas = arm.split()
    return Line(", ".join([LABELS[kind], *betas, f"n = {n}"]), question, name)  # type: ignore[index]


BEST: dict[str, Group] = {
    tokens: [with_rates(*row) for row in rows]
    for tokens, rows in {
        "1.2M": (("between", "adamw n=9"), ("between", "coupled n=6")),
        "4.9M": (("scaled_longer", "adamw n=5"), ("scaled_longer", "coupled n=5")),
        "20M": (("paper_ratio", "adamw n=0"), ("paper_ratio", "coupled n=0")),
        # one seed, each with its n after 20M tokens
        "48M": (("paper_ratio_longer", "adamw n=0"), ("paper_ratio_longer", "coupled n=0")),
    }.items()
}
"""By D: AdamW and Coupled Adam with the n that is best on the validation documents."""
