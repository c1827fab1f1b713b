"""All measures of one embedding matrix, as an object, a table, and JSON."""

import dataclasses
import html
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.diagnosis import NO_VERDICT, diagnose
from coupled_adam.embeddings.frequency import checked_counts
from coupled_adam.embeddings.geometry import Array, Mask, as_array, top_directions
from coupled_adam.embeddings.loading import load_embeddings, model_embeddings
from coupled_adam.embeddings.measures import MEASURES, MeasureInputs, Measures, numbers
from coupled_adam.embeddings.partition import Directions, log_partitions
from coupled_adam.embeddings.references import span
from coupled_adam.embeddings.similarity import Sets, TokenIds, similarity_of, word_vectors
from coupled_adam.inputs import read_array
from coupled_adam.rendering.tables import Cell, Table
from coupled_adam.runs import COUNTS

Row = list[str | Cell]
"""A label, a symbol, a value for each matrix, and the range of the references."""


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
        return f"<p>{html.escape(self.diagnosis)}</p>{self.table().__html__()}"

    @property
    def diagnosis(self) -> str:
        """Where the measures lie among reference matrices, what that means, and what not."""
        return " ".join([*self.sentences(), NO_VERDICT])

    def sentences(self, **more: Any) -> list[str]:
        """The diagnosis in sentences, with what :func:`diagnose` is told beside the measures."""
        rows = self.vocab_size - self.excluded_rows
        counted = rows - (self.unseen_tokens or 0)
        return diagnose(self, self.centered, (rows, self.hidden_size), counted, **more)

    def table(self) -> Table:
        """All measures of the three variants, and the range of the references for the first."""
        forms = self, self.centered, self.all_but_the_top
        columns = ["", "", "as it is", "- mean", f"- top {self.top_directions}", "references"]
        title = f"Embeddings, {self.vocab_size} x {self.hidden_size}"
        return Table(columns, measure_rows(forms, all_measures=True), title, left=(0, 1, 5))

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)


def measure_rows(
    reports: Sequence[Measures | Mapping[str, Any]],
    *,
    all_measures: bool = False,
    as_is: bool = True,
) -> list[Row]:
    """A row for each measure, or for each of the first, that one of some reports or dicts has.

    Those that can be compared between models come before those that depend on norms or sizes.
    Unless these are of the embeddings ``as_is``, there are no measures of the mean itself, which
    say nothing once it is removed, and no references.
    """
    rows: list[Row] = []
    of_each = [numbers(MEASURES, report) for report in reports]
    for measure in sorted(MEASURES.values(), key=lambda measure: not measure.comparable):
        values = [of_one[measure.key] for of_one in of_each]
        shown = (all_measures or measure.first) and (as_is or not measure.about_mean)
        # Without its mean or top directions a matrix has zeros that mean nothing.
        if not shown or not any(value is not None if as_is else value for value in values):
            continue
        references = span(measure.key) if as_is else ""
        rows.append([measure.label, measure.symbol, *measure.texts(values), references])
    return rows


def analyze(
    embeddings: geometry.Embeddings | nn.Module | str | Path,
    counts: Tensor | NDArray[Any] | None = None,
    *,
    sets: Sets | None = None,
    token_ids: TokenIds | None = None,
    keep: Tensor | NDArray[Any] | None = None,
    directions: int | None = None,
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

    Raises:
        ValueError: if ``embeddings`` is not a non-empty matrix of finite real numbers, or all of
            its rows are zero; if ``counts``, token ids or ``keep`` do not fit the matrix; if
            ``directions`` is not between 0 and H; if a file cannot be read.
        OSError: if there is no such file or model.
    """
    inputs = _resolve(embeddings, counts, sets, token_ids, keep)
    rows, columns = inputs.matrix.shape
    # Two passes, one, and one: each needs what those before it have found.
    top = top_directions(columns, directions)
    forms = _forms(inputs, top)
    along = _norms_and_angles(inputs, forms)
    _partitions(inputs, forms)
    as_is, centered, without_top = _measures(inputs, forms, along)
    return EmbeddingReport(
        **vars(as_is),
        vocab_size=rows,
        hidden_size=columns,
        excluded_rows=rows - len(along),
        unseen_tokens=inputs.unseen,
        centered=centered,
        all_but_the_top=without_top,
        top_directions=top,
    )


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What is measured: the arguments of :func:`analyze`, found and checked."""

    matrix: geometry.Embeddings  # [V, H]
    keep: Mask | None  # [V]
    p: Array | None  # counts or probabilities of the rows to keep
    unseen: int | None  # how many tokens have a count of zero
    sets: Sets | None
    words: list[str]
    vectors: Array  # [words, H]


def _resolve(
    embeddings: geometry.Embeddings | nn.Module | str | Path,
    counts: Tensor | NDArray[Any] | None,
    sets: Sets | None,
    token_ids: TokenIds | None,
    keep: Tensor | NDArray[Any] | None,
) -> _Inputs:
    """Find and check what :func:`analyze` is given; ``counts`` and ``keep`` are [V]."""
    # The files of a model or a run, which also has counts.
    if isinstance(embeddings, str | Path):
        own_counts = Path(embeddings) / COUNTS
        if counts is None and own_counts.is_file():
            counts = read_array(own_counts)
        entry = load_embeddings(embeddings)[-1]  # the output's, if there are two
        if entry.left_out:
            warnings.warn(f"{embeddings}: not measured: {'; '.join(entry.left_out)}", stacklevel=3)
        embeddings = entry.matrix
        # Without any row to keep, geometry says what is wrong with the matrix.
        alive = geometry.norms_or_nan(embeddings) > 0
        if keep is None and alive.any():
            keep = alive
    if isinstance(embeddings, nn.Module):
        embeddings = _matrix_of(embeddings)
    geometry.check(embeddings)
    rows, columns = embeddings.shape
    # Counts and words are those of the rows to keep.
    measured = None if keep is None else np.asarray(keep)
    if measured is not None and (measured.shape != (rows,) or measured.dtype != np.bool_):
        raise ValueError(
            f"keep must hold a boolean for each of the {rows} embeddings, but has the shape "
            f"{list(measured.shape)} and the dtype {measured.dtype}"
        )
    if measured is not None and not measured.any():
        raise ValueError("keep must be True for at least one row")
    p = None if counts is None else checked_counts(counts, rows)
    unseen = None if p is None else int((p == 0).sum())  # of all rows, also those left out
    if p is not None and measured is not None:
        p = checked_counts(p[measured], int(measured.sum()))
    words: list[str] = []
    vectors = np.zeros((0, columns))
    if sets is not None:
        if token_ids is None:
            raise ValueError("sets needs token_ids, a function from a word to its token id")
        words, vectors = word_vectors(embeddings, sets, token_ids, measured)
    return _Inputs(
        matrix=embeddings,
        keep=measured,
        p=p,
        unseen=unseen,
        sets=sets,
        words=words,
        vectors=vectors,
    )


@dataclasses.dataclass
class _Form:
    """The rows in one of their three forms: as they are, or with something subtracted."""

    mean: Tensor  # [H], what is subtracted from each row
    top: Tensor  # [H, n], the directions that are removed then
    squares: Tensor  # [H], the eigenvalues of E^T E, ascending but for those that are removed
    axes: Tensor  # [H, H], and its eigenvectors
    floor: float  # what is not longer is a zero with rounding errors
    # What the passes find out.
    norms: Tensor = dataclasses.field(init=False)  # [rows]
    directions: Tensor = dataclasses.field(init=False)  # [H], the sum of the rows at unit norm
    log_z: Sequence[Array] = ()  # [2, n] each, of the rows as they are, and at unit mean norm

    def changed(self, block: Tensor) -> Tensor:
        """Rows of the matrix [n, H] in this form."""
        block = block - self.mean
        return block - block @ self.top @ self.top.T  # [n, H]; without top, [H, 0], as it is

    @property
    def unit(self) -> float:
        """The mean norm; 1 if all rows are zero."""
        return float(self.norms.mean()) or 1.0

    @property
    def singular_values(self) -> Array:
        """The min(V, H) singular values, descending, from their squares."""
        squares = as_array(self.squares.sort(descending=True).values)
        # Rounding may have made a zero negative; and of V < H rows only V are not zero.
        values: Array = np.sqrt(np.clip(squares, 0, None))[: len(self.norms)]
        return values

    @property
    def mean_cosine(self) -> float:
        """The mean cosine over all pairs of rows; NaN for fewer than two that are not zero."""
        used = int((self.norms > 0).sum())
        # The squared sum contains every pair twice, and each row paired with itself.
        pairs = used * (used - 1)
        return (float((self.directions**2).sum()) - used) / pairs if pairs else math.nan


def _forms(inputs: _Inputs, top: int) -> list[_Form]:
    """The three forms, after two passes: for the mean, and for E^T E with the mean removed."""
    mean, norms = geometry.mean_and_norms(inputs.matrix, inputs.keep)
    geometry.check_not_zero(norms)
    gram = geometry.gram(inputs.matrix, mean, inputs.keep)
    squares, axes = torch.linalg.eigh(gram)
    # Adding the mean's part is exact; subtracting it from the raw sum would cancel digits.
    raw_squares, raw_axes = torch.linalg.eigh(gram + len(norms) * torch.outer(mean, mean))
    # The eigenvalues ascend, so that the last directions are the top ones.
    left, none = len(mean) - top, axes[:, :0]
    squares_left = torch.cat([squares[:left], torch.zeros_like(squares[left:])])
    floor = 1e-12 * float(norms.max())  # rows equal to the mean leave rounding errors
    as_is = _Form(
        mean=torch.zeros_like(mean), top=none, squares=raw_squares, axes=raw_axes, floor=0.0
    )
    centered = _Form(mean=mean, top=none, squares=squares, axes=axes, floor=floor)
    without_top = dataclasses.replace(centered, top=axes[:, left:], squares=squares_left)
    return [as_is, centered, without_top]


def _norms_and_angles(inputs: _Inputs, forms: list[_Form]) -> Array:
    """A pass for the norms and directions of each form; returns e_i . mu, [rows]."""
    mean = forms[1].mean
    rows = len(inputs.matrix) if inputs.keep is None else int(inputs.keep.sum())
    along, start = torch.empty(rows, dtype=torch.float64), 0
    for form in forms:
        form.norms, form.directions = torch.empty_like(along), torch.zeros_like(mean)
    for block in geometry.blocks(inputs.matrix, inputs.keep):
        chunk = slice(start, start + len(block))
        start += len(block)
        along[chunk] = block @ mean
        for form in forms:
            changed = form.changed(block)
            norms = changed.norm(dim=1)
            used = norms > form.floor
            form.norms[chunk] = torch.where(used, norms, 0)
            # [n] @ [n, H]: the sum of the rows at unit norm.
            form.directions += torch.where(used, 1 / norms, 0) @ changed
    return as_array(along)


def _partitions(inputs: _Inputs, forms: list[_Form]) -> None:
    """A pass for log Z of each form, as it is and at unit mean norm, which needs the norms."""
    as_is, centered, without_top = forms
    longest, longest_centered = (float(v.norms.max()) for v in (as_is, centered))
    units = 1.0, centered.unit, without_top.unit
    as_is.log_z, (*centered.log_z, log_z_at_unit) = log_partitions(
        inputs.matrix,
        [
            Directions(as_is.axes, longest, (1.0, as_is.unit)),
            Directions(centered.axes, longest_centered, units, centered.mean),
        ],
        inputs.keep,
    )
    # Without the top directions c . e_i is the same for all others, and 0 along these.
    removed = np.arange(len(as_is.mean)) >= len(as_is.mean) - without_top.top.shape[1]
    nothing = math.log(len(as_is.norms))
    without_top.log_z = [
        np.where(removed, nothing, log_z) for log_z in (centered.log_z[0], log_z_at_unit)
    ]


def _measures(inputs: _Inputs, forms: list[_Form], along: Array) -> list[Measures]:
    """The measures of the three forms; ``along`` is e_i . mu, [rows]."""
    as_is, centered, _ = forms
    measures = []
    for form in forms:
        # IsoScore is that of the covariance, by definition.
        spread = centered if form is as_is else form
        similarity = None
        if inputs.sets is not None:
            words = as_array(form.changed(torch.from_numpy(inputs.vectors).to(form.mean)))
            similarity = similarity_of(inputs.words, words, inputs.sets, form.floor)
        measured = MeasureInputs(
            columns=len(form.mean),
            norms=as_array(form.norms),
            mean_norm=float(centered.mean.norm()) if form is as_is else 0.0,
            values=form.singular_values,
            spread=spread.singular_values if spread.norms.any() else None,
            log_z=form.log_z[0],
            unit_log_z=form.log_z[1],
            mean_cosine=form.mean_cosine,
            along=along if form is as_is else None,
            p=inputs.p,
            word_similarity=similarity,
        )
        measures.append(Measures.compute(measured))
    return measures


def _matrix_of(module: nn.Module) -> Tensor:
    """The output embeddings of a model, or its input embeddings, or the matrix of a layer."""
    for weight in (*model_embeddings(module).values(), getattr(module, "weight", None)):
        if isinstance(weight, Tensor):
            return weight.detach()
    raise ValueError(
        f"embeddings: which matrix of {type(module).__name__} is meant is not clear: pass the "
        "matrix itself, such as model.embed_tokens.weight"
    )
