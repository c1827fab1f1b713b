"""Prepared corpora: a tokenizer and files of token ids on disk, cached by content."""

import contextlib
import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coupled_adam.embeddings import unigram_counts
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.files import clear_leftovers, duration, file_digest, lock, new_folder, read_text
from coupled_adam.lab.data.tokenization import (
    SPLITS,
    corpus_tokenizer,
    end_of_text_id,
    save_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    write_tokens,
)
from coupled_adam.lab.recipe import Recipe
from coupled_adam.runs import COUNTS
from coupled_adam.text.documents import Documents, open_documents
from coupled_adam.text.source import Data
from coupled_adam.text.token_files import TokenFile, Tokens, find_token_files

BY_CONTENT = ("text", "hub", "hub_revision", "tokens", "tokenizer")
"""The settings of a recipe's data that count by what is found there, not by their values."""
_LAYOUT = 2  # version of a corpus folder's layout, part of its key; raise it with each change
_PATIENCE = 24 * 3600.0  # seconds to wait for another process that prepares the same corpus


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus: its folder, and the content of the ``corpus.json`` in it.

    facts: ``source``, ``fingerprint``, ``tokenizer``, ``vocab_size``, ``dtype``, ``end_of_text``
        (an id or None); for each split ``tokens``, ``documents`` (None for token files) and
        ``files``; and ``digests``, the SHA-256 of each file in the folder.
    """

    folder: Path
    facts: dict[str, Any]

    def tokens(self, split: str) -> Tokens:
        """The token ids of ``"train"``, ``"valid"`` or ``"test"``."""
        files = [TokenFile(**file) for file in self.facts["files"][split]]
        return Tokens(files, self.folder, self.facts["vocab_size"])

    @property
    def identity(self) -> str:
        """A hash of the source's content, the tokenizer and all tokens."""
        return content_hash([self.facts["fingerprint"], self.facts["digests"]])

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training split, [V].

        Raises:
            UsageError: the file has gone since the corpus was verified, or cannot be opened.
        """
        try:
            return np.array(read_array(self.folder / COUNTS))
        except ValueError as error:
            raise UsageError(f"the corpus has changed: {error}") from None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The tokenizer's folder in Hugging Face format; None for token files without one."""
        folder = self.folder / "tokenizer"
        return folder if folder.exists() else None

    @property
    def end_of_text(self) -> int | None:
        """The id of the token that precedes each document, or None."""
        end_of_text: int | None = self.facts["end_of_text"]
        return end_of_text


def default_cache() -> Path:
    """The folder for prepared corpora: $COUPLED_ADAM_CACHE, or a folder in the user's cache."""
    chosen = os.environ.get("COUPLED_ADAM_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("coupled-adam")


def prepare_corpus(recipe: Recipe, cache: Path) -> Corpus:
    """Find the recipe's corpus in the cache, or create it there.

    The name of the corpus folder is a hash of the source's content, the tokenizer, and the settings
    of both. The folder is written under a temporary name and renamed when it is complete. Other
    processes that need the same corpus wait for the one that creates it, for a day at most. All
    files of a corpus in the cache are compared with their digests; if one is damaged, the corpus is
    created again. A cache that already contains the corpus may be read-only.

    Raises:
        UsageError: the source or tokenizer cannot be used or changes while it is read, the text is
            too short for the recipe, or the cache cannot be written.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    tokenizer = None if data.tokenizer is None else corpus_tokenizer(data.tokenizer, vocab_size)
    source: Documents | TokenFiles
    if data.tokens is not None:
        source = TokenFiles(f"data.tokens={data.tokens}", find_token_files(data, vocab_size))
    else:
        source = open_documents(data)
    # Where text and tokenizer are makes no difference: the same content is the same corpus.
    made_from = {
        "layout": _LAYOUT,
        "source": source.fingerprint,
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
        "vocab_size": vocab_size,
        "data": {k: v for k, v in dataclasses.asdict(data).items() if k not in BY_CONTENT},
    }
    folder = cache / content_hash(made_from)[:32]
    refusal = (
        f"another process has been preparing the corpus {folder} for more than "
        f"{duration(_PATIENCE)}: end it, or choose another --cache"
    )
    waits_for = f"another process that is preparing the corpus {folder}"
    try:
        # First without the lock, since a cache that holds the corpus may be read-only.
        corpus = _find(folder, source)
        if corpus is None:
            cache.mkdir(parents=True, exist_ok=True)
            with lock(cache / f"{folder.name}.lock", refusal, _PATIENCE, waits_for):
                corpus = _find(folder, source)  # created by another process in the meantime
                if corpus is None:
                    clear_leftovers(cache, _is_own)
                    corpus = _make(source, tokenizer, data, vocab_size, folder)
    except OSError as error:
        raise UsageError(
            f"the corpus cannot be written to the cache {cache} ({error.strerror or error}): "
            "make room, or choose another folder with --cache or COUPLED_ADAM_CACHE"
        ) from None
    _check_length(corpus, recipe)
    return corpus


class TokenFiles:
    """Token files that are used where they are; otherwise like :class:`Documents`.

    Attributes:
        source: the name of the source in messages.
        files: the ranges of token ids in files, for each split.
        fingerprint: a hash of the tokens of all splits, whatever the files' names are.
    """

    def __init__(self, source: str, files: dict[str, list[TokenFile]]) -> None:
        self.source = source
        self.files = files
        self.fingerprint = self._digest()

    def _digest(self) -> str:
        # Ranges, since a file may hold a header, or tokens of two splits.
        size = sum(_size(file) for parts in self.files.values() for file in parts)
        with _progress("checking the token files", size) as bar:

            def of_range(file: TokenFile) -> str:
                try:
                    return file_digest(Path(file.path), file.offset, _size(file), bar.update)
                except OSError as error:
                    raise UsageError(f"data.tokens: {file.path}: {error.strerror}") from None

            ranges = {
                split: [(file.dtype, file.length, of_range(file)) for file in parts]
                for split, parts in self.files.items()
            }
        return content_hash(ranges)

    def check(self) -> None:
        """Raise UsageError if files have changed since the fingerprint was taken."""
        if self._digest() != self.fingerprint:
            raise UsageError(f"{self.source} changed while it was read: start again")


def _size(file: TokenFile) -> int:
    return file.length * np.dtype(file.dtype).itemsize


def content_hash(content: Any) -> str:
    """The SHA-256 digest of a value of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _find(folder: Path, source: Documents | TokenFiles) -> Corpus | None:
    """The corpus in a folder; None if it is missing or damaged."""
    path = folder / "corpus.json"
    if not path.exists():
        return None
    # The file may hold any JSON, so that any of its parts may be missing or of another type.
    damaged = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    reason = path.name
    with contextlib.suppress(*damaged):
        facts = json.loads(read_text(path))
        digest = facts.pop("digest")
        # Whoever wrote the file, a corpus of documents reads nothing outside of its folder.
        own_files = {
            s: [TokenFile(f"{s}.bin", facts["dtype"], 0, facts["tokens"][s])] for s in SPLITS
        }
        is_own = isinstance(source, TokenFiles) or facts["files"] == _described(own_files)
        if (
            digest == content_hash(facts)
            and is_own
            and isinstance(facts["end_of_text"], int | None)
        ):
            reason = _difference(folder, facts["digests"])
            if not reason:
                return _loaded(folder, facts, source)
    warnings.warn(f"{folder} is damaged ({reason}), and made again", stacklevel=3)
    return None


def _difference(folder: Path, digests: dict[str, str]) -> str:
    """The first file that is not there or has another digest; otherwise empty."""
    missing = next((name for name in digests if not (folder / name).is_file()), "")
    if missing:
        return missing
    size = sum((folder / name).stat().st_size for name in digests)
    with _progress("checking the cached corpus", size) as bar:
        for name, digest in digests.items():
            if file_digest(folder / name, progress=bar.update) != digest:
                return name
    return ""


def _loaded(folder: Path, facts: dict[str, Any], source: Documents | TokenFiles) -> Corpus:
    """A corpus, which may have been made from other files with the same content."""
    files = _described(source.files) if isinstance(source, TokenFiles) else facts["files"]
    return Corpus(folder, {**facts, "files": files, "source": source.source})


def _described(files: Mapping[str, list[TokenFile]]) -> dict[str, list[dict[str, Any]]]:
    """The token files of each split, as JSON can hold them."""
    return {split: [dataclasses.asdict(f) for f in parts] for split, parts in files.items()}


def _is_own(name: str) -> bool:
    """Whether a corpus may have a file of this name, relative to its folder."""
    names = {"corpus.json", COUNTS, *(f"{split}.bin" for split in SPLITS)}
    return name in names or name.startswith("tokenizer/")


def _make(
    source: Documents | TokenFiles,
    tokenizer: PreTrainedTokenizerBase | None,
    data: Data,
    vocab_size: int,
    folder: Path,
) -> Corpus:
    with new_folder(folder, _is_own) as temporary:
        documents: dict[str, int] | dict[str, None]
        # Documents become files of ids in this folder; token files are read where they are.
        if isinstance(source, Documents):
            tokenizer = tokenizer or train_tokenizer(source, data, vocab_size)
            files, documents = write_tokens(source, data, tokenizer, vocab_size, temporary)
        else:
            files, documents = source.files, dict.fromkeys(SPLITS)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary / "tokenizer")
        np.save(temporary / COUNTS, _count(files, temporary, vocab_size))
        source.check()  # what was digested is what has been read
        written = sorted(path for path in temporary.rglob("*") if path.is_file())
        trained = None if tokenizer is None else f"BPE of {len(tokenizer)} tokens"
        facts = {
            "vocab_size": vocab_size,
            "fingerprint": source.fingerprint,
            "documents": documents,
            "tokenizer": data.tokenizer or trained,
            "end_of_text": None if tokenizer is None else end_of_text_id(tokenizer),
            "dtype": files["train"][0].dtype,
            "tokens": {s: sum(file.length for file in parts) for s, parts in files.items()},
            "files": _described(files),
            "digests": {p.relative_to(temporary).as_posix(): file_digest(p) for p in written},
        }
        content = {**facts, "digest": content_hash(facts)}
        (temporary / "corpus.json").write_text(json.dumps(content, indent=2))
    return _loaded(folder, facts, source)


def _count(files: dict[str, list[TokenFile]], folder: Path, vocab_size: int) -> NDArray[np.int64]:
    """Count the tokens of the training split, [V], and check the ids of all splits."""
    counts = np.zeros(vocab_size, np.int64)
    for split, parts in files.items():
        for file in parts:
            ids = Tokens([file], folder)
            starts = range(0, len(ids), 2**24)  # 128 MB as int64
            for start in tqdm(starts, f"counting tokens, {split}", disable=None, leave=False):
                try:
                    piece_counts = unigram_counts(ids[start : start + 2**24], vocab_size)
                except ValueError as error:
                    raise UsageError(
                        f"{file.path} ({file.dtype}): {error} Set model.vocab_size={vocab_size} "
                        "higher, or data.token_dtype"
                    ) from None
                if split == "train":
                    counts += piece_counts
    return counts


def _progress(label: str, size: int) -> "tqdm[Any]":
    """A progress bar for some bytes, which appears if that takes seconds."""
    return tqdm(desc=label, unit="B", unit_scale=True, total=size, delay=3, disable=None)


def _check_length(corpus: Corpus, recipe: Recipe) -> None:
    """Raise UsageError if a split is too short for a batch, or for a block."""
    # A block is a sequence and the token that follows its last one.
    length, batch = recipe.training.sequence_length, recipe.training.batch_size
    needed = {"train": batch * length + 1, "valid": length + 1, "test": length + 1}
    tokens, documents = corpus.facts["tokens"], corpus.facts["documents"]
    split = next((split for split in SPLITS if tokens[split] < needed[split]), None)
    if split is None:
        return
    problem, where, fix = "is too short", "", "Give more text"
    # Long enough, but as documents are not cut, they cannot be shared out.
    if documents["train"] is not None and sum(tokens.values()) >= sum(needed.values()):
        problem = "has too few documents"
        where = f" in {documents[split]} of its {sum(documents.values())} documents"
        fix = (
            "Give more documents (data.separator is what separates those of a text file), or "
            "raise data.held_out"
        )
    raise UsageError(
        f"{corpus.facts['source']} {problem}: its {split} split has {tokens[split]} tokens{where}, "
        f"and the recipe needs {needed[split]}. {fix}, or lower training.batch_size or "
        "training.sequence_length"
    )
