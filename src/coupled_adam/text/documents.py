"""Sources of text: files, data sets on the Hugging Face hub, and Python's own documentation."""

import ast
import bz2
import csv
import dataclasses
import difflib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import file_digest
from coupled_adam.text.hub import hub_error, reach_hub
from coupled_adam.text.source import Data

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd  # it detects truncated files

_PLAIN = (".txt", ".md", ".rst")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TABLES = (".jsonl", ".json", ".parquet", *_DELIMITERS)
_COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": zstd.open,
}
_CHUNK = 2**20
_MAX_DOCUMENT = "COUPLED_ADAM_MAX_DOCUMENT"


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a source. None of them is blank, and every pass yields the same documents.

    source: the name of the source in messages.
    fingerprint: a string that changes when the documents change.
    readers: for each split, a function that iterates over its documents. A held-out split without
        a reader is taken from the training documents.
    check: raises UsageError if what has been read is not what the fingerprint is of.
    """

    source: str
    fingerprint: str
    readers: Mapping[str, Callable[[], Iterator[str]]]
    check: Callable[[], None]


class _Files:
    """Files, a hash of their names and contents in order, and whether they have changed since.

    In messages ``argument``, which gave the files, precedes their paths.
    """

    def __init__(self, files: Iterable[Path], argument: str = "") -> None:
        self._argument = argument
        self._states: dict[Path, tuple[int, ...]] = {}
        contents = hashlib.sha256()
        for path in files:
            # The state comes first, so that a change while the digest is taken shows as well.
            with _naming(self.named(path)):
                self._states[path] = _state(path)
                digest = bytes.fromhex(file_digest(path))
            contents.update(path.name.encode(errors="replace") + b"\0" + digest)
        self.identity = contents.hexdigest()

    def __iter__(self) -> Iterator[Path]:
        return iter(self._states)

    def named(self, path: Path) -> str:
        """A file as messages name it."""
        return f"{self._argument}{path}"

    def check(self) -> None:
        """Raise UsageError if files have changed since their digests were taken."""
        for path, state in self._states.items():
            name = self.named(path)
            with _naming(name):
                if _state(path) != state:
                    raise UsageError(
                        f"{name} changed while it was read: start again once it is whole"
                    )


def _state(path: Path) -> tuple[int, ...]:
    """What every write to a file changes, at the latest when the file is closed."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn errors of the file system into UsageErrors that begin with a file's name."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None


def open_documents(data: Data) -> Documents:
    """Open the documents of ``data.hub`` or ``data.text`` or, by default, Python's documentation.

    The readers raise UsageError if a document cannot be read or if there is no text at all.

    Raises:
        UsageError: the source is missing, or the hub cannot be reached.
    """
    readers: dict[str, Callable[[], Iterator[str]]]
    if data.hub is not None:
        source, (identity, revision, check) = f"data.hub={data.hub}", _hub_state(data)
        splits = {"train": data.train_split, "valid": data.valid_split, "test": data.test_split}
        readers = {
            split: functools.partial(_hub, data, name, revision)
            for split, name in splits.items()
            if name
        }
    elif data.text is not None:
        files = _Files(text_files(Path(data.text)), "data.text=")
        source, identity, check = files.named(Path(data.text)), files.identity, files.check
        readers = {
            "train": lambda: itertools.chain.from_iterable(
                _read(path, data, files.named(path)) for path in files
            )
        }
    else:
        library = _Files(_library())
        source, check = "the documentation inside Python", library.check
        identity = f"{sys.version} {library.identity}"
        # It is small, and slow to parse.
        documentation = functools.cache(lambda: list(python_documentation()))
        readers = {"train": lambda: iter(documentation())}
    return Documents(
        source,
        hashlib.sha256(identity.encode()).hexdigest(),
        {split: functools.partial(_with_text, reader, source) for split, reader in readers.items()},
        check,
    )


def content_digest(files: Iterable[Path]) -> str:
    """Compute a hash of the names and contents of files, which depends on their order."""
    return _Files(files).identity


def text_files(path: Path) -> list[Path]:
    """The file itself, or the files of one kind (plain text or tables) in a folder, in order."""
    named = f"data.text={path}"
    with _naming(named):
        path.stat()
    if path.is_file():
        return [path]
    if not path.is_dir():  # a device or a pipe, which may never end
        raise UsageError(f"{named}: not a file or folder")
    files = [p for p in _files(path) if _format(p) in _PLAIN + _TABLES]
    if not files:
        raise UsageError(f"{named}: no file in it ends in {', '.join(_PLAIN + _TABLES)}")
    formats = {_format(p) for p in files}
    if not formats <= {*_PLAIN} and not formats <= {*_TABLES}:
        raise UsageError(
            f"{named} holds plain text and tables ({', '.join(sorted(formats))}): give "
            "one file, a folder of one kind, or a folder as the hub has them as data.hub"
        )
    return files


def python_documentation() -> Iterator[str]:
    """Yield passages of the language reference's topics and the standard library's docstrings.

    Every CPython contains them: about 2 MB of English prose, identical for the same version.
    """
    from pydoc_data.topics import topics

    for _, topic in sorted(topics.items()):
        yield from passages(topic.splitlines(keepends=True))
    # Docstrings are read from the source, without importing and so executing the modules.
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in _library()[1:]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 contains some files in Python 2
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        yield from passages(text.splitlines(keepends=True))


def passages(lines: Iterable[str], length: int = 4000) -> Iterator[str]:
    """Join lines into passages that end at the first blank line after ``length`` characters.

    A passage without such a line ends after four times that length.
    """
    passage = ""
    for line in lines:
        for start in range(0, len(line), 4 * length):  # one piece, unless the line is very long
            passage += line[start : start + 4 * length]
            if len(passage) >= 4 * length or (len(passage) >= length and not line.strip()):
                yield passage.strip()
                passage = ""
    yield passage.strip()


def separated(chunks: Iterable[str], separator: str, longest: int = sys.maxsize) -> Iterator[str]:
    """Split a stream of text at a separator, which may lie across two chunks.

    Text without a separator is cut soon after ``longest`` characters.
    """
    remainder = ""
    for chunk in chunks:
        *documents, remainder = (remainder + chunk).split(separator)
        yield from map(str.strip, documents)
        if len(remainder) > longest + len(separator):
            yield remainder
            remainder = ""
    yield remainder.strip()


def _with_text(reader: Callable[[], Iterator[str]], source: str) -> Iterator[str]:
    empty = True
    for document in reader():
        if document and not document.isspace():
            empty = False
            yield document
    if empty:
        raise UsageError(f"{source}: there is no text in it")


def _library() -> list[Path]:
    """The files of Python's documentation, with the topics of the language reference first."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise UsageError(
            "this Python comes without pydoc_data: give a text of your own with --text"
        ) from None
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    modules = (p for p in sorted(folder.rglob("*.py")) if not left_out & set(p.parts))
    return [Path(topics.__file__), *modules]


def _files(folder: Path) -> list[Path]:
    """All files in a folder that are not hidden, in order."""
    return sorted(
        p
        for p in folder.rglob("*")
        if p.is_file() and not any(name[0] == "." for name in p.relative_to(folder).parts)
    )


def _format(path: Path) -> str:
    """The file extension that tells the format, without that of a compression."""
    # The last two, as in text.jsonl.gz; a name may have more dots before them.
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in _COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def _read(path: Path, data: Data, where: str) -> Iterator[str]:
    """Yield the documents of a file; with an unknown extension it is read as plain text."""
    kind = _format(path)
    if kind == ".parquet":
        yield from _cells(_parquet_rows(path, data.column, where), data.column, f"{where}, row")
        return
    with _opened(path, where, newline="" if kind in _DELIMITERS else None) as stream:
        if kind in _TABLES:
            delimiter = _DELIMITERS.get(kind)
            rows = (
                _delimited_rows(stream, delimiter, where)
                if delimiter
                else _json_rows(stream, where)
            )
            yield from _cells(rows, data.column, f"{where}, row")
        elif data.separator is None:
            # Only very long lines are read in pieces.
            yield from passages(_text(functools.partial(stream.readline, _CHUNK), where))
        else:
            pieces = _text(functools.partial(stream.read, _CHUNK), where)
            for document in separated(pieces, data.separator, _longest()):
                _check_length(document, _longest(), where)
                yield document


@contextmanager
def _opened(path: Path, where: str, newline: str | None) -> Iterator[TextIO]:
    """Open a file as decompressed UTF-8 text; errors while it is read become UsageErrors."""
    try:
        unpacked = _COMPRESSIONS.get(path.suffix, open)
        with (
            unpacked(path, "rb") as file,
            io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as stream,
        ):
            yield stream
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8 text (byte 0x{error.object[error.start]:02x} in "
            f"{error.object[max(error.start - 20, 0) : error.end + 20]!r}); convert it first, or "
            "unpack it if it is an archive"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError) as error:
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from None


def _text(read: Callable[[], str], where: str) -> Iterator[str]:
    """The pieces that a function reads, up to the end; raise UsageError if they are not text."""
    for piece in iter(read, ""):
        if "\0" in piece:
            raise UsageError(
                f"{where}: holds NUL characters, which text does not: unpack it if it is an archive"
            )
        yield piece


def _longest() -> int:
    """Characters in a document: the tokenizer needs up to 500 bytes of memory for each."""
    limit = os.environ.get(_MAX_DOCUMENT) or "10000000"
    if not re.fullmatch("[0-9]{1,18}", limit) or int(limit) == 0:
        raise UsageError(f"{_MAX_DOCUMENT}={limit!r} must be a whole number, at least 1")
    return int(limit)


def _check_length(text: str, longest: int, where: str) -> None:
    if len(text) > longest:
        raise UsageError(
            f"{where}: a document has more than {_longest()} characters. Divide it, or set the "
            f"environment variable {_MAX_DOCUMENT} to a higher number"
        )


def _lines(stream: TextIO, where: str) -> Iterator[str]:
    """Yield the lines of a table, unless one is longer than any row can be."""
    longest = 6 * _longest() + _CHUNK  # \u0061 for each character, and other columns
    for number, line in enumerate(iter(functools.partial(stream.readline, longest + 1), ""), 1):
        _check_length(line, longest, f"{where}, line {number}")
        yield line


def _delimited_rows(stream: TextIO, delimiter: str, where: str) -> Iterator[Any]:
    """Yield the rows of a table whose first line names its columns."""
    csv.field_size_limit(_longest())
    rows = csv.DictReader(_lines(stream, where), delimiter=delimiter, strict=True)
    try:
        yield from rows
    except csv.Error as error:
        raise UsageError(f"{where}, after line {rows.line_num}: not a table ({error})") from None


def _json_rows(stream: TextIO, where: str) -> Iterator[Any]:
    """Yield the rows of JSON Lines, or of a single array, which is read as a whole."""
    number = 0
    try:
        # The first character that is not space tells an array from JSON Lines.
        while (start := stream.read(1)).isspace():
            number += start == "\n"
        if start == "[":
            largest, number = 100 * _longest(), 0
            array = start + stream.read(largest)
            if len(array) > largest:
                raise UsageError(
                    f"{where}: an array of more than {largest} characters: write each of its rows "
                    "on a line, as JSON Lines"
                )
            yield from json.loads(array)
            return
        lines = _lines(stream, where)
        for line in itertools.chain([start + next(lines, "")], lines):
            number += 1
            if line.strip():
                yield json.loads(line)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also for thousands of digits
        place = f"{where}, line {number}" if number else where
        raise UsageError(f"{place}: not JSON ({error})") from None


def _parquet_rows(path: Path, column: str, where: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
        _check_column(metadata.schema.to_arrow_schema().names, column, where)
        paths = {metadata.schema.column(i).path for i in range(metadata.num_columns)}
        # As dictionaries, since a short file may repeat a long text any number of times.
        with parquet.ParquetFile(path, read_dictionary=[*({column} & paths)]) as table:
            for batch in table.iter_batches(batch_size=1024, columns=[column]):
                yield from ({column: text.as_py()} for text in batch.column(0))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UsageError(f"{where}: {one_line(error)}") from None


def _cells(rows: Iterable[Any], column: str, place: str) -> Iterator[str]:
    """The texts of rows, which are empty for null; in messages a row's number follows ``place``."""
    for number, row in enumerate(rows, 1):
        where = f"{place} {number}"
        if not isinstance(row, dict):
            raise UsageError(f"{where}: not a JSON object, but {str(row)[:50]!r}")
        _check_column(row, column, where)
        text = "" if row[column] is None else row[column]
        if not isinstance(text, str):
            raise UsageError(f"{where}: column {column!r} is not text, but {str(text)[:50]!r}")
        _check_length(text, _longest(), where)
        yield text.encode(errors="replace").decode()  # JSON may contain half a surrogate pair


def _check_column(names: Collection[str], column: str, where: str) -> None:
    if column not in names:
        near = difflib.get_close_matches(column, names, n=1) or ["NAME"]
        raise UsageError(
            f"{where} has no column {column!r}, but {', '.join(sorted(names))}: a recipe can name "
            f"another one with data.column={near[0]}"
        )


def _hub_state(data: Data) -> tuple[str, str | None, Callable[[], None]]:
    """What identifies a data set's content, its full commit (None for a folder), and its check."""
    folder = Path(str(data.hub))
    if folder.exists():
        files = _Files(_files(folder) if folder.is_dir() else [folder])
        return files.identity, None, files.check
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
    return f"{data.hub} {commit}", commit, lambda: None


def _hub(data: Data, split: str, revision: str | None) -> Iterator[str]:
    from datasets import load_dataset  # this import takes a second

    with _hub_errors(data):
        # Streamed: max_tokens may need only a small part of a data set of terabytes.
        rows = load_dataset(
            data.hub, data.hub_config, split=split, revision=revision, streaming=True
        )
        if data.shuffle_seed is not None:
            rows = rows.shuffle(seed=data.shuffle_seed, buffer_size=10_000)
        yield from _cells(rows, data.column, f"data.hub={data.hub}, {split} row")


@contextmanager
def _hub_errors(data: Data) -> Iterator[None]:
    """Turn errors while a data set is read, which many libraries raise, into UsageErrors."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        is_here = Path(str(data.hub)).exists()
        reason = f"{type(error).__name__}: {one_line(error, 300)}" if is_here else hub_error(error)
        raise UsageError(
            f"data.hub={data.hub} cannot be read ({reason}): "
            "check its name, config, revision and splits, and that the hub can be reached"
        ) from None
