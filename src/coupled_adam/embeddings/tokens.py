"""What analyses say about single tokens: which were hardly trained, neighbours, hubs, changes."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.changes import Changes, compare, frequency_slope, match_rows
from coupled_adam.embeddings.geometry import Progress, RowsDone
from coupled_adam.embeddings.neighbours import Hubness, Neighbours, hubness, nearest
from coupled_adam.embeddings.undertrained import (
    INDICATORS,
    PASSES,
    Undertrained,
    finite_rows,
    undertrained_tokens,
)
from coupled_adam.embeddings.verification import Verification, verify
from coupled_adam.embeddings.vocabulary import CATEGORIES
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.rendering.tables import Table
from coupled_adam.runs import SECOND_MOMENTS, by_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEIGHBOURS = 10
VARIANTS = {"raw": False, "centered": True}
"""The two ways in which neighbours are searched: as the rows are, and with their mean removed."""


@dataclasses.dataclass(frozen=True)
class Undertrainedness:
    """The under-trained tokens of one analysis, and what the model says of them if asked."""

    analysis: Analysis
    indicated: Undertrained
    verification: Verification | None = None

    @property
    def rows(self) -> list[int]:
        """The rows to name: the candidates, and those that look like unused ones, if these are
        more.
        """
        rows: list[int] = max(self.indicated.candidates, self.indicated.alike, key=len).tolist()
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The counts of each category, and all rows that are named, as plain values."""
        alike = {*self.indicated.alike.tolist()}
        asked = self.verification
        verified = {}
        if asked is not None:
            verified = {
                "can_verify": asked.is_able,
                "controls_repeated": asked.control_probabilities.tolist(),
            }
        return {
            **_categories(self.analysis),
            "unused_rows": int(self.indicated.unused.sum()),
            "dead_rows": self.indicated.dead.tolist(),
            "order_by": self.indicated.order_by,
            "limit": self.indicated.limit,
            **verified,
            "tokens": [
                {
                    **_described(self.analysis, row),
                    **self._values(row),
                    "like_unused": row in alike,
                    **self._answers.get(row, {}),
                }
                for row in self.rows
            ],
        }

    def table(self, number: int) -> Table:
        """The first of the rows that are named, for the terminal."""
        result, counts = self.indicated, self.analysis.counts
        kinds = _categories(self.analysis)
        counted = [
            f"{kinds['categories'][name]} {name}"
            for name in CATEGORIES
            if name in kinds["categories"]
        ]
        parts = [
            f"rows by category: {', '.join(counted)}",
            f"{len(result.candidates)} candidates, the lowest by {INDICATORS[result.order_by]}",
        ]
        if kinds["surplus_tokens"]:
            parts.append(f"{kinds['surplus_tokens']} tokens of the tokenizer have no row")
        if len(result.dead):
            parts.append(f"{len(result.dead)} rows are zero or not finite")
        # Without a limit nothing tells a rare token from an unused one, which should be said.
        if result.limit is None:
            parts.append(
                "the rows that are known to be unused are too few, or do not resemble each other: "
                "candidates may be tokens that are merely rare, or well trained"
            )
        else:
            parts.append(
                f"{len(result.alike)} tokens cannot be told from the {int(result.unused.sum())} "
                "rows that are known to be unused (marked with *)"
            )
        columns = ["id", "token", "category"]
        columns += [] if self.verification is None else ["repeated", "verdict"]
        columns += [
            INDICATORS[key].replace("principal component", "PC") for key in result.indicators
        ]
        columns += [] if counts is None else ["count"]
        alike = {*result.alike.tolist()}
        rows = []
        for row in self.rows[:number]:
            cells = [f"{'*' if row in alike else ''}{row}", self.analysis.vocabulary.name(row)]
            cells.append(str(self.analysis.vocabulary.categories[row]))
            # The verdict is what was asked for: narrow windows show it, and scroll for the rest.
            if self.verification is not None:
                answer = self._answers[row]
                cells += [f"{answer['repeated']:.2%}", answer["verdict"]]
            cells += [f"{result.indicators[name][row]:.4f}" for name in result.indicators]
            cells += [] if counts is None else [f"{counts[row]:g}"]
            rows.append(cells)
        title = f"Under-trained tokens: {self.analysis.label}"
        verdicts = () if self.verification is None else (4,)
        return Table(columns, rows, title, ["; ".join(parts)], left=(1, 2, *verdicts), lead=2)

    @property
    def diagnosis(self) -> list[str]:
        """That of the analysis, and what the model's answers show if it was asked."""
        asked = self.verification
        return [*self.analysis.diagnosis, *([] if asked is None else [asked.sentence])]

    def _values(self, row: int) -> dict[str, float]:
        return {name: float(values[row]) for name, values in self.indicated.indicators.items()}

    @functools.cached_property
    def _answers(self) -> dict[int, dict[str, Any]]:
        """By row, the probability that the model repeats the token, and the verdict."""
        asked = self.verification
        if asked is None:
            return {}
        answers = zip(asked.rows.tolist(), asked.probabilities.tolist(), asked.verdicts())
        return {row: {"repeated": p, "verdict": verdict} for row, p, verdict in answers}


def find_undertrained(
    analysis: Analysis, share: float = 0.02, progress: Progress | None = None
) -> Undertrainedness:
    """Find the under-trained tokens among the reachable ones of an analysis.

    Args:
        share: as for :func:`undertrained`.
        progress: called with the number of rows done and of all rows to do, over all passes.

    Raises:
        UsageError: if no row is finite and different from zero.
    """
    on_rows = RowsDone(progress, PASSES * len(analysis.embeddings.matrix))
    try:
        result = undertrained_tokens(analysis.embeddings, analysis.vocabulary, share, on_rows)
    except ValueError as error:
        raise UsageError(f"{analysis.model}: {error}") from None
    return Undertrainedness(analysis, result)


def verify_undertrained(
    undertrained: Undertrainedness,
    model: PreTrainedModel,
    length: int,
    progress: Progress | None = None,
) -> Undertrainedness:
    """Ask the model to repeat the under-trained tokens, and as many that are well trained.

    Those are drawn from the half of the other reachable tokens that is the more frequent one or,
    without counts, has the higher indicator.

    Args:
        model: the causal language model that was analyzed.
        length, progress: as for :func:`verify`.

    Raises:
        UsageError: if the model has no tokenizer, or as :func:`verify` does.
    """
    analysis, indicated = undertrained.analysis, undertrained.indicated
    if analysis.tokenizer is None:
        raise UsageError(f"--verify needs a tokenizer, which {analysis.model} has not")
    ranks = indicated.indicators[indicated.order_by] if analysis.counts is None else analysis.counts
    rows = np.array(undertrained.rows, np.int64)
    others = analysis.vocabulary.categories == "ok"
    others[[*rows, *indicated.dead, *np.flatnonzero(indicated.unused)]] = False
    best = np.flatnonzero(others)[np.argsort(-ranks[others], kind="stable")]
    best = best[: -(-len(best) // 2)]
    size = min(len(rows), len(best))
    controls = np.sort(np.random.default_rng(0).choice(best, size, replace=False))
    asked = verify(model, analysis.tokenizer, rows, controls, length=length, progress=progress)
    return dataclasses.replace(undertrained, verification=asked)


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """The neighbours of some tokens of one analysis, and the hubs among all.

    Attributes:
        nearest: the neighbours as the rows are (``"raw"``), and with their mean removed
            (``"centered"``).
        hubs: the hubness for both.
    """

    analysis: Analysis
    nearest: dict[str, Neighbours]
    hubs: dict[str, Hubness]

    def to_dict(self) -> dict[str, Any]:
        """The neighbours of each token, and the hubs, as plain values."""
        name = self.analysis.vocabulary.name
        return {
            "neighbours": [
                {
                    **_described(self.analysis, int(row)),
                    **{
                        variant: [
                            {"id": int(token), "token": name(token), "cosine": float(cosine)}
                            for token, cosine in zip(side.neighbours[index], side.cosines[index])
                        ]
                        for variant, side in self.nearest.items()
                    },
                }
                for index, row in enumerate(self.nearest["raw"].rows)
            ],
            "hubness": {
                variant: {
                    "k": hubs.k,
                    "skewness": hubs.skewness,
                    "rows_asked": hubs.queries,
                    "largest": [
                        {**_described(self.analysis, row), "occurrences": hubs.occurrences[row]}
                        for row in hubs.largest(NEIGHBOURS).tolist()
                    ],
                }
                for variant, hubs in self.hubs.items()
            },
        }

    def tables(self) -> list[Table]:
        """The neighbours and the hubs, for the terminal."""
        name = self.analysis.vocabulary.name
        lines = []
        for index, row in enumerate(self.nearest["raw"].rows):
            for (variant, side), shown in zip(self.nearest.items(), ("as it is", "mean removed")):
                pairs = zip(side.neighbours[index], side.cosines[index])
                listed = ", ".join(f"{name(neighbour)} {cosine:.2f}" for neighbour, cosine in pairs)
                lines.append([name(row) if variant == "raw" else "", shown, listed])
        hubs = []
        for shown, hub in zip(("as it is", "mean removed"), self.hubs.values()):
            skewness = "–" if hub.skewness is None else f"{hub.skewness:.2f}"
            largest = ", ".join(
                f"{name(row)} {hub.occurrences[row]:.0f}" for row in hub.largest(NEIGHBOURS)
            )
            hubs.append([shown, skewness, largest])
        # Large matrices are asked for a sample of their rows only.
        estimated = "skewness" if self.hubs["raw"].exact else "skewness, estimated"
        return [
            Table(
                ["token", "", "neighbours and their cosines"],
                lines,
                f"Nearest by cosine: {self.analysis.label}",
                left=(0, 1, 2),
            ),
            Table(
                ["", f"{estimated} of N_k", f"largest hubs and their N_k (k = {NEIGHBOURS})"],
                hubs,
                f"Hubs: {self.analysis.label}",
                left=(0, 2),
            ),
        ]


def find_neighbours(
    analysis: Analysis, tokens: Sequence[str] = (), progress: Progress | None = None
) -> Neighbourhood:
    """Find the neighbours of tokens, or of the ten most frequent ones, and the hubs.

    Args:
        tokens: as :meth:`Vocabulary.row` takes them; none for the most frequent ones, or without
            counts for none but the hubs.
        progress: as for :func:`nearest`; called for the hubs, which take the most time.

    Raises:
        UsageError: if a token is none of the model's, or there are too few rows.
    """
    matrix = analysis.embeddings.matrix
    rows = [analysis.vocabulary.row(token) for token in tokens]
    if not tokens and analysis.counts is not None:
        dead = {*analysis.dead}
        order = np.argsort(-analysis.counts, kind="stable").tolist()
        rows = [row for row in order if row not in dead][:NEIGHBOURS]
    try:
        return Neighbourhood(
            analysis,
            {name: nearest(matrix, rows, NEIGHBOURS, centered=c) for name, c in VARIANTS.items()},
            {
                name: hubness(matrix, NEIGHBOURS, centered=centered, progress=progress)
                for name, centered in VARIANTS.items()
            },
        )
    except ValueError as error:
        raise UsageError(f"{analysis.model}: {error}") from None


def _categories(analysis: Analysis) -> dict[str, Any]:
    vocabulary = analysis.vocabulary
    return {
        "categories": dict(collections.Counter(vocabulary.categories.tolist())),
        "surplus_tokens": vocabulary.surplus,
    }


def _described(analysis: Analysis, row: int) -> dict[str, Any]:
    """The id, the token and its count, for JSON."""
    vocabulary, counts = analysis.vocabulary, analysis.counts
    return {
        "id": row,
        "token": vocabulary.texts[row],
        "category": str(vocabulary.categories[row]),
        "count": None if counts is None else counts[row].item(),
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What changed from one analysis to another.

    Attributes:
        before, after: the two.
        changes: what changed.
        norm_slopes: the slope of log norm against log count, before and after; None without counts.
        moment_slopes: the same for the rows' second moments; None where the model is not a run of
            this package, which keeps them.
    """

    before: Analysis
    after: Analysis
    changes: Changes
    norm_slopes: tuple[float | None, float | None]
    moment_slopes: tuple[float | None, float | None]

    def to_dict(self) -> dict[str, Any]:
        """The numbers, and the hundred tokens that moved most, as plain values."""
        changes, pairs = self.changes, self.changes.pairs
        return {
            "before": _matrix(self.before),
            "after": _matrix(self.after),
            "matched_by": pairs.by,
            "matched": len(pairs.first),
            "new_rows": len(pairs.new),
            "gone_rows": len(pairs.gone),
            "cka": changes.cka,
            "mean_shift": changes.mean_shift,
            "mean_norm_ratio": list(changes.mean_norm_ratio),
            "norm_frequency_correlation": _finite_list(changes.norm_frequency),
            "norm_frequency_slope": list(self.norm_slopes),
            "second_moment_frequency_slope": list(self.moment_slopes),
            "groups": {name: dataclasses.asdict(group) for name, group in changes.groups.items()},
            "movers": [
                {
                    **_described(self.after, int(pairs.second[index])),
                    "cosine": None if changes.cosines is None else _finite(changes.cosines[index]),
                    "norm_ratio": _finite(changes.norm_ratios[index]),
                }
                for index in changes.movers(100)
            ],
        }

    def tables(self, number: int) -> list[Table]:
        """The numbers, the groups of rows, and the first of the movers, for the terminal."""
        changes, pairs = self.changes, self.changes.pairs
        totals = [
            [f"tokens of both, matched by {pairs.by}", f"{len(pairs.first)}"],
            ["rows of the second only", f"{len(pairs.new)}"],
            ["rows of the first only", f"{len(pairs.gone)}"],
            ["linear CKA", f"{changes.cka:.4f}"],
            ["shift of the mean / mean norm", _shown(changes.mean_shift)],
            ["‖μ‖ʳ before, after", ", ".join(map(_shown, changes.mean_norm_ratio))],
            ["ρ before, after", ", ".join(map(_shown, changes.norm_frequency or (None, None)))],
            ["slope of log norm / log count", ", ".join(map(_shown, self.norm_slopes))],
            ["slope of log ν / log count", ", ".join(map(_shown, self.moment_slopes))],
        ]
        groups = [
            [
                name,
                str(group.rows),
                _shown(group.cosine_median),
                _shown(group.cosine_min),
                _shown(group.norm_ratio_median),
                _shown(group.norm_relative),
            ]
            for name, group in changes.groups.items()
        ]
        # Named by their rows in the second matrix, which is the one that is there to look at.
        movers = []
        for index in changes.movers(number):
            row = int(pairs.second[index])
            cosine = None if changes.cosines is None else changes.cosines[index]
            ratio = changes.norm_ratios[index]
            movers.append(
                [str(row), self.after.vocabulary.name(row), _shown(cosine), _shown(ratio)]
            )
        rows = ["", "rows", "median cos", "lowest cos", "norm after / before", "norm / mean"]
        moved = ["id", "token", "cos", "norm after / before"]
        return [
            Table(["", ""], totals, f"From {self.before.label} to {self.after.label}"),
            Table(rows, groups, "Rows"),
            Table(moved, movers, "Tokens that moved most", left=(1,)),
        ]


def compare_analyses(
    before: Sequence[Analysis], after: Sequence[Analysis], progress: Progress | None = None
) -> list[Comparison]:
    """Compare the matrices of two models, input with input and output with output.

    A tied matrix is compared with both matrices of a model that is not tied.

    Args:
        before, after: what is compared.
        progress: as for :func:`compare`, for each pair of matrices.

    Raises:
        UsageError: if they have no matrices or no tokens in common.
    """
    comparisons = []
    for earlier in before:
        for later in after:
            # A matrix that is tied, or whose role is not known, may be compared with either.
            roles = {earlier.embeddings.role, later.embeddings.role}
            if roles == {"input", "output"}:
                continue
            try:
                pairs = match_rows(earlier.vocabulary, later.vocabulary)
                changes = compare(
                    earlier.embeddings.matrix,
                    later.embeddings.matrix,
                    pairs,
                    later.counts,
                    progress=progress,
                )
            except ValueError as error:
                raise UsageError(f"--compare {earlier.model} {later.model}: {error}") from None
            slopes = [_slopes(analysis) for analysis in (earlier, later)]
            norms, moments = ((slopes[0][index], slopes[1][index]) for index in (0, 1))
            comparisons.append(Comparison(earlier, later, changes, norms, moments))
    if not comparisons:
        raise UsageError(
            f"--compare: {before[0].model} and {after[0].model} have no matrix of the same role"
        )
    return comparisons


def _slopes(analysis: Analysis) -> tuple[float | None, float | None]:
    """How a matrix's norms and second moments depend on the counts of the tokens."""
    counts, matrix = analysis.counts, analysis.embeddings.matrix
    if counts is None:
        return None, None
    norms = frequency_slope(finite_rows(matrix)[1], counts)
    saved = by_step(Path(analysis.model) / SECOND_MOMENTS, ".npy")
    if not saved:
        return norms, None
    try:
        moments = read_array(saved[max(saved)])
    except ValueError as error:
        raise UsageError(f"--compare: {error}") from None
    if moments.shape != (len(matrix),):
        return norms, None
    return norms, frequency_slope(moments.astype(np.float64), counts)


def _matrix(analysis: Analysis) -> dict[str, str]:
    entry = analysis.embeddings
    return {"model": analysis.model, "role": entry.role, "tensor": entry.tensor}


def _shown(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.4f}"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _finite_list(values: tuple[float, float] | None) -> list[float | None] | None:
    return None if values is None else [_finite(value) for value in values]
