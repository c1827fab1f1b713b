"""What changed between two embedding matrices, such as those of two checkpoints."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.analysis import Analysis, Answer
from coupled_adam.embeddings.geometry import Array, Embeddings
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.errors import UsageError, prefixed_usage_error
from coupled_adam.rendering.tables import Table

Rows = NDArray[np.int64]
_MOVERS = 100  # that JSON has


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changed from the first matrix to the second in n pairs of rows."""

    # Of each pair [n], -1 to 1; NaN for rows that are zero or not finite in one of the two.
    cosines: Array | None  # None if the widths differ
    norm_ratios: Array  # [n], ||e_i|| after / before; NaN in the same cases
    cka: float  # the linear CKA of all pairs, 0 to 1 (the same up to rotation and scale)
    mean_shift: float | None  # ||mu' - mu|| / mean norm before; None if the widths differ

    def movers(self, number: int) -> NDArray[np.int64]:
        """Indices of the pairs that turned most or, if the widths differ, whose norms changed."""
        order = -np.abs(np.log(self.norm_ratios)) if self.cosines is None else self.cosines
        return np.argsort(np.where(np.isnan(order), np.inf, order), kind="stable")[:number]


def match_rows(first: Vocabulary, second: Vocabulary) -> tuple[Rows, Rows]:
    """The rows of two vocabularies that belong together, [n] each.

    These have the same id if one vocabulary extends the other, or if one has no tokenizer, and
    otherwise the same text.
    """
    common = np.arange(min(len(first), len(second)))
    texts_of_each = [vocabulary.texts[: len(common)] for vocabulary in (first, second)]
    # Without a tokenizer all texts are empty.
    if not all(map(any, texts_of_each)) or [*texts_of_each[0]] == [*texts_of_each[1]]:
        return common, common
    texts = {*first.rows} & {*second.rows} - {""}
    pairs = [(first.rows[text], second.rows[text]) for text in texts]
    first_rows, second_rows = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T  # [n] each
    return first_rows, second_rows


def compare(
    first: Embeddings, second: Embeddings, pairs: tuple[Rows, Rows] | None = None
) -> Changes:
    """Compare two matrices [V, H] and [V', H'] row by row and as a whole.

    Linear CKA is that of Kornblith et al. (2019, arXiv 1905.00414): ||B^T A||^2 / (||A^T A|| ||B^T
    B||) with Frobenius norms and the means removed. It is defined for any two widths. Four passes
    over the rows in float64, in bounded memory. Raises ValueError if no rows belong together, or
    all rows of one matrix are equal.

    Args:
        pairs: which rows belong together; by default those of the same id.
    """
    # 1. The norms of each pair
    same_id = np.arange(min(len(first), len(second)))
    first_rows, second_rows = pairs or (same_id, same_id)
    norms = geometry.norms_or_nan(first)[first_rows], geometry.norms_or_nan(second)[second_rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = norms[1] / norms[0]
    # Rows that are zero or not finite on either side have none.
    ratios = np.where(np.isfinite(ratios) & (ratios != 0), ratios, np.nan)
    # 2. CKA. All else is over the pairs of rows that are finite on both sides.
    usable = np.flatnonzero(np.isfinite(norms[0] + norms[1]))
    if not len(usable):
        raise ValueError("the two matrices have no finite rows of the same tokens")
    before, after = (first, first_rows[usable]), (second, second_rows[usable])
    means, squares = zip(*(_mean_and_square(*side) for side in (before, after)))
    if 0 in squares:
        raise ValueError("all rows of one of the matrices are equal: CKA is not defined")
    cross, usable_cosines = _products(before, after, means)
    cka = float(cross.norm()) ** 2 / math.prod(squares)
    # 3. Directions, which two matrices of different widths do not share
    if usable_cosines is None:
        return Changes(None, ratios, cka, None)
    cosines = np.full(len(ratios), np.nan)
    cosines[usable] = usable_cosines
    shift = float((means[1] - means[0]).norm()) / float(norms[0][usable].mean())
    return Changes(cosines, ratios, cka, shift)


def _mean_and_square(matrix: Embeddings, rows: Rows) -> tuple[Tensor, float]:
    """The mean [H] of some rows, and the norm of A^T A with it removed."""
    # Each row once, as no two pairs share one; their order does not matter here.
    keep = np.isin(np.arange(len(matrix)), rows)
    mean = geometry.mean_and_norms(matrix, keep)[0]
    return mean.cpu(), float(geometry.gram(matrix, mean, keep).norm())


def _products(
    before: tuple[Embeddings, Rows], after: tuple[Embeddings, Rows], means: Sequence[Tensor]
) -> tuple[Tensor, Array | None]:
    """B^T A [H, H'] with the means removed, and the cosine of each pair [n] if the widths agree."""
    (first, first_rows), (second, second_rows) = before, after
    widths = first.shape[1], second.shape[1]
    cross = torch.zeros(widths, dtype=torch.float64)
    cosines = np.empty(len(first_rows)) if widths[0] == widths[1] else None
    for chunk in geometry.row_slices(len(first_rows), max(widths)):
        a = geometry.as_float64(first[first_rows[chunk]]).cpu()
        b = geometry.as_float64(second[second_rows[chunk]]).cpu()
        cross.addmm_((a - means[0]).T, b - means[1])
        if cosines is not None:
            scale = a.norm(dim=1) * b.norm(dim=1)
            cosines[chunk] = torch.where(scale > 0, (a * b).sum(1) / scale, torch.nan).numpy()
    return cross, cosines


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangesReport(Answer):
    """What changed from one analysis to another, which is the one that it is about."""

    changes: Changes
    rows: Rows  # [n], the row of each pair in the second matrix


def _report(before: Analysis, after: Analysis) -> ChangesReport:
    """Compare two matrices; the tokens that moved most are named."""
    first, second = before.vocabulary, after.vocabulary
    pairs = match_rows(first, second)
    with prefixed_usage_error(f"--compare {before.model} {after.model}: "):
        changes = compare(before.embeddings.matrix, after.embeddings.matrix, pairs)
    # The names of the rows are the first matrix's if the second has no tokenizer.
    vocabulary = max(second, first, key=lambda v: any(v.texts))
    movers, lines = [], []
    for index in changes.movers(_MOVERS):
        row = int(pairs[1][index])
        turned = None if changes.cosines is None else _finite(changes.cosines[index])
        ratio = _finite(changes.norm_ratios[index])
        named = {**after.token(row), "token": vocabulary.texts[row]}
        movers.append({**named, "cosine": turned, "norm_ratio": ratio})
        lines.append([str(row), vocabulary.name(row), _shown(turned), _shown(ratio)])
    numbers = {
        "before": before.identity,
        "after": after.identity,
        "matched": len(pairs[1]),
        "cka": changes.cka,
        "mean_shift": changes.mean_shift,
        "movers": movers,
    }
    note = (
        f"{len(pairs[1])} tokens of both; linear CKA {_shown(changes.cka)}; shift of the mean / "
        f"mean norm {_shown(changes.mean_shift)}"
    )
    title = f"Tokens that moved most from {before.label} to {after.label}"
    table = Table(["id", "token", "cos", "norm after / before"], lines, title, [note], left=(1,))
    return ChangesReport(after, numbers, table, changes=changes, rows=pairs[1])


def compare_analyses(before: Sequence[Analysis], after: Sequence[Analysis]) -> list[ChangesReport]:
    """Compare the matrices of two models, input with input and output with output.

    A matrix that is tied, or whose role is not known, is compared with either. Raises UsageError if
    they have no matrices or no tokens in common.
    """
    reports = [
        _report(first, second)
        for first, second in itertools.product(before, after)
        if {first.embeddings.role, second.embeddings.role} != {"input", "output"}
    ]
    if not reports:
        raise UsageError(
            f"--compare: {before[0].model} and {after[0].model} have no matrix of the same role"
        )
    return reports


def _shown(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
