"""All measures of one embedding matrix, as an object, a table, and JSON."""

import base64
import contextlib
import dataclasses
import html
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.centering import top_directions
from coupled_adam.embeddings.frequency import Convention, checked_counts, correlation_with_log
from coupled_adam.embeddings.geometry import Array, as_array
from coupled_adam.embeddings.similarity import (
    WordSimilarityReport,
    WordSimilaritySet,
    similarity_of,
    word_vectors,
)


@dataclasses.dataclass(frozen=True)
class Measures:
    """The measures of an embedding matrix; None for a measure that is not defined.

    If all rows are equal, for example, removing the mean leaves only zeros, for which the ratio,
    the measures of the spectrum and the cosine are not defined.

    Attributes:
        isotropy: the isotropy Iso with both signs of every eigenvector, 0 to 1; higher is better.
        isotropy_published: the isotropy with the signs that the linear-algebra library returns.
        isotropy_unit: the isotropy after division by the mean row norm, 0 to 1; higher is better.
        mean_norm: ||mu||; lower is better.
        mean_norm_ratio: ||mu||^r = ||mu|| / mean_i ||e_i||, 0 to 1; lower is better.
        condition: kappa = 100 sigma_min / sigma_max, 0 to 100; higher is better.
        mean_cosine_similarity: the mean over all pairs of rows, -1 to 1; lower is better.
        effective_rank: 1 to min(V, H); higher is better.
        participation_ratio: 1 to min(V, H); higher is better.
        iso_score: IsoScore, 0 to 1; higher is better. It does not depend on the mean.
        norm_mean, norm_std, norm_min, norm_max: statistics of ||e_i|| over the rows.
        norm_frequency_correlation: rho, the correlation of ||e_i|| and log p_i over the tokens that
            occur, -1 to 1; higher is better. None without counts, or if all norms or all counts are
            equal.
        norm_frequency_correlation_published: the same over all tokens, with log(p_i + 1e-10).
        mean_frequency_correlation: the correlation of e_i . mu and log p_i, -1 to 1; near 0 is
            better. None in the same cases, and if the mean is zero.
        word_similarity: the word-similarity scores; None if no sets were given.
        singular_values: [min(V, H)], descending.
    """

    isotropy: float
    isotropy_published: float
    isotropy_unit: float | None
    mean_norm: float
    mean_norm_ratio: float | None
    condition: float | None
    mean_cosine_similarity: float | None
    effective_rank: float | None
    participation_ratio: float | None
    iso_score: float | None
    norm_mean: float
    norm_std: float
    norm_min: float
    norm_max: float
    norm_frequency_correlation: float | None
    norm_frequency_correlation_published: float | None
    mean_frequency_correlation: float | None
    word_similarity: WordSimilarityReport | None
    singular_values: list[float] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class EmbeddingReport(Measures):
    """The measures of an embedding matrix in three variants. It prints as a table.

    The report's own measures are those of the matrix as it is.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        excluded_rows: the number of rows that were left out of all measures.
        unseen_tokens: the number of tokens with a count of zero, which are left out of the
            correlations with frequency (but the published one). None without counts.
        centered: the measures with the mean removed.
        all_but_the_top: the measures with the mean and the top principal directions removed.
        top_directions: the number of principal directions removed for ``all_but_the_top``.
    """

    vocab_size: int
    hidden_size: int
    excluded_rows: int
    unseen_tokens: int | None
    centered: Measures
    all_but_the_top: Measures
    top_directions: int

    def __str__(self) -> str:
        variants = (self, self.centered, self.all_but_the_top)
        header = f"{self.vocab_size} x {self.hidden_size}"
        lines = [("embeddings", "E", header, "- mean", f"- top {self.top_directions}")]
        for measure in MEASURES:
            values = [number(variant, measure.path) for variant in variants]
            if values[0] is not None:
                first, second, third = (shown(value, measure.digits) for value in values)
                lines.append((measure.label, measure.symbol, first, second, third))
        if self.unseen_tokens is not None:
            lines.append(("  tokens never seen, left out", "", str(self.unseen_tokens), "", ""))
        if self.excluded_rows:
            lines.append(("rows left out of all measures", "", str(self.excluded_rows), "", ""))
        return "\n".join(f"{a:<34}{b:<6}{c:>16}{d:>10}{e:>10}" for a, b, c, d, e in lines)

    def _repr_html_(self) -> str:
        """The table with the healthy ranges, and the spectra if matplotlib is installed."""
        variants = (self, self.centered, self.all_but_the_top)
        header = (
            f"{self.vocab_size} x {self.hidden_size}",
            "as is",
            "- mean",
            f"- top {self.top_directions}",
            "healthy, as is",
        )
        lines = []
        for measure in MEASURES:
            values = [number(variant, measure.path) for variant in variants]
            if values[0] is None:
                continue
            texts = [shown(value, measure.digits) for value in values]
            cells = [f"{measure.label} {measure.symbol}", *texts]
            note = ""
            if measure.healthy is not None:
                cells.append(str(measure.healthy))
                note = f' title="{html.escape(measure.healthy.source)}"'
                if values[0] not in measure.healthy:
                    cells[1] += " (!)"
            row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            lines.append(f"<tr{note}>{row}</tr>")
        head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        return table + _spectra(variants)

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The attributes as a JSON object, in full precision; None becomes null."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def _spectra(variants: Sequence[Measures]) -> str:
    """The singular values of the three variants as an image; empty without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # it is not needed for anything else here
        return ""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    ax = figure.subplots()
    for variant, label in zip(variants, ("as is", "- mean", "- top directions")):
        ax.plot(variant.singular_values, label=label)
    ax.set(xlabel="number", ylabel="singular value", yscale="log")
    ax.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    data = base64.b64encode(image.getvalue()).decode()
    return f'<img alt="singular values" src="data:image/png;base64,{data}">'


@dataclasses.dataclass(frozen=True)
class Healthy:
    """The range of a measure for healthy embeddings, and where the range comes from.

    Attributes:
        source: what the range is based on, as a sentence fragment.
        low, high: the ends of the range, which belong to it; None where there is no end. If both
            are None, more is better, without a limit that would hold for matrices of any size.
    """

    source: str
    low: float | None = None
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return "higher" if self.high is None else f"≤ {self.high:g}"
        if self.high is None:
            return f"≥ {self.low:g}"
        symmetric = self.low == -self.high
        return f"0 ± {self.high:g}" if symmetric else f"{self.low:g} to {self.high:g}"


_PAPER = "arXiv 2502.08441, 125M to 2.6B parameters"
_STUDY = "docs/study/1-scale.md, 0.4M to 2.6M parameters"
_ONE_RUN = "one run each of the recipe tiny"


@dataclasses.dataclass(frozen=True)
class Measure:
    """A row of a report's tables.

    Attributes:
        label, symbol: its name, and the letter for it in the paper.
        path: the path of attributes from a report to the number.
        digits: how many digits to show.
        healthy: what is healthy for the matrix as it is; None if that cannot be said.
        of_the_mean: whether it says nothing once the mean is removed.
    """

    label: str
    symbol: str
    path: tuple[str, ...]
    digits: int
    healthy: Healthy | None = None
    of_the_mean: bool = False


MEASURES = (
    Measure(
        "isotropy",
        "Iso",
        ("isotropy",),
        4,
        Healthy(f"0.83 to 0.97 with Coupled Adam, 0.10 to 0.28 with Adam ({_PAPER})", low=0.8),
    ),
    Measure("  as published (signs arbitrary)", "", ("isotropy_published",), 4, of_the_mean=True),
    Measure("  at unit mean norm", "", ("isotropy_unit",), 4),
    Measure("mean norm", "‖μ‖", ("mean_norm",), 4, of_the_mean=True),
    Measure(
        "relative mean norm",
        "‖μ‖ʳ",
        ("mean_norm_ratio",),
        4,
        Healthy(f"0.01 to 0.03 with Coupled Adam, 0.73 to 0.82 with Adam ({_PAPER})", high=0.05),
        of_the_mean=True,
    ),
    Measure(
        "condition, 100 σ_min/σ_max",
        "κ",
        ("condition",),
        2,
        Healthy(f"6.6 to 9.9 with Coupled Adam, 3.4 to 4.3 with AdamW ({_STUDY})"),
    ),
    Measure(
        "mean cosine similarity",
        "cos",
        ("mean_cosine_similarity",),
        4,
        Healthy(
            "0 if directions are uniform (Ethayarajh 2019, arXiv 1909.00512); the limits are a "
            f"rough guide: 0.007 with Coupled Adam, 0.39 with AdamW ({_ONE_RUN})",
            -0.05,
            0.05,
        ),
    ),
    Measure(
        "effective rank",
        "",
        ("effective_rank",),
        1,
        Healthy("H if all directions are used equally (Roy & Vetterli 2007)"),
    ),
    Measure(
        "participation ratio",
        "",
        ("participation_ratio",),
        1,
        Healthy("H if all directions are used equally; outliers lower it first"),
    ),
    Measure(
        "IsoScore",
        "",
        ("iso_score",),
        4,
        Healthy("1 if all directions vary equally (Rudman et al. 2022, arXiv 2108.07344)"),
    ),
    Measure("norm, mean over rows", "‖e‖", ("norm_mean",), 4),
    Measure("  standard deviation", "", ("norm_std",), 4),
    Measure(
        "norm vs. log frequency",
        "ρ",
        ("norm_frequency_correlation",),
        4,
        Healthy(f"0.75 to 0.81 with Coupled Adam, -0.69 to -0.61 with AdamW ({_STUDY})", low=0.5),
    ),
    Measure("  as published (with unseen ones)", "", ("norm_frequency_correlation_published",), 4),
    Measure(
        "along the mean vs. log frequency",
        "",
        ("mean_frequency_correlation",),
        4,
        Healthy(
            "0 if rare tokens have not drifted (arXiv 2502.08441); the limits are a rough guide: "
            f"-0.33 with Coupled Adam, -0.91 with AdamW ({_ONE_RUN})",
            -0.5,
            0.5,
        ),
        of_the_mean=True,
    ),
    Measure(
        "word similarity, mean of the sets",
        "r̄",
        ("word_similarity", "mean"),
        2,
        Healthy("57 to 58 with Coupled Adam, 3 to 5 with Adam (arXiv 2502.08441, 20B tokens)"),
    ),
    Measure("  by dot product", "", ("word_similarity", "dot_mean"), 2),
)
"""The rows of a report's tables."""


def number(measures: Measures | Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """Look up a number of a report, or of its dict, by its path; None if it is missing."""
    found: Any = measures
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else getattr(found, key, None)
    return found  # type: ignore[no-any-return]


def shown(value: float | None, digits: int) -> str:
    """Format a number for a table; a dash for None."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


PASSES = 4
"""How often :func:`analyze` passes over the rows."""


def analyze(
    embeddings: geometry.Embeddings | nn.Module,
    counts: torch.Tensor | NDArray[Any] | None = None,
    *,
    sets: Mapping[str, WordSimilaritySet] | None = None,
    token_ids: Callable[[str], int | None] | None = None,
    keep: torch.Tensor | NDArray[Any] | None = None,
    directions: int | None = None,
    on_rows: Callable[[int], object] | None = None,
) -> EmbeddingReport:
    """Measure an embedding matrix as it is, centered, and without its top principal directions.

    The measures are exact. They take four passes over the rows and two eigendecompositions of
    H x H matrices. The extra memory is a few blocks of 8 MB and H x H matrices, for any V. All are
    computed in float64, except for the exponents of the isotropy of a large matrix, if the relative
    error of the isotropy is then at most 1e-4 (see :func:`geometry.exponent_dtype`).

    Args:
        embeddings: [V, H]; a torch tensor on any device, or a NumPy array. Also a module with one
            such matrix, such as ``nn.Embedding``, or a model of transformers, whose output
            embeddings are measured if it has any, and otherwise its input embeddings.
        counts: unigram counts or probabilities [V], for the correlations with frequency.
        sets: word-similarity sets, as :func:`read_word_similarity` returns them.
        token_ids: a function from a word to its token id, needed with ``sets``; see
            :func:`single_tokens`.
        keep: [V] booleans; rows with False, such as padding, are left out of all measures.
        directions: the number of top principal directions to remove; by default H / 100, rounded
            up. See :func:`all_but_the_top`.
        on_rows: called with the number of rows of each block that a pass is done with, to show
            the progress: together :data:`PASSES` times the number of rows that are measured.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers, or all of
            its rows are zero; if ``counts``, token ids or ``keep`` do not fit the matrix; if
            ``directions`` is not between 0 and H.
    """
    if isinstance(embeddings, nn.Module):
        embeddings = _matrix_of(embeddings)
    geometry.check(embeddings)
    rows, columns = embeddings.shape
    top = top_directions(columns, directions)
    kept = _checked_keep(keep, rows)
    p = None if counts is None else checked_counts(counts, rows)
    unseen = None if p is None else int((p == 0).sum())
    words: list[str] = []
    vectors = np.zeros((0, columns))
    if sets is not None:
        if token_ids is None:
            raise ValueError("sets needs token_ids, a function from a word to its token id")
        words, vectors = word_vectors(embeddings, sets, _kept_tokens(token_ids, kept))

    mean, norms = geometry.mean_and_norms(embeddings, kept, on_rows)
    geometry.check_not_zero(float(norms.max()))
    used = len(norms)
    centred_gram = geometry.gram(embeddings, mean, kept, on_rows)
    # Adding the mean's part is exact; subtracting it from the raw sum would cancel digits.
    squares, basis = torch.linalg.eigh(centred_gram + used * torch.outer(mean, mean))
    centred_squares, centred_basis = torch.linalg.eigh(centred_gram)

    # Rows equal to the mean differ from it by rounding errors only; the floor treats them as zero.
    floor = 1e-12 * float(norms.max())
    raw, centred, topless = _Cloud(used, 0.0), _Cloud(used, floor), _Cloud(used, floor)
    along = torch.empty_like(norms)
    taken = centred_basis[:, columns - top :]
    start = 0
    for block in geometry.blocks(embeddings, kept, on_rows):
        along[start : start + len(block)] = block @ mean
        raw.add(block, start)
        block = block - mean
        centred.add(block, start)
        topless.add(block - block @ taken @ taken.T, start)
        start += len(block)

    # Z comes last, because the isotropy at unit mean norm needs the norms; and only for directions
    # that can have the largest or smallest.
    dtype = geometry.exponent_dtype(
        embeddings, max(raw.longest, centred.longest) / min(raw.unit, centred.unit, topless.unit, 1)
    )
    means, left = mean @ basis, columns - top
    chosen = raw.contenders(means, squares / used - means**2, centred.longest)
    chosen_centred = centred.contenders(0 * means, centred_squares / used, centred.longest)
    if left:
        chosen_centred[:left] |= topless.contenders(
            0 * means[:left], centred_squares[:left] / used, topless.longest
        )
        left = int(chosen_centred[:left].sum())
    axes, centred_axes = basis[:, chosen].to(dtype), centred_basis[:, chosen_centred].to(dtype)
    center = mean.to(dtype)
    for cloud in (raw, centred, topless):
        cloud.begin_z()
    for block in geometry.blocks(embeddings, kept, on_rows, dtype):
        raw.add_z(geometry.project(block, axes))
        # In the basis of the principal directions, removing the top ones means dropping columns.
        projections = geometry.project(block - center, centred_axes)
        centred.add_z(projections)
        topless.add_z(projections[:, :left])
    topless_squares = centred_squares.clone()
    topless_squares[columns - top :] = 0

    p = p if p is None or kept is None else p[kept]
    centred_vectors = vectors - as_array(mean)
    removed = as_array(taken)
    topless_vectors = centred_vectors - centred_vectors @ removed @ removed.T
    scores = [
        None if sets is None else similarity_of(words, rows, sets, cloud.floor)
        for cloud, rows in ((raw, vectors), (centred, centred_vectors), (topless, topless_vectors))
    ]
    measures = _measures(raw, squares, p, scores[0])
    centred_measures = _measures(centred, centred_squares, p, scores[1])
    return EmbeddingReport(
        **{
            **vars(measures),
            "iso_score": centred_measures.iso_score,  # that of the covariance, by definition
            "mean_norm": float(mean.norm()),
            "mean_norm_ratio": float(mean.norm()) / float(norms.mean()),
            "mean_frequency_correlation": _correlation(as_array(along), p, "seen"),
        },
        vocab_size=rows,
        hidden_size=columns,
        excluded_rows=rows - used,
        unseen_tokens=unseen,
        centered=centred_measures,
        all_but_the_top=_measures(topless, topless_squares, p, scores[2]),
        top_directions=top,
    )


def _matrix_of(module: nn.Module) -> Tensor:
    """The output embeddings of a model, or its input embeddings, or the matrix of a layer."""
    layers: list[Any] = [module]
    for name in ("get_output_embeddings", "get_input_embeddings"):
        getter = getattr(module, name, None)
        if callable(getter):
            with contextlib.suppress(NotImplementedError):  # of models without a text
                layers.append(getter())
    layers = [layer for layer in layers[1:] if layer is not None] or layers[:1]
    weight = getattr(layers[0], "weight", None)
    if isinstance(weight, Tensor):
        return weight.detach()
    tables = {
        name: layer.weight.detach()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding)
    }
    if len(tables) == 1:
        return next(iter(tables.values()))
    has = f"has several: {', '.join(tables)}" if tables else "has none"
    raise ValueError(
        f"embeddings: which matrix of {type(module).__name__} is meant is not clear, as it {has}. "
        "Pass the matrix itself, such as model.embed_tokens.weight"
    )


class _Cloud:
    """Accumulates the measures of one of a report's three variants, block by block."""

    def __init__(self, rows: int, floor: float) -> None:
        self.floor = floor
        self.norms = torch.zeros(rows, dtype=torch.float64)
        self.angles = geometry.Angles()

    def add(self, vectors: Tensor, start: int) -> None:
        """Add a block of rows [rows, H], of which the first is number ``start``."""
        norms = vectors.norm(dim=1)
        norms = torch.where(norms > self.floor, norms, 0)
        self.norms[start : start + len(norms)] = norms
        self.angles.add(vectors, norms, self.floor)

    @property
    def unit(self) -> float:
        """The mean norm; 1 if it is zero."""
        return float(self.norms.mean()) or 1.0

    @property
    def longest(self) -> float:
        """The largest norm."""
        return float(self.norms.max())

    def contenders(self, means: Tensor, variances: Tensor, reach: float) -> Tensor:
        """The directions of which Z may be needed; see :class:`geometry.Moments`."""
        moments = geometry.Moments(means, variances, reach)
        return moments.can_be_extreme(1.0, True) | moments.can_be_extreme(self.unit, False)

    def begin_z(self) -> None:
        """All rows have been added; their projections follow, once more from the first."""
        self.scale = 1 / self.unit
        self.partition = geometry.LogPartition(self.longest)
        self.unit_partition = geometry.LogPartition(self.longest * self.scale)

    def add_z(self, projections: Tensor) -> None:
        """Add the projections of a block of rows onto some directions, [rows, n]."""
        self.partition.add(projections)
        self.unit_partition.add(projections * self.scale)


def _measures(
    cloud: _Cloud, squares: Tensor, p: Array | None, word_similarity: WordSimilarityReport | None
) -> Measures:
    """The measures of rows with zero mean, from the eigenvalues of E^T E, zeros included."""
    norms = as_array(cloud.norms)
    values = geometry.singular_values_of(squares.sort().values, len(norms))
    log_z, unit_log_z = (
        _with_removed_direction(partition.log_z(), squares, len(norms))
        for partition in (cloud.partition, cloud.unit_partition)
    )
    is_point = not norms.any()
    cosine = cloud.angles.mean_cosine()
    participation = None if is_point else geometry.participation_ratio_of(values)
    iso_score = None
    if participation is not None and len(squares) > 1:
        iso_score = geometry.iso_score_of(participation, len(squares))
    return Measures(
        isotropy=geometry.isotropy_of(log_z),
        isotropy_published=geometry.isotropy_of(log_z[:1]),
        isotropy_unit=None if is_point else geometry.isotropy_of(unit_log_z),
        mean_norm=0.0,
        mean_norm_ratio=None if is_point else 0.0,
        condition=None if is_point else geometry.condition_of(values),
        mean_cosine_similarity=None if math.isnan(cosine) else cosine,
        effective_rank=None if is_point else geometry.effective_rank_of(values),
        participation_ratio=participation,
        iso_score=iso_score,
        norm_mean=float(norms.mean()),
        norm_std=float(norms.std()),
        norm_min=float(norms.min()),
        norm_max=float(norms.max()),
        norm_frequency_correlation=_correlation(norms, p, "seen"),
        norm_frequency_correlation_published=_correlation(norms, p, "published"),
        mean_frequency_correlation=None,
        word_similarity=word_similarity,
        singular_values=values.tolist(),
    )


def _with_removed_direction(log_z: Array, squares: Tensor, rows: int) -> Array:
    """Log Z [2, n], with that of a direction that was removed, exp(0) for every row, if any was."""
    return np.pad(log_z, ((0, 0), (0, int(squares[-1] == 0))), constant_values=math.log(rows))


def _correlation(values: Array, p: Array | None, convention: Convention) -> float | None:
    r = math.nan if p is None else correlation_with_log(values, p, convention)
    return None if math.isnan(r) else r


def _checked_keep(keep: Tensor | NDArray[Any] | None, rows: int) -> NDArray[np.bool_] | None:
    if keep is None:
        return None
    chosen = keep.detach().cpu().numpy() if isinstance(keep, Tensor) else np.asarray(keep)
    if chosen.shape != (rows,) or chosen.dtype != np.bool_:
        raise ValueError(
            f"keep must hold a boolean for each of the {rows} embeddings, but has the shape "
            f"{list(chosen.shape)} and the dtype {chosen.dtype}"
        )
    if not chosen.any():
        raise ValueError("keep must be True for at least one row")
    return chosen


def _kept_tokens(
    token_ids: Callable[[str], int | None], keep: NDArray[np.bool_] | None
) -> Callable[[str], int | None]:
    """Wrap ``token_ids`` so that it returns None for tokens that are left out."""

    def token_id(word: str) -> int | None:
        token = token_ids(word)
        if token is None or keep is None or not 0 <= token < len(keep) or keep[token]:
            return token
        return None

    return token_id
