"""All measures of one embedding matrix, as an object, a table, and JSON."""

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.diagnosis import Advice, diagnose
from coupled_adam.embeddings.frequency import checked_counts
from coupled_adam.embeddings.geometry import (
    Array,
    Mask,
    OnRows,
    alive_rows,
    as_array,
    top_directions,
)
from coupled_adam.embeddings.loading import load_embeddings, model_embeddings
from coupled_adam.embeddings.measures import MEASURES, MeasureInputs, Measures
from coupled_adam.embeddings.partition import Directions, log_partitions
from coupled_adam.embeddings.similarity import Sets, TokenIds, similarity_of, word_vectors
from coupled_adam.embeddings.weights import read_array
from coupled_adam.rendering.tables import Cell, Table
from coupled_adam.runs import COUNTS

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        return f"{self.diagnosis}\n{self.table()}"

    def _repr_html_(self) -> str:
        """The diagnosis, the table, and the spectra if matplotlib is installed."""
        return f"<p>{html.escape(self.diagnosis)}</p>{self.table().__html__()}{self._spectra()}"

    @property
    def diagnosis(self) -> str:
        """Whether the embeddings are healthy, which measures say so, and what to do next."""
        return " ".join(self.sentences())

    def sentences(self, dead: Sequence[str] = (), advice: Advice | None = None) -> list[str]:
        """The diagnosis, sentence by sentence; the arguments are those of :func:`diagnose`."""
        rows = self.vocab_size - self.excluded_rows
        seen = max(rows - (self.unseen_tokens or 0), 0)
        return diagnose(
            self, self.centered, (rows, self.hidden_size), seen, dead, advice or Advice()
        )

    def table(self) -> Table:
        """All measures of the three variants, and the healthy ranges of the first."""
        rows: list[list[str | Cell]] = []
        for measure in MEASURES.values():
            value, *changed = (measure.of(variant) for variant in self._variants)
            if value is not None:
                cell = Cell(measure.text(value), outside=not measure.is_healthy(value))
                texts = map(measure.text, changed)
                rows.append([measure.label, measure.symbol, cell, *texts, measure.wanted])
        for label, number in (
            ("tokens never seen, left out of correlations", self.unseen_tokens),
            ("rows left out of all measures", self.excluded_rows or None),
        ):
            if number is not None:
                rows.append([label, "", str(number), "", "", ""])
        columns = ["", "", "as it is", "- mean", f"- top {self.top_directions}", "healthy"]
        title = f"Embeddings, {self.vocab_size} x {self.hidden_size}"
        return Table(columns, rows, title, left=(0, 1, 5))

    def to_frame(self) -> "pandas.DataFrame":
        """The measures by key, with a column for each variant; this alone needs pandas."""
        import pandas

        numbers = {
            name: [measure.of(variant) for measure in MEASURES.values()]
            for name, variant in zip(("as_is", "centered", "all_but_the_top"), self._variants)
        }
        return pandas.DataFrame(numbers, index=[*MEASURES], dtype=float)

    @property
    def _variants(self) -> tuple[Measures, Measures, Measures]:
        return self, self.centered, self.all_but_the_top

    def _spectra(self) -> str:
        """The singular values of the three variants as an image; empty without matplotlib."""
        try:
            from coupled_adam.embeddings.pictures import plot_spectrum
            from coupled_adam.rendering.pictures import single
        except ModuleNotFoundError:  # it is not needed for anything else here
            return ""

        def draw(ax: "Axes") -> None:
            for number, label in enumerate(("as is", "- mean", "- top directions")):
                values = np.array(self._variants[number].singular_values)
                if values.any():
                    plot_spectrum(ax, values, f"C{number}", label)

        picture = single(draw, "singular values")
        return f'<img alt="{picture.caption}" src="{picture.data}">'

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The attributes as a JSON object, in full precision; None becomes null."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


PASSES = 4
"""How often :func:`analyze` passes over the rows."""


def analyze(
    embeddings: geometry.Embeddings | nn.Module | str | Path,
    counts: torch.Tensor | NDArray[Any] | None = None,
    *,
    sets: Sets | None = None,
    token_ids: TokenIds | None = None,
    keep: torch.Tensor | NDArray[Any] | None = None,
    directions: int | None = None,
    on_rows: OnRows = None,
) -> EmbeddingReport:
    """Measure an embedding matrix as it is, centered, and without its top principal directions.

    The measures are exact. They take four passes over the rows and two eigendecompositions of
    H x H matrices. The extra memory is a few blocks of 8 MB and H x H matrices, for any V. All are
    computed in float64, except for the exponents of the isotropy of a large matrix (see
    :func:`log_partitions`).

    Args:
        embeddings: [V, H]; a torch tensor on any device, or a NumPy array. Or a module with one
            such matrix, such as ``nn.Embedding``, or a model of transformers, whose output
            embeddings are measured if it has any, and otherwise its input embeddings. Or what
            :func:`load_embeddings` takes, without rows that are zero or not finite.
        counts: unigram counts or probabilities [V], for the correlations with frequency; those of a
            run's folder are found in it.
        sets: word-similarity sets, as :func:`read_word_similarity` returns them.
        token_ids: a function from a word to its token id, needed with ``sets``; see
            :func:`single_tokens`.
        keep: [V] booleans; rows with False, such as padding, are left out of all measures.
        directions: as for :func:`all_but_the_top`.
        on_rows: called with the number of rows of each block that a pass is done with: together
            :data:`PASSES` times the number of rows that are measured.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers, or all of
            its rows are zero; if ``counts``, token ids or ``keep`` do not fit the matrix; if
            ``directions`` is not between 0 and H; if a file cannot be read.
        OSError: if there is no such file or model.
    """
    inputs = _inputs(embeddings, counts, sets, token_ids, keep)
    columns = inputs.matrix.shape[1]
    top = top_directions(columns, directions)
    spectra = _spectra(inputs, columns - top, on_rows)
    clouds = _clouds(inputs, spectra, on_rows)
    log_z = _log_z(inputs, spectra, clouds, on_rows)
    as_is, centered, without_top = _measures(inputs, spectra, clouds, log_z)
    rows, used = len(inputs.matrix), len(spectra.norms)
    return EmbeddingReport(
        **vars(as_is),
        vocab_size=rows,
        hidden_size=columns,
        excluded_rows=rows - used,
        unseen_tokens=inputs.unseen,
        centered=centered,
        all_but_the_top=without_top,
        top_directions=top,
    )


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What is measured: the arguments of :func:`analyze`, checked."""

    matrix: geometry.Embeddings  # [V, H]
    keep: Mask | None  # [V]
    p: Array | None  # counts or probabilities of the rows to keep
    unseen: int | None  # how many tokens have a count of zero
    sets: Sets | None
    words: list[str]
    vectors: Array  # [words, H]


def _inputs(
    embeddings: geometry.Embeddings | nn.Module | str | Path,
    counts: Tensor | NDArray[Any] | None,
    sets: Sets | None,
    token_ids: TokenIds | None,
    keep: Tensor | NDArray[Any] | None,
) -> _Inputs:
    if isinstance(embeddings, str | Path):
        own_counts = Path(embeddings) / COUNTS
        if counts is None and own_counts.is_file():
            counts = read_array(own_counts)
        embeddings = load_embeddings(embeddings)[-1].matrix  # the output's, if there are two
        alive = alive_rows(embeddings)
        if keep is None and alive.any():
            keep = alive
    if isinstance(embeddings, nn.Module):
        embeddings = _matrix_of(embeddings)
    geometry.check(embeddings)
    rows, columns = embeddings.shape
    measured = None if keep is None else geometry.as_mask("keep", keep, rows)
    if measured is not None and not measured.any():
        raise ValueError("keep must be True for at least one row")
    p = None if counts is None else checked_counts(counts, rows)
    unseen = None if p is None else int((p == 0).sum())
    p = p if p is None or measured is None else p[measured]
    words: list[str] = []
    vectors = np.zeros((0, columns))
    if sets is not None:
        if token_ids is None:
            raise ValueError("sets needs token_ids, a function from a word to its token id")
        words, vectors = word_vectors(embeddings, sets, token_ids, measured)
    return _Inputs(embeddings, measured, p, unseen, sets, words, vectors)


@dataclasses.dataclass(frozen=True)
class _Spectra:
    """The mean, and the eigenvalues (ascending) and eigenvectors of E^T E, with and without it."""

    mean: Tensor  # [H]
    norms: Tensor  # [rows], of the rows as they are
    squares: Tensor  # [H]
    axes: Tensor  # [H, H]
    centered_squares: Tensor
    centered_axes: Tensor
    left: int  # how many of the centered axes are left without the top ones

    @property
    def top(self) -> Tensor:
        """The principal directions that are removed, [H, n]."""
        return self.centered_axes[:, self.left :]


def _spectra(inputs: _Inputs, left: int, on_rows: OnRows) -> _Spectra:
    """Two passes, for the mean and for E^T E with the mean removed."""
    mean, norms = geometry.mean_and_norms(inputs.matrix, inputs.keep, on_rows)
    geometry.check_not_zero(float(norms.max()))
    gram = geometry.gram(inputs.matrix, mean, inputs.keep, on_rows)
    # Adding the mean's part is exact; subtracting it from the raw sum would cancel digits.
    squares, axes = torch.linalg.eigh(gram + len(norms) * torch.outer(mean, mean))
    centered_squares, centered_axes = torch.linalg.eigh(gram)
    return _Spectra(mean, norms, squares, axes, centered_squares, centered_axes, left)


class _RowNorms:
    """The norms and the mean cosine of the rows of one variant, block by block."""

    def __init__(self, rows: int, floor: float) -> None:
        self.floor = floor  # what is not longer is a zero with rounding errors
        self.norms = torch.zeros(rows, dtype=torch.float64)
        self.angles = geometry.Angles()

    def add(self, vectors: Tensor, start: int) -> None:
        """Add a block of rows [rows, H], of which the first is number ``start``."""
        norms = vectors.norm(dim=1)
        norms = torch.where(norms > self.floor, norms, 0)
        self.norms[start : start + len(norms)] = norms
        self.angles.add(vectors, norms, self.floor)

    @property
    def units(self) -> tuple[float, float]:
        """What the rows are divided by for the two isotropies: 1, and their mean norm."""
        return 1.0, float(self.norms.mean()) or 1.0


@dataclasses.dataclass(frozen=True)
class _Clouds:
    """The rows of the three variants, and e_i . mu."""

    as_is: _RowNorms
    centered: _RowNorms
    without_top: _RowNorms
    along: Tensor  # [rows]


def _clouds(inputs: _Inputs, spectra: _Spectra, on_rows: OnRows) -> _Clouds:
    """A pass for the norms and angles of each variant."""
    rows, floor = len(spectra.norms), 1e-12 * float(spectra.norms.max())
    clouds = _Clouds(
        _RowNorms(rows, 0.0),
        _RowNorms(rows, floor),
        _RowNorms(rows, floor),
        torch.empty_like(spectra.norms),
    )
    start, top = 0, spectra.top
    for block in geometry.blocks(inputs.matrix, inputs.keep, on_rows):
        clouds.along[start : start + len(block)] = block @ spectra.mean
        clouds.as_is.add(block, start)
        block = block - spectra.mean
        clouds.centered.add(block, start)
        clouds.without_top.add(block - block @ top @ top.T, start)
        start += len(block)
    return clouds


def _log_z(
    inputs: _Inputs, spectra: _Spectra, clouds: _Clouds, on_rows: OnRows
) -> tuple[list[Array], list[Array], list[Array]]:
    """A pass for log Z of each variant, as it is and at unit mean norm, which needs the norms."""
    longest, longest_centered = (float(c.norms.max()) for c in (clouds.as_is, clouds.centered))
    unit, without_top_unit = clouds.centered.units[1], clouds.without_top.units[1]
    as_is, centered = log_partitions(
        inputs.matrix,
        [
            Directions(spectra.axes, longest, clouds.as_is.units),
            Directions(
                spectra.centered_axes, longest_centered, (1.0, unit, without_top_unit), spectra.mean
            ),
        ],
        inputs.keep,
        on_rows,
    )
    # Without the top directions c . e_i is the same for all others, and 0 along these.
    rows, without_top = len(spectra.norms), []
    for log_z in (centered[0], centered[2]):
        changed = log_z.copy()
        changed[:, spectra.left :] = math.log(rows)
        without_top.append(changed)
    return as_is, centered[:2], without_top


def _measures(
    inputs: _Inputs,
    spectra: _Spectra,
    clouds: _Clouds,
    log_z: tuple[list[Array], list[Array], list[Array]],
) -> tuple[Measures, Measures, Measures]:
    """The measures of the three variants."""
    rows, columns = len(spectra.norms), len(spectra.mean)
    squares_without_top = spectra.centered_squares.clone()
    squares_without_top[spectra.left :] = 0
    centered_vectors = inputs.vectors - as_array(spectra.mean)
    top = as_array(spectra.top)
    vectors = inputs.vectors, centered_vectors, centered_vectors - centered_vectors @ top @ top.T
    variants = []
    for cloud, squares, logs, words in zip(
        (clouds.as_is, clouds.centered, clouds.without_top),
        (spectra.squares, spectra.centered_squares, squares_without_top),
        log_z,
        vectors,
    ):
        # IsoScore is that of the covariance, by definition.
        is_raw = cloud is clouds.as_is
        spread, moved = (spectra.centered_squares, clouds.centered) if is_raw else (squares, cloud)
        variants.append(
            Measures.compute(
                MeasureInputs(
                    columns=columns,
                    norms=as_array(cloud.norms),
                    mean_norm=float(spectra.mean.norm()) if is_raw else 0.0,
                    values=geometry.singular_values_of(squares.sort().values, rows),
                    spread=geometry.singular_values_of(spread.sort().values, rows)
                    if moved.norms.any()
                    else None,
                    log_z=logs[0],
                    unit_log_z=logs[1],
                    mean_cosine=cloud.angles.mean_cosine(),
                    along=as_array(clouds.along) if is_raw else None,
                    p=inputs.p,
                    word_similarity=None
                    if inputs.sets is None
                    else similarity_of(inputs.words, words, inputs.sets, cloud.floor),
                )
            )
        )
    as_is, centered, without_top = variants
    return as_is, centered, without_top


def _matrix_of(module: nn.Module) -> Tensor:
    """The output embeddings of a model, or its input embeddings, or the matrix of a layer."""
    for weight in (*model_embeddings(module).values(), getattr(module, "weight", None)):
        if isinstance(weight, Tensor):
            return weight.detach()
    layers = {name: m for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    if len(layers) == 1:
        return next(iter(layers.values())).weight.detach()
    has = f"has several: {', '.join(layers)}" if layers else "has none"
    raise ValueError(
        f"embeddings: which matrix of {type(module).__name__} is meant is not clear, as it {has}. "
        "Pass the matrix itself, such as model.embed_tokens.weight"
    )
