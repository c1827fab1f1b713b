"""Tokens that were hardly trained: indicators from the embeddings alone.

After Land & Bartolo (EMNLP 2024, "Fishing for Magikarp", arXiv 2405.05417). The embedding of a
token that never occurs in the training text moves only as the embeddings of all such tokens do: at
the output, away from the hidden states; at the input, not at all, or by weight decay. So the rows
that resemble those that are known to be unused have hardly been trained either.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask
from coupled_adam.embeddings.loading import EmbeddingMatrix
from coupled_adam.embeddings.verification import Verification, verify
from coupled_adam.embeddings.vocabulary import CATEGORIES, Vocabulary
from coupled_adam.errors import UsageError, refused
from coupled_adam.rendering.tables import Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coupled_adam.embeddings.analysis import Analysis

Indicator = Literal["norm", "distance", "cosine", "cosine_without_first", "cosine_centered"]
INDICATORS: dict[Indicator, str] = {
    "norm": "‖e‖",
    "distance": "‖e - u‖",
    "cosine": "1 - cos",
    "cosine_without_first": "1 - cos, first principal component removed",
    "cosine_centered": "1 - cos, mean removed",
}
"""The indicators and how they are shown; u is the mean of the unused rows."""

BY_ROLE: dict[str, Indicator] = {
    "input": "norm",  # unused rows stay as they were initialised, in all directions
    "output": "cosine_centered",
    "tied": "cosine_centered",
}
"""The indicator that finds most in benchmarks/results/undertrained_tokens.json."""


@dataclasses.dataclass(frozen=True)
class Undertrained:
    """Indicators of how little each row was trained: small values mean little training."""

    # [V] each, in the embeddings' units or from 0 to 2; only the norm if no row is known to be
    # unused. NaN for rows that are not finite, which are left out of everything else.
    indicators: dict[Indicator, Array]
    order_by: Indicator  # the one that chooses the candidates
    candidates: NDArray[np.int64]  # rows, those with the lowest indicator first
    # The highest indicator of the unused rows themselves, each compared with the mean of the
    # others. None with fewer than three, or if they resemble each other no more than most rows
    # resemble them, as in a model that was not trained.
    limit: float | None
    # The rows up to this limit, the lowest first: no indicator tells them from unused rows.
    # Candidates that are not among them may be rare tokens.
    alike: NDArray[np.int64]
    unused: Mask  # [V], the rows that served as the reference
    dead: NDArray[np.int64]  # the rows that are zero or not finite


def undertrained(
    embeddings: Embeddings,
    unused: Mask | None = None,
    *,
    among: Mask | None = None,
    share: float = 0.02,
    order_by: Indicator | None = None,
) -> Undertrained:
    """Find the rows that resemble those of unused tokens; rows of the matrix [V, H] may be NaN.

    The indicators are those of Land & Bartolo (2024, arXiv 2405.05417), section 3.2 and appendix A;
    the principal component is that of the centred embeddings, as in their code. Four passes over
    the rows in float64, in bounded memory.

    Args:
        unused: [V] booleans; rows that are known to be unused, see :class:`Vocabulary`.
        among: [V] booleans; the rows that can be candidates, such as all reachable tokens.
        share: how many of these are candidates, between 0 and 1. The authors suggest 2 %.
        order_by: the indicator that chooses them. By default ``"distance"``, or ``"norm"``
            if no unused row is known; :data:`BY_ROLE` has better ones where the role is known.

    Raises:
        ValueError: if no row is finite and different from zero, or an argument has the wrong shape
            or range.
    """
    geometry.check(embeddings)
    rows = len(embeddings)
    unused = geometry.as_mask("unused", np.zeros(rows, bool) if unused is None else unused, rows)
    among = geometry.as_mask("among", np.ones(rows, bool) if among is None else among, rows)
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must be above 0 and at most 1")
    finite, norms = geometry.finite_rows(embeddings)
    healthy = finite & (norms > 0)
    if not healthy.any():
        raise ValueError("no row of embeddings is finite and different from zero")
    reference = unused & healthy
    if order_by is None:
        order_by = "distance" if reference.any() else "norm"
    elif order_by != "norm" and not reference.any():
        raise ValueError(f"order_by={order_by!r} needs rows that are known to be unused")

    indicators: dict[Indicator, Array] = {"norm": norms}
    limit = None
    if reference.any():
        indicators, limit = _compared(embeddings, finite, healthy, reference, order_by)
    # Rows that are known to be unused are the reference, and need not be found.
    choice = among & finite & ~reference
    values = np.where(choice, indicators[order_by], np.inf)
    order = np.argsort(values, kind="stable")[: choice.sum()]
    # A limit that most rows are below tells nothing, as in a model that was not trained.
    if limit is not None and (values <= limit).sum() > len(order) / 2:
        limit = None
    return Undertrained(
        indicators,
        order_by,
        order[: int(np.ceil(share * len(order)))],
        limit,
        order[: 0 if limit is None else int((values <= limit).sum())],
        reference,
        np.flatnonzero(~healthy),
    )


def _compared(
    embeddings: Embeddings, finite: Mask, healthy: Mask, reference: Mask, order_by: Indicator
) -> tuple[dict[Indicator, Array], float | None]:
    """The indicators that compare all rows with the reference, and the highest of its own rows."""
    mean = geometry.mean_and_norms(embeddings, healthy)[0]
    first = torch.linalg.eigh(geometry.gram(embeddings, mean, healthy))[1][:, -1]
    mean_unused = geometry.mean_and_norms(embeddings, reference)[0]
    indicators: dict[Indicator, Array] = {name: np.full(len(finite), np.nan) for name in INDICATORS}
    places = np.flatnonzero(finite)
    for block in geometry.blocks(embeddings, finite):
        here, places = np.split(places, [len(block)])
        for name, values in _indicators(block, mean_unused, mean, first).items():
            indicators[name][here] = geometry.as_array(values)
    unused_rows = geometry.as_float64(embeddings[np.flatnonzero(reference)])
    count = len(unused_rows)
    if count < 3:
        return indicators, None
    # The mean without a row follows from that of all of them.
    means_of_others = (mean_unused * count - unused_rows) / (count - 1)
    own = _indicators(unused_rows, means_of_others, mean, first)[order_by]
    return indicators, float(own.max())


def _indicators(
    rows: Tensor, reference: Tensor, mean: Tensor, first: Tensor
) -> dict[Indicator, Tensor]:
    """The indicators of rows [n, H], relative to one vector [H], or to one for each row."""

    def distance(a: Tensor, b: Tensor) -> Tensor:
        scale = a.norm(dim=-1) * b.norm(dim=-1)
        # A row without a direction resembles nothing.
        return 1 - torch.where(scale > 0, (a * b).sum(-1) / scale, 0)

    a, b = (x - (x @ first).unsqueeze(-1) * first for x in (rows, reference))
    return {
        "norm": rows.norm(dim=1),
        "distance": (rows - reference).norm(dim=1),
        "cosine": distance(rows, reference),
        "cosine_without_first": distance(a, b),
        "cosine_centered": distance(rows - mean, reference - mean),
    }


def undertrained_tokens(
    entry: EmbeddingMatrix, vocabulary: Vocabulary, share: float = 0.02
) -> Undertrained:
    """As :func:`undertrained`, for a model's matrix: its reachable tokens, by its role."""
    return undertrained(
        entry.matrix,
        vocabulary.unused,
        among=vocabulary.categories == "ok",
        share=share,
        order_by=BY_ROLE.get(entry.role) if vocabulary.unused.any() else None,
    )


@dataclasses.dataclass(frozen=True)
class UndertrainedReport:
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
        tokens = [
            {
                **self.analysis.token(row),
                **{name: float(values[row]) for name, values in result.indicators.items()},
                "like_unused": row in alike,
            }
            for row in self.rows
        ]
        verified: dict[str, Any] = {}
        if asked is not None:
            verified = {
                "can_verify": asked.is_able,
                "controls_repeated": asked.control_probabilities.tolist(),
            }
            for token, p, verdict in zip(tokens, asked.probabilities.tolist(), asked.verdicts()):
                token |= {"repeated": p, "verdict": verdict}
        named = {
            "categories": dict(collections.Counter(vocabulary.categories.tolist())),
            "surplus_tokens": vocabulary.surplus,
            "unused_rows": int(result.unused.sum()),
            "dead_rows": result.dead.tolist(),
            "order_by": result.order_by,
            "limit": result.limit,
            **verified,
            "tokens": tokens,
        }
        return {"diagnosis": self.diagnosis, "undertrained": named}

    def tables(self, number: int) -> list[Table]:
        """The first of the rows that are named, for the terminal."""
        result, vocabulary = self.indicated, self.analysis.vocabulary
        named = self.to_dict()["undertrained"]
        kinds = named["categories"]
        counted = ", ".join(f"{kinds[name]} {name}" for name in CATEGORIES if name in kinds)
        notes = [
            f"rows by category: {counted}",
            f"{len(result.candidates)} candidates, the lowest by {INDICATORS[result.order_by]}",
        ]
        if vocabulary.surplus:
            notes.append(f"{vocabulary.surplus} tokens of the tokenizer have no row")
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
                f"{len(result.alike)} tokens cannot be told from the {result.unused.sum()} "
                "rows that are known to be unused (marked with *); the others may be merely rare, "
                "or well trained"
            )
        # The verdict is what was asked for: narrow windows show it, and scroll for the rest.
        asked = ["repeated", "verdict"] if self.verification is not None else []
        counts = ["count"] if self.analysis.counts is not None else []
        shown = [INDICATORS[k].replace("principal component", "PC") for k in result.indicators]
        rows = []
        for token in named["tokens"][:number]:
            cells = [f"{'*' if token['like_unused'] else ''}{token['id']}"]
            cells += [vocabulary.name(token["id"]), token["category"]]
            cells += [f"{token['repeated']:.2%}", token["verdict"]] if asked else []
            cells += [f"{token[name]:.4f}" for name in result.indicators]
            cells += [f"{token['count']:g}" for _ in counts]
            rows.append(cells)
        columns = ["id", "token", "category", *asked, *shown, *counts]
        title = f"Under-trained tokens: {self.analysis.label}"
        return [
            Table(columns, rows, title, ["; ".join(notes)], left=(1, 2, 4) if asked else (1, 2))
        ]

    @property
    def diagnosis(self) -> list[str]:
        """That of the analysis, and what the model's answers show if it was asked."""
        asked = self.verification
        return [*self.analysis.diagnosis, *([] if asked is None else [asked.sentence])]


def find_undertrained(analysis: Analysis, share: float = 0.02) -> UndertrainedReport:
    """Find the under-trained tokens of an analysis; UsageError if no row is finite and not zero."""
    with refused(f"{analysis.model}: "):
        result = undertrained_tokens(analysis.embeddings, analysis.vocabulary, share)
    return UndertrainedReport(analysis, result)


def verify_undertrained(
    undertrained: UndertrainedReport, model: PreTrainedModel, length: int
) -> UndertrainedReport:
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
    asked = verify(model, analysis.tokenizer, rows, controls, length=length)
    return dataclasses.replace(undertrained, verification=asked)
