"""Open files of weights safely: list their tensors, and read single ones.

Nothing in a file is executed: PyTorch's archives are loaded with ``weights_only=True``, and
``.npy`` files with objects are refused. What cannot be read is a ValueError.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coupled_adam.errors import one_line
from coupled_adam.inputs import file_format, first_bytes, read_array, regular
from coupled_adam.runs import parse_step

_READ = ("a safetensors file", "a NumPy array", "a zip archive", "a tar archive", "a pickle")
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
    with readable(f"{path}: cannot be read"):
        start = first_bytes(path)
    if not start:
        raise ValueError(f"{path} is empty: it has 0 bytes")
    if (known := file_format(start)) and known.name not in _READ:
        raise ValueError(f"{path} is {known}")
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
        return _open_archive(path, start)
    raise ValueError(
        f"{path} must be a folder, or a file that ends in {', '.join(SUFFIXES)}; save anything "
        "else as .npy, with numpy.save"
    )


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


def _open_archive(path: Path, start: bytes) -> Weights:
    """Open a file written by ``torch.save``; nested keys are joined with dots."""
    # A zip file; before torch 1.6 a pickle, and before torch 0.1.10 one in a tar file. The last two
    # cannot be memory-mapped.
    is_zip = start.startswith(b"PK\3\4")
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
