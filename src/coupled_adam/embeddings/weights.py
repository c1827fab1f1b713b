"""Open files of weights safely: list their tensors, and read single ones.

Nothing in a file is executed: PyTorch's archives are loaded with ``weights_only=True``, and
``.npy`` files with objects are refused. What cannot be read is a ValueError.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.errors import one_line
from coupled_adam.files import regular
from coupled_adam.runs import parse_step

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
    line = start.partition(b"\n")[0].rstrip()
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
    # Word vectors: as text, a word and its numbers in each line; or word2vec's binary numbers.
    has_header = re.fullmatch(rb"\d+ \d+", line) is not None
    row = start.split(b"\n")[has_header].split() if start.count(b"\n") > has_header else []
    is_text = len(row) > 8 and all(
        re.fullmatch(rb"-?\d*\.?\d+(e-?\d+)?", cell) for cell in row[-8:]
    )
    if has_header or is_text:
        options = "no_header=True" if not has_header else f"binary={not is_text}"
        return (
            "holds word vectors, which the package gensim reads: numpy.save('NEW.npy', gensim."
            f"models.KeyedVectors.load_word2vec_format({str(path)!r}, {options}).vectors)"
        )
    return ""


def _open_safetensors(path: Path) -> Weights:
    from safetensors import safe_open

    with readable(f"{path}: not a whole safetensors file"):
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}

    def read(name: str) -> Tensor:
        with readable(f"{path}: {name} cannot be read"):  # in a dtype that this torch lacks
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return Weights(str(path), shapes, read)


def read_array(path: Path) -> NDArray[Any]:
    """Memory-map the numbers in a ``.npy`` file; writing to the array does not change the file."""
    with readable(f"{path}: not a .npy file of numbers"):
        # This function never unpickles, and compares the size of the file with its header.
        array = np.lib.format.open_memmap(regular(path), mode="c")
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: not a .npy file of numbers, but of {array.dtype}")
    return array


def _open_archive(path: Path) -> Weights:
    """Open a file written by ``torch.save``; nested keys are joined with dots."""
    try:
        # The format before torch 1.6 is not a zip file and cannot be memory-mapped.
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
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
