"""What analyses say about single tokens: which were hardly trained, neighbours, hubs, changes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coupled_adam.embeddings.analysis import Analysis
from coupled_adam.embeddings.changes import Changes, compare, frequency_slope, match_rows
from coupled_adam.embeddings.geometry import Progress, rows_done
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
from coupled_adam.errors import UsageError, refused
from coupled_adam.rendering.tables import Table
from coupled_adam.runs import SECOND_MOMENTS, by_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEIGHBOURS = 10
_VARIANTS = {"raw": "as it is", "centered": "mean removed"}
"""The two ways in which neighbours are searched, and how they are shown."""


@dataclasses.dataclass(frozen=True)
class Undertrainedness:
    """The under-trained tokens of one analysis, and what the model says of them if asked."""

    analysis: Analysis
    indicated: Undertrained
    verification: Verification | None = None

    @property
    def rows(self) -> list[int]:
        """The rows to name: the candidates, or those like unused ones if these are more."""
        rows: list[int] = max(self.indicated.candidates, self.indicated.alike, key=len).tolist()
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The counts of each category, and all rows that are named, as plain values."""
        result, vocabulary, asked = self.indicated, self.analysis.vocabulary, self.verification
        alike = {*result.alike.tolist()}
        verified: dict[str, Any] = {}
        answers: dict[int, dict[str, Any]] = {}
        if asked is not None:
            verified = {
                "can_verify": asked.is_able,
                "controls_repeated": asked.control_probabilities.tolist(),
            }
            said = zip(asked.rows.tolist(), asked.probabilities.tolist(), asked.verdicts())
            answers = {row: {"repeated": p, "verdict": verdict} for row, p, verdict in said}
        return {
            "categories": dict(collections.Counter(vocabulary.categories.tolist())),
            "surplus_tokens": vocabulary.surplus,
            "unused_rows": int(result.unused.sum()),
            "dead_rows": result.dead.tolist(),
            "order_by": result.order_by,
            "limit": result.limit,
            **verified,
            "tokens": [
                {
                    **_described(self.analysis, row),
                    **{name: float(values[row]) for name, values in result.indicators.items()},
                    "like_unused": row in alike,
                    **answers.get(row, {}),
                }
                for row in self.rows
            ],
        }

    def table(self, number: int) -> Table:
        """The first of the rows that are named, for the terminal."""
        result, numbers = self.indicated, self.to_dict()
        has_verdicts, has_counts = self.verification is not None, self.analysis.counts is not None
        kinds = numbers["categories"]
        counted = ", ".join(f"{kinds[name]} {name}" for name in CATEGORIES if name in kinds)
        notes = [
            f"rows by category: {counted}",
            f"{len(result.candidates)} candidates, the lowest by {INDICATORS[result.order_by]}",
        ]
        if numbers["surplus_tokens"]:
            notes.append(f"{numbers['surplus_tokens']} tokens of the tokenizer have no row")
        if len(result.dead):
            notes.append(f"{len(result.dead)} rows are zero or not finite")
        # Without a limit nothing tells a rare token from an unused one, which should be said.
        if result.limit is None:
            notes.append(
                "the rows that are known to be unused are too few, or do not resemble each other: "
                "candidates may be tokens that are merely rare, or well trained"
            )
        else:
            notes.append(
                f"{len(result.alike)} tokens cannot be told from the {numbers['unused_rows']} "
                "rows that are known to be unused (marked with *)"
            )
        # The verdict is what was asked for: narrow windows show it, and scroll for the rest.
        columns = ["id", "token", "category", *["repeated", "verdict"] * has_verdicts]
        columns += [INDICATORS[k].replace("principal component", "PC") for k in result.indicators]
        columns += ["count"] * has_counts
        rows = []
        for token in numbers["tokens"][:number]:
            cells = [f"{'*' if token['like_unused'] else ''}{token['id']}"]
            cells += [self.analysis.vocabulary.name(token["id"]), token["category"]]
            cells += [f"{token['repeated']:.2%}", token["verdict"]] if has_verdicts else []
            cells += [f"{token[name]:.4f}" for name in result.indicators]
            cells += [f"{token['count']:g}"] if has_counts else []
            rows.append(cells)
        title = f"Under-trained tokens: {self.analysis.label}"
        left = (1, 2, 4) if has_verdicts else (1, 2)
        return Table(columns, rows, title, ["; ".join(notes)], left=left)

    @property
    def diagnosis(self) -> list[str]:
        """That of the analysis, and what the model's answers show if it was asked."""
        asked = self.verification
        return [*self.analysis.diagnosis, *([] if asked is None else [asked.sentence])]


def find_undertrained(
    analysis: Analysis, share: float = 0.02, progress: Progress | None = None
) -> Undertrainedness:
    """Find the under-trained tokens of an analysis; UsageError if no row is finite and not zero."""
    on_rows = rows_done(progress, PASSES * len(analysis.embeddings.matrix))
    with refused(f"{analysis.model}: "):
        result = undertrained_tokens(analysis.embeddings, analysis.vocabulary, share, on_rows)
    return Undertrainedness(analysis, result)


def verify_undertrained(
    undertrained: Undertrainedness,
    model: PreTrainedModel,
    length: int,
    progress: Progress | None = None,
) -> Undertrainedness:
    """Ask the model to repeat the under-trained tokens, and as many that are well trained.

    Those are drawn from the half of the other reachable tokens that is the more frequent one or,
    without counts, has the higher indicator. For the rest see :func:`verify`.
    """
    analysis, indicated = undertrained.analysis, undertrained.indicated
    if analysis.tokenizer is None:
        raise UsageError(f"--verify needs a tokenizer, which {analysis.model} has not")
    ranks = indicated.indicators[indicated.order_by] if analysis.counts is None else analysis.counts
    rows = np.array(undertrained.rows, np.int64)
    candidates = analysis.vocabulary.categories == "ok"
    candidates[[*rows, *indicated.dead, *np.flatnonzero(indicated.unused)]] = False
    best = np.flatnonzero(candidates)[np.argsort(-ranks[candidates], kind="stable")]
    best = best[: -(-len(best) // 2)]
    size = min(len(rows), len(best))
    controls = np.sort(np.random.default_rng(0).choice(best, size, replace=False))
    asked = verify(model, analysis.tokenizer, rows, controls, length=length, progress=progress)
    return dataclasses.replace(undertrained, verification=asked)


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """The neighbours of some tokens of one analysis, and the hubs among all, for each variant."""

    analysis: Analysis
    nearest: dict[str, Neighbours]
    hubs: dict[str, Hubness]

    def to_dict(self) -> dict[str, Any]:
        """The neighbours of each token, and the hubs, as plain values."""
        name = self.analysis.vocabulary.name

        def near(index: int, neighbours: Neighbours) -> list[dict[str, Any]]:
            pairs = zip(neighbours.neighbours[index].tolist(), neighbours.cosines[index].tolist())
            return [{"id": row, "token": name(row), "cosine": cosine} for row, cosine in pairs]

        return {
            "neighbours": [
                {
                    **_described(self.analysis, int(row)),
                    **{variant: near(index, side) for variant, side in self.nearest.items()},
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
        name, numbers = self.analysis.vocabulary.name, self.to_dict()
        lines, hubs = [], []
        for entry in numbers["neighbours"]:
            for variant, shown in _VARIANTS.items():
                listed = ", ".join(f"{n['token']} {n['cosine']:.2f}" for n in entry[variant])
                lines.append([name(entry["id"]) if variant == "raw" else "", shown, listed])
        for variant, entry in numbers["hubness"].items():
            skewness = "–" if entry["skewness"] is None else f"{entry['skewness']:.2f}"
            largest = (f"{name(hub['id'])} {hub['occurrences']:.0f}" for hub in entry["largest"])
            hubs.append([_VARIANTS[variant], skewness, ", ".join(largest)])
        # Large matrices are asked for a sample of their rows only.
        skewness = "skewness" if self.hubs["raw"].exact else "skewness, estimated"
        label = self.analysis.label
        columns = ["token", "", "neighbours and their cosines"]
        nearest = Table(columns, lines, f"Nearest by cosine: {label}", left=(0, 1, 2))
        columns = ["", f"{skewness} of N_k", f"largest hubs and their N_k (k = {NEIGHBOURS})"]
        return [nearest, Table(columns, hubs, f"Hubs: {label}", left=(0, 2))]


def find_neighbours(
    analysis: Analysis, tokens: Sequence[str] = (), progress: Progress | None = None
) -> Neighbourhood:
    """Find the neighbours of tokens, or of the ten most frequent ones, and the hubs.

    Tokens are as :meth:`Vocabulary.row` takes them. Raises UsageError if one of them is none of the
    model's, or there are too few rows.
    """
    matrix, counts = analysis.embeddings.matrix, analysis.counts
    rows = [analysis.vocabulary.row(token) for token in tokens]
    if not tokens and counts is not None:
        order = np.argsort(-counts, kind="stable")
        rows = order[~np.isin(order, analysis.dead)][:NEIGHBOURS].tolist()
    near, hubs = {}, {}
    with refused(f"{analysis.model}: "):
        for variant in _VARIANTS:
            centered = variant == "centered"
            near[variant] = nearest(matrix, rows, NEIGHBOURS, centered=centered)
            hubs[variant] = hubness(matrix, NEIGHBOURS, centered=centered, progress=progress)
    return Neighbourhood(analysis, near, hubs)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What changed from one analysis to another; pairs are before and after."""

    before: Analysis
    after: Analysis
    changes: Changes
    norm_slopes: tuple[float | None, float | None]  # of log norm against log count
    moment_slopes: tuple[
        float | None, float | None
    ]  # of the rows' second moments, which our runs keep

    def to_dict(self, movers: int = 100) -> dict[str, Any]:
        """The numbers, and the tokens that moved most, at most so many, as plain values."""
        changes, pairs = self.changes, self.changes.pairs
        frequency = changes.norm_frequency
        return {
            "before": self.before.matrix,
            "after": self.after.matrix,
            "matched_by": pairs.by,
            "matched": len(pairs.first),
            "new_rows": len(pairs.new),
            "gone_rows": len(pairs.gone),
            "cka": changes.cka,
            "mean_shift": changes.mean_shift,
            "mean_norm_ratio": list(changes.mean_norm_ratio),
            "norm_frequency_correlation": frequency and [_finite(rho) for rho in frequency],
            "norm_frequency_slope": list(self.norm_slopes),
            "second_moment_frequency_slope": list(self.moment_slopes),
            "groups": {name: dataclasses.asdict(group) for name, group in changes.groups.items()},
            # Named by their rows in the second matrix, which is the one that is there to look at.
            "movers": [
                {
                    **_described(self.after, int(pairs.second[index])),
                    "cosine": None if changes.cosines is None else _finite(changes.cosines[index]),
                    "norm_ratio": _finite(changes.norm_ratios[index]),
                }
                for index in changes.movers(movers)
            ],
        }

    def tables(self, number: int) -> list[Table]:
        """The numbers, the groups of rows, and the first of the movers, for the terminal."""
        numbers = self.to_dict(number)
        totals = [
            [f"tokens of both, matched by {numbers['matched_by']}", str(numbers["matched"])],
            ["rows of the second only", str(numbers["new_rows"])],
            ["rows of the first only", str(numbers["gone_rows"])],
        ]
        for label, key in (
            ("linear CKA", "cka"),
            ("shift of the mean / mean norm", "mean_shift"),
            ("‖μ‖ʳ before, after", "mean_norm_ratio"),
            ("ρ before, after", "norm_frequency_correlation"),
            ("slope of log norm / log count", "norm_frequency_slope"),
            ("slope of log ν / log count", "second_moment_frequency_slope"),
        ):
            pair = numbers[key] if isinstance(numbers[key], list) else [numbers[key]]
            totals.append([label, ", ".join(map(_shown, pair))])
        groups = []
        for name, group in numbers["groups"].items():
            rows, *statistics = group.values()
            groups.append([name, str(rows), *map(_shown, statistics)])
        movers = []
        for token in numbers["movers"]:
            change = _shown(token["cosine"]), _shown(token["norm_ratio"])
            movers.append([str(token["id"]), self.after.vocabulary.name(token["id"]), *change])
        heads = ["", "rows", "median cos", "lowest cos", "norm after / before", "norm / mean"]
        moved = ["id", "token", "cos", "norm after / before"]
        return [
            Table(["", ""], totals, f"From {self.before.label} to {self.after.label}"),
            Table(heads, groups, "Rows"),
            Table(moved, movers, "Tokens that moved most", left=(1,)),
        ]


def compare_analyses(
    before: Sequence[Analysis], after: Sequence[Analysis], progress: Progress | None = None
) -> list[Comparison]:
    """Compare the matrices of two models, input with input and output with output.

    A tied matrix is compared with both matrices of a model that is not tied. Raises UsageError if
    they have no matrices or no tokens in common.
    """
    comparisons = []
    for first in before:
        for second in after:
            # A matrix that is tied, or whose role is not known, may be compared with either.
            if {first.embeddings.role, second.embeddings.role} == {"input", "output"}:
                continue
            matrices = first.embeddings.matrix, second.embeddings.matrix
            with refused(f"--compare {first.model} {second.model}: "):
                pairs = match_rows(first.vocabulary, second.vocabulary)
                changes = compare(*matrices, pairs, second.counts, progress=progress)
            norms, moments = zip(_slopes(first), _slopes(second))
            comparisons.append(Comparison(first, second, changes, norms, moments))
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
    with refused("--compare: "):
        moments = read_array(saved[max(saved)])
    if moments.shape != (len(matrix),):
        return norms, None
    return norms, frequency_slope(moments.astype(np.float64), counts)


def _described(analysis: Analysis, row: int) -> dict[str, Any]:
    """The id, the token and its count, for JSON."""
    vocabulary, counts = analysis.vocabulary, analysis.counts
    return {
        "id": row,
        "token": vocabulary.texts[row],
        "category": str(vocabulary.categories[row]),
        "count": None if counts is None else counts[row].item(),
    }


def _shown(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
