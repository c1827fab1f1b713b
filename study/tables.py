"""Write the tables of the README and of ``docs/study/``. Comments mark where each begins and ends.

    python -m study.tables

Each mean is followed by the sample standard deviation in its last digit. A value is bold if it is
significantly better than that of the first row of its group, and italic if it is significantly
worse. The value of the first row is bold if
it is significantly better than that of the only other row. The test is a one-sided Student t-test
at 95 %. The column p is for the loss being lower than that of the first row, followed by the p of
the t-test of the differences between runs with the same seed. A dagger marks the seeds of
runs whose code was not committed. Columns that none of a table's runs have are left out.
"""

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coupled_adam.files import write_atomically
from coupled_adam.lab.reporting.finished_run import COLUMNS
from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    shorthand,
    shown_p,
)
from coupled_adam.rendering.tables import Cell, Table

from .questions import QUESTIONS, RATES
from .run import HERE
from .run import results as read_results

DOCS = HERE.parent / "docs" / "study"
PAGES = (HERE.parent / "README.md", *sorted(DOCS.glob("*.md")))
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


def mean_word_similarity(run: Run) -> float | None:
    """The mean over the word-similarity sets with at least 20 usable pairs."""
    sets = run.get("word_similarity", {}).values()
    scores = [score["r"] for score in sets if score["pairs"] >= 20]
    return float(np.mean(scores)) if scores else None


def _at_the_end(key: str, times: float = 1.0) -> Callable[[Run], float | None]:
    """A function that returns a number of the last fit of a run's second moments."""
    return lambda run: times * run["second_moment"][-1][key]


MEASURES = {
    key: Measure(
        column.title,
        mean_word_similarity if key == "word_similarity" else _at(key),
        column.digits,
        column.better or "higher",
    )
    for key, column in COLUMNS.items()
} | {
    "valid_loss": Measure("L (validation) ↓", _at("valid_loss"), 3, "lower"),
    "test_documents": Measure(
        "L of test documents ↓", _at("documents", "test", "loss"), 3, "lower"
    ),
    "valid_documents": Measure(
        "L of validation documents ↓", _at("documents", "valid", "loss"), 3, "lower"
    ),
    "men": Measure("r of MEN ↑", _at("word_similarity", "MEN", "r"), 0, "higher"),
    "men_centered": Measure(
        "the same, centred ↑", _at("word_similarity_centered", "MEN", "r"), 0, "higher"
    ),
    "initial_mean_norm": Measure("‖μ‖ at the start", _at("initial_mean_norm"), 4, "lower"),
    "input_mean_norm_ratio": Measure("‖μ‖ʳ of input ↓", _at("input_mean_norm_ratio"), 3, "lower"),
    "input_isotropy": Measure("Iso of input ↑", _at("input_isotropy"), 2, "higher"),
    "A": Measure("1000 A", _at_the_end("A", 1000), 2, "higher"),
    "r_squared": Measure("R²", _at_the_end("r_squared"), 3, "higher"),
    "exponent": Measure("exponent", _at_the_end("exponent"), 2, "higher"),
    "load_entropy": Measure("load entropy ↑", _at("load_entropy"), 3, "higher"),
    "router_mean_norm_ratio": Measure(
        "‖μ‖ʳ of router ↓", _at("router_mean_norm_ratio"), 3, "lower"
    ),
}
NEWER = ("isotropy_unit", "isotropy_unit_centered", "effective_rank")
"""Measures that the first runs of the study did not record."""
ALL = (*(key for key in COLUMNS if COLUMNS[key].column and key != "accuracy"), *NEWER)
MORE = ("valid_loss", *ALL, "men")
FEW = ("valid_loss", "test_loss", "mean_norm_ratio", "isotropy_unit", "men")


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
    bold: Literal["first", "all"] = "first",
) -> Table:
    """Create one table of all groups, one below the other, and its footnote.

    Args:
        groups: the rows.
        measures: the columns.
        first: the header of the first column.
        bold: ``"first"``: better than the first row of the group; ``"all"``: better than each other
            row of the group, as in the paper's Table 7.
    """
    lines = [line for group in groups for line in group]
    shown = [
        name for name in measures if name not in NEWER or any(values(line, name) for line in lines)
    ]
    header = [first, *(MEASURES[name].header for name in shown), "p", "p, paired", "seeds"]
    tested = "test_loss" if "test_loss" in measures else measures[0]
    rows = []
    for group in groups:
        for line in group:
            rivals = [other for other in group if other is not line]
            if bold == "first" and line is not group[0]:
                rivals = [group[0]]
            elif bold == "first" and len(group) != 2:
                rivals = []
            cells = [_cell(line, rivals, name) for name in shown]
            rows.append([line.label, *cells, *_p(line, group[0], tested), _seeds(line)])
    marked = not all(is_committed(run) for line in lines for run in runs(line).values())
    return Table(header, rows, notes=[UNCOMMITTED] if marked else [])


def _p(line: Line, baseline: Line, measure: str) -> list[str]:
    """The p-values, unpaired and paired, that a measure is lower than in another row."""
    if line is baseline:
        return ["", ""]
    unpaired = one_sided_t_test(values(line, measure), values(baseline, measure), "lower")
    paired = paired_t_test(by_seed(line, measure), by_seed(baseline, measure))
    return [p_text(unpaired), p_text(None if paired is None else paired.one_sided("lower"))]


def p_text(p: float | None) -> str:
    """A p-value in a cell; empty for None."""
    return "" if p is None else shown_p(p).removeprefix("p ").removeprefix("= ")


def _seeds(line: Line) -> str:
    """The number of runs; or their seeds, with a dagger for each whose code was not committed."""
    seeds = runs(line)
    if all(map(is_committed, seeds.values())):
        return str(len(seeds))
    return ", ".join(f"{seed}" if is_committed(run) else f"{seed} †" for seed, run in seeds.items())


UNCOMMITTED = "†: the run with this seed was made by code with changes that were not committed."


def _cell(line: Line, rivals: Sequence[Line], name: str) -> str | Cell:
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


BASE = (
    Line("AdamW", "learning_rate", "lr=0.005 adamw"),
    Line("Coupled Adam", "learning_rate", "lr=0.005 coupled"),
)


LABELS: dict[Arm, str] = {"adamw": "AdamW", "coupled": "Coupled Adam"}


def pair(label: str, question: str, name: str) -> Group:
    """The rows of AdamW and Coupled Adam in the same setting."""
    return [Line(f"{label} {text}", question, f"{name} {arm}") for arm, text in LABELS.items()]


SCALE = {
    ("1.2M", "0.4M"): ("learning_rate", "lr=0.005"),
    ("2.5M", "0.4M"): ("scale", "N=0.4M steps=1200"),
    ("4.9M", "0.4M"): ("scale", "N=0.4M steps=2400"),
    ("1.2M", "1.1M"): ("scale", "N=1.1M steps=600"),
    ("1.2M", "2.6M"): ("scale", "N=2.6M steps=600"),
}
"""By D and N: the question with the two runs, and the common part of their names."""


def of_exponent(question: str, arm: Arm, n: int, label: str = "") -> Line:
    """The row of question 2 with this n; the runs for n = 0 are in another question."""
    if n != 0:
        return Line(label, question, f"{arm} n={n}")
    where, name = SCALE["1.2M" if question == "scaled" else "4.9M", "0.4M"]
    return Line(label, where, f"{name} {arm}")


def exponents(question: str, arm: Arm) -> dict[float, Line]:
    """The rows of question 2 by n."""
    pattern = re.compile(rf"{arm} n=(-?\d+)")
    tried = [int(n[1]) for name in QUESTIONS[question] if (n := pattern.fullmatch(name))]
    return {
        n: of_exponent(question, arm, n, f"{LABELS[arm]}, n = {n}") for n in sorted([0, *tried])
    }


def _scale() -> Table:
    groups = [
        pair(f"{tokens}, {size}:", question, name)
        for (tokens, size), (question, name) in SCALE.items()
    ]
    return table(groups, MORE, "D, N: Adam")


def _second_moment() -> Table:
    groups = [
        [Line(f"{tokens}, {size}", question, f"{name} adamw")]
        for (tokens, size), (question, name) in SCALE.items()
    ]
    return table(groups, ("A", "r_squared", "exponent"), "D, N")


def _learning_rate() -> Table:
    groups = [
        pair(f"{lr}:", "learning_rate", f"lr={lr}") for lr in ("0.0025", "0.005", "0.01", "0.02")
    ]
    return table(groups, ("valid_loss", "isotropy", "mean_norm_ratio"))


def _scaled(question: str) -> Table:
    """Each arm's runs, compared with n = 0, followed by each arm's best run by validation loss."""
    groups, best = [], []
    for arm in LABELS:
        lines = exponents(question, arm)
        groups.append([lines.pop(0), *lines.values()])
        line = min(groups[-1], key=lambda line: np.mean(values(line, "valid_loss")))
        best.append(dataclasses.replace(line, label=f"best: {line.label}"))
    return table([*groups, best], MORE)


def _rate() -> Table:
    scaled = of_exponent("scaled", "coupled", 5, "ν times 2⁻⁵")
    faster = Line("learning rate times 2^2.5", "scaled", "coupled lr_factor=2^2.5")
    return table([[scaled, faster]], MORE)


def _sgd() -> Table:
    lines = [Line(f"SGD, {name.replace('=', ' = ')}", "sgd", name) for name in QUESTIONS["sgd"]]
    return table([[*BASE, *lines]], ("valid_loss", *ALL), bold="all")


def _tying() -> Table:
    untied = {
        "adamw": "untied: AdamW",
        **{f"coupled {w}": f"untied: coupled {w}" for w in ("both", "input", "output")},
    }
    lines = [Line(label, "tying", f"untied {name}") for name, label in untied.items()]
    tied = [dataclasses.replace(line, label=f"tied: {line.label}") for line in BASE]
    return table(
        [tied, lines], ("initial_mean_norm", *ALL, "input_isotropy", "input_mean_norm_ratio")
    )


def _schedules() -> Table:
    cosine = [dataclasses.replace(line, label=f"cosine: {line.label}") for line in BASE]
    constant, wsd = (pair(f"{name}:", "schedules", name) for name in ("constant", "wsd"))
    return table([cosine, constant, wsd], ALL)


def _masked_lm() -> Table:
    lines = [Line("AdamW", "masked_lm", "adamw"), Line("Coupled Adam", "masked_lm", "coupled")]
    return table([lines], ALL)


def _experts() -> Table:
    lines = [
        Line("AdamW", "experts", "adamw"),
        Line("Coupled Adam", "experts", "coupled"),
        Line("Coupled Adam, router too", "experts", "coupled and router"),
    ]
    return table([lines], (*ALL[:4], "load_entropy", "router_mean_norm_ratio"))


def _muon() -> Table:
    rates = ("0.0025", "0.005", "0.01", "0.02")
    groups = [pair(f"rate {lr}: Muon +", "muon", f"lr={lr}") for lr in rates]
    return table([BASE, *groups], ("valid_loss", *ALL))


ALTERNATIVES = {
    "adamw": "AdamW",
    "coupled": "Coupled Adam",
    "centered_each_step": "mean subtracted after each step",
    "mean_loss_0.0001": "mean's penalty, 1e-4",
    "mean_loss_0.01": "mean's penalty, 1e-2",
    "mean_loss_1": "mean's penalty, 1",
    "z_loss": "z-loss, 1e-4",
    "soft_cap": "logits capped at 30",
    "weight_decay": "embeddings decay, 0.1",
    "lr_factor_0.25": "embeddings' rate times 0.25",
    "centered_at_the_end": "mean subtracted afterwards",
    "recentered_at_the_end": "the same, function preserved",
}


def alternative(lr: float, name: str) -> Line | None:
    """The row of a run of question 9, which may be in another question; None if there is none."""
    line = Line(ALTERNATIVES[name], "alternatives", f"lr={lr:g} {name}")
    if name in LABELS:
        line = dataclasses.replace(line, question="learning_rate")
    elif (lr, name) == (5e-3, "lr_factor_0.25"):
        line = of_exponent("scaled", "adamw", -4, line.label)
    return line if line.name in QUESTIONS[line.question] else None


def _alternatives(lr: float) -> Table:
    lines = [line for name in ALTERNATIVES if (line := alternative(lr, name))]
    return table([lines], MORE)


def _between(question: str, best: str, borrowed: Sequence[Line] = ()) -> Table:
    """AdamW at its best n, followed by everything else that has runs, in the order of a."""
    names = sorted(QUESTIONS[question], key=lambda name: ("full" in name, "a=" in name))
    lines = [*borrowed, *(between(question, name) for name in names)]
    first = next(line for line in lines if line.name == best)
    return table([[first, *(line for line in lines if line != first and runs(line))]], MORE)


def between(question: str, name: str, setting: str = "") -> Line:
    """A row of question 12, from any question whose embeddings have rates of their own.

    Args:
        question: the question that has its runs.
        name: their name, as in ``a=0.5 n=7``, without the setting.
        setting: what a question that has several puts in front of it, as in ``untied``.
    """
    arm, _, n = name.rpartition(" n=")
    kind, *betas = arm.split() if question.startswith(("betas", "batch")) else [arm]
    label = LABELS.get(kind, kind.replace("a=", "a = ").replace("full", "V x H,"))  # type: ignore[call-overload]
    label = ", ".join([label, *betas, f"n = {n}"])
    if not setting:
        return Line(label, question, name)
    shown = setting.replace("lr=", "rate ").replace("warmup=", "warmup ")
    return Line(f"{shown}: {label}", question, f"{setting} {name}")


def _settings(question: str) -> Table:
    """For each setting of a question AdamW at its best n, followed by everything else with runs."""
    groups: dict[str, list[Line]] = {}
    for full in QUESTIONS[question]:
        setting, _, name = full.partition(" ")
        line = between(question, name, setting)
        if runs(line) and setting != "muon":
            groups.setdefault(setting, []).append(line)

    def rank(line: Line) -> tuple[bool, float]:
        return " adamw " not in line.name, float(np.mean(values(line, "valid_loss")))

    for lines in groups.values():
        lines.insert(0, lines.pop(lines.index(min(lines, key=rank))))
    return table([*groups.values()], FEW)


def _between_muon() -> Table:
    """Beside Muon, with rates relative to the core's; both other arms are of another question."""
    groups = []
    for name in QUESTIONS["between_models"]:
        if match := re.fullmatch(r"muon (.*) a=0\.5", name):
            rates = match[1]
            label = f"{'tied' if rates.startswith('f') else 'untied'}, {rates.replace('=', ' = ')}:"
            adams = ("muon", "lr=0.01") if rates == "f=1" else ("muon_rates", rates)
            half = Line(f"{label} a = 0.5", "between_models", name)
            groups.append([*pair(label, *adams), half])
    return table(groups, FEW, "Muon +")


BEST: dict[str, Group] = {
    tokens: [between(*row) for row in rows]
    for tokens, rows in {
        "1.2M": (("between", "adamw n=9"), ("between", "coupled n=6"), ("between", "a=0.5 n=7")),
        "4.9M": (
            ("scaled_longer", "adamw n=5"),
            ("scaled_longer", "coupled n=5"),
            ("between_longer", "a=0.5 n=3"),
        ),
        "20M": (
            ("paper_ratio", "adamw n=0"),
            ("paper_ratio", "coupled n=0"),
            ("paper_ratio", "a=0.5 n=2"),
        ),
        "48M": (  # one seed, each with its n after 20M tokens
            ("paper_ratio_longer", "adamw n=0"),
            ("paper_ratio_longer", "coupled n=0"),
            ("paper_ratio_longer", "a=0.5 n=2"),
        ),
    }.items()
}
"""By D: AdamW, Coupled Adam and a = 0.5 with the n that is best on the validation documents."""


def _summary() -> Table:
    """The best rows of question 12, with what each optimizer keeps of a matrix."""
    kept = ("AdamW, 2VH", "Coupled Adam, VH + H", "a = 0.5, zero-sum, VH + V + H")
    groups = [
        [dataclasses.replace(line, label=f"{tokens}: {label}") for label, line in zip(kept, rows)]
        for tokens, rows in BEST.items()
    ]
    return table(groups, ("test_loss", "mean_norm_ratio", "men"), "tokens: optimizer, state")


RECOMMENDED = (
    Line("AdamW, betas 0.9, 0.95: 2 V x H", "betas_longer", "adamw 0.9 0.95 n=0"),
    Line("AdamW, betas 0, 0.999: 2 V x H", "betas_longer", "adamw 0 0.999 n=1"),
    Line("LEAN: V + H", "betas_longer", "a=0.75 0 0.99 n=2"),
)
"""What we recommend, after 20M tokens, with AdamW as usual and at its best betas; and its state."""


def _readme() -> Table:
    """The same in words that need no other page, without p."""
    shown = ("test_documents", "mean_norm_ratio", "effective_rank", "men")
    usual = RECOMMENDED[0]
    rows = [
        [
            *line.label.split(": "),
            *(_cell(line, [] if line is usual else [usual], name) for name in shown),
        ]
        for line in RECOMMENDED
    ]
    header = ["embeddings", "optimizer state", "test loss ↓", "offset of the mean ↓"]
    header += ["effective rank ↑", "word similarity ↑"]
    return Table(header, rows, left=(0, 1))


def _muon_rates() -> Table:
    """Pairs with the same rates, relative to the core; those with f = 1 are of question 8."""
    names = list(dict.fromkeys(name.rpartition(" ")[0] for name in QUESTIONS["muon_rates"]))
    rows = [pair("tied, f = 1:", "muon", "lr=0.01")]
    for name in names:
        label = (
            name.replace("=", " = ").replace("f =", "tied, f =").replace("input", "untied, input")
        )
        rows.append(pair(f"{label}:", "muon_rates", name))
    return table([row for row in rows if runs(row[0])], ("valid_loss", *ALL))


def _switching() -> Table:
    lines = [
        Line("AdamW, then Coupled Adam", "switching", "switched"),
        Line("AdamW, recentered, then Coupled Adam", "switching", "recentered_and_switched"),
        Line("AdamW, recentered, on with AdamW", "switching", "recentered"),
    ]
    return table([[BASE[0], *lines, BASE[1]]], ALL)


def _betas(question: str) -> Table:
    """AdamW at its best betas, followed by everything else that has runs, by loss."""
    lines = [between(question, name) for name in QUESTIONS[question]]
    lines = sorted(
        (line for line in lines if runs(line)), key=lambda line: np.mean(values(line, "valid_loss"))
    )
    losses = ("test_documents", "valid_documents", "valid_loss")
    geometry = ("mean_norm_ratio", "isotropy_unit_centered", "effective_rank")
    first = min(lines, key=lambda line: not line.name.startswith("adamw"))
    rows = [first, *(line for line in lines if line is not first)]
    return table([rows], (*losses, *geometry, "men", "men_centered"))


TRAINED_BY = {"adamw": "adamw 0.9 0.95 n=4", "lean": "a=0.75 0 0.99 n=4"}
"""The trainings whose gradients question 15 gives to all rules."""


def movement(measure: str, training: str) -> dict[str, NDArray[np.float64]]:
    """A measure of :mod:`study.movement` by rule, for each band: the mean over all windows."""
    seeds = results("movement")[TRAINED_BY[training]]["seeds"].values()
    windows = [window["rules"] for run in seeds for window in run["windows"]]
    return {
        rule: np.mean([window[rule][measure] for window in windows], axis=0) for rule in windows[0]
    }


def _movement(measure: str, training: str) -> Table:
    """The measure of each rule, for the frequent tokens on the left and the rare on the right."""
    by_rule = movement(measure, training)
    bands = len(next(iter(by_rule.values())))
    header = ["update of the embeddings", *(f"to {16 * 2**band}" for band in range(bands))]
    rows = [[rule, *(f"{value:.2f}" for value in of_bands)] for rule, of_bands in by_rule.items()]
    return Table(header, rows)


TABLES: dict[str, Callable[[], Table]] = {
    "learning_rate": _learning_rate,
    "scale": _scale,
    "second_moment": _second_moment,
    **{question: partial(_scaled, question) for question in ("scaled", "scaled_longer")},
    "rate": _rate,
    "sgd": _sgd,
    "tying": _tying,
    "schedules": _schedules,
    "masked_lm": _masked_lm,
    "experts": _experts,
    "muon": _muon,
    **{f"alternatives_{lr:g}": partial(_alternatives, lr) for lr in RATES},
    "switching": _switching,
    "between": partial(_between, "between", "adamw n=9"),
    # In question 2, n scales Coupled Adam's second moment, with the effect of the same n here.
    "between_longer": partial(
        _between,
        "between_longer",
        "adamw n=5",
        [between("scaled_longer", n) for n in ("adamw n=5", "coupled n=5", "coupled n=3")],
    ),
    "paper_ratio": partial(_between, "paper_ratio", "adamw n=0"),
    "paper_ratio_longer": partial(_between, "paper_ratio_longer", "adamw n=0"),
    **{
        question: partial(_settings, question)
        for question in ("between_rates", "between_models", "paper_ratio_rates", "warmup")
    },
    "between_muon": _between_muon,
    "muon_rates": _muon_rates,
    **{
        question: partial(_betas, question)
        for question in (
            "betas",
            "batch_16k",
            "batch_64k",
            "betas_longer",
            "betas_untied",
            "betas_rotary",
            "betas_H=32",
            "peers",
        )
    },
    **{
        f"movement_{measure}_{training}": partial(_movement, measure, training)
        for measure, training in (("in_batch", "lean"), ("cosine", "adamw"), ("cosine", "lean"))
    },
    "summary": _summary,
    "readme": _readme,
}


def filled(page: str) -> str:
    """Return a page with updated tables."""
    from . import referee  # whose tables are made of rows of this module

    made_by = {**TABLES, **referee.TABLES}

    def updated(place: re.Match[str]) -> str:
        return f"{place[1]}\n{made_by[place[2]]().markdown()}{place[3]}"

    return re.sub(r"(<!-- table: (\w[\w.=]*) -->)\n.*?(<!-- end -->)", updated, page, flags=re.S)


def main() -> None:
    """Update all pages."""
    for path in PAGES:
        write_atomically(path, filled(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
