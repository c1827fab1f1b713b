"""Files of weights, opened: which tensors there are, read one at a time.

No pickle of the user's is ever executed: safetensors (a file, or the ranges of one on the Hugging
Face hub), PyTorch's archives with ``weights_only=True``, ``.npy`` without objects, and distributed
checkpoints by an unpickler that makes nothing but their own records.
"""

import dataclasses
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", ".npy", *_ARCHIVES)
"""Of the files that :func:`open_file` opens."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Tensors by name: their shapes, how to read one, and what the model's configuration says."""

    source: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any] | None = None


def open_file(path: Path) -> Weights:
    """Open a file by its suffix.

    Raises:
        ValueError: another suffix; a damaged file; one that needs pickle.
    """
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".npy":
        return _open_array(path)
    if path.suffix in _ARCHIVES or re.fullmatch(r"step-\d+", path.name):
        return open_archive(path)
    raise ValueError(f"{path}: a folder, or a file that ends in {', '.join(SUFFIXES)}, is needed")


def _open_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    return Weights(str(path), shapes, file.get_tensor)


def _open_array(path: Path) -> Weights:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not a whole .npy file of numbers ({error})") from None
    if not np.issubdtype(array.dtype, np.floating) or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: floating-point numbers are needed, not {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{path} has shape {list(array.shape)}: a matrix [V, H] is needed")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return Weights(str(path), {"": array.shape}, lambda _: torch.from_numpy(native))


def open_archive(path: Path) -> Weights:
    """Open what ``torch.save`` wrote, of any shape: its tensors, by their keys joined with dots.

    Raises:
        ValueError: a damaged file; one that needs pickle.
    """
    try:
        # The format before torch 1.6 is no zip file, and cannot be mapped.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # pickle's, zip's and torch's own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read without executing a pickle, which is not safe, or is damaged "
            f"({reason}): save the weights as safetensors"
        ) from None
    tensors = dict(_tensors(content, ""))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return Weights(str(path), shapes, tensors.__getitem__)


def _tensors(content: Any, prefix: str) -> list[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        return [(prefix, content)]
    if not isinstance(content, Mapping):
        return []
    pairs = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in content.items())
    return [found for name, value in pairs for found in _tensors(value, name)]


def open_distributed(folder: Path) -> Weights:
    """Open a folder of torch.distributed.checkpoint, as sharded training saves.

    Raises:
        ValueError: it is damaged, or its index names what such an index does not hold.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        """As torch's, which would execute any pickle."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            found: Metadata = metadata
            return found

    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except (pickle.UnpicklingError, AttributeError, EOFError, ValueError, TypeError) as error:
        raise ValueError(f"{folder}: not a whole distributed checkpoint ({error})") from None

    def read(name: str) -> Tensor:
        target = torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load({name: target}, storage_reader=Reader(folder), no_dist=True)
        except (CheckpointException, Exception) as error:  # the former is no Exception
            reason = str(error).strip().splitlines()[-1][:200]
            raise ValueError(f"{folder}: {name} cannot be read ({reason})") from None
        return target

    return Weights(str(folder), {n: tuple(entry.size) for n, entry in tensors.items()}, read)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the plain records of a distributed checkpoint's index, and nothing else."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
                    *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def open_hub_file(name: str, filename: str, revision: str | None) -> Weights:
    """Open a safetensors file of a model on the hub; only the bytes of its tensors are fetched.

    Raises:
        ValueError: it is not such a file, or the answer is not what was asked for.
        Exception: of huggingface_hub and its HTTP client.
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
            for part in response.iter_bytes():
                content += part
                if len(content) > length:
                    raise ValueError(f"{url}: the server sends more than it was asked for")
        if len(content) != length:
            raise ValueError(f"{url}: {len(content)} bytes came where {length} were asked for")
        return content

    def read(tensor: str) -> Tensor:
        info = header.tensors[tensor]
        dtype = _DTYPES.get(info.dtype)
        first, end = info.data_offsets
        size = math.prod(info.shape) * (dtype.itemsize if dtype else 0)
        if dtype is None or end - first != size:
            raise ValueError(f"{name}: {tensor} is stored as {info.dtype}, not as numbers we read")
        start = 8 + int.from_bytes(fetch(0, 8), "little")
        return torch.frombuffer(fetch(start + first, size), dtype=dtype).view(info.shape)

    shapes = {tensor: tuple(info.shape) for tensor, info in header.tensors.items()}
    return Weights(f"{name}/{filename}", shapes, read)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
