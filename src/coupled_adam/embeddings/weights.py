"""Open files of weights safely: list their tensors, and read single ones.

No code from a pickle is ever executed: PyTorch's archives are loaded with ``weights_only=True``;
``.npy`` files with objects are refused; and the index of a distributed checkpoint is read by an
unpickler that creates only plain records. No file outside the given folder is read, and no more
memory is allocated than the files hold data for. What cannot be read is a ValueError.
"""

import contextlib
import dataclasses
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.errors import one_line
from coupled_adam.runs import is_checkpoint

_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", ".npy", *_ARCHIVES)
"""The suffixes of the files that :func:`open_file` opens."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The shapes of a file's tensors by name, a function to read one, and the model's config."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any] | None = None


@contextlib.contextmanager
def _readable(otherwise: str, hint: str = "") -> Iterator[None]:
    """Make a ValueError of what libraries raise, of many types, for what is damaged or unsafe."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{otherwise} ({one_line(error)}){hint}") from None


def open_file(path: Path) -> Weights:
    """Open a file of weights according to its suffix, which must be known."""
    _check_file(path)
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
    if path.suffix in _ARCHIVES or is_checkpoint(path):
        return _open_archive(path)
    raise ValueError(f"{path} must be a folder, or a file that ends in {', '.join(SUFFIXES)}")


def _check_file(path: Path) -> None:
    """Raise ValueError for a pipe, which others may never write to, a device or a folder."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")


def _open_safetensors(path: Path) -> Weights:
    from safetensors import safe_open

    with _readable(f"{path}: not a whole safetensors file"):
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}

    def read(name: str) -> Tensor:
        with _readable(f"{path}: {name} cannot be read"):  # in a dtype that this torch lacks
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return Weights(str(path), shapes, read)


def read_array(path: Path) -> NDArray[Any]:
    """Memory-map the numbers in a ``.npy`` file; writing to the array does not change the file."""
    _check_file(path)
    with _readable(f"{path}: not a .npy file of numbers"):
        # This function never unpickles, and compares the size of the file with its header.
        array = np.lib.format.open_memmap(path, mode="c")
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: not a .npy file of numbers, but of {array.dtype}")
    return array


def _open_archive(path: Path) -> Weights:
    """Open a file written by ``torch.save``; nested keys are joined with dots."""
    unsafe = f"{path} cannot be read without executing a pickle, which is not safe, or is damaged"
    with _readable(unsafe, ": save the weights as safetensors"):
        # The format before torch 1.6 is not a zip file and cannot be memory-mapped. torch, too,
        # looks at the first bytes, where zipfile looks for an end.
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        if is_zip:
            # torch never compresses; what is compressed could expand to any size.
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if entry.compress_type or entry.file_size != entry.compress_size:
                        raise ValueError(f"its entry {entry.filename} is compressed")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    tensors = _tensors(content)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return Weights(str(path), shapes, tensors.__getitem__)


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors in nested dicts; each dict is visited once, as it may contain itself."""
    tensors: dict[str, Tensor] = {}
    visited: set[int] = set()
    waiting = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor) and _is_plain(value):
            tensors[name] = value
        elif isinstance(value, Mapping) and id(value) not in visited:
            visited.add(id(value))
            waiting += [(f"{name}.{key}" if name else str(key), v) for key, v in value.items()]
    return tensors


def _is_plain(x: Tensor) -> bool:
    """Whether the storage holds all elements; zero strides could expand one to any number."""
    if x.layout != torch.strided or x.device.type != "cpu" or x.is_nested:
        return False
    return x.numel() * x.element_size() <= x.untyped_storage().nbytes()


def open_distributed(folder: Path) -> Weights:
    """Open a folder written by torch.distributed.checkpoint, as in sharded training."""
    with _readable(f"{folder}: not a whole distributed checkpoint"):
        tensors, _ = _index(folder)

    def read(name: str) -> Tensor:
        with _readable(f"{folder}: {name} cannot be read"):
            return tensors[name].read(folder)

    return Weights(str(folder), {name: entry.shape for name, entry in tensors.items()}, read)


def check_distributed(folder: Path) -> None:
    """Raise ValueError unless torch can unpickle all of a distributed checkpoint safely."""
    unsafe = "cannot be loaded without executing a pickle, which is not safe, or is damaged"
    with _readable(f"{folder} {unsafe}"):
        tensors, places = _index(folder)
        for (name, _), place in places.items():
            if name not in tensors:
                place.load(folder)


def check_inside(folder: Path, name: str) -> None:
    """Raise ValueError if a file that an index names is a link to outside of the folder.

    The hub's cache is known: its snapshots are links to ``../../blobs``.
    """
    target, home = (folder / name).resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise ValueError(f"{folder / name} is a link to outside of its folder: copy the file there")


@dataclasses.dataclass(frozen=True)
class _Place:
    """The bytes of a file that hold an object of a distributed checkpoint, or a block of one."""

    file: str
    start: int
    length: int

    def load(self, folder: Path) -> Any:
        check_inside(folder, self.file)
        with (folder / self.file).open("rb") as file:
            file.seek(self.start)
            content = io.BytesIO(file.read(self.length))
        return torch.load(content, map_location="cpu", weights_only=True)


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """A tensor in blocks, of which each has offsets, sizes, and a place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[tuple[tuple[int, ...], tuple[int, ...], _Place]]

    def read(self, folder: Path) -> Tensor:
        if sum(math.prod(sizes) for _, sizes, _ in self.blocks) != math.prod(self.shape):
            raise ValueError("its blocks do not add up to the whole tensor")
        # Memory is allocated for what the files hold, not for what an index claims.
        promised = sum(place.length for *_, place in self.blocks)
        available = sum((folder / f).stat().st_size for f in {p.file for *_, p in self.blocks})
        if math.prod(self.shape) * self.dtype.itemsize > promised or promised > available:
            raise ValueError("its files are shorter than the index says")
        tensor = torch.zeros(self.shape, dtype=self.dtype)
        for offsets, sizes, place in self.blocks:
            block = place.load(folder)
            if not isinstance(block, Tensor) or not _is_plain(block) or block.shape != sizes:
                raise ValueError(f"the content of {place.file} does not match the index")
            tensor[tuple(slice(start, start + n) for start, n in zip(offsets, sizes))] = block
        return tensor


def _index(folder: Path) -> tuple[dict[str, _Sharded], dict[tuple[str, Any], _Place]]:
    """The tensors of a distributed checkpoint, and the places of all objects by name and offsets.

    Offsets are None for what is not a block of a tensor.
    """
    index = _IndexUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load().state
    places = {}
    for key, value in index["storage_data"].items():
        file = value.state["relative_path"]
        if not re.fullmatch(r"[\w.-]+", file) or file.startswith("."):
            raise ValueError(f"{file!r} is not the name of a file in it")
        if value.state.get("transform_descriptors"):
            raise ValueError(f"{file!r} is compressed")
        start, length = _whole_numbers((value.state["offset"], value.state["length"]))
        places[key.state["fqn"], key.state.get("offset")] = _Place(file, start, length)
    tensors = {}
    for name, entry in index["state_dict_metadata"].items():
        if isinstance(name, str) and type(entry).__name__ == "TensorStorageMetadata":
            (dtype,) = (x for x in entry.state["properties"].state if isinstance(x, torch.dtype))
            blocks = []
            for chunk in entry.state["chunks"]:
                offsets, sizes = (_whole_numbers(chunk.state[key]) for key in ("offsets", "sizes"))
                blocks.append((offsets, sizes, places[name, offsets]))
            tensors[name] = _Sharded(_whole_numbers(entry.state["size"]), dtype, blocks)
    return tensors, places


def _whole_numbers(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"{number!r} is not a valid size or offset")
    return tuple(numbers)


class _Record:
    """A stand-in for an object of torch in an index, with its state but without behaviour."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Accept and ignore the arguments of the real class."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Python's implementation: the one in C allocates memory for as many objects as the pickle claims.
class _IndexUnpickler(pickle._Unpickler):
    """Unpickles the index of a distributed checkpoint into plain records, and nothing else."""

    _RECORDS = (
        r"torch\.serialization\._get_layout|pathlib(\._local)?\.PosixPath"
        r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo"
        r"|metadata\.(Metadata|MetadataIndex|StorageMeta|TensorProperties|_MEM_FORMAT_ENCODING"
        r"|(Tensor|Chunk|Bytes)StorageMetadata))"
    )

    def find_class(self, module: str, name: str) -> Any:
        member = getattr(torch, name, None) if module == "torch" else None
        if isinstance(member, torch.dtype):
            return member
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if re.fullmatch(self._RECORDS, f"{module}.{name}"):
            return type(name, (_Record,), {})
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which is not allowed")


def open_hub_file(name: str, filename: str, revision: str | None) -> Weights:
    """Open a safetensors file of a model on the hub; only the tensors that are read are downloaded.

    huggingface_hub and its HTTP client raise many types.
    """
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

    def fetch(first: int, length: int) -> bytearray:
        headers = {**build_hf_headers(), "range": f"bytes={first}-{first + length - 1}"}
        content = bytearray()
        with get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            for piece in response.iter_bytes():
                content += piece
                if len(content) > length:
                    break
        if len(content) != length:
            raise ValueError(f"{url}: received {len(content)} bytes instead of {length}")
        return content

    def read(tensor: str) -> Tensor:
        info = header.tensors[tensor]
        dtype = _DTYPES.get(info.dtype)
        first, end = info.data_offsets
        size = math.prod(info.shape) * (dtype.itemsize if dtype else 0)
        if dtype is None or end - first != size or min(first, *info.shape) < 0:
            raise ValueError(f"{name}: {tensor} has the unsupported type {info.dtype}")
        start = 8 + int.from_bytes(fetch(0, 8), "little")
        return torch.frombuffer(fetch(start + first, size), dtype=dtype).view(info.shape)

    shapes = {tensor: tuple(info.shape) for tensor, info in header.tensors.items()}
    return Weights(f"{name}/{filename}", shapes, read)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
