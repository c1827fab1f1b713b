"""What users bring: opened and read in one way, as it may be another person's.

Files are regular ones, whose content has an end, and nothing in them is executed.
"""

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from coupled_adam.errors import UsageError, lacks_resources, one_line

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def regular(path: Path) -> Path:
    """The path of a file whose content has an end; everything that others bring is opened by it.

    Raises OSError if it is a pipe, for which one would wait for ever, or a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device, and no regular file", str(path))
    return path


class Format(NamedTuple):
    """A format of files that are neither plain text nor bare numbers."""

    name: str
    beginning: bytes  # a regular expression
    remedy: str  # what to do with such a file where it is not read

    def __str__(self) -> str:
        return f"{self.name}: {self.remedy}"


_UNPACK = "unpack it"
_UNPACK_TEXT = "unpack it, or let a text's name end in .gz, .bz2, .xz or .zst"
_TOKENS = "write the ids that follow its header to a file of their own, with NumPy's tofile"
# Three bytes or more, as token ids may begin with any two.
_FORMATS = (
    Format("a pointer of Git LFS in place of the file", b"version https://git-lfs", "git lfs pull"),
    Format("a NumPy array", rb"\x93NUMPY", "name it as .npy where ids or matrices are read"),
    Format("a .npz of NumPy", rb"PK\x03\x04.{26}[^/\0]+\.npy", "numpy.save one of its arrays"),
    Format("a zip archive", rb"PK\x03\x04", _UNPACK),
    Format("a tar archive", rb".{257}ustar", _UNPACK),
    Format("an archive", rb"7z\xbc\xaf|Rar!", _UNPACK),
    Format("compressed by gzip", rb"\x1f\x8b\x08", _UNPACK_TEXT),
    Format("compressed by bzip2", rb"BZh[1-9]", _UNPACK_TEXT),
    Format("compressed by xz", rb"\xfd7zXZ", _UNPACK_TEXT),
    Format("compressed by zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _UNPACK_TEXT),
    Format("a Parquet file", rb"PAR1", "it holds texts, for --text"),
    Format("an Arrow file", rb"ARROW1|\xff{4}.{3}\x00\x10\x00{3}", "write it as Parquet"),
    Format("an HDF5 file", rb"\x89HDF", "write what is in it as .npy or Parquet"),
    Format("an SQLite database", rb"SQLite format", "write what is in it as .csv or Parquet"),
    Format("a safetensors file", rb".{4}\x00{4}\{", "it holds the weights of a model"),
    Format("a pickle", rb"\x80\x02\x8a\nl|\x80[\x04\x05]\x95.{4}\x00{4}", "save it as .npy"),
    Format("a GGUF file", rb"GGUF", "numpy.save what gguf.dequantize makes of a tensor in it"),
    Format("packed tokens of Lit-LLaMA", rb"LITPKDS", f"{_TOKENS} (offset 24)"),
    Format("an index of Megatron-LM", rb"MMIDIDX", "name the .bin file beside it"),
    Format("a file of llm.c", rb".[\xd7-\xd9]\x34\x01.\x00{3}", f"{_TOKENS}, if it has any"),
    Format("an image", rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF.{4}WEBP", "name a text, ids or weights"),
    Format("a PDF", rb"%PDF-", "save its text as .txt"),
)


def first_bytes(path: Path) -> bytes:
    """What a file begins with, by which :func:`file_format` knows it."""
    with regular(path).open("rb") as file:
        return file.read(4096)


def file_format(start: bytes) -> Format | None:
    """The format of a file that begins so; None for plain text, bare numbers, and all unknown."""
    return next((f for f in _FORMATS if re.match(f.beginning, start, re.DOTALL)), None)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file; OSError or UnicodeDecodeError if it cannot be read, or is no text."""
    if is_no_text := file_format(first_bytes(path)):
        raise OSError(errno.EINVAL, f"it is {is_no_text}", str(path))
    return path.read_text(encoding=encoding)


@contextlib.contextmanager
def reading_own(path: Path) -> Iterator[None]:
    """Make a UsageError of what the block raises: a file of ours cannot be read, or is damaged."""
    try:
        yield
    except OSError as error:  # which says nothing of the content
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except Exception as error:  # whatever is wrong with the content
        if lacks_resources(error):
            raise
        raise UsageError(
            f"{path} is damaged ({one_line(error, 200)}): restore it, or move it away"
        ) from None


def read_own(path: Path, parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of the text of a file that this package has written."""
    with reading_own(path):
        return parse(read_text(path))


def read_array(path: Path) -> "np.memmap[Any, Any]":
    """Memory-map the numbers in a ``.npy`` file; writing to the array does not change the file.

    Raises OSError if it cannot be read, and ValueError if it is no such file, or of other things.
    """
    import numpy as np

    try:
        # This function never unpickles, and compares the size of the file with its header.
        array = np.lib.format.open_memmap(regular(path), mode="c")
    except OSError:
        raise
    except Exception as error:  # of many types
        raise ValueError(f"{path}: not a .npy file of numbers ({one_line(error)})") from None
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: not a .npy file of numbers, but of {array.dtype}")
    return array


def check_model_folder(folder: Path) -> None:
    """Raise UsageError for a model's folder in which a library would wait, or read other files.

    A pipe or a device may be at any depth, and an index of weights may name any file.
    """
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is no file: remove it")
        if path.name.endswith(".index.json"):
            names = read_own(path, lambda text: [*json.loads(text)["weight_map"].values()])
            check_names_inside(str(path), names, UsageError)


def check_names_inside(
    source: str, names: Iterable[object], error: type[Exception] = ValueError
) -> None:
    """Raise an error if an index, which may be another person's, names what is not beside it."""
    for name in names:
        if Path(str(name)).is_absolute() or ".." in Path(str(name)).parts:
            raise error(f"{source}: its index names {name}, which is outside of its folder")
