"""The source that the section ``data`` of a recipe names: documents by split, or token files."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coupled_adam.errors import UsageError, one_line, prefixed_usage_error
from coupled_adam.fields import require
from coupled_adam.files import checksum
from coupled_adam.lab.sections import Data
from coupled_adam.text.documents import column_texts, documents, text_files, visible_files
from coupled_adam.text.hub import hub_error, reach_hub
from coupled_adam.text.python_documentation import library_files, python_documentation
from coupled_adam.text.token_files import TokenFile, token_file


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents, or token files, which are read where they are.

    name: the name of the source in messages.
    fingerprint: a string that changes when the documents or tokens change.
    documents: the documents of each split, none of them blank. They can be iterated over once,
        which reads them, and raises UsageError if one cannot be read or there are none. A held-out
        split that is missing here is taken from the training documents.
    files: the ranges of token ids in files, for each split; None for documents.
    """

    name: str
    fingerprint: str
    documents: Mapping[str, Iterator[str]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[TokenFile]] | None = None


def open_source(data: Data, vocab_size: int) -> Source:
    """Open ``data.tokens``, ``data.hub`` or ``data.text`` or, by default, Python's documentation.

    Raises UsageError if the source is missing or damaged, or the hub cannot be reached.
    """
    if data.tokens is not None:
        with prefixed_usage_error("data.tokens=", UsageError):
            files = find_token_files(data, vocab_size)
            used = {Path(file.path): None for parts in files.values() for file in parts}
            ranges = {split: [dataclasses.astuple(f)[1:] for f in files[split]] for split in files}
            # Also by the ranges, which max_tokens and the cut for a test split change.
            fingerprint = content_hash([content_digest(used), ranges])
        return Source(f"data.tokens={data.tokens}", fingerprint, files=files)
    # Documents are read only when they are iterated over: to find a corpus in the cache, their
    # identity is enough.
    if data.hub is not None:
        name, (identity, revision) = f"data.hub={data.hub}", _hub_state(data)
        names = {"train": data.train_split, "valid": data.valid_split, "test": data.test_split}
        splits = {
            split: _hub_documents(data, there, revision) for split, there in names.items() if there
        }
    elif data.text is not None:
        name = f"data.text={data.text}"
        with prefixed_usage_error("data.text=", UsageError):
            identity = content_digest(text_files(Path(data.text)))
        splits = {"train": _text_documents(data)}
    else:
        name = "the documentation inside Python"
        identity = f"{sys.version} {content_digest(library_files())}"
        splits = {"train": filter(str.strip, python_documentation())}
    return Source(name, hashlib.sha256(identity.encode()).hexdigest(), splits)


def content_digest(paths: Iterable[Path]) -> str:
    """A hash of the names and contents of files, in their order."""
    contents = hashlib.sha256()
    for path in paths:
        try:
            digest = checksum(path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        contents.update(path.name.encode(errors="replace") + b"\0" + bytes.fromhex(digest))
    return contents.hexdigest()


def content_hash(content: Any) -> str:
    """The SHA-256 digest of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# The word of a split stands alone: pretrain_val.bin is for validation, and latest.bin for nothing.
_SPLIT_WORDS = {
    split: re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    for split, words in (("train", "train"), ("valid", "val|valid|validation"), ("test", "test"))
}


def find_token_files(data: Data, vocab_size: int) -> dict[str, list[TokenFile]]:
    """Find the token files of each split in the folder ``data.tokens``.

    Their names contain the word train, val (or valid, validation) or test, not inside a longer
    word, and end in ``.bin`` or, if no file does, in ``.npy``. Several files of a split are sorted
    by name. Without files for the test, the second half of the validation tokens is the test split.
    Raises UsageError if a split has no files, or a file belongs to two, is truncated or no such.
    """
    folder = Path(str(data.tokens))
    found: dict[str, list[Path]] = {split: [] for split in _SPLIT_WORDS}
    for path in sorted(folder.glob("*.bin")) or sorted(folder.glob("*.npy")):
        of = [split for split, word in _SPLIT_WORDS.items() if word.search(path.stem)]
        if len(of) > 1:
            raise UsageError(f"{path} is named after two splits, {' and '.join(of)}: rename it")
        for split in of:
            found[split].append(path)
    splits: dict[str, list[TokenFile]] = {}
    for split, paths in found.items():
        if not paths and split != "test":
            word = {"valid": "val"}.get(split, split)
            reason = "no such folder"
            if folder.is_dir():
                reason = f"no file with the word {word} in its name, such as {word}.bin, in it"
            raise UsageError(f"{folder}: {reason}")
        splits[split] = [token_file(path, vocab_size, data.token_dtype) for path in paths]
    # nanoGPT writes no test split.
    if not splits["test"]:
        half = sum(file.length for file in splits["valid"]) // 2
        splits["valid"], splits["test"] = _split_at(splits["valid"], half)
    for split, files in splits.items():
        limit = data.max_tokens if split == "train" else data.max_held_out_tokens
        if limit is not None:
            splits[split] = _split_at(files, limit)[0]
    return splits


def _split_at(files: list[TokenFile], at: int) -> tuple[list[TokenFile], list[TokenFile]]:
    """Split files into those with the first ``at`` tokens and those with the rest."""
    halves = []
    for file in files:
        halves.append(file.split_at(at))
        at -= halves[-1][0].length
    return [first for first, _ in halves], [last for _, last in halves]


def _text_documents(data: Data) -> Iterator[str]:
    with prefixed_usage_error("data.text=", UsageError):
        yield from documents(Path(str(data.text)), data.separator, data.column)


def _hub_state(data: Data) -> tuple[str, str | None]:
    """What identifies a data set's content, and its full commit (None for a folder)."""
    folder = Path(os.path.abspath(str(data.hub)))
    if folder.exists():
        # Hidden files, too, if its README names them.
        with _hub_errors(data):
            named = itertools.chain(*_hub_builder(data, None)[1].values())
        return content_digest(sorted({*visible_files(folder), *map(Path, named)})), None
    from huggingface_hub import snapshot_download

    reach_hub()
    # The hub's own cache remembers the commit, in case the hub cannot be reached later.
    with _hub_errors(data):
        snapshot = snapshot_download(
            str(data.hub),
            repo_type="dataset",
            revision=data.hub_revision,
            allow_patterns="README.md",
        )
    commit = Path(snapshot).name
    return f"{data.hub} {commit}", commit


def _hub_builder(data: Data, revision: str | None) -> tuple[Any, dict[str, list[str]]]:
    """The reader of a data set, and its files by split; UsageError for a file outside of it."""
    from datasets import load_dataset_builder  # this import takes a second

    builder = load_dataset_builder(str(data.hub), data.hub_config, revision=revision)
    files = {str(split): [*map(str, f)] for split, f in (builder.config.data_files or {}).items()}
    place = "hf://" if revision else f"{os.path.abspath(str(data.hub))}/"
    for file in itertools.chain(*files.values()):
        inside = (file if revision else os.path.normpath(file)).startswith(place)
        require(inside, f"its README names a file outside of it, {file}")
    return builder, files


def _hub_documents(data: Data, split: str, revision: str | None) -> Iterator[str]:
    with _hub_errors(data):
        builder, files = _hub_builder(data, revision)
        whole = data.hub_documents if split == data.train_split else None
        # The hub's own copies in Parquet end at 5 GB, in a folder such as partial-train.
        parts = (Path(file).parent.name for file in files.get(split, ()) if "/partial-" in file)
        folder = next(parts, None)
        if folder is not None and data.max_tokens is None:
            problem = f"its copy holds only a part of it, in the folder {folder}"
            require(whole is None, f"{problem}. {_HOW_TO_TAKE_PART}")
            warnings.warn(f"data.hub={data.hub}: {problem}", stacklevel=2)
        # Streamed: max_tokens may need only a small part of a data set of terabytes.
        rows = builder.as_streaming_dataset(split=split)
        if data.shuffle_seed is not None:
            rows = rows.shuffle(seed=data.shuffle_seed, buffer_size=10_000)
        count, empty = 0, True
        # As Arrow's tables, so that other columns are not converted; short ones, as not all of a
        # text may be needed.
        tables = rows.with_format("arrow").iter(batch_size=100)
        for text in column_texts(tables, data.column):
            count += 1
            if text.strip():
                empty = False
                yield text
        require(not empty, "there is no text in it")
        if whole is not None:
            problem = f"it has {count:,} documents of {whole:,}. {_HOW_TO_TAKE_PART}"
            require(count >= whole, problem)


@contextmanager
def _hub_errors(data: Data) -> Iterator[None]:
    """Turn errors while a data set is read, which many libraries raise, into UsageErrors."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"data.hub={data.hub}: {error}{_otherwise(data)}") from None
    except Exception as error:
        is_here = Path(str(data.hub)).exists()
        reason = one_line(error, 300) if is_here else hub_error(error)
        if "scripts are no longer supported" in str(error):
            reason = "a script makes its text, and is not run: give a revision with Parquet files"
            reason += "" if is_here else ", such as --data.hub_revision refs/convert/parquet"
        raise UsageError(
            f"data.hub={data.hub} cannot be read ({reason}).{_otherwise(data)}"
        ) from None


_HOW_TO_TAKE_PART = "To train on a part of it, add --data.hub_documents null."


def _otherwise(data: Data) -> str:
    """The end of a message: what else can be given."""
    named = f" Otherwise, {data.hub_otherwise}." if data.hub_otherwise else ""
    return f"{named} Files of your own: --text FILE, or --data.tokens FOLDER."
