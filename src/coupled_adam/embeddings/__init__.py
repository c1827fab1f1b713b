"""Measures of the geometry of a model's embeddings: those of arXiv 2502.08441, and more.

Every measure takes an embedding matrix [V, H] as a torch tensor (on any device, in any
floating-point dtype) or as a NumPy array. It computes in float64 on the tensor's device, and needs
extra memory only for a few H x H matrices and for blocks of rows, not for a copy of the matrix.
"""

from coupled_adam.errors import install

try:
    from coupled_adam.embeddings.frequency import unigram_counts
    from coupled_adam.embeddings.geometry import (
        all_but_the_top,
        mean_embedding,
        mean_norm_ratio,
        row_norms,
        subtract_mean,
    )
    from coupled_adam.embeddings.loading import EmbeddingMatrix, load_embeddings
    from coupled_adam.embeddings.measures import Measures
    from coupled_adam.embeddings.partition import isotropy
    from coupled_adam.embeddings.report import EmbeddingReport, analyze
    from coupled_adam.embeddings.similarity import (
        SetScore,
        WordSimilarityReport,
        WordSimilaritySet,
        download_word_similarity,
        read_word_similarity,
        single_tokens,
        word_similarity,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: coupled_adam.embeddings needs an extra, {install('embeddings')}", name=error.name
    ) from None

__all__ = [
    "EmbeddingMatrix",
    "EmbeddingReport",
    "Measures",
    "SetScore",
    "WordSimilarityReport",
    "WordSimilaritySet",
    "all_but_the_top",
    "analyze",
    "download_word_similarity",
    "isotropy",
    "load_embeddings",
    "mean_embedding",
    "mean_norm_ratio",
    "read_word_similarity",
    "row_norms",
    "single_tokens",
    "subtract_mean",
    "unigram_counts",
    "word_similarity",
]
