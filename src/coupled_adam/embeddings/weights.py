"""Open files of weights safely: list their tensors, and read single ones.

Nothing in a file is executed: PyTorch's archives are loaded with ``weights_only=True``, and
``.npy`` files with objects are refused. What cannot be read is a ValueError.
"""

import contextlib
import dataclasses
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coupled_adam.errors import one_line
from coupled_adam.inputs import read_array, regular
from coupled_adam.runs import parse_step

_FASTTEXT = (793712314).to_bytes(4, "little")  # how its models begin
_ZIP = b"PK\3\4"
_LONGEST_LINE = 1 << 20  # bytes
_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", ".npy", *_ARCHIVES)
"""The suffixes of the files that :func:`open_file` opens."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The shapes of a file's tensors by name, a function to read one, and what is said of them."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the model's config.json


@contextlib.contextmanager
def readable(otherwise: str) -> Iterator[None]:
    """Make a ValueError of what libraries raise, of many types, for what cannot be read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{otherwise} ({one_line(error)})") from None


def open_file(path: Path) -> Weights:
    """Open a file of weights according to its suffix, which must be known."""
    if hint := _known_format(path):
        raise ValueError(f"{path} {hint}")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".npy":
        array = read_array(path)
        if array.dtype.kind != "f" or array.ndim != 2:
            kind = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{path}: a matrix [V, H] of floats is needed, not {kind}")
        # torch knows no other byte order than the machine's.
        native = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        return Weights(str(path), {"": array.shape}, lambda _: native)
    if path.suffix in _ARCHIVES or parse_step(path) is not None:  # a checkpoint of a run
        return _open_archive(path)
    raise ValueError(
        f"{path} must be a folder, or a file that ends in {', '.join(SUFFIXES)}; save anything "
        "else as .npy, with numpy.save"
    )


def _known_format(path: Path) -> str:
    """What a file is and what to do, if people bring its format and it is not read here."""
    with readable(f"{path}: cannot be read"), regular(path).open("rb") as file:
        start = file.read(4096)
    # By the content, since these files have any name.
    if not start:
        return "is empty: it has 0 bytes"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of git-lfs in place of the file: git lfs pull brings it"
    if start.startswith(b"GGUF"):
        return (
            "is a GGUF file, which the package gguf reads: {t.name: t for t in gguf.GGUFReader"
            f"({str(path)!r}).tensors}}['token_embd.weight'] is a tensor t, and numpy.save("
            "'NEW.npy', gguf.dequantize(t.data, t.tensor_type)) makes a matrix of it"
        )
    save = "numpy.save('NEW.npy', "
    if start.startswith(_FASTTEXT):
        return (
            f"holds a model of fastText, which the package gensim reads: {save}gensim.models."
            f"fasttext.load_facebook_vectors({str(path)!r}).vectors)"
        )
    if start.startswith(_ZIP) and (arrays := _arrays(path)):
        return (
            f"holds the arrays {', '.join(arrays)}: {save}numpy.load({str(path)!r})"
            f"[{arrays[0]!r}]) makes a file of one of them"
        )
    if options := _word_vectors(path):
        return (
            f"holds word vectors, which the package gensim reads: {save}gensim.models.KeyedVectors"
            f".load_word2vec_format({str(path)!r}, {options}).vectors)"
        )
    return ""


def _arrays(path: Path) -> list[str]:
    """The names of the arrays in a file that ``numpy.savez`` has written; empty for others."""
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            names = archive.namelist()
    except Exception:  # of many types, for a damaged archive
        return []
    arrays = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    return arrays if len(arrays) == len(names) else []


def _word_vectors(path: Path) -> str:
    """The options with which gensim reads a file of word vectors; empty if it is none.

    As text they have a word and its numbers in each line, and word2vec's binary format has a word,
    a space and float32 numbers; their count and width may come first.
    """
    with regular(path).open("rb") as file:
        first, second = (file.readline(_LONGEST_LINE) for _ in range(2))
    header = re.fullmatch(rb"(\d{1,12}) (\d{1,9})\s*", first)
    if header is None:
        width = len(first.split()) - 1
        is_text = width > 1 and not _numbers(first, width + 1)
        is_text = is_text and all(_numbers(line, width) for line in (first, second) if line)
        return "no_header=True" if is_text else ""
    count, width = map(int, header.groups())
    if _numbers(second, width):
        return "binary=False"
    # A word has a byte at least, and a space behind it.
    is_binary = path.stat().st_size >= len(first) + count * (4 * width + 2)
    return "binary=True" if count and width and is_binary else ""


def _numbers(line: bytes, count: int) -> bool:
    """Whether the last fields of a line are so many numbers."""
    fields = line.split()
    try:
        return 0 < count <= len([float(field) for field in fields[-count:]])
    except ValueError:
        return False


def _open_safetensors(path: Path) -> Weights:
    from safetensors import safe_open

    with readable(f"{path}: not a whole safetensors file"):
        file: Any = safe_open(regular(path), framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}

    def read(name: str) -> Tensor:
        with readable(f"{path}: {name} cannot be read"):  # in a dtype that this torch lacks
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return Weights(str(path), shapes, read)


def _open_archive(path: Path) -> Weights:
    """Open a file written by ``torch.save``; nested keys are joined with dots."""
    with readable(f"{path}: cannot be read"), regular(path).open("rb") as file:
        start = file.read(512)
    # A zip file; before torch 1.6 a pickle, and before torch 0.1.10 one in a tar file. The last two
    # cannot be memory-mapped.
    is_zip = start.startswith(_ZIP)
    if not is_zip and start[:1] != b"\x80" and b"ustar" not in start:
        raise ValueError(
            f"{path} is not a file that torch.save has written; as a matrix of another program, "
            "save it as .npy, with numpy.save"
        )
    try:
        tensors = dict(_tensors("", torch.load(path, "cpu", weights_only=True, mmap=is_zip)))
    except Exception:
        # torch's own message recommends to execute what is in the file.
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, and is not unpickled, which could "
            "execute it: if you trust it, load it with torch and save its weights with "
            "safetensors.torch.save_file"
        ) from None
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return Weights(str(path), shapes, tensors.__getitem__)


def _tensors(name: str, content: Any) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors in nested dicts, by their names."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), value)
    elif isinstance(content, Tensor) and content.layout is torch.strided:
        yield name, content
