"""How embeddings depend on the frequency of their tokens."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.embeddings.geometry import Array
from coupled_adam.text.token_files import Tokens

_BLOCK = 2**24


def unigram_counts(
    tokens: torch.Tensor | NDArray[Any] | Tokens, vocab_size: int
) -> NDArray[np.int64]:
    """Count how often each token id occurs, [vocab_size].

    The ids may have any shape and integer dtype, and be memory-mapped or in several files.

    Raises:
        ValueError: if an id is not between 0 and V - 1.
    """
    ids = tokens if isinstance(tokens, Tokens) else np.asarray(tokens).reshape(-1)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ids), _BLOCK):  # bincount needs 8 bytes of memory per id
        block = ids[start : start + _BLOCK]
        low, high = block.min(), block.max()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token ids range from {low} to {high}, but must be between 0 and "
                f"{vocab_size - 1}: is vocab_size the number of rows of the embeddings?"
            )
        counts += np.bincount(block, minlength=vocab_size)
    return counts


def correlation_with_log(values: Array, p: Array, floor: float | None = None) -> float:
    """The Pearson correlation of values [V] with log p [V]; NaN if all of one side are equal.

    Rows with p = 0 have no log p, and are left out. With a floor they are not: all shares of p are
    then that much larger, as in arXiv 2502.08441, where such rows lie far from all others.
    """
    if floor is None:
        values, p = values[p > 0], p[p > 0]
    else:
        p = p / p.sum() + floor
    # pearsonr would warn of a side without variance.
    with np.errstate(all="ignore"):
        if np.ptp(values) == 0 or np.ptp(p) == 0:
            return float("nan")
    return float(stats.pearsonr(values, np.log(p)).statistic)


def checked_counts(counts: torch.Tensor | NDArray[Any], rows: int) -> Array:
    """Check unigram counts against the number of embeddings; return them as float64 [V]."""
    if isinstance(counts, torch.Tensor):
        counts = counts.detach().cpu().numpy()
    p = np.asarray(counts, dtype=np.float64)
    if p.shape != (rows,):
        raise ValueError(
            f"counts has the shape {list(p.shape)}, but must hold one count for each of the {rows} "
            "embeddings"
        )
    if not (np.isfinite(p) & (p >= 0)).all():
        raise ValueError("counts must not be negative, NaN or infinite")
    if (p > 0).sum() < 2:  # no correlation is defined
        raise ValueError("counts must be positive for at least two tokens")
    return p
