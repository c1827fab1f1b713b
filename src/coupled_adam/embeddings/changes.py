"""What changed between two embedding matrices, such as those of two checkpoints."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.frequency import checked_counts, correlation_with_log
from coupled_adam.embeddings.geometry import Array, Embeddings, Progress, rows_done
from coupled_adam.embeddings.undertrained import finite_rows
from coupled_adam.embeddings.vocabulary import Vocabulary

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
class Group:
    """How a group of rows changed; None for what is not defined for it."""

    rows: int  # how many
    cosine_median: float | None  # of the cosine similarities of each row, before and after
    cosine_min: float | None
    norm_ratio_median: float | None  # of ||e_i|| after / before
    norm_relative: float | None  # the mean norm, relative to that of all rows of the second matrix


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changed from the first matrix to the second; pairs of numbers are before and after."""

    pairs: Pairs  # the rows that were compared
    # Of each pair [n], -1 to 1; NaN for rows that are zero or not finite in one of the two.
    cosines: Array | None  # None if the widths differ
    norm_ratios: Array  # [n], ||e_i|| after / before; NaN in the same cases
    # "old": tokens of both that were seen, or all of them without counts; "unseen": tokens of both
    # with a count of zero; "new": rows of the second matrix only.
    groups: dict[str, Group]
    cka: float  # the linear CKA of all pairs, 0 to 1 (the same up to rotation and scale)
    mean_shift: float | None  # ||mu' - mu|| / mean norm before; None if the widths differ
    mean_norm_ratio: tuple[float, float]  # ||mu||^r of the pairs' rows
    norm_frequency: tuple[float, float] | None  # of norm and log count; None without counts

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


def compare(
    first: Embeddings,
    second: Embeddings,
    pairs: Pairs | None = None,
    counts: Tensor | NDArray[Any] | None = None,
    *,
    progress: Progress | None = None,
) -> Changes:
    """Compare two embedding matrices [V, H] and [V', H'] row by row and as a whole.

    Linear CKA is that of Kornblith et al. (2019, arXiv 1905.00414): ||B^T A||^2 / (||A^T A||
    ||B^T B||) with Frobenius norms and the means removed. It is defined for any two widths. Four
    passes over the rows in float64, in bounded memory.

    Args:
        pairs: which rows belong together; by default those of the same id.
        counts: unigram counts [V'] of the second matrix's tokens.

    Raises:
        ValueError: if no rows belong together, or counts do not fit.
    """
    if pairs is None:
        pairs = match_rows(Vocabulary.of_ids(len(first)), Vocabulary.of_ids(len(second)))
    p = None if counts is None else checked_counts(counts, len(second))
    on_rows = rows_done(progress, len(first) + len(second) + 6 * len(pairs.first))
    finite, before = finite_rows(first, on_rows)
    finite_second, after = finite_rows(second, on_rows)
    usable = finite[pairs.first] & finite_second[pairs.second]
    if not usable.any():
        raise ValueError("the two matrices have no finite rows of the same tokens")
    rows, rows_of_second = pairs.first[usable], pairs.second[usable]
    same_width = first.shape[1] == second.shape[1]
    # Rows that are zero or not finite on either side have no ratio.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = after[pairs.second] / before[pairs.first]
    ratios[~np.isfinite(ratios) | (ratios == 0)] = np.nan

    norms = before[rows].mean(), after[rows_of_second].mean()
    geometry.check_not_zero(min(norms))
    # The norms of A^T A and B^T B, and below that of B^T A, all with the means removed.
    means, grams = [], []
    for matrix, used in ((first, rows), (second, rows_of_second)):
        keep = np.isin(np.arange(len(matrix)), used)
        mean = geometry.mean_and_norms(matrix, keep, on_rows)[0]
        means.append(mean.cpu())
        grams.append(float(geometry.gram(matrix, mean, keep, on_rows).norm()))
    if 0 in grams:
        raise ValueError("all rows of one of the matrices are equal: CKA is not defined")
    cross = torch.zeros(len(means[0]), len(means[1]), dtype=torch.float64)
    cosines = np.full(len(pairs.first), np.nan) if same_width else None
    for chunk in geometry.row_slices(len(rows), max(first.shape[1], second.shape[1])):
        a = geometry.as_float64(first[rows[chunk]]).cpu()
        b = geometry.as_float64(second[rows_of_second[chunk]]).cpu()
        cross.addmm_((a - means[0]).T, b - means[1])
        if cosines is not None:
            scale = a.norm(dim=1) * b.norm(dim=1)
            of_rows = torch.where(scale > 0, (a * b).sum(1) / scale, torch.nan)
            cosines[np.flatnonzero(usable)[chunk]] = of_rows.numpy()
        on_rows(2 * len(a))

    frequency, seen = None, np.ones(len(pairs.first), np.bool_)
    if p is not None:
        used_p = p[rows_of_second]
        rho = correlation_with_log(before[rows], used_p)
        frequency = rho, correlation_with_log(after[rows_of_second], used_p)
        seen = p[pairs.second] > 0
    mean_norm, groups = float(np.nanmean(after)), {}
    for name, chosen in (("old", seen), ("unseen", ~seen)):
        turned = None if cosines is None else cosines[chosen]
        groups[name] = _group(after[pairs.second][chosen], mean_norm, ratios[chosen], turned)
    groups["new"] = _group(after[pairs.new], mean_norm)
    return Changes(
        pairs,
        cosines,
        ratios,
        {name: group for name, group in groups.items() if group.rows},
        float(cross.norm()) ** 2 / math.prod(grams),
        float((means[1] - means[0]).norm()) / float(norms[0]) if same_width else None,
        (float(means[0].norm() / norms[0]), float(means[1].norm() / norms[1])),
        frequency,
    )


def linear_cka(first: Embeddings, second: Embeddings) -> float:
    """The linear CKA of two matrices with one row for each token, [V, H] and [V, H']; 0 to 1.

    Raises ValueError if they have different numbers of rows, or all rows of one are equal.
    """
    if len(first) != len(second):
        raise ValueError(f"the matrices have {len(first)} and {len(second)} rows")
    return compare(first, second).cka


def frequency_slope(values: Array, counts: Tensor | NDArray[Any]) -> float | None:
    """The slope of log values [V] against log counts [V], by least squares.

    For Adam's second moments, averaged over each row, it is near 1 (arXiv 2502.08441, section 3):
    rare tokens then take steps that are too large. With Coupled Adam it is 0. Tokens that never
    occur, and values that are not positive, are left out; None if fewer than two different counts
    remain.
    """
    p = checked_counts(counts, len(values))
    used = (p > 0) & (values > 0) & np.isfinite(values)
    if len(np.unique(p[used])) < 2:
        return None
    return float(np.polyfit(np.log(p[used]), np.log(values[used]), 1)[0])


def _group(
    norms: Array, mean_norm: float, ratios: Array | None = None, cosines: Array | None = None
) -> Group:
    def of(numbers: Array | None, function: Any) -> float | None:
        finite = np.zeros(0) if numbers is None else numbers[np.isfinite(numbers)]
        return float(function(finite)) if len(finite) else None

    relative = of(norms, np.mean)
    return Group(
        len(norms),
        of(cosines, np.median),
        of(cosines, np.min),
        of(ratios, np.median),
        None if relative is None else relative / mean_norm,
    )
