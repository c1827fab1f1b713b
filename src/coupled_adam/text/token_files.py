"""Token ids on disk: the files of prepared corpora, and those written by nanoGPT and llm.c."""

import dataclasses
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import resolved
from coupled_adam.inputs import file_format, read_array, regular

_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
_HEADER = 256 * 4  # bytes; magic number, version, number of tokens, and zeros, as int32
# Printable characters; ids without a byte beyond them are a matter of a few dozen.
_TEXT = re.compile(rb"[\t-\r -~\x80-\xf4]{64,}")
# What llm.c's header begins with, for GPT-2's tokens and for Llama 3's.
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A range of token ids in a file, with its offset in bytes and its length in tokens."""

    path: str
    dtype: str
    offset: int
    length: int

    def split_at(self, at: int) -> tuple["TokenFile", "TokenFile"]:
        """Split into the first ``at`` tokens and the rest."""
        at = min(max(at, 0), self.length)
        offset = self.offset + at * np.dtype(self.dtype).itemsize
        rest = dataclasses.replace(self, offset=offset, length=self.length - at)
        return dataclasses.replace(self, length=at), rest

    def read(self, folder: Path, start: int, stop: int) -> NDArray[Any]:
        """The ids [stop - start] of a part; a relative path is relative to ``folder``.

        The file is not kept open, since a large corpus has more files than a process may open.
        Raises OSError if the file cannot be read, or has become shorter.
        """
        path, count = folder / self.path, min(stop, self.length) - start
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        ids = np.fromfile(path, self.dtype, count, offset=offset)
        if len(ids) < count:  # it was cut after its length was read
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), str(path))
        return ids


class Tokens:
    """Token ids of one or several files in a folder, with ``len`` and slices without a step."""

    def __init__(self, files: Sequence[TokenFile], folder: Path = Path()) -> None:
        self._files = files
        self._folder = folder
        self._ends = np.cumsum([file.length for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> NDArray[Any]:
        start, stop, _ = where.indices(int(self._ends[-1]))
        stop = max(start, stop)
        pieces = [np.empty(0, self._files[0].dtype)]  # so that an empty slice has a dtype
        # From the file in which the slice begins to the one in which it ends.
        for number in range(int(np.searchsorted(self._ends, start, "right")), len(self._files)):
            file = self._files[number]
            begin = int(self._ends[number]) - file.length
            if begin >= stop:
                break
            pieces.append(file.read(self._folder, max(start - begin, 0), stop - begin))
        return np.concatenate(pieces)


def token_file(path: Path, vocab_size: int, dtype: str | None = None) -> TokenFile:
    """Describe all tokens of a file, which may have llm.c's header, or be an array of NumPy.

    Anything else that has a format, or is text, is refused: its bytes are no ids. Raises UsageError
    if the file cannot be read, is truncated, or holds other things or wider numbers.

    Args:
        vocab_size: V, above all ids.
        dtype: the type of the ids, ``"uint16"``, ``"uint32"`` or ``"int64"``. None is that of the
            header or, without one, the smaller of uint16 and uint32 that can represent the ids.
    """
    try:
        with regular(path).open("rb") as file:
            size = path.stat().st_size
            start = file.read(2**16)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if start.startswith(b"\x93NUMPY"):
        return _array_file(path)
    magic, version, promised = np.frombuffer(start[:12].ljust(12, b"\0"), "<i4").tolist()
    stated = _LLM_C.get((magic, version))
    if not stated and (known := file_format(start)):
        raise UsageError(f"{path} is {known}")
    if _TEXT.fullmatch(start[:4096]):
        raise UsageError(f"{path} is text, and not token ids: give it as --text")
    offset = _HEADER if stated else 0
    kind = stated or dtype or ("uint16" if vocab_size <= 2**16 else "uint32")
    # Ids of another type, or a copy that was cut off, rarely fill the file exactly.
    length, remainder = divmod(size - offset, np.dtype(_DTYPES[kind]).itemsize)
    if remainder or length < 0 or (stated and length != promised):
        raise UsageError(f"{path} is damaged, or does not hold {kind}: it has {size} bytes")
    # The upper half of a small number is 0, and stands behind the lower one.
    numbers = np.frombuffer(start[: len(start) // 8 * 8], _DTYPES[kind])
    if not (stated or dtype) and len(numbers) >= 16 and numbers.any() and not numbers[1::2].any():
        raise UsageError(
            f"{path}: every second number is 0 if its tokens are read as {kind}, so they seem to "
            "be wider: say what they are with data.token_dtype, or with --token-dtype of analyze"
        )
    return TokenFile(str(resolved(path)), _DTYPES[kind], offset, length)


def _array_file(path: Path) -> TokenFile:
    """The ids of a ``.npy`` file, whose header says where and what they are."""
    try:
        ids = read_array(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = list(ids.shape)
        raise UsageError(f"{path} must hold ids, [tokens], and has {ids.dtype} of shape {shape}")
    return TokenFile(str(resolved(path)), ids.dtype.str, ids.offset, len(ids))
