"""How embeddings depend on the frequency of their tokens."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from coupled_adam.embeddings.geometry import Embeddings, as_array, blocks, mean_embedding, row_norms

_BLOCK = 2**24

Convention = Literal["seen", "published"]
"""What tokens that never occur count for in a correlation with log p_i."""


def unigram_counts(tokens: torch.Tensor | NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """Count how often each token id occurs, [vocab_size].

    The ids may have any shape and integer dtype, and be memory-mapped.

    Raises:
        ValueError: if an id is not between 0 and V - 1.
    """
    ids = np.asarray(tokens).reshape(-1)
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


def norm_frequency_correlation(
    embeddings: Embeddings, counts: torch.Tensor | NDArray[Any], *, convention: Convention = "seen"
) -> float:
    """The Pearson correlation rho of ||e_i|| with log p_i, where p_i is the unigram probability.

    Args:
        embeddings: [V, H].
        counts: [V], counts or probabilities (the total does not matter).
        convention: ``"seen"`` leaves tokens with zero probability out: they have no log p_i.
            ``"published"`` correlates all rows with log(p_i + 1e-10), as in arXiv 2502.08441, for
            comparison with values in the literature. Padding and other tokens that never occur are
            then points far from all others, at log 1e-10, whose weight depends on the constant.

    It is NaN if all norms or all probabilities are equal.

    Raises:
        ValueError: if counts do not have the shape [V], are negative or not finite, or if fewer
            than two are positive; if the convention is neither of the two.
    """
    return correlation_with_log(row_norms(embeddings), counts, convention)


def mean_frequency_correlation(
    embeddings: Embeddings, counts: torch.Tensor | NDArray[Any]
) -> float:
    """The Pearson correlation of e_i . mu with log p_i, between -1 and 1.

    If it is negative, rare tokens lie further in the direction of the mean than frequent tokens,
    so that it is mostly the rare tokens that shift the mean away from the origin. Arguments, result
    and errors are those of :func:`norm_frequency_correlation`.
    """
    mean = torch.from_numpy(mean_embedding(embeddings))
    along = np.concatenate([as_array(rows @ mean.to(rows.device)) for rows in blocks(embeddings)])
    return correlation_with_log(along, counts)


def correlation_with_log(
    values: NDArray[np.float64],
    counts: torch.Tensor | NDArray[Any],
    convention: Convention = "seen",
) -> float:
    """The correlation of values [V] with log p [V]; see :func:`norm_frequency_correlation`."""
    if convention not in ("seen", "published"):
        raise ValueError(f"Invalid convention: {convention!r} ('seen' or 'published')")
    p = checked_counts(counts, len(values))
    if convention == "seen":
        values, p = values[p > 0], p[p > 0]
    else:
        p = p / p.sum() + 1e-10
    with np.errstate(all="ignore"):
        if np.ptp(values) == 0 or np.ptp(p) == 0:
            return float("nan")
    return float(stats.pearsonr(values, np.log(p)).statistic)


def checked_counts(counts: torch.Tensor | NDArray[Any], rows: int) -> NDArray[np.float64]:
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
    if (p > 0).sum() < 2:
        raise ValueError("counts must be positive for at least two tokens")
    return p
