"""Prepared corpora: a tokenizer and files of token ids on disk, cached by content."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coupled_adam.embeddings import unigram_counts
from coupled_adam.errors import UsageError, prefixed_usage_error
from coupled_adam.fields import require
from coupled_adam.files import checksum, new_folder, remove
from coupled_adam.inputs import read_array, read_text
from coupled_adam.lab.data.source import Source, content_hash, open_source
from coupled_adam.lab.data.tokenization import (
    SPLITS,
    corpus_tokenizer,
    save_tokenizer,
    write_tokens,
)
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.sections import Data
from coupled_adam.runs import COUNTS
from coupled_adam.text.token_files import TokenFile, Tokens
from coupled_adam.text.tokenizers import end_of_text_id

# The settings of a recipe's data that are identified by their content, not by their values.
_BY_CONTENT = ("text", "hub", "hub_revision", "hub_otherwise", "tokens", "tokenizer")
_FACTS = "corpus.json"
_LAYOUT = 3  # version of a corpus folder's layout, part of its key; raise it with each change


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus: its folder, and what is in it.

    facts: ``source``, ``fingerprint``, ``tokenizer``, ``dtype`` and ``end_of_text`` (an id or
        None); and for each split the numbers of ``tokens`` and of ``documents``, which is None for
        token files.
    files: the token files of each split.
    """

    folder: Path
    facts: dict[str, Any]
    files: Mapping[str, list[TokenFile]]

    def tokens(self, split: str) -> Tokens:
        """The token ids of ``"train"``, ``"valid"`` or ``"test"``."""
        return Tokens(self.files[split], self.folder)

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training split, [V]."""
        counts: NDArray[np.int64] = read_array(self.folder / COUNTS)
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
    """Find the recipe's corpus in the cache, which may be read-only then, or create it there.

    The name of the corpus folder is a hash of the source's content, the tokenizer, and the settings
    of both. It gets the name when it is complete, and is made again if one of its files has
    changed. Other processes that need the same corpus wait for the one that creates it.

    Raises UsageError if the source or tokenizer cannot be used, the text is too short, or the cache
    cannot be written, and OSError if a corpus in the cache cannot be read now.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    tokenizer = None
    if data.tokenizer is not None:
        tokenizer = corpus_tokenizer(data.tokenizer, vocab_size)
    source = open_source(data, vocab_size)
    folder = cache / _key(source, tokenizer, data, vocab_size)
    # First without the lock, since a cache that holds the corpus may be read-only.
    facts = _facts(folder)
    if facts is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{folder.name}.lock"):
                facts = _facts(folder)
                if facts is None:
                    remove(folder)
                    facts = _make(source, tokenizer, data, vocab_size, folder)
        except OSError as error:
            raise UsageError(
                f"the corpus cannot be written to the cache {cache} ({error.strerror or error}): "
                "make room, or choose another folder with COUPLED_ADAM_CACHE"
            ) from None
    # The text may have moved since the corpus was made; token files are read where they are.
    facts = {key: value for key, value in facts.items() if key != "checksums"}
    facts["source"] = source.name
    files = {s: [TokenFile(f"{s}.bin", facts["dtype"], 0, facts["tokens"][s])] for s in SPLITS}
    corpus = Corpus(folder, facts, source.files or files)
    _check_length(corpus, recipe)
    return corpus


def _key(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, data: Data, vocab_size: int
) -> str:
    """The name of a corpus's folder: the same content is the same corpus, wherever it lies."""
    # By the files that it is saved as, since a tokenizer's name says nothing about its content.
    digest = None
    if tokenizer is not None:
        try:
            with tempfile.TemporaryDirectory() as temporary:
                digest = save_tokenizer(tokenizer, Path(temporary))
        except OSError as error:
            raise UsageError(
                f"the temporary folder cannot be written ({error.strerror or error}): make room, "
                "or choose another one with TMPDIR"
            ) from None
    # Without defaults, so that a new key does not rename existing corpora.
    settings = {k: v for k, v in vars(data).items() if v != getattr(type(data), k)}
    made_from = {
        "layout": _LAYOUT,
        "source": source.fingerprint,
        "tokenizer": digest,
        "vocab_size": vocab_size,
        "data": {k: v for k, v in settings.items() if k not in _BY_CONTENT},
    }
    return content_hash(made_from)[:32]


def _check_length(corpus: Corpus, recipe: Recipe) -> None:
    """Raise UsageError if a split is too short for the recipe, which the cache does not know."""
    # A block is a sequence and the token that follows its last one.
    length, batch = recipe.training.sequence_length, recipe.training.batch_size
    for split, needed in zip(SPLITS, (batch * length + 1, length + 1, length + 1)):
        tokens = corpus.facts["tokens"][split]
        require(
            tokens >= needed,
            f"{corpus.facts['source']} is too short: its {split} split has {tokens} tokens, and "
            f"the recipe needs {needed}. Give more text, in more documents (data.separator), raise "
            "data.held_out, or lower training.batch_size or training.sequence_length",
        )


def _make(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    data: Data,
    vocab_size: int,
    folder: Path,
) -> dict[str, Any]:
    """Make a corpus, and return its facts."""
    with new_folder(folder) as temporary:
        files, documents = source.files, dict[str, int | None].fromkeys(SPLITS)
        # Documents become files of ids in this folder; token files are read where they are.
        if files is None:
            tokenizer, files, documents = write_tokens(
                source, data, tokenizer, vocab_size, temporary
            )
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary / "tokenizer")
        # Counting also checks all ids, before the corpus gets its name.
        np.save(temporary / COUNTS, _count(files, temporary, vocab_size))
        trained = None if tokenizer is None else f"BPE of {len(tokenizer)} tokens"
        facts = {
            "fingerprint": source.fingerprint,
            "documents": documents,
            "tokenizer": data.tokenizer or trained,
            "end_of_text": None if tokenizer is None else end_of_text_id(tokenizer),
            "dtype": files["train"][0].dtype,
            "tokens": {s: sum(file.length for file in files[s]) for s in files},
            "checksums": _checksums(temporary),
        }
        content = json.dumps({**facts, "checksum": content_hash(facts)}, indent=2)
        (temporary / _FACTS).write_text(content, encoding="utf-8")
    return facts


def _facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a corpus; None if it is missing, or one of its files has changed."""
    try:
        facts: dict[str, Any] = json.loads(read_text(folder / _FACTS))
        # Whatever else lies there, such as what a desktop leaves, is not the corpus.
        is_whole = facts.pop("checksum") == content_hash(facts) and all(
            checksum(folder / name) == digest for name, digest in facts["checksums"].items()
        )
        return facts if is_whole else None
    # Other errors of the system are not damage: what cannot be read now may be whole.
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksums(folder: Path) -> dict[str, str]:
    """The checksum of each of a corpus's files, except that of its facts."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _FACTS)
    return {path.relative_to(folder).as_posix(): checksum(path) for path in files}


def _count(files: dict[str, list[TokenFile]], folder: Path, vocab_size: int) -> NDArray[np.int64]:
    """Count the tokens of the training split, [V], and check the ids of all splits."""
    counts = np.zeros(vocab_size, np.int64)
    pairs = [(split, file) for split in files for file in files[split]]
    for split, file in tqdm(pairs, "counting tokens", disable=None, leave=False):
        with prefixed_usage_error(
            f"model.vocab_size={vocab_size} or data.token_dtype does not fit {file.path} "
            f"({file.dtype}): "
        ):
            counts += unigram_counts(Tokens([file], folder), vocab_size) * (split == "train")
    return counts
