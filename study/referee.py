"""What a referee asks of a difference: over seeds, over documents, among how many tests."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    shorthand,
)
from coupled_adam.rendering.tables import Cell, Table

from .questions import FINAL_SETTINGS, FORMULA_SETTINGS, RATES_BESIDE, SETTINGS
from .rows import BEST, Line, by_seed, p_text, runs, values
from .run import results

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the headline table: does ``line`` have another loss than ``baseline``?"""

    tokens: str
    line: Line
    baseline: Line


ADAMW_BEST = Line("AdamW, 0, 0.99", "betas", "adamw 0 0.99 n=5")
A_BEST = Line("a = 0.75, 0, 0.99", "betas", "a=0.75 0 0.99 n=4")
AFTER_20M = (
    Line("AdamW, 0, 0.999", "betas_longer", "adamw 0 0.999 n=2"),
    Line("AdamW, 0.9, 0.95 (five seeds)", "betas_longer", "adamw 0.9 0.95 n=0"),
    Line("AdamW, 0, 0.99", "betas_longer", "adamw 0 0.99 n=1"),
    Line("AdamW, 0.9, 0.999", "betas_longer", "adamw 0.9 0.999 n=1"),
    Line("a = 0.75, 0, 0.99", "betas_longer", "a=0.75 0 0.99 n=2"),
    Line("LEAN", "one_pass_longer", "plain delayed n=1"),
    Line("Ember", "one_pass_longer", "ember free n=2"),
)
"""After 20M tokens: the AdamW that all others are tested against, and these others."""


def headline() -> list[Comparison]:
    """The family of tests: everything that the pages conclude about losses of tuned optimizers."""
    family = []
    for tokens in ("1.2M", "4.9M", "20M"):
        adamw, coupled, half = (
            dataclasses.replace(line, label=f"{name}, 0.9, 0.95")
            for name, line in zip(("AdamW", "Coupled Adam", "a = 0.5"), BEST[tokens])
        )
        rows = [(coupled, adamw), (half, adamw)]
        if tokens == "4.9M":
            rows += [(line, ADAMW_BEST) for line in (adamw, coupled, half, A_BEST)]
        if tokens == "20M":
            rows += [(line, AFTER_20M[0]) for line in (coupled, *AFTER_20M[1:])]
        family += [Comparison(tokens, *row) for row in rows]
    return family


def holm(p: Sequence[float]) -> list[float]:
    """The p-values of a family of tests, corrected by Holm's step-down method (1979).

    The smallest is multiplied by the number of tests, the next by one less, and so on; none becomes
    smaller than one before it, or larger than 1.
    """
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(np.asarray(p)[order] * factors), 1)
    return [*map(float, corrected)]


def two_sided_p(line: Line, baseline: Line) -> float | None:
    """The p of Student's t-test that the test losses of two rows have different means."""
    lower = one_sided_t_test(values(line, "test_loss"), values(baseline, "test_loss"), "lower")
    return None if lower is None else 2 * min(lower, 1 - lower)


Kind = Literal["losses", "band_losses"]


def held_out(line: Line, kind: Kind = "losses", split: str = "test") -> dict[int, Array]:
    """The losses of documents, or of bands of frequency, by seed, of the runs that have them."""
    return {
        seed: np.array(run["documents"][split][kind])
        for seed, run in runs(line).items()
        if "documents" in run
    }


def difference(line: Line, kind: Kind = "losses", split: str = "test") -> Array:
    """These losses minus those of AdamW with the best betas, the mean over the common seeds."""
    ours, best = held_out(line, kind, split), held_out(ADAMW_BEST, kind, split)
    means: Array = np.mean([ours[seed] - best[seed] for seed in ours.keys() & best.keys()], axis=0)
    return means


def interval(differences: Array) -> tuple[float, float]:
    """The 95 % interval of the mean difference, by a bootstrap over documents."""
    random = np.random.default_rng(0)
    means = stats.bootstrap(
        (differences,), np.mean, n_resamples=9999, method="percentile", rng=random
    )
    return float(means.confidence_interval.low), float(means.confidence_interval.high)


def headline_table() -> Table:
    """Each comparison, with p corrected for their number; bold if that is below 0.05."""
    family = [pair for pair in headline() if runs(pair.line) and runs(pair.baseline)]
    p = {pair: two_sided_p(pair.line, pair.baseline) for pair in family}
    tested = {pair: value for pair, value in p.items() if value is not None}
    corrected = dict(zip(tested, holm([*tested.values()])))
    rows: list[list[str | Cell]] = []
    for pair in family:
        line, baseline = pair.line, pair.baseline
        difference = np.mean(values(line, "test_loss")) - np.mean(values(baseline, "test_loss"))
        paired = paired_t_test(by_seed(line, "test_loss"), by_seed(baseline, "test_loss"))
        rows.append(
            [
                pair.tokens,
                f"{line.label} against {baseline.label}",
                Cell(f"{difference:+.3f}", bold=corrected.get(pair, 1) < SIGNIFICANCE),
                p_text(p[pair]),
                p_text(corrected.get(pair)),
                p_text(None if paired is None else paired.p),
                f"{len(runs(line))}, {len(runs(baseline))}",
            ]
        )
    header = ["tokens", "", "difference of L", "p", "p, Holm", "p, paired", "seeds"]
    return Table(header, rows, left=(0, 1))


BETAS = (
    ADAMW_BEST,
    Line("AdamW, 0, 0.999", "betas", "adamw 0 0.999 n=5"),
    Line("AdamW, 0.9, 0.999", "betas", "adamw 0.9 0.999 n=5"),
    Line("AdamW, 0.9, 0.95", "betas", "adamw 0.9 0.95 n=5"),
    Line("Coupled Adam, 0.9, 0.999", "betas", "coupled 0.9 0.999 n=4"),
    Line("Coupled Adam, 0.9, 0.95", "betas", "coupled 0.9 0.95 n=4"),
    Line("a = 0.5, 0.9, 0.95", "betas", "a=0.5 0.9 0.95 n=3"),
    Line("a = 0.5, 0, 0.99", "betas", "a=0.5 0 0.99 n=4"),
    A_BEST,
)
"""Rows of the tables of documents and of bands, as far as they have runs."""


def documents_table() -> Table:
    """The difference from AdamW with the best betas on two sets of documents, with intervals."""
    rows = []
    for line in with_documents():
        cells: list[str | Cell] = [line.label]
        for split in ("valid", "test"):
            if line is ADAMW_BEST:
                cells.append(f"{np.mean([*held_out(line, split=split).values()]):.4f}")
                continue
            differences = difference(line, split=split)
            low, high = interval(differences)
            text = f"{differences.mean():+.4f} ({low:+.4f} to {high:+.4f})"
            cells.append(Cell(text, bold=low > 0 or high < 0))
        rows.append([*cells, str(len(runs(line)))])
    header = ["embeddings", "validation documents", "test documents", "seeds"]
    return Table(header, rows)


def bands_table() -> Table:
    """The loss by how frequent the predicted token is, relative to AdamW with the best betas."""
    lines = with_documents()
    (run, *_) = runs(lines[0]).values()
    tokens = np.array(run["documents"]["test"]["band_tokens"])
    header = ["embeddings", *(f"to {16 * 2**band}" for band in range(len(tokens)))]
    shares = (f"{share:.0%}".replace("%", " %") for share in tokens / tokens.sum())
    rows = [["share of the text", *shares]]
    for line in lines:
        if line is ADAMW_BEST:
            losses = np.mean([*held_out(line, "band_losses").values()], axis=0)
            cells = [f"{loss:.3f}" for loss in losses]
        else:
            cells = [f"{loss:+.3f}" for loss in difference(line, "band_losses")]
        rows.append([line.label, *cells])
    return Table(header, rows)


@dataclasses.dataclass(frozen=True)
class ComparedSetting:
    """Each arm's chosen n and losses in a setting of :data:`SETTINGS`.

    factors: n of AdamW and of LEAN, the one with the lower validation loss with seed 4.
    losses: on the test documents, by seed.
    """

    name: str
    factors: tuple[int, int]
    losses: tuple[Mapping[int, float], Mapping[int, float]]

    @property
    def difference(self) -> float:
        """LEAN's loss minus AdamW's, the mean over the seeds."""
        adamw, lean = self.losses
        return float(np.mean([lean[seed] - adamw[seed] for seed in adamw]))


def best_rate(question: str, name: str, factors: Sequence[int]) -> tuple[int, Line]:
    """The n with the lowest validation loss with seed 4, and its runs."""
    lines = {n: Line("", question, f"{name} n={n}") for n in factors}
    return min(lines.items(), key=lambda entry: by_seed(entry[1], "valid_loss").get(4, np.inf))


def settings() -> list[ComparedSetting]:
    """The settings of :data:`SETTINGS` whose runs are complete."""
    complete = []
    for name, setting in SETTINGS.items():
        chosen = [
            best_rate("settings", f"{name} {arm}", setting.tried)
            for arm in ("adamw 0 0.999", "lean 0 0.99")
        ]
        losses = [by_seed(line, "test_documents") for _, line in chosen]
        if all(len(seeds) == 3 for seeds in losses):
            factors = chosen[0][0], chosen[1][0]
            complete.append(ComparedSetting(name, factors, (losses[0], losses[1])))
    return complete


def settings_table() -> Table:
    """Each setting, and the mean of the differences with the 95 % interval of Student's t."""
    rows: list[list[str | Cell]] = []
    compared = settings()
    for setting in compared:
        paired = paired_t_test(setting.losses[1], setting.losses[0])
        cells = []
        for n, losses in zip(setting.factors, setting.losses):
            cells += [str(n), shorthand([*losses.values()], 3)]
        p = p_text(None if paired is None else paired.p)
        rows.append([setting.name, *cells, f"{setting.difference:+.3f}", p])
    differences = [setting.difference for setting in compared]
    p = p_text(float(stats.ttest_1samp(differences, 0).pvalue))
    rows.append(["mean", *[""] * 4, mean_of_settings(differences), p])
    arms = ("AdamW, 0, 0.999", "LEAN")
    header = [cell for arm in arms for cell in (f"{arm}: n", "L of test documents ↓")]
    return Table(["setting", *header, "LEAN − AdamW", "p, paired"], rows)


def mean_of_settings(differences: Sequence[float]) -> str:
    """The mean of a number of each setting, with the 95 % interval of Student's t."""
    low, high = stats.ttest_1samp(differences, 0).confidence_interval()
    return f"{np.mean(differences):+.3f} ({low:+.3f} to {high:+.3f})"


BESIDE_LEAN = (
    ("one moment for each row", "row_moments", "row_moment 0 0.99"),
    ("without zero-sum updates", "ember_and_free", "lean free 0 0.99"),
    ("Ember", "ember_and_free", "ember free"),
)
"""What is compared with LEAN in each setting: its header, its question, and its runs."""


def beside_lean_table() -> Table:
    """Their loss on documents minus LEAN's with seed 4, each at its best rate that was tried."""
    rows = []
    differences: dict[str, list[float]] = {header: [] for header, *_ in BESIDE_LEAN}
    for setting in settings():
        lean = setting.losses[1][4]
        cells = []
        for header, question, name in BESIDE_LEAN:
            n, line = best_rate(question, f"{setting.name} {name}", SETTINGS[setting.name].tried)
            difference = by_seed(line, "test_documents")[4] - lean
            differences[header].append(difference)
            cells.append(f"{difference:+.3f} ({n})")
        rows.append([setting.name, str(setting.factors[1]), *cells])
    rows.append(["mean", "", *map(mean_of_settings, differences.values())])
    return Table(["setting", "LEAN's n", *differences], rows)


FINAL_LABELS = {
    "lean2 0 0.99": "LEAN",
    "adamw 0 0.999": "AdamW, 0, 0.999",
    "ember free": "Ember",
}


def finalist(setting: str, arm: str) -> Line:
    """One of :data:`FINAL_ARMS` at its earlier rate."""
    runs = FINAL_SETTINGS[setting].earlier[arm].runs or ("finals", f"{setting} {arm}")
    return Line(FINAL_LABELS[arm], *runs)


def finalists(setting: str) -> list[Line]:
    """AdamW, and what is compared with it at the earlier rates, as far as it has runs."""
    lines = [
        finalist(setting, "adamw 0 0.999"),
        finalist(setting, "lean2 0 0.99"),
        Line("LEAN, decay", "finals", f"{setting} lean2 0 0.99 decay=0.02"),
        Line("LEAN, free", "finals", f"{setting} lean2 0 0.99 free"),
        Line("AdamW, decay", "finals", f"{setting} adamw 0 0.999 decay=0.02"),
    ]
    return [line for line in lines if runs(line)]


def finals_table(measure: str) -> Table:
    """AdamW's loss in each setting, and how far the others are above it with the same seeds."""
    above: dict[str, dict[str, float]] = {}
    adamw: dict[str, str] = {}
    pairs: dict[str, set[int]] = {}
    for setting in FINAL_SETTINGS:
        baseline, *others = finalists(setting)
        losses = by_seed(baseline, measure)
        adamw[setting] = shorthand([*losses.values()], 3)
        for line in others:
            tried = by_seed(line, measure)
            differences = [tried[seed] - losses[seed] for seed in tried.keys() & losses.keys()]
            above.setdefault(line.label, {})[setting] = float(np.mean(differences))
            pairs.setdefault(setting, set()).add(len(differences))
    rows = []
    for setting, loss in adamw.items():
        cells = (by_setting.get(setting) for by_setting in above.values())
        shown = ("" if cell is None else f"{cell:+.3f}" for cell in cells)
        rows.append([setting, loss, *shown, ", ".join(map(str, sorted(pairs[setting])))])
    means = [
        f"{mean_of_settings([*by_setting.values()])}, {len(by_setting)} settings"
        for by_setting in above.values()
    ]
    rows.append(["mean", "", *means, ""])
    return Table(["setting", baseline.label, *above, "pairs"], rows)


def at_rates(setting: str, arm: str) -> dict[float, Line]:
    """One of :data:`FINAL_ARMS` at all factors that have runs, the earlier one first."""
    factor = FINAL_SETTINGS[setting].earlier[arm].factor
    tried = {factor: finalist(setting, arm)}
    for times, multiple in RATES_BESIDE.items():
        beside = Line(FINAL_LABELS[arm], "final_rates", f"{setting} {arm} {times}")
        if runs(beside):
            tried[factor * multiple] = beside
    return tried


def at_best_rate(setting: str, arm: str) -> tuple[float, Line]:
    """The factor with the lowest validation loss with the first seed, and its runs."""
    earlier, *beside = at_rates(setting, arm).items()
    # After 9,768 steps there are five seeds at it, and a single run beside it for the rule alone.
    if setting == "9768 steps":
        return earlier
    seed = min(by_seed(earlier[1], "valid_loss"))
    return min([earlier, *beside], key=lambda entry: by_seed(entry[1], "valid_loss")[seed])


def final_rates_table() -> Table:
    """AdamW, LEAN and Ember in each setting, each at its own rate, on the test documents."""
    rows: list[list[str | Cell]] = []
    above: dict[str, list[float]] = {"lean2 0 0.99": [], "ember free": []}
    for setting in FINAL_SETTINGS:
        factor, adamw = at_best_rate(setting, "adamw 0 0.999")
        losses = by_seed(adamw, "test_documents")
        cells = [f"{factor:.3g}", shorthand([*losses.values()], 3)]
        pairs = []
        for arm, differences in above.items():
            factor, line = at_best_rate(setting, arm)
            tried = by_seed(line, "test_documents")
            seeds = tried.keys() & losses.keys()
            differences.append(float(np.mean([tried[seed] - losses[seed] for seed in seeds])))
            cells += [f"{factor:.3g}", f"{differences[-1]:+.3f}"]
            pairs.append(str(len(seeds)))
        rows.append([setting, *cells, ", ".join(dict.fromkeys(pairs))])
    lean, ember = (f"{mean_of_settings(each)}, {len(each)} settings" for each in above.values())
    rows.append(["mean", "", "", "", lean, "", ember, ""])
    header = ["AdamW: factor", "L of test documents ↓", "LEAN: factor", "LEAN − AdamW"]
    return Table(["setting", *header, "Ember: factor", "Ember − AdamW", "pairs"], rows)


FORMULA_LABELS = {
    "limit": "new limit",
    "limit later": "zero-sum from step 100",
    "limit free": "never",
    "relative": "candidate",
    "relative later": "zero-sum from step 100",
    "relative free": "never",
}


def formula_table() -> Table:
    """Validation losses with the first seed, of AdamW, LEAN's second edition and the candidate.

    Each is at the best of its rates, but at a low rate all have the same.
    """
    rows: list[list[str | Cell]] = []
    above: list[list[float]] = []
    for setting, (_, factor) in FORMULA_SETTINGS.items():
        name, low, _ = setting.partition(" low")
        tried: list[list[Line | None]] = [
            [at_rates(name, arm).get(factor) if low else at_best_rate(name, arm)[1]]
            for arm in ("adamw 0 0.999", "lean2 0 0.99")
        ]
        tried += [
            [
                Line("", "formula", run)
                for run in results("formula")
                if run.startswith(f"{setting} {formula} x")
            ]
            for formula in FORMULA_LABELS
        ]
        seed = min(by_seed(finalist(name, "adamw 0 0.999"), "valid_loss"))
        losses = [
            min((by_seed(line, "valid_loss")[seed] for line in lines if line), default=np.nan)
            for lines in tried
        ]
        rows.append([setting, *("" if np.isnan(loss) else f"{loss:.3f}" for loss in losses)])
        if not low:
            above.append([loss - losses[1] for loss in losses])
    known = [[x for x in of_all if not np.isnan(x)] for of_all in zip(*above)]
    means = (f"{np.mean(x):+.3f}, {len(x)} settings" if x else "" for x in known)
    rows.append(["mean difference from the second edition", *means])
    return Table(["setting", "AdamW, 0, 0.999", "second edition", *FORMULA_LABELS.values()], rows)


def with_documents() -> list[Line]:
    """The rows of :data:`BETAS` that have a loss for each document."""
    return [line for line in BETAS if held_out(line)]


TABLES: Mapping[str, Callable[[], Table]] = {
    "headline": headline_table,
    "documents": documents_table,
    "bands": bands_table,
    "settings": settings_table,
    "beside_lean": beside_lean_table,
    "finals": partial(finals_table, "test_documents"),
    "finals_valid": partial(finals_table, "valid_loss"),
    "final_rates": final_rates_table,
    "formula": formula_table,
}
