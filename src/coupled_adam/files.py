"""Files that are written completely or not at all, and folders that one process writes to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coupled_adam.errors import UsageError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename it.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; an existing file is intact.
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
    """Lock a folder against other processes that write to it; being killed releases the lock.

    Raises:
        UsageError: another process has locked it.
        OSError: the folder does not exist, or cannot be written to.
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
