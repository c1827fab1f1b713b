"""Files and folders that are complete or absent, and locks that end with their process.

What is being written has a name that nothing else has, ``.coupled-adam-`` and a random number, and
is locked while its process lives. So what a killed process has left can be told from everything
else, and only that is ever cleared.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from coupled_adam.errors import UsageError

LOCK = ".lock"
"""The file by which a folder is locked."""
_TEMPORARY = re.compile(r"\.coupled-adam-[0-9a-f]{16}\.tmp")
_ASIDE = re.compile(r"\.(.+)\.coupled-adam-old")
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_CHUNK = 2**22
_SAYS_AFTER = 5.0  # seconds of waiting


def temporary_path(path: Path) -> Path:
    """A name in the same folder for what will become ``path``; only this package gives it."""
    return path.with_name(f".coupled-adam-{secrets.token_hex(8)}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a path has a name from :func:`temporary_path`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    The content is on the disk before the file has its name, and the name when this returns.

    Raises:
        OSError: if the disk is full or the folder is not writable; an existing file is kept.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        with _made(path, lambda temporary: temporary.touch(exist_ok=False)) as temporary:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file, and the temporary one is gone
        raise


@contextmanager
def new_folder(
    path: Path, is_own: Callable[[str], bool] = lambda _: False, replace: bool = True
) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes ``path`` if the block ends without an error.

    Its files are on the disk before it has its name, and the name when this returns. If there is a
    folder ``path`` already, it is put aside and then removed. If the process is killed between the
    two renames, :func:`clear_leftovers` puts it back.

    Args:
        is_own: whether a file of the old folder, named by its path in it, is to be removed with
            it. All others are moved to the new folder.
        replace: whether to replace a folder ``path``; otherwise one with anything in it is an
            error.

    Raises:
        OSError: the disk is full or the place is not writable; the old folder is kept.
    """
    with _made(path, Path.mkdir) as temporary:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(Path(folder, name))
            sync_folder(Path(folder))
        if not replace or not os.path.lexists(path):
            temporary.rename(path)
            sync_folder(path.parent)
            return
        old = path.with_name(f".{path.name}.coupled-adam-old")
        with _locked(path, is_needed=False):
            path.rename(old)
            temporary.rename(path)
        sync_folder(path.parent)
        try:
            _dissolve(old, path, is_own)
        except OSError as error:  # the new folder is there, which is what was asked for
            warnings.warn(
                f"{old} could not be removed ({error.strerror}): remove it, or it will be tried "
                "again next time",
                stacklevel=3,
            )


def clear_leftovers(folder: Path, is_own: Callable[[str], bool] | None = None) -> None:
    """Remove what killed processes of this package have left in a folder, and nothing else.

    Args:
        is_own: as for :func:`new_folder`, which it helps to finish. Without it, folders that have
            been replaced are left to a caller who knows it.
    """
    for entry in sorted(folder.iterdir()):
        aside = _ASIDE.fullmatch(entry.name)
        if entry.is_symlink() or not (aside or is_temporary(entry)):
            continue
        # It cannot be locked while a process is working on it, nor if it is another user's.
        with contextlib.suppress(OSError), _locked(entry):
            if not aside:
                remove(entry)
            elif not os.path.lexists(folder / aside[1]):
                entry.rename(folder / aside[1])
            elif is_own is not None:
                _dissolve(entry, folder / aside[1], is_own)


def make_folder(path: Path) -> list[Path]:
    """Create a folder with those above it, and return the new ones, the innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    # The name of a folder is in the one above it, which is flushed so that it survives a crash.
    for folder in reversed(missing):
        sync_folder(folder.parent)
    return missing


def remove(path: Path) -> None:
    """Remove a file or a folder that this package has made, whatever is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_RESULTS = {
    b"<!doctype html>": b'<meta name="generator" content="coupled-adam">',
    b"\x89PNG": b"coupled-adam",
    b"<?xml": b"<dc:title>coupled-adam",
    b"%PDF": b"(coupled-adam)",
    b"PAR1": b"coupled-adam",
    b"model,role,tensor,variant": b"",
    b'{\n  "test_loss"': b"",
}
"""How results begin, and by which mark pages, pictures and maps are known for ours."""


def is_result(path: Path) -> bool:
    """Whether a file is empty, or a result of this package: a page, picture, table or evaluation.

    A text that only speaks of the package is none.
    """
    # Formats differ in whether they name their program at the start or at the end.
    with open_regular(path) as file:
        start = file.read(2**16)
        file.seek(max(0, path.stat().st_size - 2**16))
        ends = start + file.read()
    return not ends or any(start.startswith(b) and mark in ends for b, mark in _RESULTS.items())


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, unbuffered.

    Raises:
        OSError: it cannot be read.
        UsageError: it is a pipe, which others may never write to, or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise UsageError(f"{path} is a pipe or a device, and should be a file")
        return cast(BinaryIO, os.fdopen(descriptor, "rb", buffering=0))
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, errors: str = "strict") -> str:
    """The content of a file in UTF-8; ``errors`` as for :meth:`bytes.decode`."""
    with open_regular(path) as file:
        return file.read().decode(errors=errors)


def sync(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can do that for folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def file_digest(
    path: Path,
    start: int = 0,
    length: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> str:
    """The SHA-256 digest of a file's content, as hexadecimal digits.

    Args:
        start: the offset of the first byte.
        length: the number of bytes; None goes on to the end of the file.
        progress: called with the number of bytes of each piece that has been read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        file.seek(start)
        while piece := file.read(_CHUNK if length is None else min(_CHUNK, length)):
            digest.update(piece)
            length = None if length is None else length - len(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()


def sole_writer(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder against other writing processes; errors are those of :func:`lock`."""
    refusal = f"{folder} is in use by another process: wait for it, or choose another --out"
    return lock(folder / LOCK, refusal)


@contextmanager
def lock(path: Path, refusal: str, wait: float = 0, waits_for: str = "") -> Iterator[None]:
    """Hold the lock of a file; the system releases it when the process ends, however it does.

    The file may be removed by the process that holds its lock.

    Args:
        refusal: the message if another process holds it.
        wait: for how many seconds to try again until then.
        waits_for: what is said on standard error meanwhile.

    Raises:
        UsageError: if another process holds the lock.
        OSError: if the file cannot be created or locked.
    """
    go_on = waiting(waits_for, wait)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if _acquired(path, descriptor):
                yield
                return
        finally:
            os.close(descriptor)
        if not go_on():
            raise UsageError(refusal)


def _acquired(path: Path, descriptor: int) -> bool:
    """Whether this process now holds the lock of the file at a path, if there are locks at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held it may have removed the file.
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
        warnings.warn(
            f"{path.parent} is on a file system without locks: nothing keeps another process from "
            "writing to it at the same time",
            stacklevel=4,
        )
        return True


def waiting(event: str, limit: float) -> Callable[[], bool]:
    """A function that sleeps a moment, and returns False if it has been so for ``limit`` seconds.

    After some seconds it says once, on standard error, what this process is waiting for.
    """
    began = time.monotonic()
    announced = False

    def go_on() -> bool:
        nonlocal announced
        waited = time.monotonic() - began
        if waited >= _SAYS_AFTER and not announced and limit > 0:
            announced = True
            print(f"waiting for {event}, {duration(limit)} at most", file=sys.stderr, flush=True)
        if waited >= limit:
            return False
        time.sleep(min(0.1, limit - waited))
        return True

    return go_on


def duration(seconds: float) -> str:
    """A number of seconds in words."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} seconds"


@contextmanager
def _made(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A file or folder under a temporary name, removed unless the block renames it to ``path``."""
    temporary = temporary_path(path)
    try:
        make(temporary)
        with _locked(temporary, is_needed=False):
            yield temporary
    except BaseException:  # at any moment: nothing else ever has this name
        remove(temporary)
        raise


@contextmanager
def _locked(path: Path, is_needed: bool = True) -> Iterator[None]:
    """Lock a file or folder itself, to show that this process is working on it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with contextlib.nullcontext() if is_needed else contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _dissolve(old: Path, new: Path, is_own: Callable[[str], bool]) -> None:
    """Remove a folder that has been replaced, and move what is not its own to the new one."""
    # In reverse order, so that each folder is empty when its turn comes.
    for path in sorted(old.rglob("*"), reverse=True):
        target = new / path.relative_to(old)
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif is_own(path.relative_to(old).as_posix()):
            path.unlink()
        elif not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            sync_folder(target.parent)
    with contextlib.suppress(OSError):
        old.rmdir()
