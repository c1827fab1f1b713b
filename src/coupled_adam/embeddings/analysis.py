"""Analyze the embeddings of models, however they were trained."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings import similarity
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.embeddings.frequency import unigram_counts
from coupled_adam.embeddings.geometry import Array, Mask, norms_or_nan
from coupled_adam.embeddings.loading import EmbeddingMatrix, load_embeddings
from coupled_adam.embeddings.repair import least_norm, repair_commands
from coupled_adam.embeddings.report import EmbeddingReport, analyze
from coupled_adam.embeddings.vocabulary import Vocabulary, read_vocabulary
from coupled_adam.errors import UsageError, prefixed_usage_error, printable
from coupled_adam.files import shortest_names
from coupled_adam.inputs import read_array
from coupled_adam.rendering.tables import Table
from coupled_adam.runs import COUNTS, model_source
from coupled_adam.text.token_files import Tokens, token_file
from coupled_adam.text.tokenizers import load_tokenizer, token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The report of one embedding matrix of a model."""

    model: str  # as the user gave it
    name: str  # the model's, which tells it from others in a table
    embeddings: EmbeddingMatrix
    report: EmbeddingReport
    padding_rows: int | None  # rows that belong to no token; None without a tokenizer
    counts: NDArray[Any] | None  # unigram counts [V]
    keep: Mask | None  # the rows that were measured, [V]; None if all were
    norms: Array  # [V], of all rows; NaN for those that are not finite
    dead: list[int]  # the rows that are zero or not finite, which are never measured
    tiny: list[int]  # other rows that a repair would replace
    repair_command: str  # which gives dead rows new values; empty where it would be refused
    recenter_command: str  # which removes the mean; empty where it would be refused
    tokenizer: PreTrainedTokenizerBase | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """What the rows stand for; ids alone if nothing says so."""
        return read_vocabulary(self.tokenizer, len(self.embeddings.matrix))

    @property
    def label(self) -> str:
        """The model's name, and the role of the matrix."""
        entry = self.embeddings
        if entry.role == "embeddings":  # of which nothing is known
            return self.name
        side = f"{entry.side} " * (entry.role == "input" and bool(entry.side))
        return f"{self.name}, {side}{entry.role}"

    @functools.cached_property
    def diagnosis(self) -> list[str]:
        """The verdict, then where the measures lie and what that means, in sentences."""
        return self.report.sentences(
            role=self.embeddings.role,
            dead=[self.vocabulary.name(row) for row in self.dead],
            tiny=[self.vocabulary.name(row) for row in self.tiny],
            left_out=self.embeddings.left_out,
            repair=self.repair_command,
            recenter=self.recenter_command,
        )

    @property
    def identity(self) -> dict[str, str]:
        """Which matrix it is, for JSON."""
        entry = self.embeddings
        return {"model": self.model, "role": entry.role, "tensor": entry.tensor}

    def token(self, row: int) -> dict[str, Any]:
        """The id, the token and its count, for JSON."""
        return {
            "id": row,
            "token": self.vocabulary.texts[row],
            "category": str(self.vocabulary.categories[row]),
            "count": None if self.counts is None else self.counts[row].item(),
        }

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON: a description of the matrix, and the report's attributes."""
        return {
            "diagnosis": self.diagnosis,
            **self.identity,
            "left_out": [*self.embeddings.left_out],
            "dtype": str(self.embeddings.matrix.dtype).removeprefix("torch."),
            "padding_rows": self.padding_rows,
            "dead_rows": self.dead,
            "tiny_rows": self.tiny,
            **self.report.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question about the tokens of a matrix, beyond its measures."""

    analysis: Analysis
    numbers: dict[str, Any]  # for JSON
    table: Table  # of all tokens
    said: Sequence[str] = ()  # what it adds to the verdict
    is_ranking: bool = True  # whether the first rows of the table matter most

    def shown(self, number: int) -> Table:
        """The table, or the first rows of a ranking."""
        hidden = len(self.table.rows) - number
        if not self.is_ranking or hidden <= 0:
            return self.table
        notes = [*self.table.notes, f"{hidden} more are not shown; --json has them"]
        return dataclasses.replace(self.table, rows=self.table.rows[:number], notes=notes)


def analyze_model(
    model: str,
    inputs: AnalysisInputs,
    *,
    name: str | None = None,
    revision: str | None = None,
    sets: similarity.Sets | None = None,
    tokens: Sequence[str] = (),
    device: str = "cpu",
    status: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> list[Analysis]:
    """Analyze the embeddings of a model: one matrix if they are tied, else input and output.

    Rows that are zero or not finite are left out, and those that ``inputs`` excludes. Raises
    UsageError if there is no such model, or no embeddings or token in it; if counts, a tokenizer or
    a text do not fit the embeddings, or are needed but were not given.

    Args:
        model, revision: as :func:`load_embeddings` takes them.
        name: what it is called in tables; None is its last name.
        tokens: those that the model must have, as :meth:`Vocabulary.row` takes them.
        status: shows what is being measured.
    """
    (name,) = [name] if name else shortest_names([model])
    with prefixed_usage_error("", (ValueError, OSError)):
        matrices = load_embeddings(model, tensor=inputs.tensor, revision=revision)
    needed = sets is not None or "padding" in (inputs.exclude or ()) or inputs.text is not None
    tokenizer = find_tokenizer(model, inputs.tokenizer, revision, needed)
    # A token that is misspelt should be found out before the measures take minutes.
    if tokens:
        vocabulary = read_vocabulary(tokenizer, min(len(entry.matrix) for entry in matrices))
        for token in tokens:
            vocabulary.row(token)
    token_ids = None if tokenizer is None else similarity.single_tokens(tokenizer)
    analyses = []
    for entry in matrices:
        is_token = None  # [V]
        if tokenizer is not None:
            is_token = np.isin(np.arange(len(entry.matrix)), [*tokenizer.get_vocab().values()])
        norms = norms_or_nan(entry.matrix)
        with prefixed_usage_error(f"{model}: "):
            counts = _counts(model, inputs, tokenizer, is_token, len(entry.matrix), entry.config)
            keep = _rows_to_measure(norms > 0, is_token, counts, inputs.exclude or ())
            with status(f"measuring {name}, {entry.role}"):
                report = analyze(
                    entry.matrix.to(device), counts, sets=sets, token_ids=token_ids, keep=keep
                )
        dead: list[int] = np.flatnonzero(~(norms > 0)).tolist()
        tiny: list[int] = np.flatnonzero((norms > 0) & (norms <= least_norm(norms))).tolist()
        # A model's embeddings are repaired, and not any tensor.
        repair = recenter = ""
        if inputs.tensor is None:
            repair, recenter = repair_commands(model, revision, entry, [*dead, *tiny])
        analyses.append(
            Analysis(
                model=model,
                name=name,
                embeddings=entry,
                report=report,
                padding_rows=None if is_token is None else int((~is_token).sum()),
                counts=counts,
                keep=keep,
                norms=norms,
                dead=dead,
                tiny=tiny,
                repair_command=repair,
                recenter_command=recenter,
                tokenizer=tokenizer,
            )
        )
    return analyses


def _rows_to_measure(
    alive: Mask, is_token: Mask | None, counts: NDArray[Any] | None, exclude: Collection[str]
) -> Mask | None:
    """The rows to measure, [V]; None for all."""
    # Without any row to measure, analyze says what is wrong with the matrix.
    keep = alive | (not alive.any())
    if "padding" in exclude and is_token is not None:
        keep &= is_token
    if "unseen" in exclude:
        if counts is None:
            raise UsageError("--exclude unseen needs --counts, --text or --tokens")
        keep &= counts > 0
    if not keep.any():
        raise UsageError(f"--exclude {' '.join(exclude)} leaves no row of the embeddings")
    return None if keep.all() else keep


def word_similarity_sets(place: str | Path) -> dict[str, similarity.WordSimilaritySet]:
    """The word-similarity sets in a file or folder; or those to ``"download"`` and keep."""
    with prefixed_usage_error("--word-similarity: ", (OSError, ValueError)):
        if str(place) == "download":
            place = similarity.download_word_similarity()
        return similarity.read_word_similarity(place)


def find_tokenizer(
    model: str, named: str | None, revision: str | None, needed: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that ``--tokenizer`` names, or a model's own; None if it has none.

    Raises UsageError if the named one cannot be read, or there is none and it is needed.
    """
    if named is not None:
        with prefixed_usage_error("--tokenizer ", UsageError):
            return load_tokenizer(named)
    if Path(model).is_file():
        if needed:
            raise UsageError(f"{model} is a file without a tokenizer: pass one with --tokenizer")
        return None
    name = model_source(model)
    try:
        return load_tokenizer(name, revision)
    except UsageError as error:
        if needed:
            raise UsageError(f"{error}: pass a tokenizer with --tokenizer") from None
        if any(Path(name).glob("tokenizer*")):  # which are damaged
            warnings.warn(printable(f"{error}: the analysis goes on without one"), stacklevel=3)
        return None


def _counts(
    model: str,
    inputs: AnalysisInputs,
    tokenizer: PreTrainedTokenizerBase | None,
    is_token: Mask | None,
    rows: int,
    config: Mapping[str, Any],
) -> NDArray[Any] | None:
    """How often each token occurs, [rows], from what is named or from a run's folder."""
    if inputs.text is not None:
        assert tokenizer is not None
        counts = np.zeros(rows, dtype=np.int64)
        with prefixed_usage_error("--text ", UsageError):
            for piece in token_pieces(inputs.text, tokenizer, config):  # in bounded memory
                counts += unigram_counts(piece, rows)
        return counts
    if inputs.tokens:
        with prefixed_usage_error("--tokens ", UsageError):
            ids = Tokens([token_file(path, rows, inputs.token_dtype) for path in inputs.tokens])
            return unigram_counts(ids, rows)
    if inputs.counts is not None:
        with prefixed_usage_error("--counts ", (ValueError, OSError)):
            return _read_counts(inputs.counts, is_token, rows)
    path = Path(model) / COUNTS  # of a run
    return _read_counts(path, is_token, rows) if path.exists() else None


def _read_counts(path: Path, is_token: Mask | None, rows: int) -> NDArray[Any]:
    """Counts in a ``.npy`` file, [rows]; 0 for padding beyond them, as ``is_token`` [rows] says."""
    counts = read_array(path)
    # Training counts the tokens of its vocabulary, to which the model's matrix may add padding.
    missing = rows - counts.size
    is_padding = is_token is not None and not is_token[counts.size :].any()
    if counts.ndim != 1 or missing < 0 or (missing > 0 and not is_padding):
        raise ValueError(
            f"{path} has the shape {list(counts.shape)}, but must hold one number for each of the "
            f"{rows} rows of the embeddings, except padding at their end"
        )
    return np.append(counts, np.zeros(missing, counts.dtype))
