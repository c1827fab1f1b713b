"""Files that are whole or absent."""

import os
from pathlib import Path


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
