"""Files and folders that are complete or absent.

They are written in one way: beside their place under a hidden name, then renamed.
"""

import contextlib
import errno
import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from coupled_adam.inputs import regular

try:
    import fcntl
except ImportError:  # on Windows, where what a killed process has left stays
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file as :func:`new_file` does.

    Raises OSError if the disk is full or the folder is not writable; an existing file is kept.
    """
    with new_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield an empty file to fill, which becomes ``path`` if the block ends without an error."""
    with _becoming(path, lambda temporary: temporary.touch(exist_ok=False)) as temporary:
        yield temporary


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes ``path`` if the block ends without an error.

    Raises OSError if the disk is full, the place is not writable, or ``path`` has something in it.
    """
    with _becoming(path, Path.mkdir) as temporary:
        yield temporary


@contextmanager
def _becoming(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Make something beside ``path``; it is renamed if the block ends well, otherwise removed."""
    # A file's name has at most 255 bytes.
    name = f".{os.fsdecode(os.fsencode(path.name)[:180])}-unfinished-"
    # A lock ends with its process: what can be locked has been left by one that was killed.
    for leftover in path.parent.glob(f"{glob.escape(name)}*"):
        with contextlib.suppress(OSError), _locked(leftover):
            remove(leftover)
    temporary = path.with_name(f"{name}{secrets.token_hex(4)}")
    try:
        make(temporary)
        with _locked(temporary, is_needed=False):
            yield temporary
            temporary.replace(path)
    except OSError as error:
        if error.errno is None:  # NumPy's, which says how many numbers a full disk has taken
            raise OSError(errno.ENOSPC, str(error), str(path)) from None
        # A full disk names no file, and the temporary one will be gone.
        if error.filename is None or str(error.filename).startswith(str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        remove(temporary)


@contextmanager
def _locked(path: Path, is_needed: bool = True) -> Iterator[None]:
    """Lock a file or a folder itself; OSError if another process has, or if locks are needed."""
    descriptor = -1
    try:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            if fcntl is None:
                raise OSError("there are no locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # network file systems lock only what can be written to
            if is_needed:
                raise
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def resolved(path: Path) -> Path:
    """Where a path leads, through links; one that leads to itself is left as it is.

    ``Path.resolve`` raises RuntimeError for it before Python 3.13.
    """
    return Path(os.path.realpath(path))


def shortest_names(paths: Sequence[str | Path]) -> list[str]:
    """The last name of each path, with as many of its folders as tell it from the others."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    lengths = [1] * len(parts)
    while True:
        names = [str(Path(*its_parts[-n:])) for its_parts, n in zip(parts, lengths)]
        # A path that is given twice has one name.
        alike = {n for n in names if len({p for p, name in zip(parts, names) if name == n}) > 1}
        if not alike:
            return names
        lengths = [n + (name in alike) for n, name in zip(lengths, names)]


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and below it, also where links lead, in order."""
    visited = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # a link may lead to a folder that it is in
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        yield from (Path(place, name) for name in sorted(names))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """The SHA-256 of the content of a file."""
    digest = hashlib.sha256()
    with regular(path).open("rb", buffering=0) as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()
