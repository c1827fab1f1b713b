"""The documents of text files, and of Python's own documentation."""

import ast
import bz2
import csv
import gzip
import itertools
import json
import lzma
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coupled_adam.errors import UsageError, did_you_mean, one_line

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

T = TypeVar("T")
PLAIN = (".txt", ".md", ".rst")
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OPEN: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": zstd.open,
}
"""How the files of each compression are opened."""


def documents(path: Path, separator: str | None = None, column: str = "text") -> Iterator[str]:
    """Yield the documents of a text, none of which is blank; every pass yields the same ones.

    Args:
        path: a file or a folder, as for :func:`text_files`. A file with an unknown ending is read
            as plain text.
        separator: the text between two documents of plain text; None cuts it into passages.
        column: the column, or the key in JSON, that holds the text of a table.

    Raises:
        UsageError: a file cannot be read, or there is no text at all; the message begins with a
            path.
    """
    empty = True
    for file in text_files(path):
        with _readable(file):
            for document in _file_documents(file, separator, column):
                if document and not document.isspace():
                    empty = False
                    yield document
    if empty:
        raise UsageError(f"{path}: there is no text in it")


def text_files(path: Path) -> list[Path]:
    """The file itself, or the files of one kind (plain text or tables) in a folder, in order.

    Raises:
        UsageError: there is no such file or folder, or it does not hold files of one kind.
    """
    with _readable(path):
        path.stat()
    if not path.is_dir():
        return [path]
    files = [file for file in visible_files(path) if _format(file) in PLAIN + TABLES]
    if not files:
        raise UsageError(f"{path}: no file in it ends in {', '.join(PLAIN + TABLES)}")
    formats = {_format(file) for file in files}
    if not formats <= {*PLAIN} and not formats <= {*TABLES}:
        raise UsageError(
            f"{path} holds plain text and tables ({', '.join(sorted(formats))}): give "
            "one file, or a folder of one kind"
        )
    return files


def visible_files(folder: Path) -> list[Path]:
    """All files in a folder and below it that are not hidden, in order."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(name[0] == "." for name in path.relative_to(folder).parts)
    )


def column_texts(tables: "Iterable[Table | RecordBatch]", column: str) -> Iterator[str]:
    """Yield the texts in a column; UsageError if there is no such column, or it holds no text."""

    def values() -> Iterator[Any]:
        for table in tables:
            _check_column(table.schema.names, column)
            # datasets makes quoted JSON of all texts in a column that holds something else as well.
            if "json" in str(table.schema.field(column).type):
                raise UsageError(f"column {column!r} is not text in all of its rows")
            yield from table[column].to_pylist()

    yield from _texts(values(), column)


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


def separated(chunks: Iterable[str], separator: str) -> Iterator[str]:
    """Split a stream of text at a separator, which may lie across two chunks."""
    remainder = ""
    for chunk in chunks:
        *complete, remainder = (remainder + chunk).split(separator)
        yield from map(str.strip, complete)
    yield remainder.strip()


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


def python_documentation() -> Iterator[str]:
    """Yield passages of the language reference's topics and the standard library's docstrings.

    Every CPython contains them: about 2 MB of English prose, identical for the same version.
    """
    from pydoc_data.topics import topics

    for _, topic in sorted(topics.items()):
        yield from passages(topic.splitlines(keepends=True))
    # Docstrings are read from the source, without importing and so executing the modules.
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in library_files()[1:]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 contains some files in Python 2
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        yield from passages(text.splitlines(keepends=True))


def library_files() -> list[Path]:
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


def _format(path: Path) -> str:
    """The file extension that tells the format, without that of a compression."""
    # The last two, as in text.jsonl.gz; a name may have more dots before them.
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in _OPEN]
    return suffixes[-1] if suffixes else ""


def _file_documents(path: Path, separator: str | None, column: str) -> Iterator[str]:
    kind = _format(path)
    if kind == ".parquet":
        from pyarrow import parquet

        with _OPEN.get(path.suffix, open)(path, "rb") as file:
            yield from column_texts(parquet.ParquetFile(file).iter_batches(1000), column)
    elif kind in (".jsonl", ".json"):
        yield from _texts(_json_values(_lines(path), column), column)
    elif kind in _DELIMITERS:
        yield from _cells(_lines(path), _DELIMITERS[kind], column)
    elif separator is None:
        yield from passages(_lines(path))
    else:
        chunks = batched(_lines(path), 2**20, len)
        yield from separated(map("".join, chunks), separator)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text, which is unpacked while it is read, with their ends."""
    with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
        for line in file:
            if "\0" in line:
                raise UsageError("NUL characters are in it, which text has not: unpack an archive")
            yield line


def _json_values(lines: Iterator[str], column: str) -> Iterator[Any]:
    """Yield the values of a key of JSON Lines, or of a single array, which is read as a whole."""
    first = next(lines, "")
    texts = filter(str.strip, itertools.chain([first], lines))
    is_array = first.lstrip().startswith("[")
    number = 0
    try:
        for row in json.loads("".join(texts)) if is_array else map(json.loads, texts):
            number += 1
            if not isinstance(row, dict):
                raise UsageError(f"row {number} is not a JSON object, but {str(row)[:50]!r}")
            _check_column([*row], column)
            yield row[column]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"row {number + 1}: not JSON ({error})") from None


def _cells(lines: Iterable[str], delimiter: str, column: str) -> Iterator[str]:
    """Yield the texts in a column of a table whose first line names its columns."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names = next(reader, [])
    _check_column(names, column)
    for row in filter(None, reader):
        if len(row) != len(names):
            raise UsageError(
                f"line {reader.line_num}: a row of {len(row)} columns, where the first line names "
                f"{len(names)}"
            )
        yield row[names.index(column)]


def _texts(values: Iterable[Any], column: str) -> Iterator[str]:
    """The values of a column, which are texts or null; UsageError for anything else."""
    for number, value in enumerate(values, 1):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"row {number}: {column!r} is not text, but {str(value)[:50]!r}")
        # JSON may hold half a surrogate pair, which UTF-8 cannot.
        yield "" if value is None else value.encode(errors="replace").decode()


def _check_column(names: Sequence[str], column: str) -> None:
    if column not in names:
        hint = did_you_mean(column, names, "name the column that holds the text")
        raise UsageError(f"column={column!r} is not among its columns {', '.join(names)}: {hint}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Put a path before the message of an error, and make it a UsageError."""
    try:
        yield
    except Exception as error:  # each format has its own
        reason = getattr(error, "strerror", None) or one_line(error, 300)
        raise UsageError(f"{path}: {reason}") from None
