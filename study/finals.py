"""Tables of the finals: AdamW, LEAN and Ember in thirteen settings, each at its own rate."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy import stats

from coupled_adam.lab.reporting.statistics import shorthand
from coupled_adam.rendering.tables import Cell, Table

from .questions import (
    BESIDE,
    CHOSEN,
    FINAL_ARMS,
    FINAL_SETTINGS,
    FORMULA_SETTINGS,
    QUESTIONS,
    RATES_BESIDE,
)
from .rows import Line, by_seed, results, runs

LEAN, ADAMW, EMBER = FINAL_ARMS
Lines = Sequence[Line]
"""Rows of the same runs with different seeds."""
Key = TypeVar("Key")


def seeds_of(lines: Iterable[Line], measure: str) -> dict[int, float]:
    """A measure by seed, of runs that several questions have."""
    return {seed: value for line in lines for seed, value in by_seed(line, measure).items()}


def differences(ours: Lines, theirs: Lines, measure: str) -> list[float]:
    """Those of the runs with the same seeds."""
    tried, baseline = seeds_of(ours, measure), seeds_of(theirs, measure)
    return [tried[seed] - baseline[seed] for seed in tried.keys() & baseline.keys()]


def interval(numbers: Sequence[float]) -> str:
    """The 95 % interval of Student's t for a mean; empty for a single number."""
    if len(numbers) < 2:
        return ""
    low, high = stats.ttest_1samp(numbers, 0).confidence_interval()
    return f"{low:+.3f} to {high:+.3f}"


def mean_of_settings(numbers: Sequence[float]) -> str:
    """The mean of a number of each setting, with its interval."""
    return f"{np.mean(numbers):+.3f} ({interval(numbers)}), {len(numbers)} settings"


def finalist(setting: str, arm: str) -> Line:
    """One of :data:`FINAL_ARMS` at its earlier rate."""
    return Line("", *(FINAL_SETTINGS[setting].earlier[arm].runs or ("finals", f"{setting} {arm}")))


CHANGES = {
    "LEAN": LEAN,
    "LEAN, decay": f"{LEAN} decay=0.02",
    "LEAN, free": f"{LEAN} free",
    "AdamW, decay": f"{ADAMW} decay=0.02",
}
"""What is compared with AdamW at the earlier rates, by its label."""


def finals_table() -> Table:
    """AdamW's validation loss, and how far the others are above it with the same seeds."""
    above: dict[str, list[float]] = {label: [] for label in CHANGES}
    rows = []
    for setting in FINAL_SETTINGS:
        adamw = finalist(setting, ADAMW)
        cells, pairs = [shorthand([*by_seed(adamw, "valid_loss").values()], 3)], set()
        for label, name in CHANGES.items():
            each = differences([Line("", "finals", f"{setting} {name}")], [adamw], "valid_loss")
            if each:
                above[label].append(float(np.mean(each)))
                pairs.add(len(each))
            cells.append(f"{np.mean(each):+.3f}" if each else "")
        rows.append([setting, *cells, ", ".join(map(str, sorted(pairs)))])
    rows.append(["mean", "", *map(mean_of_settings, above.values()), ""])
    return Table(["setting", "AdamW, 0, 0.999", *CHANGES, "pairs"], rows)


def at_rates(setting: str, arm: str) -> dict[float, Lines]:
    """One of :data:`FINAL_ARMS` at all factors that have runs, the earlier one first."""
    factor = FINAL_SETTINGS[setting].earlier[arm].factor
    tried: dict[float, Lines] = {factor: [finalist(setting, arm)]}
    for times, multiple in RATES_BESIDE.items():
        beside = Line("", "final_rates", f"{setting} {arm} {times}")
        if runs(beside):
            tried[factor * multiple] = [beside]
    return tried


def with_decay(setting: str, arm: str = ADAMW) -> dict[float, Lines]:
    """The same with embeddings that decay: the runs of the finals, and those of the rivals."""
    name = f"{setting} {arm} decay=0.02"
    entries = {
        ("finals", name): QUESTIONS["finals"][name],
        **{
            ("rivals", rival): entry
            for rival, entry in QUESTIONS["rivals"].items()
            if rival.startswith(f"{name} x")
        },
    }
    tried: dict[float, Lines] = {}
    for (question, of_runs), entry in entries.items():
        if runs(line := Line("", question, of_runs)):
            factor = round(entry.arm["lr_factor"], 9)
            tried[factor] = [*tried.get(factor, ()), line]
    return tried


def best(tried: Mapping[Key, Lines], measure: str = "valid_loss") -> tuple[Key, Lines]:
    """The factor or name with the lowest validation loss with the first seed, and its runs."""
    losses = {key: seeds_of(lines, measure) for key, lines in tried.items()}
    seed = min(seed for by_key in losses.values() for seed in by_key)
    key = min(losses, key=lambda key: losses[key].get(seed, np.inf))
    return key, tried[key]


def at_best_rate(setting: str, arm: str) -> tuple[float, Lines]:
    """An optimizer of the finals at its best factor; LEAN is the third edition as far as it ran."""
    if arm == LEAN:
        factor = CHOSEN[setting][1]
        third = {
            factor * multiple: [line]
            for times, multiple in BESIDE.items()
            if runs(line := Line("", "formula", f"{setting} limit later {times}"))
        }
        if third:
            return best(third)
    return at_best_rate_before(setting, arm)


def at_best_rate_before(setting: str, arm: str) -> tuple[float, Lines]:
    """The same with LEAN's second edition."""
    tried = at_rates(setting, arm)
    # After 9,768 steps there are five seeds at the earlier rate, and beside it single runs that
    # were made for the rule of the rate alone.
    return next(iter(tried.items())) if setting == "9768 steps" else best(tried)


def final_rates_table() -> Table:
    """AdamW, with decayed embeddings and without, LEAN and Ember, each at its own rate."""
    rows: list[list[str]] = []
    above: dict[str, list[float]] = {}
    for setting in FINAL_SETTINGS:
        arms = {"AdamW": ADAMW, "LEAN": LEAN, "Ember": EMBER}
        chosen = {name: at_best_rate(setting, arm) for name, arm in arms.items()}
        chosen["AdamW, decay"] = best(tried) if (tried := with_decay(setting)) else (np.nan, ())
        cells, numbers = {"setting": setting}, []
        for name, rivals in COMPARED.items():
            factor, ours = chosen[name]
            cells[f"{name}: factor"] = f"{factor:.3g}".replace("nan", "")
            if not rivals:
                losses = [*seeds_of(ours, "test_documents").values()]
                cells["L of test documents ↓"] = shorthand(losses)
            for rival in rivals:
                each = differences(ours, chosen[rival][1], "test_documents")
                cells[column := f"{name} − {rival}"] = f"{np.mean(each):+.3f}" if each else ""
                if each:
                    above.setdefault(column, []).append(float(np.mean(each)))
                    numbers.append(str(len(each)))
        rows.append([*cells.values(), ", ".join(dict.fromkeys(numbers))])
    means = {column: mean_of_settings(numbers) for column, numbers in above.items()}
    rows.append(["mean", *(means.get(column, "") for column in [*cells][1:]), ""])
    return Table([*cells, "pairs"], rows)


COMPARED: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "AdamW, decay": ("AdamW",),
    "LEAN": ("AdamW", "AdamW, decay"),
    "Ember": ("AdamW",),
}
"""The optimizers of :func:`final_rates_table`, and what each is held against."""

FORMULAS = {
    "limit": "new limit",
    "limit later": "zero-sum from step 100",
    "limit free": "never",
}


def formula_table() -> Table:
    """Validation losses with the first seed, of AdamW and LEAN.

    Each is at the best of its rates, but at a low rate all have the same.
    """
    rows: list[list[str | Cell]] = []
    above: list[list[float]] = []
    for setting, (_, factor) in FORMULA_SETTINGS.items():
        name, low, _ = setting.partition(" low")
        tried = [
            at_rates(name, arm).get(factor, ()) if low else at_best_rate_before(name, arm)[1]
            for arm in (ADAMW, LEAN)
        ]
        tried += [
            [
                Line("", "formula", run)
                for run in results("formula")
                if run.startswith(f"{setting} {formula} x")
            ]
            for formula in FORMULAS
        ]
        # 2,400 steps at a low rate have seed 4 by mistake, where the finals have 1.
        seed = min(by_seed(tried[2][0] if low else finalist(name, ADAMW), "valid_loss"))
        losses = [
            min((by_seed(line, "valid_loss").get(seed, np.nan) for line in lines), default=np.nan)
            for lines in tried
        ]
        rows.append([setting, *("" if np.isnan(loss) else f"{loss:.3f}" for loss in losses)])
        if not low:
            above.append([loss - losses[1] for loss in losses])
    known = [[x for x in of_all if not np.isnan(x)] for of_all in zip(*above)]
    means = (f"{np.mean(x):+.3f}, {len(x)} settings" if x else "" for x in known)
    rows.append(["mean difference from the second edition", *means])
    return Table(["setting", "AdamW, 0, 0.999", "second edition", *FORMULAS.values()], rows)
