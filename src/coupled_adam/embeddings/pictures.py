"""Pictures of embedding matrices, each drawn into the axes of a matplotlib figure."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from coupled_adam.embeddings.geometry import Array, Embeddings, as_array, as_float64, mean_embedding
from coupled_adam.rendering.pictures import scatter

_POINTS = 10_000  # points drawn for each matrix; more would cover each other
_ROWS = 20_000  # rows from which the axis of a projection is computed


def plot_cloud(ax: Axes, embeddings: Embeddings, color: str, label: str | None = None) -> None:
    """Draw rows [V, H], projected onto their mean (X) and the direction of most variance across it.

    Of a large matrix a fixed random sample of the rows is drawn; the mean is that of all rows.
    """
    mean = mean_embedding(embeddings)
    chosen = np.random.default_rng(0).permutation(len(embeddings))[:_ROWS]
    sample = as_array(as_float64(embeddings[chosen]))
    # Without a mean any direction will do.
    length = np.linalg.norm(mean)
    along = mean / length if length > 0 else np.eye(len(mean))[0]
    across = sample - np.outer(sample @ along, along)
    _, vectors = np.linalg.eigh(across.T @ across)
    points = sample[:_POINTS] @ np.stack([along, vectors[:, -1]], axis=1)
    scatter(ax, points[:, 0], points[:, 1], color, label)
    ax.plot(length, 0, "X", color=color, markersize=9, mec="white", zorder=3)


def finish_clouds(ax: Axes) -> None:
    """Draw the origin and label the axes."""
    ax.axhline(0, color="black", linewidth=0.5)
    ax.axvline(0, color="black", linewidth=0.5)
    ax.plot(0, 0, "+", color="black", markersize=18, mew=2.5, zorder=4)
    ax.annotate("origin", (0, 0), xytext=(-12, -20), textcoords="offset points", ha="right")
    ax.set(
        title="Embeddings from the side (X: their mean)",
        xlabel="along the mean embedding",
        ylabel="largest spread across it",
        aspect="equal",
        adjustable="datalim",
    )


def plot_norms(
    ax: Axes, norms: Array, counts: NDArray[Any], color: str, label: str | None = None
) -> None:
    """Draw the norms [V] against the unigram probabilities of the tokens, from counts [V]."""
    p = counts / counts.sum()
    seen = p > 0
    scatter(ax, p[seen], norms[seen], color, label)
    ax.set(
        title="Norm against frequency", xlabel="unigram probability", ylabel="‖eᵢ‖", xscale="log"
    )
    ax.set_ylim(0, auto=True)  # the next one may be larger


def plot_norm_histogram(ax: Axes, norms: Array, color: str, label: str | None = None) -> None:
    """Draw the distribution of the norms [V]."""
    # An area, and its outline over it, which stays visible where areas of several models overlap.
    ax.hist(norms, bins=100, density=True, histtype="stepfilled", alpha=0.35, color=color)
    ax.hist(norms, bins=100, density=True, histtype="step", color=color, label=label)
    ax.set(title="Norms", xlabel="‖eᵢ‖", ylabel="density")
    ax.set_xlim(0, auto=True)


def plot_spectrum(ax: Axes, values: Array, color: str, label: str | None = None) -> None:
    """Draw the singular values [min(V, H)], descending, relative to the largest."""
    ax.plot(range(1, len(values) + 1), values / values[0], color=color, label=label)
    ax.set(
        title="Singular values", xlabel="rank", ylabel="σ / σ of rank 1", xscale="log", yscale="log"
    )
