"""Open files of weights safely: list their tensors, and read single ones.

Nothing in a file is executed: PyTorch's archives are loaded with ``weights_only=True``, ``.npy``
files with objects are refused, and the index of a distributed checkpoint, which is a pickle, may
name only what torch itself writes there. What cannot be read is a ValueError that says what to do.
"""

import contextlib
import dataclasses
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.errors import one_line
from coupled_adam.runs import is_checkpoint

_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
_VECTORS = (".txt", ".vec", ".gguf")
SUFFIXES = (".safetensors", ".npy", *_ARCHIVES, *_VECTORS)
"""The suffixes of the files that :func:`open_file` opens."""
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclasses.dataclass(frozen=True)
class Weights:
    """The shapes of a file's tensors by name, a function to read one, and what is said of them."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any] | None = None  # the model's config.json
    words: Sequence[str] | None = None  # what the rows stand for, [V]


@contextlib.contextmanager
def readable(otherwise: str) -> Iterator[None]:
    """Make a ValueError of what libraries raise, of many types, for what is damaged or unsafe."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{otherwise} ({one_line(error)})") from None


def open_file(path: Path) -> Weights:
    """Open a file of weights according to its suffix, which must be known."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(_POINTER):
        raise ValueError(
            f"{path} is a pointer of Git LFS and not the file itself: run git lfs pull in its "
            "repository"
        )
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".npy":
        array = read_array(path)
        if array.dtype.kind != "f":
            raise ValueError(f"{path}: floating-point numbers are needed, not {array.dtype}")
        if array.ndim != 2:
            raise ValueError(f"{path} has shape {list(array.shape)}: a matrix [V, H] is needed")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return Weights(str(path), {"": array.shape}, lambda _: torch.from_numpy(native))
    # word2vec's .bin begins with two numbers, and fastText's with a number of its own.
    is_vectors = re.match(rb"\d+ \d+\n", start) or start.startswith(b"\xba\x16\x4f\x2f")
    if path.suffix in _VECTORS or (path.suffix == ".bin" and is_vectors):
        from coupled_adam.embeddings.vectors import open_vectors

        return open_vectors(path)
    if path.suffix in _ARCHIVES or is_checkpoint(path):
        return _open_archive(path)
    raise ValueError(
        f"{path} must be a folder, or a file that ends in {', '.join(SUFFIXES)}; anything else can "
        "be saved as .npy, with numpy.save"
    )


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
        array = np.lib.format.open_memmap(path, mode="c")
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: not a .npy file of numbers, but of {array.dtype}")
    return array


def _open_archive(path: Path) -> Weights:
    """Open a file written by ``torch.save``; nested keys are joined with dots."""
    try:
        # The format before torch 1.6 is not a zip file and cannot be memory-mapped.
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        tensors = dict(_tensors("", content))
    except Exception as error:
        # torch's own message recommends to execute what is in the file.
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {name[1]}" if name else "holds more than tensors, or is damaged"
        raise ValueError(
            f"{path} {what}, and is not unpickled, which could execute it: if you trust it, "
            "load it with torch and save its weights with safetensors.torch.save_file"
        ) from None
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return Weights(str(path), shapes, tensors.__getitem__)


_DENSE = torch.strided, "cpu"


def _tensors(name: str, content: Any) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors in nested dicts, by their names."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), value)
    elif isinstance(content, Tensor) and (content.layout, content.device.type) == _DENSE:
        yield name, content


def open_distributed(folder: Path) -> Weights:
    """Open a folder written by torch.distributed.checkpoint, as in sharded training."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            with (folder / ".metadata").open("rb") as file:
                metadata: Metadata = _IndexUnpickler(file).load()
            for place in (metadata.storage_data or {}).values():
                if Path(place.relative_path).name != place.relative_path:
                    raise ValueError(f"{place.relative_path!r} is not the name of a file in it")
            return metadata

    with readable(f"{folder}: not a whole distributed checkpoint"):
        entries = Reader(folder).read_metadata().state_dict_metadata
    tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}

    def read(name: str) -> Tensor:
        with readable(f"{folder}: {name} cannot be read"):
            tensor = torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype)
            try:
                with warnings.catch_warnings(action="ignore"):  # that there is only one process
                    load({name: tensor}, storage_reader=Reader(folder), no_dist=True)
            except CheckpointException as error:  # which is no Exception
                raise ValueError(next(iter(error.failures.values()))[0]) from None
        return tensor

    return Weights(str(folder), {name: tuple(e.size) for name, e in tensors.items()}, read)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the index of a distributed checkpoint, which may name nothing else."""

    _ALLOWED = (
        r"torch\.(Size|\w*float\w*|u?int\d+|bool|complex\d+)|collections\.OrderedDict"
        r"|torch\.serialization\._get_layout|pathlib(\._local)?\.PosixPath"
        r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo"
        r"|metadata\.(Metadata|MetadataIndex|StorageMeta|TensorProperties|_MEM_FORMAT_ENCODING"
        r"|(Tensor|Chunk|Bytes)StorageMetadata))"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not re.fullmatch(self._ALLOWED, f"{module}.{name}"):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def open_hub_file(name: str, filename: str, revision: str | None) -> Weights:
    """Open a safetensors file of a model on the hub; only the tensors that are read are downloaded.

    huggingface_hub and its HTTP client raise many types.
    """
    import safetensors.torch
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.errors import SafetensorsParsingError
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not listed
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    try:
        header = HfApi().parse_safetensors_file_metadata(name, filename, revision=revision)
    except SafetensorsParsingError as error:
        raise ValueError(f"{name}: {filename} is not a safetensors file ({error})") from None
    url = hf_hub_url(name, filename, revision=revision)

    def fetch(first: int, length: int) -> bytes:
        headers = {**build_hf_headers(), "range": f"bytes={first}-{first + length - 1}"}
        response = get_session().get(url, headers=headers, follow_redirects=True)
        hf_raise_for_status(response)
        if len(response.content) != length:
            raise ValueError(f"{url}: received {len(response.content)} bytes instead of {length}")
        return response.content

    def read(tensor: str) -> Tensor:
        info = header.tensors[tensor]
        first, end = info.data_offsets
        start = 8 + int.from_bytes(fetch(0, 8), "little")
        # A file with this tensor alone, which safetensors decodes and checks.
        place = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [0, end - first]}
        head = json.dumps({"": place}).encode()
        content = len(head).to_bytes(8, "little") + head + fetch(start + first, end - first)
        with readable(f"{name}: {tensor} cannot be read"):
            return safetensors.torch.load(content)[""]

    shapes = {tensor: tuple(info.shape) for tensor, info in header.tensors.items()}
    return Weights(f"{name}/{filename}", shapes, read)
