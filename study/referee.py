"""What a referee asks of a difference: over seeds, over documents, among how many tests."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.lab.reporting.statistics import SIGNIFICANCE, one_sided_t_test, paired_t_test

from .tables import BEST, Line, by_seed, runs, values


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the headline table: does ``line`` have another loss than ``baseline``?"""

    tokens: str
    line: Line
    baseline: Line


ADAMW_BEST = Line("AdamW, 0, 0.999", "betas", "adamw 0 0.999 n=5")
A_BEST = Line("a = 0.75, 0, 0.99", "betas", "a=0.75 0 0.99 n=4")


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


def two_sided_p(line: Line, baseline: Line) -> float:
    """The p of Student's t-test that the test losses of two rows have different means."""
    lower = one_sided_t_test(values(line, "test_loss"), values(baseline, "test_loss"), "lower")
    return math.nan if lower is None else 2 * min(lower, 1 - lower)


def by_document(line: Line, split: str = "test") -> NDArray[np.float64]:
    """The loss of each held-out document, the mean over seeds; empty without such runs."""
    losses = [
        run["documents"][split]["losses"] for run in runs(line).values() if "documents" in run
    ]
    return np.mean(losses, axis=0) if losses else np.empty(0)


def interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean difference, by a bootstrap over documents."""
    found = stats.bootstrap(
        (differences,), np.mean, n_resamples=9999, method="percentile", rng=np.random.default_rng(0)
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def headline_table() -> str:
    """Each comparison, with p corrected for their number; bold if that is below 0.05."""
    family = [pair for pair in headline() if runs(pair.line) and runs(pair.baseline)]
    p = [two_sided_p(pair.line, pair.baseline) for pair in family]
    tested = [i for i, value in enumerate(p) if not math.isnan(value)]
    corrected = dict(zip(tested, holm([p[i] for i in tested])))
    rows = ["| tokens | | difference of L | p | p, Holm | p, paired | seeds |"]
    rows.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for i, pair in enumerate(family):
        line, baseline = pair.line, pair.baseline
        difference = np.mean(values(line, "test_loss")) - np.mean(values(baseline, "test_loss"))
        shown = f"{difference:+.3f}"
        if corrected.get(i, 1) < SIGNIFICANCE:
            shown = f"**{shown}**"
        paired = paired_t_test(by_seed(line, "test_loss"), by_seed(baseline, "test_loss"))
        cells = (
            pair.tokens,
            f"{line.label} against {baseline.label}",
            shown,
            *map(_p, (p[i], corrected.get(i, math.nan), math.nan if paired is None else paired.p)),
            f"{len(runs(line))}, {len(runs(baseline))}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _p(p: float) -> str:
    return "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}"


BETAS = (
    ADAMW_BEST,
    Line("AdamW, 0.9, 0.999", "betas", "adamw 0.9 0.999 n=5"),
    Line("AdamW, 0.9, 0.95", "betas", "adamw 0.9 0.95 n=4"),
    Line("Coupled Adam, 0.9, 0.999", "betas", "coupled 0.9 0.999 n=4"),
    Line("Coupled Adam, 0.9, 0.95", "betas", "coupled 0.9 0.95 n=4"),
    Line("a = 0.5, 0.9, 0.95", "betas", "a=0.5 0.9 0.95 n=3"),
    Line("a = 0.5, 0, 0.99", "betas", "a=0.5 0 0.99 n=4"),
    A_BEST,
)
"""Rows of the tables of documents and of bands, as far as they have runs."""


def documents_table() -> str:
    """The difference from AdamW at its best betas on two sets of documents, with intervals."""
    rows = ["| embeddings | validation documents | test documents | seeds |"]
    rows.append("| --- | ---: | ---: | ---: |")
    for line in with_documents():
        cells = [line.label]
        for split in ("valid", "test"):
            losses = by_document(line, split)
            if line is ADAMW_BEST:
                cells.append(f"{losses.mean():.4f}")
                continue
            differences = losses - by_document(ADAMW_BEST, split)
            low, high = interval(differences)
            shown = f"{differences.mean():+.4f}"
            if low > 0 or high < 0:
                shown = f"**{shown}**"
            cells.append(f"{shown} ({low:+.4f} to {high:+.4f})")
        rows.append("| " + " | ".join([*cells, str(len(runs(line)))]) + " |")
    return "\n".join(rows) + "\n"


def band_losses(line: Line) -> NDArray[np.float64]:
    """The mean loss of the test documents' tokens in each band of frequency, over the seeds."""
    found = [run["documents"]["test"]["band_losses"] for run in runs(line).values()]
    means: NDArray[np.float64] = np.mean(found, axis=0)
    return means


def bands_table() -> str:
    """The loss by how frequent the predicted token is, relative to AdamW at its best betas."""
    lines = with_documents()
    (run, *_) = runs(lines[0]).values()
    tokens = np.array(run["documents"]["test"]["band_tokens"])
    header = ["embeddings", *(f"to {16 * 2**band}" for band in range(len(tokens)))]
    shares = [
        "share of the text",
        *(f"{share:.0%}".replace("%", " %") for share in tokens / tokens.sum()),
    ]
    rows = [header, ["---", *("---:" for _ in tokens)], shares]
    for line in lines:
        losses = band_losses(line)
        if line is ADAMW_BEST:
            cells = [f"{loss:.3f}" for loss in losses]
        else:
            cells = [f"{loss:+.3f}" for loss in losses - band_losses(ADAMW_BEST)]
        rows.append([line.label, *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def with_documents() -> list[Line]:
    """The rows of :data:`BETAS` that have a loss for each document."""
    return [line for line in BETAS if len(by_document(line))]


TABLES: Mapping[str, Callable[[], str]] = {
    "headline": headline_table,
    "documents": documents_table,
    "bands": bands_table,
}
