"""Write the tables of ``docs/study/``, ``docs/tables.md`` and ``tables.md``, between their marks.

    python -m study.tables

Each mean is followed by the sample standard deviation in its last digit. A value is bold if it is
significantly better than that of the first row of its group, and italic if it is significantly
worse. The value of the first row is bold if it is significantly better than that of the only other
row. The test is a one-sided Student t-test at 95 %. The column p is for the loss being lower than
that of the first row, followed by the p of the t-test of the differences between runs with the same
seed. A dagger marks runs whose code was not committed.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coupled_adam.files import write_atomically
from coupled_adam.lab.reporting.statistics import shorthand
from coupled_adam.rendering.tables import Cell, Table

from . import finals, rate
from .finals import at_best_rate, best, differences, interval
from .questions import QUESTIONS, RATES, SECOND_SETTINGS
from .rows import (
    BEST,
    LABELS,
    MEASURES,
    Arm,
    Group,
    Line,
    by_seed,
    cell,
    dagger,
    results,
    runs,
    side_by_side,
    table,
    values,
    with_rates,
)
from .run import HERE

DOCS = HERE.parent / "docs" / "study"
GPU = HERE.parent / "benchmarks" / "results" / "gpu" / "nvidia-h200.json"
TIMED = {"rows": 128256, "columns": 4096, "dtype": "float32", "others": 0, "clip": False}
"""The case of ``benchmarks/gpu.py`` that :func:`_recommended` shows."""
PAGES = (DOCS.parent / "tables.md", *sorted(DOCS.glob("*.md")), HERE / "tables.md")


def pair(question: str, name: str) -> Group:
    """The rows of AdamW and Coupled Adam in the same setting."""
    return [Line(label, question, f"{name} {arm}") for arm, label in LABELS.items()]


BASE = pair("learning_rate", "lr=0.005")
LOSS_AND_SHAPE = ("test_loss", "isotropy", "mean_norm_ratio")
SCALE = {
    ("1.2M", "0.4M"): ("learning_rate", "lr=0.005"),
    ("2.5M", "0.4M"): ("scale", "N=0.4M steps=1200"),
    ("4.9M", "0.4M"): ("scale", "N=0.4M steps=2400"),
    ("1.2M", "1.1M"): ("scale", "N=1.1M steps=600"),
    ("1.2M", "2.6M"): ("scale", "N=2.6M steps=600"),
}
"""By D and N: the question with the two runs, and the common part of their names."""


def exponents(question: str, arm: Arm) -> dict[int, Line]:
    """The rows of a question by n; the scaled runs for n = 0 are in other questions."""
    names = {name: re.fullmatch(rf"{arm} n=(-?\d+)", name) for name in QUESTIONS[question]}
    tried = {int(n[1]): Line("", question, name) for name, n in names.items() if n}
    if question.startswith("scaled"):
        where, name = SCALE["1.2M" if question == "scaled" else "4.9M", "0.4M"]
        tried[0] = Line("", where, f"{name} {arm}")
    return tried


def _second_moment() -> Table:
    measures = ("A", "r_squared", "exponent")
    rows = []
    for (tokens, size), (question, name) in SCALE.items():
        line = Line(f"{tokens}, {size}", question, f"{name} adamw")
        rows.append([line.label + dagger(line), *(cell(line, [], key) for key in measures)])
    return Table(["D, N", *(MEASURES[key].header for key in measures)], rows)


def _by_n() -> Table:
    """The test loss for each n, of AdamW and Coupled Adam after three amounts of data."""
    questions = {
        "1.2M": ("between", "scaled"),
        "4.9M": ("between_longer", "scaled_longer"),
        "20M": ("paper_ratio",),
    }
    columns = {
        f"{tokens}: {label}": {
            n: line for question in sources for n, line in exponents(question, arm).items()
        }
        for tokens, sources in questions.items()
        for arm, label in LABELS.items()
    }

    def shown(line: Line | None) -> str:
        return "" if line is None else f"{cell(line, [], 'test_loss')}{dagger(line)}"

    factors = sorted({n for column in columns.values() for n in column})
    rows = [[f"{n}", *(shown(column.get(n)) for column in columns.values())] for n in factors]
    # As n = 5, without scaling the moment
    as_a_rate = Line("", "scaled", "coupled lr_factor=2^2.5")
    rows.append(["5, as a rate", "", shown(as_a_rate), *[""] * (len(columns) - 2)])
    return Table(["n", *columns], rows)


def _tying() -> Table:
    untied = {
        "adamw": "untied: AdamW",
        **{f"coupled {w}": f"untied: coupled {w}" for w in ("both", "input", "output")},
    }
    lines = [Line(label, "tying", f"untied {name}") for name, label in untied.items()]
    tied = [dataclasses.replace(line, label=f"tied: {line.label}") for line in BASE]
    return table([tied, lines], (*LOSS_AND_SHAPE, "input_isotropy", "input_mean_norm_ratio"))


def _masked_lm_and_experts() -> Table:
    routed = Line("Coupled Adam", "experts", "coupled and router")
    settings = {
        name: [Line(label, question, arm) for arm, label in LABELS.items()]
        for name, question in {"BERT": "masked_lm", "mixture of experts": "experts"}.items()
    }
    settings["the same, router coupled"] = [settings["mixture of experts"][0], routed]
    return side_by_side(settings, LOSS_AND_SHAPE)


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
    """The row of an alternative, which may be in another question; None if there is none."""
    line = Line(ALTERNATIVES[name], "alternatives", f"lr={lr:g} {name}")
    if name in LABELS:
        line = dataclasses.replace(line, question="learning_rate")
    elif (lr, name) == (5e-3, "lr_factor_0.25"):
        line = dataclasses.replace(line, question="scaled", name="adamw n=-4")
    return line if line.name in QUESTIONS[line.question] else None


def _alternatives() -> Table:
    """Each alternative at two rates, in comparison with AdamW at the same rate."""
    rows: list[list[str | Cell]] = []
    for name, label in ALTERNATIVES.items():
        lines = {lr: line for lr in RATES if (line := alternative(lr, name))}
        cells: list[str | Cell] = [label + dagger(*lines.values())]
        for lr in RATES:
            usual = alternative(lr, "adamw")
            rivals = [usual] if usual is not None and name != "adamw" else []
            cells += [cell(lines[lr], rivals, key) if lr in lines else "" for key in LOSS_AND_SHAPE]
        rows.append(cells)
    header = [f"{lr:g}: {MEASURES[key].header}" for lr in RATES for key in LOSS_AND_SHAPE]
    return Table(["AdamW and", *header], rows)


def _settings(question: str) -> Table:
    """For each setting of a question, both optimizers, each at its best n on validation."""
    settings: dict[str, list[Line]] = {}
    for setting in dict.fromkeys(name.partition(" ")[0] for name in QUESTIONS[question]):
        best = {}
        for arm, label in LABELS.items():
            tried = [
                Line(label, question, name)
                for name in QUESTIONS[question]
                if name.startswith(f"{setting} {arm} ")
            ]
            tried = [line for line in tried if runs(line)]
            best[label] = min(tried, key=lambda line: np.mean(values(line, "valid_loss")))
        factors = ", ".join(line.name.rpartition("n=")[2] for line in best.values())
        shown = setting.replace("lr=", "rate ").replace("=", " ")
        label = shown if question == "warmup" else f"{shown}; n = {factors}"
        settings[label] = [*best.values()]
    return side_by_side(settings, ("test_loss", "mean_norm_ratio"))


def _beside_muon() -> Table:
    """One rate for Muon and the embeddings, then rates relative to Muon's, 1e-2."""
    settings = {
        f"one rate, {lr}": pair("muon", f"lr={lr}") for lr in ("0.0025", "0.005", "0.01", "0.02")
    }
    for rates in ("f=0.25", "f=1", "f=4", "f=16", "input=1 head=1", "input=4 head=1"):
        label = f"{'tied' if rates.startswith('f') else 'untied'}, {rates.replace('=', ' = ')}"
        settings[label.replace(" head", ", head")] = pair(
            *(("muon", "lr=0.01") if rates == "f=1" else ("muon_rates", rates))
        )
    return side_by_side(settings, ("test_loss", "mean_norm_ratio"), "Muon +")


def _summary() -> Table:
    """The best rows of each optimizer after each amount of data."""
    groups = [
        [dataclasses.replace(line, label=f"{tokens}: {line.label}") for line in rows]
        for tokens, rows in BEST.items()
    ]
    return table(groups, ("test_loss", "mean_norm_ratio", "men"), "tokens: optimizer")


class Recommended(NamedTuple):
    """Runs, the state of a matrix [V, H], and the name of a time in ``benchmarks/gpu.py``."""

    line: Line
    state: str
    timed_as: str | None = None  # the fused AdamW, to which all others are relative


RECOMMENDED = (
    Recommended(Line("AdamW, betas 0.9, 0.95", "betas_longer", "adamw 0.9 0.95 n=0"), "2 V x H"),
    Recommended(Line("AdamW, betas 0, 0.999", "betas_longer", "adamw 0 0.999 n=2"), "2 V x H"),
    Recommended(
        Line("Coupled Adam", "betas_longer", "coupled 0.9 0.95 n=0"), "V x H + H", "Coupled Adam"
    ),
    Recommended(Line("LEAN", "finals", "9768 steps lean2 0 0.99"), "V + 2H", "LEAN"),
    Recommended(Line("Ember", "one_pass_longer", "ember free n=2"), "V + H", "Ember compiled"),
)
"""What we recommend and its rivals, after 20M tokens."""


def _recommended() -> Table:
    """The rows of :data:`RECOMMENDED` in words that need no other page, without tests."""
    rows = [
        [
            line.label + (", compiled" if timed_as == "Ember compiled" else ""),
            state,
            "1" if timed_as is None else f"{step_time(timed_as):.2f}",
            *(cell(line, [], name) for name in ("test_documents", "mean_norm_ratio")),
            str(len(runs(line))),
        ]
        for line, state, timed_as in RECOMMENDED
    ]
    columns = ["embeddings", "state (V tokens, width H)", "update on an H200 ↓"]
    columns += ["test loss after 9,768 steps ↓", "mean embedding's norm, relative ↓", "seeds"]
    return Table(columns, rows, left=(0, 1))


def _geometry() -> Table:
    """The rows of :data:`RECOMMENDED`, of which none is marked: no direction is the better one."""
    measures = (
        *("isotropy", "isotropy_centered", "isotropy_unit", "mean_norm_ratio"),
        *("norm_frequency_correlation", "frequent_norm", "rare_norm", "effective_rank", "men"),
    )
    rows = [
        [row.line.label, *(cell(row.line, [], name) for name in measures)] for row in RECOMMENDED
    ]
    headers = (MEASURES[name].header.rstrip(" ↑↓") for name in measures)
    return Table(["embeddings", *headers], rows)


WIDER = {
    "AdamW, 0, 0.999": ("adamw 0 0.999", 1),
    "LEAN": ("lean", 1),
    "AdamW, 0.9, 0.95": ("adamw 0.9 0.95", 6),
    "Ember": ("ember", 6),
}
"""The arms of :mod:`study.wider` by what the page calls them, and the seed that chose the rate."""

SECOND_RUN = range(6, 16)
"""Its seeds; those of the first run are 1, which only chose rates, to 5."""


def _wider() -> Table:
    """The validation loss by n with one seed, and what the chosen rate has in the second run."""
    rows = []
    for label, (arm, seed) in WIDER.items():
        lines = {n: Line("", "wider", f"{arm} n={n}") for n in (0, 2, 4)}
        losses = {n: by_seed(line, "valid_loss")[seed] for n, line in lines.items()}
        n = min(losses, key=losses.__getitem__)
        test, mean = (
            [x for number, x in by_seed(lines[n], measure).items() if number in SECOND_RUN]
            for measure in ("test_loss", "mean_norm_ratio")
        )
        cells = [f"{loss:.3f}" for loss in losses.values()]
        rows.append([label, *cells, str(n), shorthand(test), shorthand(mean), str(len(test))])
    header = ["embeddings", *(f"L (validation), n = {n}" for n in (0, 2, 4))]
    return Table([*header, "n", "test loss", "‖μ‖ʳ", "seeds"], rows)


def _wider_pairs() -> Table:
    """LEAN minus the AdamW with its betas at n = 2, of each run of the wider model and of both."""
    ours, theirs = (
        by_seed(Line("", "wider", f"{arm} n=2"), "test_loss") for arm in ("lean", "adamw 0 0.999")
    )
    rows = []
    for label, chosen in (
        ("2 to 5, first run", range(2, 6)),
        ("6 to 15, second run", SECOND_RUN),
        ("both", range(2, 16)),
    ):
        pairs = [ours[seed] - theirs[seed] for seed in chosen]
        each = ", ".join(f"{pair:+.3f}" for pair in pairs) if label != "both" else ""
        rows.append([label, each, f"{np.mean(pairs):+.3f}", interval(pairs)])
    return Table(["seeds", "differences", "mean", "95 % interval"], rows, left=(0, 1, 3))


def step_time(optimizer: str) -> float:
    """The median time of a step on a GPU, relative to torch's fused AdamW."""
    (ratio,) = (
        result["ratio"]
        for result in json.loads(GPU.read_text())["steps"]
        if (result["case"], result["optimizer"]) == (TIMED, optimizer)
    )
    _, median, _ = ratio
    return float(median)


EDITIONS = {
    "600 steps": (
        ("geometric", "first 0 0.99"),
        ("geometric", "lean2 0 0.99"),
        ("formula", "1.2M limit later x1"),
    ),
    "9,768 steps": (
        ("one_pass_longer", "plain delayed n=1"),
        ("finals", "9768 steps lean2 0 0.99"),
    ),
    "4,800 steps of 512 tokens": (
        ("rate_rule", "512 lean x2"),
        ("finals", "512 lean2 0 0.99"),
        ("formula", "512 limit later x1"),
    ),
    "the same at half the rate": (
        ("rate_rule", "512 lean x1"),
        ("final_rates", "512 lean2 0 0.99 x0.5"),
        ("formula", "512 low limit later x1"),
    ),
}
"""Where LEAN's editions have had the same rate."""


def _editions() -> Table:
    """The validation losses of LEAN's editions, and their seeds."""
    lines = []
    for label, editions in EDITIONS.items():
        tried = [Line("", *edition) for edition in editions]
        seeds = [
            " to ".join(map(str, dict.fromkeys((min(x), max(x))))) for x in map(runs, tried) if x
        ]
        losses = (cell(x, [], "valid_loss") for x in tried)
        blank = [""] * (3 - len(tried))
        lines.append([label, *losses, *blank, ", ".join(dict.fromkeys(seeds))])
    return Table(["", "first edition", "second edition", "third edition", "seeds"], lines)


def _first_page() -> Table:
    """The README's two lines side by side, after each number of steps, and their differences."""
    cells = []
    for steps, beta2 in itertools.product((600, 2400, 9768), (0.999, 0.95)):
        before, after, second = (
            Line("", "first_page", f"{steps} steps {line} 0.9 {beta2:g}")
            for line in ("adamw", "line", "line second")
        )
        edition = "" if runs(after) else ", second edition"
        after = after if runs(after) else second
        shown = [cell(line, [], "test_documents") for line in (before, after)]
        pairs = differences([after], [before], "test_documents")
        difference = [f"{np.mean(pairs):+.3f}", interval(pairs), str(len(pairs))]
        cells.append([f"{steps:,}{edition}", f"0.9, {beta2:g}", *shown, *difference])
    columns = ["steps", "betas", "the line before ↓", "the line after ↓", "difference"]
    return Table([*columns, "95 % interval", "seeds"], cells)


def _screening() -> Table:
    """How far the validation loss of what is tried is above that of the second edition's base."""
    labels = {
        "adamw 0 0.999": "AdamW, 0, 0.999",
        "adamw 0 0.999 decay=0.02": "AdamW, 0, 0.999, embeddings decay by 0.02",
        "weighted 0 0.999": "columns weighted by the rows",
        "lean2 0 0.99": "β₂ = 0.99",
        "lean2 0 tokens": "β₂ by the tokens of a step",
        "lean2 0 0.999 a=0.5": "a = 0.5",
        "lean2 0 0.999 a=1": "a = 1",
        "lean2 0 0.999 free": "updates need not sum to zero",
        "lean2 0 0.999 decay=0.01": "embeddings decay by 0.01",
        "lean2 0 0.999 decay=0.02": "embeddings decay by 0.02",
    }

    def losses(name: str) -> NDArray[np.float64]:
        """The one of each setting, NaN if it has not been run."""
        lines = [Line("", "screening", f"{setting} {name}") for setting in SECOND_SETTINGS]
        return np.array([next(iter(by_seed(x, "valid_loss").values()), np.nan) for x in lines])

    base = losses("lean2 0 0.999")
    table_rows = []
    for name, label in labels.items():
        above = losses(name) - base
        cells = ["" if np.isnan(x) else f"{x:+.3f}" for x in (*above, np.nanmean(above))]
        table_rows.append([label, *cells])
    return Table(["", *SECOND_SETTINGS, "on average"], table_rows)


def _switching() -> Table:
    lines = [
        Line("AdamW, then Coupled Adam", "switching", "switched"),
        Line("AdamW, recentered, then Coupled Adam", "switching", "recentered_and_switched"),
        Line("AdamW, recentered, on with AdamW", "switching", "recentered"),
    ]
    adamw, coupled = BASE
    measures = ("test_loss", "isotropy", "mean_norm", "mean_norm_ratio")
    return table([[adamw, *lines, coupled]], measures)


def _betas(lines: Iterable[Line]) -> Table:
    """AdamW with the best betas, followed by everything else that has runs, by loss.

    Of each rule at several rates only one is shown: the rate with the most seeds, which validation
    has chosen, or else the best on validation.
    """
    lines = sorted(
        (line for line in lines if runs(line)), key=lambda line: np.mean(values(line, "valid_loss"))
    )
    by_rule: dict[str, Line] = {}
    for line in lines:
        rule = line.name.rpartition(" n=")[0]
        by_rule[rule] = max(by_rule.get(rule, line), line, key=lambda tried: len(runs(tried)))
    lines = [line for line in lines if line in by_rule.values()]
    first = min(lines, key=lambda line: not line.name.startswith("adamw"))
    rows = [first, *(line for line in lines if line is not first)]
    return table([rows], ("test_documents", "valid_loss", "mean_norm_ratio"))


PEERS = {
    "AdamW, 0, 0.999": ("betas", "adamw 0 0.999"),
    "AdamW, 0, 0.999, zero-sum": ("peers", "centered adamw 0 0.999"),
    "Ember": ("zero_sum", "ember free"),
    "Adafactor": ("table_rules", "adafactor free"),
    "DeepSeek-V4.1's": ("table_rules", "balanced free"),
    "DeepSeek-V4.1's without momentum": ("table_rules", "balanced 0 free"),
    "a moment for each row": ("peers", "row_moment 0 0.99"),
    "a moment for each row, beta2 0.999": ("peers", "row_moment 0 0.999"),
    "columns of norm 1": ("peers", "columns 0 0.95"),
    "columns, momentum 0.9": ("peers", "columns 0.9 0.95"),
    "rows of norm 1": ("peers", "rows 0 0.95"),
    "rows, momentum 0.9": ("peers", "rows 0.9 0.95"),
    "matrix of norm 1": ("peers", "matrix 0 0.95"),
    "matrix, momentum 0.9": ("peers", "matrix 0.9 0.95"),
    "signs, momentum 0.9": ("peers", "sign 0.9 0.95"),
    "Lion": ("peers", "lion 0.9 0.99"),
}
"""Optimizers with little state, and rivals: the question and the name of their runs without n."""


def _peers() -> Table:
    """All of :data:`PEERS` and LEAN, each at one of its rates."""
    lines = [
        Line(f"{label}, n = {name.rpartition('=')[2]}", question, name)
        for label, (question, rule) in PEERS.items()
        for name in results(question)
        if name.rpartition(" n=")[0] == rule
    ]
    (lean,) = at_best_rate("2400 steps", "lean2 0 0.99")[1]
    return _betas([*lines, dataclasses.replace(lean, label="LEAN, n = 5")])


MOVED = "adamw 0.9 0.95 n=4"
"""The training of ``betas`` whose gradients ``movement`` gives to all rules."""


def _movement() -> Table:
    """Of each rule, the rarer half's share of movement in the batch, and cosines of all and of it.

    Each is the mean over all windows of :mod:`study.movement`, that of all also over the bands.
    """
    measured = results("movement")[MOVED]["seeds"].values()
    windows = [window["rules"] for run in measured for window in run["windows"]]
    rows = []
    for rule in windows[0]:
        in_batch, cosine = (
            np.mean([window[rule][measure] for window in windows], axis=0)
            for measure in ("in_batch", "cosine")
        )
        rows.append([rule, *(f"{x:.2f}" for x in (in_batch[-1], cosine.mean(), cosine[-1]))])
    return Table(["update of the embeddings", "with the token", "cosine, all", "rarer half"], rows)


BESIDE_MUON = {
    "LEAN": "lean",
    "AdamW, 0, 0.999": "adamw 0 0.999",
    "AdamW, 0.8, 0.95": "adamw 0.8 0.95",
    "AdamW, 0.8, 0.995": "adamw 0.8 0.995",
    "AdamW, 0.8, 0.96": "adamw 0.8 0.96",
    "AdamW, 0.5, 0.95": "adamw 0.5 0.95",
}
"""The columns of the table of embeddings beside Muon, those with runs, by the names of these."""


def _tables_beside_muon() -> Table:
    """Validation losses of one seed by rate, then test documents at the best rates, all seeds."""
    rows: list[list[str | Cell]] = []
    tried = {
        label: {
            float(name.rpartition("=")[2]): [Line("", "muon_tables", name)]
            for name in results("muon_tables")
            if name.startswith(f"{arm} f=")
        }
        for label, arm in BESIDE_MUON.items()
    }
    tried = {label: by_factor for label, by_factor in tried.items() if by_factor}
    chosen = [best(by_factor) for by_factor in tried.values()]
    for factor in sorted({*itertools.chain(*tried.values())}):
        cells: list[str | Cell] = [f"validation, f = {factor:g}"]
        for by_factor, (best_factor, _) in zip(tried.values(), chosen):
            losses = [values(line, "valid_loss")[0] for line in by_factor.get(factor, ())]
            cells.append(Cell("".join(map("{:.3f}".format, losses)), bold=factor == best_factor))
        rows.append(cells)
    lines = [line for _, (line,) in chosen]
    rows.append(["test documents", *(cell(line, [], "test_documents") for line in lines)])
    rows.append(["‖μ‖ʳ", *(cell(line, [], "mean_norm_ratio") for line in lines)])
    rows.append(["seeds", *(str(len(runs(line))) for line in lines)])
    return Table(["", *tried], rows, left=(0,))


HASHED_BIGRAMS = {
    "no table": "no table",
    "LEAN, sparse": "lean",
    "SparseAdam, 0, 0.999": "sparse adam 0 0.999",
    "SparseAdam, 0.9, 0.999 (its default)": "sparse adam 0.9 0.999",
    "Adagrad, sparse": "adagrad",
    "row-wise Adagrad": "row-wise adagrad",
    "SGD, sparse": "sgd",
    "AdamW, dense, 0, 0.999": "adamw 0 0.999",
}
"""The rows of the table of hashed bigrams, and the names of their runs."""


def _hashed_bigrams() -> Table:
    """Each optimizer of the table at the rate that has the lowest validation loss with one seed."""
    lines: list[list[str | Cell]] = []
    for label, arm in HASHED_BIGRAMS.items():
        state = ""
        cells: list[str | Cell] = []
        for steps in (600, 2400):
            named = re.compile(rf"{steps} steps {re.escape(arm)}( [\d.]+)?")
            tried = {
                name: [Line("", "hashed_bigrams", name)]
                for name in results("hashed_bigrams")
                if named.fullmatch(name)
            }
            if not tried:
                cells += ["", ""]
                continue
            name, (line,) = best(tried, "valid_documents")
            if arm != "no table":
                state = f"{next(iter(runs(line).values()))['state_bytes'] / 1e6:,.0f}"
            cells += [_rate(name, tried), cell(line, [], "test_documents")]
        lines.append([label, state, *cells])
    after = ("rate", "loss after {} steps ↓")
    columns = [text.format(steps) for steps in ("600", "2,400") for text in after]
    return Table(["optimizer of the table", "its state, MB", *columns], lines, left=(0,))


def _rate(name: str, tried: Iterable[str]) -> str:
    """The rate in the name of a run, with a star if none was tried on one side of it."""
    rates = sorted(float(other.split()[-1]) for other in tried if other[-1].isdigit())
    if not rates:
        return ""
    rate = float(name.split()[-1])
    return f"{rate:g}" + "*" * (rate in (rates[0], rates[-1]))


VOCABULARY, WIDTH = 4096, 64
EIGHT_BITS = 2 + 8 / 256
"""Bytes of 8-bit AdamW for a parameter."""
BESIDE_CORES: dict[str, tuple[tuple[str, str] | None, str, float]] = {
    "AdamW, 0.9, 0.95": (
        ("cores", "600 steps adamw 0.9 0.95"),
        "adamw 0.9 0.95",
        8 * VOCABULARY * WIDTH,
    ),
    "AdamW, 0, 0.999": (
        ("settings", "1.2M adamw 0 0.999 n=8"),
        "adamw 0 0.999",
        8 * VOCABULARY * WIDTH,
    ),
    "LEAN": (("formula", "1.2M limit later x1"), "lean2 0 0.99", 4 * (VOCABULARY + 2 * WIDTH)),
    "8-bit AdamW, 0.9, 0.95": (None, "all 0.9 0.95", EIGHT_BITS * VOCABULARY * WIDTH),
    "8-bit AdamW, 0, 0.999": (None, "all 0 0.999", EIGHT_BITS * VOCABULARY * WIDTH),
}
"""Optimizers of the embeddings: runs beside a float32 core and an 8-bit one, and bytes of state."""


def _cores() -> Table:
    """Losses beside a float32 and an 8-bit core with one seed, and the state beside the latter."""
    rows = []
    for label, (usual, eight_bit, of_embeddings) in BESIDE_CORES.items():
        beside = Line("", "cores", f"600 steps 8-bit {eight_bit}")
        usual_loss = f"{by_seed(Line('', *usual), 'test_documents')[4]:.3f}" if usual else ""
        core = EIGHT_BITS * (runs(beside)[4]["parameters"] - VOCABULARY * WIDTH)
        state = f"{(core + of_embeddings) / 1e6:.2f}"
        rows.append([label, usual_loss, f"{by_seed(beside, 'test_documents')[4]:.3f}", state])
    return Table(["embeddings", "core in float32: L ↓", "core in 8 bits: L ↓", "state, MB"], rows)


def _disturbed() -> Table:
    """Validation losses where nothing, all gradients or one row's jump, without clipping."""
    arms = {"AdamW, 0, 0.999": "adamw 0 0.999", "Coupled Adam": "coupled n=5", "LEAN": "lean"}
    rows = []
    for label, arm in arms.items():
        lines = [Line("", "disturbed", f"{jump} {arm}") for jump in ("none", "all", "row")]
        rows.append([label, *(cell(line, [], "valid_loss") for line in lines)])
    return Table(["embeddings", "no jump", "all gradients", "one row's"], rows)


TABLES: dict[str, Callable[[], Table]] = {
    "summary": _summary,
    "by_n": _by_n,
    **{name: partial(_settings, name) for name in ("between_rates", "between_models", "warmup")},
    "beside_muon": _beside_muon,
    "switching": _switching,
    "alternatives": _alternatives,
    "masked_lm_and_experts": _masked_lm_and_experts,
    "schedules": partial(
        side_by_side,
        {"cosine": BASE} | {name: pair("schedules", name) for name in ("constant", "wsd")},
        LOSS_AND_SHAPE,
    ),
    "tying": _tying,
    "second_moment": _second_moment,
    "scale": partial(
        side_by_side,
        {f"{tokens}, {size}": pair(*runs_of) for (tokens, size), runs_of in SCALE.items()},
        (*LOSS_AND_SHAPE, "men"),
        "D, N",
    ),
    "learning_rate": partial(
        side_by_side,
        {lr: pair("learning_rate", f"lr={lr}") for lr in ("0.0025", "0.005", "0.01", "0.02")},
        ("valid_loss", "isotropy", "mean_norm_ratio"),
        "rate",
    ),
    **{
        question: partial(_betas, [with_rates(question, name) for name in QUESTIONS[question]])
        for question in ("betas", "betas_longer")
    },
    "peers": _peers,
    "movement": _movement,
    "recommended": _recommended,
    "geometry": _geometry,
    "wider": _wider,
    "wider_pairs": _wider_pairs,
    "editions": _editions,
    "first_page": _first_page,
    "screening": _screening,
    "muon_tables": _tables_beside_muon,
    "hashed_bigrams": _hashed_bigrams,
    "rate_costs": rate.table,
    "finals_valid": finals.finals_table,
    "final_rates": finals.final_rates_table,
    "formula": finals.formula_table,
    "cores": _cores,
    "disturbed": _disturbed,
}


def filled(page: str) -> str:
    """Return a page with updated tables."""

    def updated(place: re.Match[str]) -> str:
        return f"{place[1]}\n{TABLES[place[2]]().markdown()}{place[3]}"

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
