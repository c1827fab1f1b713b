"""Whether results may be written where they are to go.

A folder that several results go to is claimed, by a lock that ends with its process.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from coupled_adam.errors import UsageError
from coupled_adam.fields import require
from coupled_adam.files import resolved, write_atomically

T = TypeVar("T")

LOCK = ".lock"
"""The file by which a folder is locked; it stays when the lock is released."""


def check_outputs(overwrite: bool | None = None, **outputs: Path | None) -> None:
    """Refuse what cannot be written, or exists: a file without ``overwrite``, None for any."""
    named: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        name = f"--{option} {path}"
        if overwrite is None:
            require(not os.path.lexists(path), f"{name} exists: choose another name")
        elif path.exists() and not _is_stream(path):
            require(not path.is_dir(), f"{name} is a folder: choose the name of a file")
            require(overwrite, f"{name} exists: choose another name, or add --overwrite")
        # Folders above it are made: what counts is the nearest that is there.
        place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        is_below_a_file = place != path.absolute() and not place.is_dir()
        require(
            os.access(place, os.W_OK) and not is_below_a_file,
            f"{name} cannot be written: {place} is no folder to write to",
        )
        has_ending = option not in ("html", "explore") or path.suffix in (".html", ".htm")
        require(has_ending or _is_stream(path), f"{name} is a page: end its name in .html")
        # Two options may name one file in two ways, as by a link.
        other = named.setdefault(resolved(path), option)
        require(other == option, f"--{other} and {name} are the same file: choose two")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that an option names, and the folders above it.

    What is no file, such as ``/dev/stdout`` or ``/dev/null``, is written into, and stays.
    """
    if _is_stream(path):
        with path.open("ab") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(resolved(path), content)  # a link stays one


def _is_stream(path: Path) -> bool:
    # What the shell has opened may be a file, too, which it goes on writing to.
    is_of_shell = str(path).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/"))
    return path.exists() and not path.is_dir() and (is_of_shell or not path.is_file())


@contextmanager
def sole_writer(folder: Path, wait: float = 0) -> Iterator[None]:
    """Lock a folder against other writing processes; the system unlocks it when this one ends.

    Raises UsageError if another process writes to it, or this one may not.

    Args:
        wait: the seconds to wait for another process.
    """
    try:
        lock = FileLock(folder / LOCK).acquire(timeout=wait)
    except Timeout:
        raise UsageError(
            f"{folder} is in use by another process: wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock:
        yield


@contextmanager
def claimed(folder: Path, check: Callable[[], T]) -> Iterator[T]:
    """Make a folder if it is not there, and be its only writer until the block ends.

    ``check`` refuses a folder that must not be written to; what it returns is yielded. It is called
    before anything is changed, and again when no other process can change it. Raises UsageError if
    the folder is in use, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} exists, and is no folder: choose another name")
    check()
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    with sole_writer(folder):
        try:
            yield check()
        finally:
            # What has failed before anything was written leaves nothing.
            with contextlib.suppress(OSError):
                if [entry.name for entry in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    for place in missing:
                        place.rmdir()


def check_unused(folder: Path, problem: str = "exists") -> None:
    """Raise UsageError, with a problem, if a folder that is to be new has been used.

    A process that was killed before it wrote anything leaves hidden files.
    """
    is_new = not folder.exists() or (
        folder.is_dir() and all(entry.name.startswith(".") for entry in folder.iterdir())
    )
    if not is_new:
        hint = "continue it with --resume, or " if problem == "exists" else ""
        raise UsageError(f"--out {folder} {problem}: {hint}choose another folder")


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {folder} cannot be written ({error.strerror}): choose another folder")
