"""What changed between two embedding matrices, such as those of two checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, finite_rows
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.errors import UsageError, refused
from coupled_adam.rendering.tables import Table

if TYPE_CHECKING:
    from coupled_adam.embeddings.analysis import Analysis

Rows = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Which rows of two matrices belong to the same token."""

    first: Rows  # [n], the row of each common token in the first matrix
    second: Rows  # [n], and in the second
    by: str  # "id" or "text": what they have in common
    new: Rows  # the rows of the second matrix whose tokens the first does not have
    gone: Rows  # the rows of the first matrix whose tokens the second does not have


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changed from the first matrix to the second; pairs of numbers are before and after."""

    pairs: Pairs  # the rows that were compared
    # Of each pair [n], -1 to 1; NaN for rows that are zero or not finite in one of the two.
    cosines: Array | None  # None if the widths differ
    norm_ratios: Array  # [n], ||e_i|| after / before; NaN in the same cases
    cka: float  # the linear CKA of all pairs, 0 to 1 (the same up to rotation and scale)
    mean_shift: float | None  # ||mu' - mu|| / mean norm before; None if the widths differ

    def movers(self, number: int) -> NDArray[np.int64]:
        """Indices of the pairs that turned most or, if the widths differ, whose norms changed."""
        order = -np.abs(np.log(self.norm_ratios)) if self.cosines is None else self.cosines
        return np.argsort(np.where(np.isnan(order), np.inf, order), kind="stable")[:number]


def match_rows(first: Vocabulary, second: Vocabulary) -> Pairs:
    """Match the rows of two vocabularies.

    Rows match by id if no id has different texts in the two, as when one vocabulary extends the
    other, or if there is no tokenizer. Otherwise they match by the text of reachable tokens.
    """
    has_first, has_second = (np.asarray(v.categories != "none") for v in (first, second))
    common = min(len(first), len(second))
    # Ids that have a text in both must have the same one, or ids mean nothing across the two.
    named = [(a, b) for a, b in zip(first.texts, second.texts) if a and b]
    if all(a == b for a, b in named):
        # In two vocabularies of ids alone all common rows match, as do rows without a token.
        same = np.flatnonzero((has_first[:common] == has_second[:common]) | (not named))
        new = np.setdiff1d(np.arange(len(second)), same)
        gone = np.setdiff1d(np.flatnonzero(has_first | (not named)), same)
        return Pairs(same, same, "id", new, gone)
    rows = {text: row for text, row in first.rows.items() if text}
    pairs = sorted((row, rows[text]) for text, row in second.rows.items() if text in rows)
    second_rows, first_rows = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    new = np.setdiff1d(np.flatnonzero(has_second), second_rows)
    gone = np.setdiff1d(np.flatnonzero(has_first), first_rows)
    return Pairs(first_rows, second_rows, "text", new, gone)


def compare(first: Embeddings, second: Embeddings, pairs: Pairs | None = None) -> Changes:
    """Compare two matrices [V, H] and [V', H'] row by row and as a whole.

    Linear CKA is that of Kornblith et al. (2019, arXiv 1905.00414): ||B^T A||^2 / (||A^T A||
    ||B^T B||) with Frobenius norms and the means removed. It is defined for any two widths. Four
    passes over the rows in float64, in bounded memory.

    Args:
        pairs: which rows belong together; by default those of the same id.

    Raises:
        ValueError: if no rows belong together, or all rows of one matrix are equal.
    """
    if pairs is None:
        pairs = match_rows(Vocabulary.of_ids(len(first)), Vocabulary.of_ids(len(second)))
    (finite, before), (finite_second, after) = map(finite_rows, (first, second))
    usable = finite[pairs.first] & finite_second[pairs.second]
    if not usable.any():
        raise ValueError("the two matrices have no finite rows of the same tokens")
    # Rows that are zero or not finite on either side have no ratio.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = after[pairs.second] / before[pairs.first]
    ratios[~np.isfinite(ratios) | (ratios == 0)] = np.nan
    rows, rows_of_second = pairs.first[usable], pairs.second[usable]
    geometry.check_not_zero(before[rows])
    # The norms of A^T A and B^T B, and below that of B^T A, all with the means removed.
    means, grams = [], []
    for matrix, used in ((first, rows), (second, rows_of_second)):
        keep = np.isin(np.arange(len(matrix)), used)
        mean = geometry.mean_and_norms(matrix, keep)[0]
        means.append(mean.cpu())
        grams.append(float(geometry.gram(matrix, mean, keep).norm()))
    if 0 in grams:
        raise ValueError("all rows of one of the matrices are equal: CKA is not defined")
    widths = first.shape[1], second.shape[1]
    same_width = widths[0] == widths[1]
    cross = torch.zeros(widths, dtype=torch.float64)
    cosines = np.full(len(usable), np.nan)
    for chunk in geometry.row_slices(len(rows), max(widths)):
        a = geometry.as_float64(first[rows[chunk]]).cpu()
        b = geometry.as_float64(second[rows_of_second[chunk]]).cpu()
        cross.addmm_((a - means[0]).T, b - means[1])
        if same_width:
            scale = a.norm(dim=1) * b.norm(dim=1)
            found = torch.where(scale > 0, (a * b).sum(1) / scale, torch.nan)
            cosines[np.flatnonzero(usable)[chunk]] = found.numpy()
    shift = float((means[1] - means[0]).norm()) / float(before[rows].mean()) if same_width else None
    cka = float(cross.norm()) ** 2 / math.prod(grams)
    return Changes(pairs, cosines if same_width else None, ratios, cka, shift)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What changed from one analysis to another; pairs are before and after."""

    before: Analysis
    after: Analysis
    changes: Changes

    def to_dict(self, movers: int = 100) -> dict[str, Any]:
        """The numbers, and up to ``movers`` of the tokens that moved most, as plain values."""
        changes, pairs = self.changes, self.changes.pairs
        return {
            "before": self.before.matrix,
            "after": self.after.matrix,
            "matched_by": pairs.by,
            "matched": len(pairs.first),
            "new_rows": len(pairs.new),
            "gone_rows": len(pairs.gone),
            "cka": changes.cka,
            "mean_shift": changes.mean_shift,
            # Named by their rows in the second matrix, which is the one that is there to look at.
            "movers": [
                {
                    **self.after.token(int(pairs.second[index])),
                    "cosine": None if changes.cosines is None else _finite(changes.cosines[index]),
                    "norm_ratio": _finite(changes.norm_ratios[index]),
                }
                for index in changes.movers(movers)
            ],
        }

    def tables(self, number: int) -> list[Table]:
        """The numbers, and the first of the movers, for the terminal."""
        numbers = self.to_dict(number)
        totals = [
            [f"tokens of both, matched by {numbers['matched_by']}", str(numbers["matched"])],
            ["rows of the second only", str(numbers["new_rows"])],
            ["rows of the first only", str(numbers["gone_rows"])],
            ["linear CKA", _shown(numbers["cka"])],
            ["shift of the mean / mean norm", _shown(numbers["mean_shift"])],
        ]
        movers = []
        for token in numbers["movers"]:
            change = _shown(token["cosine"]), _shown(token["norm_ratio"])
            movers.append([str(token["id"]), self.after.vocabulary.name(token["id"]), *change])
        moved = ["id", "token", "cos", "norm after / before"]
        return [
            Table(["", ""], totals, f"From {self.before.label} to {self.after.label}"),
            Table(moved, movers, "Tokens that moved most", left=(1,)),
        ]


def compare_analyses(before: Sequence[Analysis], after: Sequence[Analysis]) -> list[Comparison]:
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
            pairs = match_rows(first.vocabulary, second.vocabulary)
            with refused(f"--compare {first.model} {second.model}: "):
                changes = compare(first.embeddings.matrix, second.embeddings.matrix, pairs)
            comparisons.append(Comparison(first, second, changes))
    if not comparisons:
        raise UsageError(
            f"--compare: {before[0].model} and {after[0].model} have no matrix of the same role"
        )
    return comparisons


def _shown(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
