"""Files that are written completely or not at all, and folders that one process writes to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coupled_adam.errors import UsageError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    Raises:
        OSError: if the disk is full or the folder is not writable; an existing file is kept.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file, and the temporary one is gone
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other writing processes; the lock is released even on SIGKILL.

    Raises:
        UsageError: if another process has locked it.
        OSError: if the folder does not exist or is not writable.
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
