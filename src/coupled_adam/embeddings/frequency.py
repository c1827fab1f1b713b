"""How embeddings depend on the frequency of their tokens."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.embeddings.geometry import (
    Embeddings,
    as_array,
    blocks,
    mean_embedding,
    row_norms,
)

_BLOCK = 2**24


def unigram_counts(tokens: torch.Tensor | NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """How often each token id occurs, [vocab_size].

    Args:
        tokens: token ids, of any shape and integer dtype; may be a memory map.
        vocab_size: V; ids are below it.

    Raises:
        ValueError: an id outside of 0 ... V - 1.
    """
    ids = np.asarray(tokens).reshape(-1)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ids), _BLOCK):  # bincount takes 8 bytes for each
        block = ids[start : start + _BLOCK]
        low, high = block.min(), block.max()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token ids run from {low} to {high}, outside of 0 ... {vocab_size - 1}: "
                "is vocab_size the number of rows of the embeddings?"
            )
        counts += np.bincount(block, minlength=vocab_size)
    return counts


def norm_frequency_correlation(
    embeddings: Embeddings, counts: torch.Tensor | NDArray[Any]
) -> float:
    """Rho, the Pearson correlation of ||e_i|| with log p_i, the unigram probability: -1 to 1.

    Args:
        embeddings: [V, H].
        counts: [V], counts or probabilities (the correlation does not depend on the total).
            Tokens with zero probability have no logarithm and are left out.

    Returns:
        rho; NaN where all norms, or all probabilities, are the same.

    Raises:
        ValueError: counts that are negative, not finite or not [V], or fewer than two positive.
    """
    return correlation_with_log(row_norms(embeddings), counts)


def mean_frequency_correlation(
    embeddings: Embeddings, counts: torch.Tensor | NDArray[Any]
) -> float:
    """The Pearson correlation of e_i . mu with log p_i: -1 to 1.

    If it is negative, rare tokens lie further along the mean than frequent ones: it is with them
    that the mean has drifted. Arguments, result and errors are those of
    :func:`norm_frequency_correlation`.
    """
    mean = torch.from_numpy(mean_embedding(embeddings))
    along = np.concatenate([as_array(rows @ mean.to(rows.device)) for rows in blocks(embeddings)])
    return correlation_with_log(along, counts)


def correlation_with_log(values: NDArray[np.float64], counts: torch.Tensor | NDArray[Any]) -> float:
    """The correlation of values [V] with log counts [V], where those are above zero."""
    p = seen(counts, len(values))
    used = p > 0
    with np.errstate(all="ignore"):
        if np.ptp(values[used]) == 0 or np.ptp(p[used]) == 0:
            return float("nan")
    return float(stats.pearsonr(values[used], np.log(p[used])).statistic)


def seen(counts: torch.Tensor | NDArray[Any], rows: int) -> NDArray[np.float64]:
    """Check unigram counts against the number of embeddings; return them as float64 [V]."""
    if isinstance(counts, torch.Tensor):
        counts = counts.detach().cpu().numpy()
    p = np.asarray(counts, dtype=np.float64)
    if p.shape != (rows,):
        raise ValueError(
            f"counts of shape {list(p.shape)}: one for each of the {rows} embeddings is needed"
        )
    if not (np.isfinite(p) & (p >= 0)).all():
        raise ValueError("counts: negative, NaN or infinite values")
    if (p > 0).sum() < 2:
        raise ValueError("counts: fewer than two tokens with a probability above zero")
    return p
