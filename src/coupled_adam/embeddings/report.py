"""All measures of one embedding matrix, as an object, a table, and JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.frequency import norm_frequency_correlation, seen


@dataclasses.dataclass(frozen=True)
class EmbeddingReport:
    """The measures of an embedding matrix; printed, a small table.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        isotropy: Iso, 0 to 1, sign-safe; higher is better.
        isotropy_published: Iso with the eigenvectors' signs as the library returned them.
        mean_norm: ||mu||; lower is better.
        mean_norm_ratio: ||mu||^r = ||mu|| / mean_i ||e_i||, 0 to 1; lower is better.
        condition: kappa = 100 sigma_min / sigma_max, 0 to 100; higher is better.
        norm_frequency_correlation: rho, -1 to 1; higher is better. None without counts, or where
            all norms or all counts are the same.
        unseen_tokens: how many tokens have zero counts, and so no part in rho. None without counts.
    """

    vocab_size: int
    hidden_size: int
    isotropy: float
    isotropy_published: float
    mean_norm: float
    mean_norm_ratio: float
    condition: float
    norm_frequency_correlation: float | None = None
    unseen_tokens: int | None = None

    def __str__(self) -> str:
        rows = [
            ("embeddings", "E", f"{self.vocab_size} x {self.hidden_size}"),
            ("isotropy", "Iso", f"{self.isotropy:.4f}"),
            ("  as published (signs arbitrary)", "", f"{self.isotropy_published:.4f}"),
            ("mean norm", "‖μ‖", f"{self.mean_norm:.4f}"),
            ("relative mean norm", "‖μ‖ʳ", f"{self.mean_norm_ratio:.4f}"),
            ("condition, 100 σ_min/σ_max", "κ", f"{self.condition:.2f}"),
        ]
        if self.unseen_tokens is not None:
            rho = self.norm_frequency_correlation
            rows.append(("norm vs. log frequency", "ρ", "-" if rho is None else f"{rho:.4f}"))
            rows.append(("  tokens never seen, left out", "", str(self.unseen_tokens)))
        return "\n".join(f"{name:<34}{symbol:<6}{value:>12}" for name, symbol, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The attributes as a JSON object, in full precision; what is None is null."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def analyze(
    embeddings: geometry.Embeddings, counts: torch.Tensor | NDArray[Any] | None = None
) -> EmbeddingReport:
    """Measure an embedding matrix.

    Args:
        embeddings: [V, H]; a torch tensor on any device, or an array.
        counts: unigram counts or probabilities [V], for the correlation with frequency.

    Raises:
        ValueError: not a non-empty real finite matrix; all rows zero; counts that do not fit.
    """
    geometry.check(embeddings)
    rows, columns = embeddings.shape
    unseen = None if counts is None else int(np.sum(seen(counts, rows) == 0))
    ratio = geometry.mean_norm_ratio(embeddings)
    eigenvalues, eigenvectors = geometry.eigen(embeddings)
    log_z = geometry.log_partition(embeddings, eigenvectors)
    rho = None if counts is None else norm_frequency_correlation(embeddings, counts)
    return EmbeddingReport(
        vocab_size=rows,
        hidden_size=columns,
        isotropy=geometry.isotropy_of(log_z),
        isotropy_published=geometry.isotropy_of(log_z[:1]),
        mean_norm=geometry.mean_norm(embeddings),
        mean_norm_ratio=ratio,
        condition=geometry.condition_of(eigenvalues, rows),
        norm_frequency_correlation=None if rho is None or math.isnan(rho) else rho,
        unseen_tokens=unseen,
    )
