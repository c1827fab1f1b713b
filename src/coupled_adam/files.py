"""Files and folders that are complete or absent, and locks that end with their process."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coupled_adam.errors import UsageError

LOCK = ".lock"
"""The file by which a folder is locked; it stays when the lock is released."""


def temporary_path(path: Path) -> Path:
    """A hidden name beside ``path`` for what will become it: ``.NAME-`` and random digits."""
    return path.with_name(f".{path.name[:200]}-{secrets.token_hex(4)}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    Raises:
        OSError: if the disk is full or the folder is not writable; an existing file is kept.
    """
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file, and the temporary one is gone
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes ``path`` if the block ends without an error.

    A process that is killed leaves it under its name from :func:`temporary_path`.

    Args:
        replace: whether to remove a folder ``path``; otherwise one with anything in it is an error.

    Raises:
        OSError: the disk is full or the place is not writable; the old folder is kept.
    """
    temporary, old = temporary_path(path), temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
        if replace and path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other writing processes; the system unlocks it when this one ends.

    Raises:
        UsageError: if another process writes to it.
        OSError: if the folder is not writable.
    """
    try:
        lock = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{folder} is in use by another process: wait for it, or choose another --out"
        ) from None
    with lock:
        yield
