"""Token ids on disk: the files of prepared corpora, and those written by nanoGPT and llm.c."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.errors import UsageError
from coupled_adam.text.source import Data

_HEADER = 256 * 4  # bytes; magic number, version, number of tokens, and zeros, as int32
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A range of token ids in a file, with its offset in bytes and its length in tokens."""

    path: str
    dtype: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        """Raise ValueError for invalid fields, since they may come from a damaged file."""
        types = str, str, int, int
        values = dataclasses.astuple(self)
        fits = all(type(value) is kind for value, kind in zip(values, types))
        if not fits or self.dtype not in ("<u2", "<u4") or min(self.offset, self.length) < 0:
            raise ValueError(f"{self} is not a range of token ids")

    def is_there(self, folder: Path) -> bool:
        """Whether the file exists and is still long enough."""
        path = folder / self.path
        return path.is_file() and path.stat().st_size >= self._byte(self.length)

    def cut(self, at: int) -> tuple["TokenFile", "TokenFile"]:
        """Split into the first ``at`` tokens and the rest."""
        at = min(max(at, 0), self.length)
        rest = dataclasses.replace(self, offset=self._byte(at), length=self.length - at)
        return dataclasses.replace(self, length=at), rest

    def read(self, folder: Path, start: int, stop: int) -> NDArray[Any]:
        """The ids [stop - start] of a part; a relative path is relative to ``folder``.

        The file is not mapped into memory, since a mapped one that is truncated kills the process
        (SIGBUS), nor kept open, since a large corpus has more files than a process may open.

        Raises:
            UsageError: the file has become shorter.
        """
        path = folder / self.path
        stop = min(stop, self.length)
        ids = np.fromfile(path, self.dtype, stop - start, offset=self._byte(start))
        if len(ids) < stop - start:
            raise UsageError(
                f"{path} was truncated while it was in use: restore it, and continue with --resume"
            )
        return ids

    def _byte(self, token: int) -> int:
        """Where in the file a token is."""
        return self.offset + token * np.dtype(self.dtype).itemsize


class Tokens:
    """Token ids of one or several files in a folder, with ``len`` and slices without a step.

    Slicing raises UsageError for ids that are not below ``vocab_size``, as in a file that has been
    replaced since it was checked.
    """

    def __init__(
        self, files: Sequence[TokenFile], folder: Path = Path(), vocab_size: int | None = None
    ) -> None:
        self._files = files
        self._folder = folder
        self._vocab_size = vocab_size
        self._ends = np.cumsum([file.length for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> NDArray[Any]:
        start, stop, _ = where.indices(len(self))
        stop = max(start, stop)
        pieces = [np.empty(0, self._files[0].dtype)]
        # From the file in which the slice begins to the one in which it ends.
        for number in range(int(np.searchsorted(self._ends, start, "right")), len(self._files)):
            file = self._files[number]
            begin = int(self._ends[number]) - file.length
            if begin >= stop:
                break
            ids = file.read(self._folder, max(start - begin, 0), stop - begin)
            if self._vocab_size is not None and len(ids) and ids.max() >= self._vocab_size:
                raise UsageError(
                    f"{file.path}: token id {ids.max()} is beyond "
                    f"model.vocab_size={self._vocab_size}: the file has changed; restore it"
                )
            pieces.append(ids)
        return np.concatenate(pieces)


def find_token_files(data: Data, vocab_size: int) -> dict[str, list[TokenFile]]:
    """Find the token files of each split in the folder ``data.tokens``.

    They are named ``*train*.bin``, ``*val*.bin`` and ``*test*.bin``; several files of a split are
    sorted by name. Without test files, the second half of the validation tokens is the test split.

    Raises:
        UsageError: a split has no files, or a file is truncated or in another format.
    """
    folder = Path(str(data.tokens))
    splits: dict[str, list[TokenFile]] = {}
    for split, word in (("train", "train"), ("valid", "val"), ("test", "test")):
        paths = sorted(folder.glob(f"*{word}*.bin"))
        if not paths and split != "test":
            reason = f"no file *{word}*.bin in it" if folder.is_dir() else "no such folder"
            raise UsageError(f"data.tokens={folder}: {reason}")
        splits[split] = [token_file(path, vocab_size, data) for path in paths]
    # nanoGPT writes no test split.
    if not splits["test"]:
        half = sum(file.length for file in splits["valid"]) // 2
        splits["valid"], splits["test"] = _cut(splits["valid"], half)
    for split, files in splits.items():
        limit = data.max_tokens if split == "train" else data.max_held_out_tokens
        if limit is not None:
            splits[split] = _cut(files, limit)[0]
    return splits


def token_file(path: Path, vocab_size: int, data: Data | None = None) -> TokenFile:
    """Describe all tokens of a file, which may have llm.c's header.

    Without ``data.token_dtype`` the ids have the header's type or, without a header, the smaller of
    uint16 and uint32 that can represent the ids below ``vocab_size``.

    Raises:
        UsageError: the file cannot be read, is truncated, or is in another format.
    """
    named, token_dtype = f"data.tokens={path}", data.token_dtype if data else None
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(12).ljust(12, b"\0")
    except OSError as error:
        raise UsageError(f"{named}: {error.strerror}") from None
    magic, version, promised = np.frombuffer(start, "<i4").tolist()
    smallest = "uint16" if vocab_size <= 2**16 else "uint32"
    dtype, offset = token_dtype or smallest, 0
    if (magic, version) in _LLM_C:
        dtype, offset = _LLM_C[magic, version], _HEADER
        if token_dtype not in (None, dtype):
            raise UsageError(
                f"data.token_dtype={token_dtype}, but {path} says it has {dtype}: leave it out"
            )
    elif magic // 10000 == 2024:  # llm.c's are dates; unlikely in a file of ids alone
        raise UsageError(
            f"{named} has the header {magic}, version {version}; of llm.c's files those with "
            f"{' or '.join(f'{m}, version {v}' for m, v in _LLM_C)} hold tokens"
        )
    # Ids of another type, or a copy that was cut off, rarely fill the file exactly.
    length, remainder = divmod(size - offset, np.dtype(dtype).itemsize)
    if remainder or length < 0 or (offset and length != promised):
        promise = f", where its header says {promised} tokens" if offset else ""
        advice = ", or set data.token_dtype" if data else ""
        raise UsageError(
            f"{named} is damaged: {size - offset} bytes of {dtype}{promise}. Copy or write it again"
            f"{advice}"
        )
    little_endian = np.dtype(dtype).newbyteorder("<").str
    return TokenFile(str(path.resolve()), little_endian, offset, length)


def _cut(files: list[TokenFile], at: int) -> tuple[list[TokenFile], list[TokenFile]]:
    """Split files into those with the first ``at`` tokens and those with the rest."""
    cuts = []
    for file in files:
        cuts.append(file.cut(at))
        at -= cuts[-1][0].length
    return [first for first, _ in cuts], [last for _, last in cuts]
