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
from coupled_adam.embeddings.centering import top_directions
from coupled_adam.embeddings.diagnosis import diagnose
from coupled_adam.embeddings.frequency import checked_counts
from coupled_adam.embeddings.geometry import Array, OnRows, as_array
from coupled_adam.embeddings.loading import load_embeddings, model_embeddings
from coupled_adam.embeddings.measures import MEASURES, Measures, Summary
from coupled_adam.embeddings.partition import Directions, extreme_directions, sum_partitions
from coupled_adam.embeddings.similarity import Sets, TokenIds, similarity_of, word_vectors
from coupled_adam.embeddings.undertrained import alive_rows
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

    def sentences(
        self, model: str = "MODEL", role: str = "", dead: Sequence[str] = ()
    ) -> list[str]:
        """The diagnosis, sentence by sentence; the arguments are those of :func:`diagnose`."""
        size = self.vocab_size - self.excluded_rows, self.hidden_size
        return diagnose(self, self.centered, size, model, role, dead)

    def table(self) -> Table:
        """All measures of the three variants, and the healthy ranges of the first."""
        rows: list[list[str | Cell]] = []
        for measure in MEASURES.values():
            value, *changed = (measure.of(variant) for variant in self._variants)
            if value is not None:
                cell = Cell(measure.text(value), outside=not measure.is_healthy(value))
                healthy = str(measure.healthy or "")
                rows.append(
                    [measure.label, measure.symbol, cell, *map(measure.text, changed), healthy]
                )
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
    computed in float64, except for the exponents of the isotropy of a large matrix, if the relative
    error of the isotropy is then at most 1e-4 (see :func:`sum_partitions`).

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
    top = top_directions(columns, directions)
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

    mean, norms = geometry.mean_and_norms(embeddings, measured, on_rows)
    geometry.check_not_zero(float(norms.max()))
    used = len(norms)
    centred_gram = geometry.gram(embeddings, mean, measured, on_rows)
    # Adding the mean's part is exact; subtracting it from the raw sum would cancel digits.
    squares, basis = torch.linalg.eigh(centred_gram + used * torch.outer(mean, mean))
    centred_squares, centred_basis = torch.linalg.eigh(centred_gram)
    left = columns - top
    top_axes = centred_basis[:, left:]

    # Rows equal to the mean differ from it by rounding errors only; the floor treats them as zero.
    floor = 1e-12 * float(norms.max())
    raw, centred, topless = _Cloud(used, 0.0), _Cloud(used, floor), _Cloud(used, floor)
    along = torch.empty_like(norms)
    start = 0
    for block in geometry.blocks(embeddings, measured, on_rows):
        along[start : start + len(block)] = block @ mean
        raw.add(block, start)
        block = block - mean
        centred.add(block, start)
        topless.add(block - block @ top_axes @ top_axes.T, start)
        start += len(block)

    # Z comes last, because the isotropy at unit mean norm needs the norms; and only for directions
    # that can have the largest or smallest.
    means, variances = mean @ basis, centred_squares / used
    raw_directions = Directions(
        basis, raw.longest, raw.views(means, squares / used - means**2, centred.longest)
    )
    # In the basis of the principal directions, removing the top ones means dropping columns.
    centred_views = centred.views(0 * means, variances, centred.longest)
    centred_views += topless.views(0 * means[:left], variances[:left], topless.longest)
    centred_directions = Directions(centred_basis, centred.longest, centred_views, mean)
    sum_partitions(embeddings, [raw_directions, centred_directions], measured, on_rows)
    topless_squares = centred_squares.clone()
    topless_squares[left:] = 0
    centred_vectors = vectors - as_array(mean)
    axes = as_array(top_axes)
    topless_vectors = centred_vectors - centred_vectors @ axes @ axes.T

    def measures(
        cloud: _Cloud, squares: Tensor, log_z: Sequence[Array], word_vectors: Array, **raw: Any
    ) -> Measures:
        """Those of a cloud, whose mean is zero unless ``raw`` has what depends on it."""
        norms = as_array(cloud.norms)
        values = geometry.singular_values_of(squares.sort().values, used)
        # Z of a direction that was removed is that of a zero for every row.
        removed = (0, 0), (0, int(squares[-1] == 0))
        of_zero = [np.pad(z, removed, constant_values=math.log(used)) for z in log_z]
        scores = None if sets is None else similarity_of(words, word_vectors, sets, cloud.floor)
        centred = {"mean_norm": 0.0, "along": None, "spread": values if norms.any() else None}
        return Measures.of(
            Summary(
                columns=columns,
                norms=norms,
                values=values,
                log_z=of_zero[0],
                unit_log_z=of_zero[1],
                mean_cosine=cloud.angles.mean_cosine(),
                p=p,
                word_similarity=scores,
                **(centred | raw),
            )
        )

    # IsoScore is that of the covariance, by definition.
    spread = None
    if centred.norms.any():
        spread = geometry.singular_values_of(centred_squares, used)
    of_mean = {"mean_norm": float(mean.norm()), "along": as_array(along), "spread": spread}
    log_z = [raw_directions.log_z(view) for view in range(2)]
    centred_log_z = [centred_directions.log_z(view) for view in range(4)]
    return EmbeddingReport(
        **vars(measures(raw, squares, log_z, vectors, **of_mean)),
        vocab_size=rows,
        hidden_size=columns,
        excluded_rows=rows - used,
        unseen_tokens=unseen,
        centered=measures(centred, centred_squares, centred_log_z[:2], centred_vectors),
        all_but_the_top=measures(topless, topless_squares, centred_log_z[2:], topless_vectors),
        top_directions=top,
    )


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


class _Cloud:
    """The norms and the angles of one of a report's three variants, block by block."""

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
    def longest(self) -> float:
        """The largest norm."""
        return float(self.norms.max())

    def views(self, means: Tensor, variances: Tensor, reach: float) -> list[tuple[float, Tensor]]:
        """As they are and at unit mean norm: see :class:`Directions`."""
        views = [(1.0, True), (float(self.norms.mean()) or 1.0, False)]
        return [
            (unit, extreme_directions(means, variances, reach, unit, published))
            for unit, published in views
        ]
