"""Sources of text: files, data sets on the Hugging Face hub, and Python's own documentation."""

import ast
import dataclasses
import functools
import hashlib
import itertools
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import file_digest
from coupled_adam.text.formats import (
    PLAIN,
    TABLES,
    file_documents,
    file_format,
    passages,
    row_texts,
)
from coupled_adam.text.hub import hub_error, reach_hub
from coupled_adam.text.source import Data


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
                file_documents(path, data, files.named(path)) for path in files
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
    files = [p for p in _files(path) if file_format(p) in PLAIN + TABLES]
    if not files:
        raise UsageError(f"{named}: no file in it ends in {', '.join(PLAIN + TABLES)}")
    formats = {file_format(p) for p in files}
    if not formats <= {*PLAIN} and not formats <= {*TABLES}:
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
        yield from row_texts(rows, data.column, f"data.hub={data.hub}, {split} row")


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
