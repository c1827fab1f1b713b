"""Embeddings with their mean removed, or with their mean and their top principal directions."""

import math

import torch

from coupled_adam.embeddings.geometry import Embeddings, blocks, check, gram, mean_and_norms


def subtract_mean(embeddings: Embeddings) -> torch.Tensor:
    """e_i - mu for every row.

    Args:
        embeddings: [V, H]; a torch tensor on any device, or an array.

    Returns:
        A new tensor [V, H] in the dtype and on the device of a tensor; in float64 for an array.

    Raises:
        ValueError: not a non-empty real finite matrix.
    """
    return all_but_the_top(embeddings, 0)


def all_but_the_top(embeddings: Embeddings, directions: int | None = None) -> torch.Tensor:
    """Subtract the mean, then the components along the top principal directions.

    Mu & Viswanath (2018), Algorithm 1, arXiv 1702.01417.

    Args:
        embeddings: [V, H]; a torch tensor on any device, or an array.
        directions: how many to remove; None is one for each hundred of H, rounded up, as the
            authors of the method suggest.

    Returns:
        As :func:`subtract_mean`.

    Raises:
        ValueError: not a non-empty real finite matrix; directions outside of 0 ... H.
    """
    check(embeddings)
    top = top_directions(embeddings.shape[1], directions)
    mean, _ = mean_and_norms(embeddings)
    _, vectors = torch.linalg.eigh(gram(embeddings, mean))
    vectors = vectors[:, vectors.shape[1] - top :]
    if isinstance(embeddings, torch.Tensor):
        result = torch.empty_like(embeddings.detach())
    else:
        result = torch.empty(embeddings.shape, dtype=torch.float64)
    start = 0
    for block in blocks(embeddings):
        block = block - mean
        block -= block @ vectors @ vectors.T
        result[start : start + len(block)] = block
        start += len(block)
    return result


def top_directions(hidden_size: int, directions: int | None) -> int:
    """How many principal directions :func:`all_but_the_top` removes."""
    if directions is None:
        return math.ceil(hidden_size / 100)
    if not 0 <= directions <= hidden_size:
        raise ValueError(f"directions={directions} must be from 0 to H = {hidden_size}")
    return directions
