"""Embeddings with their mean removed, or with their mean and their top principal directions."""

import math

import torch

from coupled_adam.embeddings.geometry import Embeddings, blocks, check, gram, mean_and_norms


def subtract_mean(embeddings: Embeddings) -> torch.Tensor:
    """Subtract the mean embedding mu from every row of a matrix [V, H].

    The result is a new tensor like the given one; for an array, in float64 on the CPU.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers.
    """
    return all_but_the_top(embeddings, 0)


def all_but_the_top(embeddings: Embeddings, directions: int | None = None) -> torch.Tensor:
    """Subtract the mean, then the components along the top principal directions.

    This is Algorithm 1 of Mu & Viswanath (2018), arXiv 1702.01417. By default H / 100 directions,
    rounded up, are removed, as its authors suggest. The result is as for :func:`subtract_mean`.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers, or
            ``directions`` is not between 0 and H.
    """
    check(embeddings)
    top = top_directions(embeddings.shape[1], directions)
    mean, _ = mean_and_norms(embeddings)
    _, vectors = torch.linalg.eigh(gram(embeddings, mean))
    # The eigenvalues ascend, so that the last vectors are the top directions.
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
