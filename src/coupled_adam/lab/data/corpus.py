"""From documents to a tokenizer and token files on disk, which are cached by content."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coupled_adam.embeddings import unigram_counts
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.lab.recipe import Recipe
from coupled_adam.text.documents import Documents, content_digest, open_documents
from coupled_adam.text.source import Data
from coupled_adam.text.token_files import TokenFile, Tokens, find_token_files
from coupled_adam.text.tokenizers import load_tokenizer

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "valid", "test")
_LAYOUT = 1  # version of a corpus folder's layout, part of its key; raise it with each change
_BATCH = 2_000_000  # characters per call of the tokenizer, which has its own threads
_BPE_CHARACTERS = 10**9  # the most that a BPE is trained on


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
        return Tokens([TokenFile(**file).open(self.folder) for file in self.facts["files"][split]])

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training split, [V]."""
        return np.array(read_array(self.folder / "unigram_counts.npy"))

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
    processes that need the same corpus wait for the one that creates it. A cache that already
    contains the corpus may be read-only.

    Raises:
        UsageError: the source or tokenizer cannot be used, the text is too short for the recipe,
            or the cache cannot be written.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    tokenizer = None if data.tokenizer is None else corpus_tokenizer(data.tokenizer, vocab_size)
    source: Documents | dict[str, list[TokenFile]]
    if data.tokens is not None:
        name = f"data.tokens={data.tokens}"
        source = find_token_files(data, vocab_size)
        paths = [Path(file.path) for files in source.values() for file in files]
        # Token files are not copied: if only their time has changed, they still need a new check.
        identity: Any = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    else:
        source = open_documents(data)
        name, identity = source.source, source.fingerprint
    hashed = ("text", "hub", "hub_revision", "tokens", "tokenizer")  # by content, not by name
    made_from = {
        "layout": _LAYOUT,
        "source": identity,
        "tokenizer": None if tokenizer is None else _tokenizer_digest(tokenizer),
        "vocab_size": vocab_size,
        "data": {k: v for k, v in dataclasses.asdict(data).items() if k not in hashed},
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
    corpus = _find(cache / key, source)
    if corpus is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{key}.lock"):
                corpus = _find(cache / key, source)  # created by another process in the meantime
                if corpus is None:
                    _remove_leftovers(cache, key)
                    corpus = _make(source, tokenizer, data, vocab_size, cache / key)
        except OSError as error:
            raise UsageError(
                f"the corpus cannot be written to the cache {cache} ({error.strerror or error}): "
                "make room, or choose another folder with --cache or COUPLED_ADAM_CACHE"
            ) from None
    _check_length(corpus, recipe)
    # The cached corpus may have been created from another source with the same content.
    return Corpus(corpus.folder, {**corpus.facts, "source": name})


def corpus_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load a tokenizer, whose ids are below ``vocab_size``, from the hub or a folder.

    Raises:
        UsageError: there is no such tokenizer, it has too many tokens, or it has no end-of-text
            token.
    """
    try:
        tokenizer = load_tokenizer(name)
    except UsageError as error:
        raise UsageError(
            f"data.tokenizer={error}: give a tokenizer's folder or its id on the Hugging Face hub"
        ) from None
    size = max(len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values()))
    if size > vocab_size:
        raise UsageError(
            f"data.tokenizer={name} has {size} tokens: set model.vocab_size={vocab_size} to as "
            "many or, better, to the next multiple of 64"
        )
    if _end_of_text(tokenizer) is None:
        raise UsageError(
            f"data.tokenizer={name} has neither eos_token nor bos_token, which is needed between "
            "documents: set one in its tokenizer_config.json"
        )
    return tokenizer


def held_out_split(document: str, share: float) -> str:
    """The split of a document, as a function of its text; valid and test get ``share`` each."""
    start = hashlib.sha256(document.encode()).digest()[:8]
    place = int.from_bytes(start, "big") / 2**64
    return "valid" if place < share else "test" if place < 2 * share else "train"


def _find(folder: Path, source: Documents | dict[str, list[TokenFile]]) -> Corpus | None:
    """The corpus in a folder; None if it is missing or damaged.

    A corpus that refers to files other than its own and those of the source counts as damaged.
    """
    paths = {f"{split}.bin" for split in SPLITS}
    if not isinstance(source, Documents):
        paths = {file.path for files in source.values() for file in files}
    damaged = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*damaged):
        facts = json.loads((folder / "corpus.json").read_text())
        complete = all((folder / path).stat().st_size == n for path, n in facts["sizes"].items())
        files = {s: [TokenFile(**file) for file in facts["files"][s]] for s in SPLITS}
        tokens = {s: sum(file.length for file in parts) for s, parts in files.items()}
        present = (
            f.path in paths and f.is_there(folder) for parts in files.values() for f in parts
        )
        known = isinstance(facts["end_of_text"], int | None) and facts["tokens"] == tokens
        if complete and known and all(present):
            return Corpus(folder, facts)
    return None


def _remove_leftovers(cache: Path, key: str) -> None:
    """Remove temporary folders of killed processes: those whose lock is not held."""
    for folder in cache.glob("*.tmp"):
        its_key = folder.name.split(".")[0]
        if not re.fullmatch(r"[0-9a-f]{32}\.\w+\.tmp", folder.name):  # not ours
            continue
        lock = (
            contextlib.nullcontext() if its_key == key else FileLock(cache / f"{its_key}.lock", 0)
        )
        with contextlib.suppress(OSError), lock:  # the lock is held, or belongs to another user
            shutil.rmtree(folder, ignore_errors=True)


def _make(
    source: Documents | dict[str, list[TokenFile]],
    tokenizer: PreTrainedTokenizerBase | None,
    data: Data,
    vocab_size: int,
    folder: Path,
) -> Corpus:
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        facts: dict[str, Any] = {"vocab_size": vocab_size}
        if isinstance(source, Documents):
            facts["fingerprint"] = source.fingerprint
            tokenizer = tokenizer or _train_tokenizer(source, data, vocab_size)
            files, facts["documents"] = _write_tokens(
                source, data, tokenizer, vocab_size, temporary
            )
        else:
            files = source
            paths = dict.fromkeys(Path(file.path) for parts in files.values() for file in parts)
            facts["fingerprint"] = content_digest(paths)
            facts["documents"] = dict.fromkeys(SPLITS)
        facts["tokenizer"] = data.tokenizer
        facts["end_of_text"] = None
        if tokenizer is not None:
            facts["tokenizer"] = data.tokenizer or f"BPE of {len(tokenizer)} tokens"
            facts["end_of_text"] = _end_of_text(tokenizer)
            _save_tokenizer(tokenizer, temporary / "tokenizer")
        facts["dtype"] = files["train"][0].dtype
        facts["tokens"] = {s: sum(file.length for file in parts) for s, parts in files.items()}
        facts["files"] = {s: [dataclasses.asdict(f) for f in parts] for s, parts in files.items()}
        np.save(temporary / "unigram_counts.npy", _count(files, temporary, vocab_size))
        written = [path for path in temporary.rglob("*") if path.is_file()]
        facts["sizes"] = {str(path.relative_to(temporary)): path.stat().st_size for path in written}
        (temporary / "corpus.json").write_text(json.dumps(facts, indent=2))
        for path in (*written, temporary / "corpus.json"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # before the folder gets its name, in case of a crash
        shutil.rmtree(folder, ignore_errors=True)  # a damaged corpus
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(folder, facts)


def _assigned(documents: Documents, part: str, data: Data) -> Iterator[tuple[str, str]]:
    """Yield the pairs (split, document) of a reader's documents."""
    for document in documents.readers[part]():
        split = held_out_split(document, data.held_out) if part == "train" else part
        yield part if split in documents.readers else split, document


def _train_tokenizer(documents: Documents, data: Data, vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE on the training documents only."""

    def texts() -> Iterator[str]:
        left = _BPE_CHARACTERS
        if data.max_tokens is not None:
            left = min(left, 4 * data.max_tokens)  # about four characters a token
        for split, text in _assigned(documents, "train", data):
            if split == "train":
                yield text
                left -= len(text)
                if left <= 0:
                    return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bar = tqdm(texts(), desc="text for the BPE", unit=" documents", disable=None)
    tokenizer.train_from_iterator(bar, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT
    )


def _write_tokens(
    documents: Documents,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    folder: Path,
) -> tuple[dict[str, list[TokenFile]], dict[str, int]]:
    """Write the token ids of each split, with an end-of-text token before each document.

    Returns:
        The files and the number of documents of each split.
    """
    end_of_text, encode = _end_of_text(tokenizer), _encoder(tokenizer)
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    limits = dict.fromkeys(SPLITS, data.max_held_out_tokens or sys.maxsize)
    limits["train"] = data.max_tokens or sys.maxsize
    tokens, counts = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context((folder / f"{s}.bin").open("wb")) for s in SPLITS}
        bar = stack.enter_context(
            tqdm(desc="tokens", unit="", unit_scale=True, total=data.max_tokens, disable=None)
        )
        for part in documents.readers:
            for batch in _batches(_assigned(documents, part, data)):
                wanted = [(split, text) for split, text in batch if tokens[split] < limits[split]]
                for (split, _), encoded in zip(wanted, encode([text for _, text in wanted])):
                    ids = np.array([end_of_text, *encoded], dtype)[: limits[split] - tokens[split]]
                    files[split].write(ids.tobytes())
                    tokens[split] += len(ids)
                    counts[split] += len(ids) > 0
                    bar.update(len(ids))
                if tokens[part] >= limits[part]:
                    break
    return {s: [TokenFile(f"{s}.bin", dtype, 0, tokens[s])] for s in SPLITS}, counts


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = [], 0
    for split, text in documents:
        batch.append((split, text))
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Iterator[list[int]]]:
    """A function from texts to ids that treats special tokens within a text as plain text."""
    if tokenizer.is_fast:
        rust = tokenizer.backend_tokenizer  # twice as fast as calling it through transformers
        rust.encode_special_tokens = True
        return lambda texts: (
            encoding.ids for encoding in rust.encode_batch_fast(texts, add_special_tokens=False)
        )
    return lambda texts: (
        tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        for text in texts
    )


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    found: int | None = tokenizer.eos_token_id
    return tokenizer.bos_token_id if found is None else found


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises a bare Exception if the disk is full
        raise OSError(str(error)) from error


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _save_tokenizer(tokenizer, Path(folder))
        return content_digest(sorted(path for path in Path(folder).rglob("*") if path.is_file()))


def _count(files: dict[str, list[TokenFile]], folder: Path, vocab_size: int) -> NDArray[np.int64]:
    """Count the tokens of the training split, [V], and check the ids of all splits."""
    counts = np.zeros(vocab_size, np.int64)
    for split, parts in files.items():
        for file in parts:
            ids = file.open(folder)
            for start in range(0, len(ids), 2**24):  # 128 MB as int64
                try:
                    found = unigram_counts(ids[start : start + 2**24], vocab_size)
                except ValueError as error:
                    raise UsageError(
                        f"{file.path} ({file.dtype}): {error} Set model.vocab_size={vocab_size} "
                        "higher, or data.token_dtype"
                    ) from None
                if split == "train":
                    counts += found
    return counts


def _check_length(corpus: Corpus, recipe: Recipe) -> None:
    # A block is a sequence and the token that follows its last one.
    length, batch = recipe.training.sequence_length, recipe.training.batch_size
    for split, blocks in (("train", batch), ("valid", 1), ("test", 1)):
        tokens = corpus.facts["tokens"][split]
        if tokens < blocks * length + 1:
            raise UsageError(
                f"the text is too short: its {split} split has {tokens} tokens, and the recipe "
                f"needs {blocks * length + 1} ({blocks} x {length} and one). Give more text, or "
                "lower training.batch_size or training.sequence_length"
            )
