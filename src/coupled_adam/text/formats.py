"""The documents of a file: plain text, JSON, CSV or Parquet, which may be compressed."""

import bz2
import csv
import difflib
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from coupled_adam.errors import UsageError, one_line
from coupled_adam.text.source import Data

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd  # it detects truncated files

PLAIN = (".txt", ".md", ".rst")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (".jsonl", ".json", ".parquet", *_DELIMITERS)
_COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": zstd.open,
}
_CHUNK = 2**20
_MAX_DOCUMENT = "COUPLED_ADAM_MAX_DOCUMENT"


def file_format(path: Path) -> str:
    """The file extension that tells the format, without that of a compression."""
    # The last two, as in text.jsonl.gz; a name may have more dots before them.
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in _COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def file_documents(path: Path, data: Data, where: str) -> Iterator[str]:
    """Yield the documents of a file; with an unknown extension it is read as plain text.

    Raises:
        UsageError: it cannot be read; the message begins with ``where``.
    """
    kind = file_format(path)
    if kind == ".parquet":
        rows = _parquet_rows(path, data.column, where)
        yield from row_texts(rows, data.column, f"{where}, row")
        return
    with _opened(path, where, newline="" if kind in _DELIMITERS else None) as stream:
        if kind in _DELIMITERS:
            rows = _delimited_rows(stream, _DELIMITERS[kind], where)
            yield from row_texts(rows, data.column, f"{where}, row")
        elif kind in TABLES:
            yield from row_texts(_json_rows(stream, where), data.column, f"{where}, row")
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


def row_texts(rows: Iterable[Any], column: str, place: str) -> Iterator[str]:
    """The texts of rows, which are empty for null; in messages a row's number follows ``place``."""
    longest = _longest()
    for number, row in enumerate(rows, 1):
        where = f"{place} {number}"
        if not isinstance(row, dict):
            raise UsageError(f"{where}: not a JSON object, but {str(row)[:50]!r}")
        _check_column(row, column, where)
        text = "" if row[column] is None else row[column]
        if not isinstance(text, str):
            raise UsageError(f"{where}: column {column!r} is not text, but {str(text)[:50]!r}")
        _check_length(text, longest, where)
        yield text.encode(errors="replace").decode()  # JSON may contain half a surrogate pair


def _check_column(names: Collection[str], column: str, where: str) -> None:
    if column not in names:
        near = difflib.get_close_matches(column, names, n=1) or ["NAME"]
        raise UsageError(
            f"{where} has no column {column!r}, but {', '.join(sorted(names))}: a recipe can name "
            f"another one with data.column={near[0]}"
        )


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
