"""Analyze the embeddings of models, however they were trained."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from coupled_adam.embeddings import similarity
from coupled_adam.embeddings.frequency import unigram_counts
from coupled_adam.embeddings.geometry import Mask, alive_rows
from coupled_adam.embeddings.loading import EmbeddingMatrix, load_embeddings
from coupled_adam.embeddings.report import PASSES, EmbeddingReport, analyze
from coupled_adam.embeddings.vocabulary import Vocabulary, read_vocabulary
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError, one_line, printable, refused
from coupled_adam.runs import COUNTS, MODEL, is_run
from coupled_adam.text.token_files import Tokens, token_file
from coupled_adam.text.tokenizers import load_tokenizer, token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Excluded = Literal["padding", "unseen"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where to find what an analysis needs and the model's folder does not contain."""

    tensor: str | None = None  # the embeddings in the file; None to find them by known names
    revision: str | None = None  # a branch, tag or commit, for models on the Hugging Face hub
    tokenizer: str | None = None  # a folder, or an id on the hub; None for the model's own
    counts: Path | None = None  # a .npy file with unigram counts [V]
    text: Path | None = None  # a file or folder of text, whose tokens are counted
    tokens: Sequence[Path] = ()  # token files of nanoGPT and llm.c, whose tokens are counted


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The report of one embedding matrix of a model."""

    model: str  # as the user gave it
    embeddings: EmbeddingMatrix
    report: EmbeddingReport
    padding_rows: int | None  # rows that belong to no token; None without a tokenizer
    counts: NDArray[Any] | None  # unigram counts [V]
    keep: Mask | None  # the rows that were measured, [V]; None if all were
    dead: list[int]  # the rows that are zero or not finite, which are never measured
    tokenizer: PreTrainedTokenizerBase | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """What the rows stand for; ids alone if the model has no tokenizer."""
        return read_vocabulary(self.tokenizer, len(self.embeddings.matrix))

    @property
    def label(self) -> str:
        """The model's name, and the role of the matrix."""
        name = Path(self.model).name or self.model
        return name if self.embeddings.role == "embeddings" else f"{name}, {self.embeddings.role}"

    @property
    def diagnosis(self) -> list[str]:
        """Whether the embeddings are healthy, and what to do next, in sentences."""
        names = [self.vocabulary.name(row) for row in self.dead]
        return self.report.sentences(self.model, self.embeddings.role, names)

    @property
    def matrix(self) -> dict[str, str]:
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
            **self.matrix,
            "dtype": str(self.embeddings.matrix.dtype).removeprefix("torch."),
            "padding_rows": self.padding_rows,
            "dead_rows": self.dead,
            **self.report.to_dict(),
        }


def analyze_model(
    model: str,
    source: Source,
    *,
    sets: similarity.Sets | None = None,
    exclude: Collection[Excluded] = (),
    directions: int | None = None,
    tokens: Sequence[str] = (),
    device: str = "cpu",
) -> list[Analysis]:
    """Analyze the embeddings of a model: one matrix if they are tied, else input and output.

    Rows that are zero or not finite are left out; with ``exclude``, also those that belong to no
    token of the tokenizer (``"padding"``), and tokens with a count of zero (``"unseen"``).
    ``tokens`` are those that the model must have, as :meth:`Vocabulary.row` takes them.

    Raises:
        UsageError: if there is no such model, or no embeddings or token in it; if counts, a
            tokenizer or a text do not fit the embeddings, or are needed but were not given.
    """
    needed = bool(sets) or "padding" in exclude
    # One that is named is loaded before the work, since it may be misspelt.
    tokenizer = None if source.tokenizer is None else find_tokenizer(model, source, needed)
    option = "" if source.tensor is None else f"--tensor {source.tensor}: "
    with refused(option, (ValueError, OSError)):
        matrices = load_embeddings(model, tensor=source.tensor, revision=source.revision)
    for entry in matrices:
        width = entry.matrix.shape[1]
        if (directions or 0) > width:
            raise UsageError(
                f"--top {directions}: the embeddings of {model} have only {width} directions"
            )
    if source.tokenizer is None:
        tokenizer = find_tokenizer(model, source, needed)
    # A token that is misspelt should be found out before the measures take minutes.
    if tokens:
        vocabulary = read_vocabulary(tokenizer, min(len(entry.matrix) for entry in matrices))
        for token in tokens:
            vocabulary.row(token)
    analyses = []
    for entry in matrices:
        rows = len(entry.matrix)
        with refused(f"{model}: "):
            is_token = token_ids = padding = None
            if tokenizer is not None:
                ids = np.array(sorted(tokenizer.get_vocab().values()))
                if "padding" in exclude and ids[-1] >= rows:
                    raise ValueError(
                        f"the tokenizer has a token with id {ids[-1]}, but the embeddings have "
                        f"only {rows} rows. --exclude padding needs the model's own tokenizer"
                    )
                is_token = np.isin(np.arange(rows), ids)
                token_ids, padding = similarity.single_tokens(tokenizer), int((~is_token).sum())
            counts = _counts(model, source, tokenizer, rows, is_token)
            alive = alive_rows(entry.matrix)
            # Without any row to measure, analyze says what is wrong with the matrix.
            measured = alive | (not alive.any())
            if "padding" in exclude and is_token is not None:
                measured &= is_token
            if "unseen" in exclude:
                if counts is None:
                    raise UsageError("--exclude unseen needs --counts, --text or --tokens")
                measured &= counts > 0
            if not measured.any():
                raise UsageError(f"--exclude {' '.join(exclude)} leaves no row of the embeddings")
            total, keep = PASSES * int(measured.sum()), None if measured.all() else measured
            label = f"measuring {printable(Path(model).name)}"
            with tqdm(
                total=total, desc=label, unit=" rows", unit_scale=True, disable=None, leave=False
            ) as bar:
                report = analyze(
                    entry.matrix.to(device),
                    counts,
                    sets=sets,
                    token_ids=token_ids,
                    keep=keep,
                    directions=directions,
                    on_rows=bar.update,
                )
        dead = np.flatnonzero(~alive).tolist()
        analyses.append(Analysis(model, entry, report, padding, counts, keep, dead, tokenizer))
    return analyses


def word_similarity_sets(place: str | Path) -> dict[str, similarity.WordSimilaritySet]:
    """The word-similarity sets in a folder, or those that are to be ``"download"``-ed and kept."""
    folder = Path(place)
    if str(place) == "download":
        try:
            folder = similarity.download_word_similarity()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--word-similarity download: {one_line(error)}. Put the published files into a "
                "folder and pass --word-similarity FOLDER instead"
            ) from None
    with refused("--word-similarity: ", (OSError, ValueError)):
        return similarity.read_word_similarity(folder)


def find_tokenizer(model: str, source: Source, needed: bool) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None if it has none, unless one is needed, named or counts a text."""
    needed = needed or source.text is not None
    is_named, name = source.tokenizer is not None, source.tokenizer or model
    if not is_named and Path(model).is_file():
        if needed:
            raise UsageError(f"{model} is a file without a tokenizer: pass one with --tokenizer")
        return None
    if not is_named and is_run(Path(model)):
        name = str(Path(model) / MODEL)
    try:
        return load_tokenizer(name, None if is_named else source.revision)
    except UsageError as error:
        if is_named or needed:
            hint = "pass a tokenizer with --tokenizer"
            text = f"--tokenizer {error}" if is_named else f"{error}: {hint}"
            raise UsageError(text) from None
        if any(Path(name).glob("tokenizer*")):  # which are damaged
            warnings.warn(f"{error}: the analysis goes on without one", stacklevel=3)
        return None


def _counts(
    model: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: int,
    is_token: Mask | None,
) -> NDArray[Any] | None:
    """How often each token occurs, [rows]; 0 for padding beyond the counted vocabulary."""
    if source.text is not None or source.tokens:
        return _counted(model, source, tokenizer, rows)
    path = source.counts or Path(model) / COUNTS
    if source.counts is None and not path.exists():
        return None
    option = "--counts " if source.counts else ""
    with refused(option):
        counts = read_array(path)
    # Training counts the tokens of its vocabulary, to which the model's matrix may add padding.
    missing_are_padding = is_token is not None and not is_token[counts.size :].any()
    if counts.ndim != 1 or not (
        len(counts) == rows or (len(counts) < rows and missing_are_padding)
    ):
        raise UsageError(
            f"{option}{path} has the shape {list(counts.shape)}, but must hold one number for each "
            f"of the {rows} rows of the embeddings; only padding at their end may be left out, "
            "where a tokenizer tells which rows are padding"
        )
    return np.concatenate([counts, np.zeros(rows - len(counts), dtype=counts.dtype)])


def _counted(
    model: str, source: Source, tokenizer: PreTrainedTokenizerBase | None, rows: int
) -> NDArray[np.int64]:
    """How often each token occurs in a text or in token files, [rows]; in bounded memory."""
    pieces: Iterable[NDArray[Any]]
    if source.text is not None:
        assert tokenizer is not None
        given, pieces = f"--text {source.text}", token_pieces(source.text, tokenizer)
    else:
        tokens = Tokens([token_file(path, rows) for path in source.tokens])
        starts = range(0, len(tokens), 2**24)
        bar = tqdm(starts, "counting tokens", disable=None, leave=False)
        pieces = (tokens[start : start + 2**24] for start in bar)
        given = f"--tokens {' '.join(map(str, source.tokens))}"
    counts = np.zeros(rows, dtype=np.int64)
    with refused(f"{model}: {given}: "):
        for piece in pieces:
            counts += unigram_counts(piece, rows)
    return counts
