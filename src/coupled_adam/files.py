"""Files that are whole or absent, folders that one process writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coupled_adam.errors import UsageError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename it.

    Raises:
        OSError: the disk is full, or the folder cannot be written; a file that was there is intact.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that would write into it; a killed one lets it go.

    Raises:
        UsageError: another process holds it.
        OSError: the folder is not there, or cannot be written.
    """
    lock = FileLock(folder / ".lock", 0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"{folder} is in use by another process: wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
