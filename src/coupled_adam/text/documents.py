"""The documents of text files."""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coupled_adam.errors import UsageError, did_you_mean, one_line
from coupled_adam.files import files_below
from coupled_adam.inputs import file_format, regular

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

T = TypeVar("T")
PLAIN = (".txt", ".md")
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_OPEN: dict[str, Callable[..., Any]] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".xz": lzma.open,
    # Whatever the window that the file was written with; memory is taken as it is needed.
    ".zst": partial(zstd.open, options={zstd.DecompressionParameter.window_log_max: 31}),
}


def documents(path: Path, separator: str | None = None, column: str = "text") -> Iterator[str]:
    """Yield the documents of a text, none of which is blank; every pass yields the same ones.

    Raises UsageError if a file cannot be read, there is no text, or the separator never occurs in
    plain text; the message begins with a path.

    Args:
        path: a file or a folder, as for :func:`text_files`. A file with an unknown ending is read
            as plain text; upper and lower case are alike.
        separator: the text between two documents of plain text; None cuts it into passages. It is
            searched for :func:`as_understood`.
        column: the column, or the key in JSON, that holds the text of a record.
    """
    empty, occurs = True, separator is None
    searched = None if separator is None else as_understood(separator)
    for file in text_files(path):
        occurs |= _format(file) in RECORDS
        with _readable(file):
            for number, document in enumerate(_file_documents(file, searched, column)):
                occurs |= number > 0
                if document and not document.isspace():
                    empty = False
                    yield document
    if empty:
        raise UsageError(f"{path}: there is no text in it")
    if not occurs:
        raise UsageError(f"{path}: the separator {searched!r} never occurs in it")


def text_files(path: Path) -> list[Path]:
    """The file itself, or the files of one kind (plain text or records) in a folder, in order."""
    with _readable(path):
        path.stat()
    if not path.is_dir():
        return [path]
    visible = visible_files(path)
    files = [file for file in visible if _format(file) in PLAIN + RECORDS]
    # A README of data is about them.
    others = [file for file in files if file.stem.upper() != "README"]
    files = others or files
    formats = {_format(file) for file in files}
    if not files or (formats - {*PLAIN} and formats & {*PLAIN}):
        raise UsageError(
            f"{path}: its files must end in {', '.join(PLAIN)}, or all in {', '.join(RECORDS)}; "
            f"there are {', '.join(sorted(formats)) or 'none of these'}"
        )
    if skipped := len(visible) - len(files):
        warnings.warn(f"{path}: {skipped} of {len(visible)} files are not read", stacklevel=2)
    return files


def visible_files(folder: Path) -> list[Path]:
    """All files in a folder and below it that are not hidden, in order; also links to nothing."""
    return sorted(
        path
        for path in files_below(folder)
        if (path.is_file() or path.is_symlink())
        and not any(name[0] == "." for name in path.relative_to(folder).parts)
    )


def column_texts(tables: "Iterable[Table | RecordBatch]", column: str) -> Iterator[str]:
    """Yield the texts in a column; UsageError if there is no such column, or it holds no text."""
    for table in tables:
        _check_column(table.schema.names, column)
        for value in table[column].to_pylist():
            yield _text(value, column)


_PASSAGE = 4000  # characters
_PIECE = 64 * 4 * _PASSAGE  # of a line, so that passages end where they would in the whole line


def passages(lines: Iterable[str], length: int = _PASSAGE) -> Iterator[str]:
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


def separated(chunks: Iterable[str], separator: str) -> Iterator[str]:
    """Split a stream of text at a separator, which may lie across two chunks."""
    begun: list[str] = []  # of a document, whose end is not known yet
    end = ""  # of the chunks so far, where a separator may have begun
    for chunk in chunks:
        *complete, last = (end + chunk).split(separator)
        if complete:
            yield "".join([*begun, complete[0]]).strip()
            yield from map(str.strip, complete[1:])
            begun = []
        decided = max(len(last) - len(separator) + 1, 0)
        begun.append(last[:decided])
        end = last[decided:]
    yield "".join([*begun, end]).strip()


def as_understood(separator: str) -> str:
    r"""A separator as it is searched for: \n and \t, as a shell passes them on, and newlines."""
    for written, meant in (("\\n", "\n"), ("\\t", "\t"), ("\r\n", "\n"), ("\r", "\n")):
        separator = separator.replace(written, meant)
    return separator


def batched(items: Iterable[T], size: int, length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists, each of which ends once the lengths in it add up to a size."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += length(item)
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _format(path: Path) -> str:
    """The file extension that tells the format, without that of a compression."""
    # The last two, as in text.jsonl.gz; a name may have more dots before them.
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    suffixes = [suffix for suffix in suffixes if suffix not in _OPEN]
    return suffixes[-1] if suffixes else ""


def _file_documents(path: Path, separator: str | None, column: str) -> Iterator[str]:
    """The documents of one file, which may be blank; the caller names it in errors."""
    kind, opened = _format(path), _OPEN.get(path.suffix.lower(), open)
    with opened(regular(path), "rb") as file:
        start = file.read(4096)
    if start.startswith(b"PAR1"):
        try:
            from pyarrow import parquet
        except ModuleNotFoundError:
            raise UsageError(".parquet needs a package: pip install pyarrow") from None

        yield from column_texts(parquet.ParquetFile(path).iter_batches(1000), column)
        return
    _check_text(start, kind)
    with opened(path, "rt", encoding="utf-8-sig") as lines:
        if kind in RECORDS:
            is_table = kind in (".csv", ".tsv")
            for row in _table_rows(lines, kind) if is_table else _json_rows(lines):
                _check_column(row, column)
                yield _text(row[column], column)
            return
        # A text without newlines is one long line, which is read in pieces.
        pieces: Iterator[str] = iter(lambda: lines.readline(_PIECE), "")
        if separator is None:
            yield from passages(pieces)
        else:  # in large chunks, as most lines have no separator
            yield from separated(map("".join, batched(pieces, 2**20, len)), separator)


# A key of an object, which arrays may be around, or a text that is the first of an array.
_JSON = re.compile(rb'\s*((\[\s*)*\{\s*"[^"]*"\s*:|\[\s*"[^"]*"\s*[,\]])')


def _check_text(start: bytes, kind: str) -> None:
    """Raise UsageError for a file whose first bytes are not those of a text of this kind."""
    if known := file_format(start):
        raise UsageError(f"it is {known}")
    # Without a mark at its beginning, every other byte is 0 where letters are Latin.
    is_wide = len(start) > 9 and not (start[:64:2].strip(b"\0") and start[1:64:2].strip(b"\0"))
    if is_wide or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError("it is UTF-16: iconv -f UTF-16 -t UTF-8 makes UTF-8 of it")
    if b"\0" in start:
        raise UsageError(f"it is no text, but binary: byte {start.index(0)} is 0")
    if kind == ".parquet":
        raise UsageError("it is no Parquet file")
    if kind not in PLAIN + RECORDS and _JSON.match(start):
        raise UsageError(
            "it begins with JSON: rename it to end in .jsonl if each line is an object, and in "
            ".txt if it is plain text"
        )


def _json_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines."""
    for number, line in enumerate(lines, 1):
        problem = ""
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            problem = f"is not JSON: {error}"
        else:
            if isinstance(row, dict):
                yield row
            elif row is not None:
                problem = f"is not a JSON object, but {str(row)[:50]!r}"
        if problem:
            raise UsageError(
                f"line {number} {problem}. Each row must be an object in a line of its own, as "
                "pandas.read_json(FILE).to_json('NEW.jsonl', orient='records', lines=True) writes "
                "an array of them"
            )


def _table_rows(lines: Iterable[str], kind: str) -> Iterator[dict[str, str]]:
    """The rows of a .csv or .tsv file below the first line, which names the columns.

    In a .tsv no field holds a tab or a line break, and a quotation mark is mostly that of a
    sentence: only those around a whole field are taken off.
    """
    csv.field_size_limit(sys.maxsize)  # the limit is 128 kB otherwise; a field is a document
    is_tsv = kind == ".tsv"
    dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {"strict": True}
    rows = csv.reader(lines, **dialect)
    names: list[str] = []
    try:
        for row in rows:
            if is_tsv:
                quoted = [re.fullmatch(r'"((?:[^"]|"")*)"', field) for field in row]
                row = [q[1].replace('""', '"') if q else field for q, field in zip(quoted, row)]
            if twice := [name for name in row if not names and row.count(name) > 1]:
                raise UsageError(f"the first line names the column {twice[0]!r} twice")
            if names and row and len(row) != len(names):
                raise UsageError(f"line {rows.line_num} has not as many columns as the first line")
            if names and row:
                yield dict(zip(names, row))
            names = names or row
    except csv.Error as error:
        raise UsageError(f"line {rows.line_num}: {error}") from None


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str | None):
        raise UsageError(f"{column!r} is not text in each row, but {str(value)[:50]!r}")
    # JSON may hold half a surrogate pair, which UTF-8 cannot.
    return (value or "").encode(errors="replace").decode()


def _check_column(names: Iterable[str], column: str) -> None:
    if column not in names:
        raise UsageError(
            f"column={column!r} is not among its columns: {did_you_mean(column, names)}; "
            "--data.column chooses it for train and compare, and other commands read 'text'"
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Put a path before the message of an error, and make it a UsageError."""
    try:
        yield
    except Exception as error:  # each format has its own
        reason = getattr(error, "strerror", None) or one_line(error, 300)
        raise UsageError(f"{path}: {reason}") from None
