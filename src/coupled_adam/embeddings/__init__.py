"""How the embeddings of a model lie in space: the measures of arXiv 2502.08441.

Every function takes an embedding matrix [V, H] as a torch tensor (any device, any floating-point
dtype) or as an array, computes in float64, and needs extra memory for a few H x H matrices and
blocks of rows, never for a copy of the matrix.
"""

from coupled_adam.embeddings.frequency import norm_frequency_correlation, unigram_counts
from coupled_adam.embeddings.geometry import (
    condition,
    isotropy,
    mean_embedding,
    mean_norm,
    mean_norm_ratio,
    row_norms,
)
from coupled_adam.embeddings.report import EmbeddingReport, analyze
from coupled_adam.embeddings.similarity import (
    SetScore,
    WordSimilarityReport,
    WordSimilaritySet,
    read_word_similarity,
    word_similarity,
)

__all__ = [
    "EmbeddingReport",
    "SetScore",
    "WordSimilarityReport",
    "WordSimilaritySet",
    "analyze",
    "condition",
    "isotropy",
    "mean_embedding",
    "mean_norm",
    "mean_norm_ratio",
    "norm_frequency_correlation",
    "read_word_similarity",
    "row_norms",
    "unigram_counts",
    "word_similarity",
]
