"""Tokens that were hardly trained: indicators from the embeddings alone.

After Land & Bartolo (EMNLP 2024, "Fishing for Magikarp", arXiv 2405.05417). The embedding of a
token that never occurs in the training text moves only as the embeddings of all such tokens do: at
the output, away from the hidden states; at the input, not at all, or by weight decay. So the rows
that resemble those that are known to be unused have hardly been trained either.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.analysis import Analysis, Answer
from coupled_adam.embeddings.geometry import Array, Embeddings, Mask
from coupled_adam.embeddings.verification import Verification, verify
from coupled_adam.rendering.tables import Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Indicator = Literal["norm", "cosine_centered"]
INDICATORS: dict[Indicator, str] = {"norm": "‖e‖", "cosine_centered": "1 - cos, mean removed"}
"""The indicators and how they are shown; the cosine is to the mean of the unused rows."""

SHARE = 0.02
"""How many of the rows are candidates, as the authors suggest."""


@dataclasses.dataclass(frozen=True)
class Undertrained:
    """Indicators of how little each row was trained: small values mean little training."""

    # [V] each; only the norm if no row is known to be unused. NaN for rows that are not finite.
    indicators: dict[Indicator, Array]
    order_by: Indicator  # the one that chooses the candidates
    candidates: NDArray[np.int64]  # rows, those with the lowest indicator first
    # The highest indicator of the unused rows themselves. None with fewer than three, or if they
    # resemble each other no more than most rows resemble them, as in a model that was not trained.
    limit: float | None
    # The rows up to this limit, the lowest first: no indicator tells them from unused rows.
    # Candidates that are not among them may be rare tokens.
    alike: NDArray[np.int64]
    unused: Mask  # [V], the rows that served as the reference


def undertrained(
    embeddings: Embeddings,
    unused: Mask,
    among: Mask,
    *,
    role: str = "output",
    share: float = SHARE,
    norms: Array | None = None,
) -> Undertrained:
    """Find the rows that resemble those of unused tokens; rows of the matrix [V, H] may be NaN.

    The indicators are two of those of Land & Bartolo (2024, arXiv 2405.05417), section 3.2. Three
    passes over the rows in float64, in bounded memory.

    Args:
        unused: [V] booleans; rows that are known to be unused, see :class:`Vocabulary`.
        among: [V] booleans; the rows that can be candidates, such as all reachable tokens.
        role: as in :class:`EmbeddingMatrix`. Unused rows of an input matrix stay as they were
            initialised, in all directions, so that the norm tells them; elsewhere the cosine does.
        share: how many of the rows that can be are candidates, above 0 and at most 1.
        norms: [V], as :func:`geometry.norms_or_nan` returns them, if they are known.
    """
    # 1. The indicators; rows of zeros, which have no direction, are no reference
    norms = geometry.norms_or_nan(embeddings) if norms is None else norms
    finite = np.isfinite(norms)
    reference = unused & (norms > 0)
    values, own = indicators(embeddings, norms, reference)
    order_by: Indicator = "norm" if role == "input" or not reference.any() else "cosine_centered"
    # 2. The order; rows that are known to be unused are the reference, and need not be found
    key = np.where(among & finite & ~reference, values[order_by], np.inf)
    order = np.argsort(key, kind="stable")[: np.isfinite(key).sum()]
    # 3. Which of them are like unused rows
    limit = float(own[order_by].max()) if reference.sum() >= 3 else -math.inf
    alike = order[key[order] <= limit]
    # A limit that most rows are below tells nothing, as in a model that was not trained.
    is_known = limit > -math.inf and len(alike) <= len(order) / 2
    return Undertrained(
        indicators=values,
        order_by=order_by,
        candidates=order[: math.ceil(share * len(order))],
        limit=limit if is_known else None,
        alike=alike if is_known else order[:0],
        unused=reference,
    )


def indicators(
    embeddings: Embeddings, norms: Array, reference: Mask
) -> tuple[dict[Indicator, Array], dict[Indicator, Array]]:
    """The indicators of all rows [V], and those of the reference, as compared with each other."""
    values: dict[Indicator, Array] = {"norm": norms}
    own: dict[Indicator, Array] = {"norm": norms[reference]}
    if reference.any():
        mean = geometry.mean_and_norms(embeddings, norms > 0)[0]
        unused = geometry.mean_and_norms(embeddings, reference)[0]
        finite = np.isfinite(norms)
        distances = [
            _distance(block - mean, unused - mean) for block in geometry.blocks(embeddings, finite)
        ]
        values["cosine_centered"] = np.full(len(norms), np.nan)
        values["cosine_centered"][finite] = geometry.as_array(torch.cat(distances))
        rows = geometry.as_float64(embeddings[np.flatnonzero(reference)])
        # Each is compared with the mean of the others, which follows from the mean of all, [n, H].
        others = (unused * len(rows) - rows) / (len(rows) - 1)
        own["cosine_centered"] = geometry.as_array(_distance(rows - mean, others - mean))
    return values, own


def _distance(rows: Tensor, others: Tensor) -> Tensor:
    """1 - the cosines of rows [n, H] and one vector [H], or one for each row."""
    scale = rows.norm(dim=-1) * others.norm(dim=-1)
    # A row without a direction resembles nothing.
    return 1 - torch.where(scale > 0, (rows * others).sum(-1) / scale, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UndertrainedReport(Answer):
    """The under-trained tokens of one analysis, and what the model says of them if asked."""

    indicated: Undertrained
    rows: list[int]  # those that are named
    verification: Verification | None = None


def _report(
    analysis: Analysis, found: Undertrained, asked: Verification | None = None
) -> UndertrainedReport:
    """Name the candidates, or the tokens like unused ones if these are more."""
    vocabulary = analysis.vocabulary
    rows: list[int] = max(found.candidates, found.alike, key=len).tolist()
    # 1. As plain values, which become JSON; there may be thousands
    alike = {*found.alike.tolist()}
    tokens = [
        {
            **analysis.token(row),
            **{name: float(values[row]) for name, values in found.indicators.items()},
            "like_unused": row in alike,
        }
        for row in rows
    ]
    named: dict[str, Any] = {
        "categories": dict(collections.Counter(vocabulary.categories.tolist())),
        "unused_rows": int(found.unused.sum()),
        "order_by": found.order_by,
        "limit": found.limit,
        "tokens": tokens,
    }
    if asked is not None:
        named["can_verify"] = asked.is_able
        named["controls_repeated"] = asked.control_probabilities.tolist()
        for token, p, verdict in zip(tokens, asked.probabilities.tolist(), asked.verdicts()):
            token |= {"repeated": p, "verdict": verdict}
    # 2. As a table. The verdict is what was asked for: narrow windows show it, and scroll for the
    # rest.
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "id": lambda token: f"{'*' * token['like_unused']}{token['id']}",
        "token": lambda token: vocabulary.name(token["id"]),
    }
    if asked is not None:
        columns["repeated"] = lambda token: f"{token['repeated']:.2%}"
        columns["verdict"] = lambda token: str(token["verdict"])
    for name in found.indicators:
        columns[INDICATORS[name]] = lambda token, name=name: f"{token[name]:.4f}"  # type: ignore[misc]
    if analysis.counts is not None:
        columns["count"] = lambda token: f"{token['count']:g}"
    note = f"{len(found.candidates)} candidates, the lowest by {INDICATORS[found.order_by]}; "
    if found.limit is not None:
        note += (
            f"* marks the {len(found.alike)} tokens that cannot be told from the "
            f"{found.unused.sum()} rows that are known to be unused; "
        )
    note += "others may be merely rare, or well trained"
    lines = [[text(token) for text in columns.values()] for token in tokens]
    title = f"Under-trained tokens: {analysis.label}"
    table = Table([*columns], lines, title, [note], left=(1, 3) if asked else (1,))
    # 3. As sentences
    untrained = f"{len(alike):,} of {len(vocabulary):,} tokens look{'s' * (len(alike) == 1)} "
    said = [] if found.limit is None else [f"{untrained}untrained."]
    said += [] if asked is None else [asked.sentence]
    return UndertrainedReport(
        analysis,
        {"undertrained": named},
        table,
        said,
        indicated=found,
        rows=rows,
        verification=asked,
    )


def find_undertrained(analysis: Analysis, share: float = SHARE) -> UndertrainedReport:
    """Find the under-trained tokens of an analysis, among those that are reachable."""
    entry, vocabulary = analysis.embeddings, analysis.vocabulary
    indicated = undertrained(
        entry.matrix,
        vocabulary.unused,
        vocabulary.categories == "ok",
        role=entry.role,
        share=share,
        norms=analysis.norms,
    )
    return _report(analysis, indicated)


def verify_undertrained(
    undertrained: UndertrainedReport, model: PreTrainedModel, length: int
) -> UndertrainedReport:
    """Ask the model to repeat the under-trained tokens, and as many that are well trained.

    Those are drawn from the half of the other reachable tokens that is the more frequent one or,
    without counts, has the higher indicator. For the rest see :func:`verify`.
    """
    analysis, indicated = undertrained.analysis, undertrained.indicated
    assert analysis.tokenizer is not None  # or the command would have refused it
    ranks = indicated.indicators[indicated.order_by] if analysis.counts is None else analysis.counts
    # The controls: reachable tokens that are not in doubt, dead, or known to be unused.
    rows = np.array(undertrained.rows, np.int64)
    candidates = analysis.vocabulary.categories == "ok"
    candidates[[*rows, *analysis.dead, *np.flatnonzero(indicated.unused)]] = False
    best = np.flatnonzero(candidates)[np.argsort(-ranks[candidates], kind="stable")]
    best = best[: -(-len(best) // 2)]  # the better half, rounded up
    size = min(len(rows), len(best))
    controls = np.sort(np.random.default_rng(0).choice(best, size, replace=False))
    asked = verify(model, analysis.tokenizer, rows, controls, length=length)
    return _report(analysis, indicated, asked)
