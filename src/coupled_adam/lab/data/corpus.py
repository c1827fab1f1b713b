"""Prepared corpora: a tokenizer and files of token ids on disk, cached by content."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coupled_adam.embeddings import unigram_counts
from coupled_adam.errors import UsageError
from coupled_adam.files import new_folder
from coupled_adam.lab.data.source import Documents, TokenFiles, content_hash, open_source
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
from coupled_adam.lab.sections import Data
from coupled_adam.runs import COUNTS
from coupled_adam.text.token_files import TokenFile, Tokens

BY_CONTENT = ("text", "hub", "hub_revision", "tokens", "tokenizer")
"""The settings of a recipe's data that count by what is found there, not by their values."""
_SAYS_AFTER = 5.0  # seconds of waiting
_LAYOUT = 2  # version of a corpus folder's layout, part of its key; raise it with each change


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus: its folder, and the content of the ``corpus.json`` in it.

    facts: ``source``, ``fingerprint``, ``tokenizer``, ``vocab_size``, ``dtype``, ``end_of_text``
        (an id or None); and for each split ``tokens``, ``documents`` (None for token files) and
        ``files``.
    """

    folder: Path
    facts: dict[str, Any]

    def tokens(self, split: str) -> Tokens:
        """The token ids of ``"train"``, ``"valid"`` or ``"test"``."""
        files = [TokenFile(**file) for file in self.facts["files"][split]]
        return Tokens(files, self.folder)

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training split, [V]."""
        counts: NDArray[np.int64] = np.load(self.folder / COUNTS)
        return counts

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
    of both; a folder of that name is the corpus. It gets the name when it is complete. Other
    processes that need the same corpus wait for the one that creates it. A cache that already
    contains the corpus may be read-only.

    Raises:
        UsageError: the source or tokenizer cannot be used, the text is too short for the recipe, or
            the cache cannot be written.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    tokenizer = None if data.tokenizer is None else corpus_tokenizer(data.tokenizer, vocab_size)
    source = open_source(data, vocab_size)
    # Where text and tokenizer are makes no difference: the same content is the same corpus.
    made_from = {
        "layout": _LAYOUT,
        "source": source.fingerprint,
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
        "vocab_size": vocab_size,
        "data": {k: v for k, v in dataclasses.asdict(data).items() if k not in BY_CONTENT},
    }
    folder = cache / content_hash(made_from)[:32]
    path = folder / "corpus.json"
    process = f"another process that is preparing the corpus {folder}"
    try:
        # First without the lock, since a cache that holds the corpus may be read-only.
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with waiting_for(cache / f"{folder.name}.lock", process):
                # Another process may have created it in the meantime; one that was killed has
                # left what nobody else writes to.
                for leftover in cache.glob(f".{folder.name}-*"):
                    shutil.rmtree(leftover)
                if not path.exists():
                    _make(source, tokenizer, data, vocab_size, folder)
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"the corpus cannot be written to the cache {cache} ({error.strerror or error}): "
            "make room, or choose another folder with COUPLED_ADAM_CACHE"
        ) from None
    except ValueError as error:
        raise UsageError(f"{folder} is damaged ({error}): remove it") from None
    # The same content may have been found elsewhere when the corpus was made.
    if isinstance(source, TokenFiles):
        facts["files"] = _described(source.files)
    corpus = Corpus(folder, {**facts, "source": source.name})
    _check_length(corpus, recipe)
    return corpus


@contextmanager
def waiting_for(path: Path, event: str) -> Iterator[None]:
    """Hold the lock of a file, and wait until the process that holds it has released it.

    Args:
        event: what is said on standard error to be waited for, after some seconds.
    """
    lock = FileLock(path)
    with suppress(Timeout):
        lock.acquire(timeout=_SAYS_AFTER)
    if not lock.is_locked:
        print(f"waiting for {event}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _described(files: Mapping[str, list[TokenFile]]) -> dict[str, list[dict[str, Any]]]:
    """The token files of each split, as JSON can hold them."""
    return {split: [dataclasses.asdict(f) for f in parts] for split, parts in files.items()}


def _make(
    source: Documents | TokenFiles,
    tokenizer: PreTrainedTokenizerBase | None,
    data: Data,
    vocab_size: int,
    folder: Path,
) -> None:
    with new_folder(folder) as temporary:
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
        }
        (temporary / "corpus.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


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
