"""The weights of a model: in its folder, whole or in shards, or on the Hugging Face hub."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from coupled_adam.embeddings.weights import SUFFIXES, Weights, open_file, readable
from coupled_adam.inputs import check_names_inside, read_text
from coupled_adam.runs import CHECKPOINTS, MODEL, by_step, inner_runs, is_run
from coupled_adam.text.hub import hub_error, is_hub_id, reach_hub

LISTED = 8
"""How many files or tensors a message names."""

Wanted = Callable[[str], bool]


def open_model(source: str | Path, revision: str | None, is_wanted: Wanted) -> Weights:
    """Open what :func:`load_embeddings` takes; raises its errors.

    Args:
        is_wanted: whether a tensor of this name will be read, by which shards are chosen.
    """
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, is_wanted)
    if path.exists():
        return open_file(path)
    if is_hub_id(str(source)) and path.suffix not in SUFFIXES:
        return _open_hub(str(source), revision, is_wanted)
    raise FileNotFoundError(f"{source}: there is no such file, folder or model")


def _open_folder(folder: Path, is_wanted: Wanted) -> Weights:
    """Open a model's folder, that of a run, or that of a checkpoint."""
    if is_run(folder):
        if (folder / MODEL).exists():
            return _open_folder(folder / MODEL, is_wanted)
        # While a run is being trained, its last checkpoint is what there is.
        checkpoints = by_step(folder / CHECKPOINTS)
        if not checkpoints:
            raise ValueError(f"{folder} is a run that has neither a model nor a checkpoint yet")
        last = checkpoints[max(checkpoints)]
        return _open_folder(last, is_wanted) if last.is_dir() else open_file(last)
    if (folder / ".metadata").exists():
        raise ValueError(
            f"{folder} is a distributed checkpoint, whose index is a pickle: convert it with "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} NEW.pt"
        )
    config = _json(folder / "config.json") if (folder / "config.json").exists() else {}
    # In the order of transformers. An index may be stale, of an earlier save in several files.
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            opened = open_file(folder / name)
            return dataclasses.replace(opened, source=str(folder), config=config)
        index = folder / f"{name}.index.json"
        if index.exists():
            shards = _shards(str(folder), _json(index), is_wanted)
            return _join(str(folder), [open_file(folder / file) for file in shards], config)
    names = sorted(f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir())
    listed = ", ".join(names[:LISTED]) + ", ..." * (len(names) > LISTED)
    runs = [f": name a run, such as {run}" for run in inner_runs(folder)[:1]]
    raise ValueError(
        f"{folder} has no weights that can be read: no model.safetensors or pytorch_model.bin, nor "
        f"an index of one; it holds {listed or 'nothing'}{''.join(runs)}"
    )


def _shards(source: str, index: Mapping[str, Any], is_wanted: Wanted) -> list[str]:
    """The files of a model's shards that may have a wanted tensor; the others are not opened."""
    with readable(f"{source}: not an index of weights"):
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
    check_names_inside(source, files.values())
    wanted = {file for name, file in files.items() if is_wanted(name)}
    # Without a known name in the index any of them may have it.
    return sorted(wanted or {*files.values()})


def _join(source: str, shards: Sequence[Weights], config: Mapping[str, Any]) -> Weights:
    """The tensors of several files as those of one."""
    places = {name: shard for shard in shards for name in shard.shapes}  # which has a tensor
    shapes = {name: shard.shapes[name] for name, shard in places.items()}
    return Weights(source, shapes, lambda name: places[name].read(name), config)


def _open_hub(name: str, revision: str | None, is_wanted: Wanted) -> Weights:
    """Open a model on the hub; only the bytes of its embeddings are downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, RemoteEntryNotFoundError

    reach_hub()

    def download(filename: str) -> dict[str, Any]:
        try:
            return _json(Path(huggingface_hub.hf_hub_download(name, filename, revision=revision)))
        except RemoteEntryNotFoundError:
            return {}

    try:
        config = download("config.json")
        try:
            weights = _open_hub_file(name, "model.safetensors", revision)
        except EntryNotFoundError:
            index = download("model.safetensors.index.json")
            if not index:
                raise
            shards = _shards(name, index, is_wanted)
            return _join(name, [_open_hub_file(name, file, revision) for file in shards], config)
        return dataclasses.replace(weights, source=name, config=config)
    except ValueError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise FileNotFoundError(
            f"{name}: there is no such file or folder here, nor a model on the hub that can be "
            f"read ({hub_error(error)})"
        ) from None


def _open_hub_file(name: str, filename: str, revision: str | None) -> Weights:
    """Open a safetensors file of a model on the hub; only the tensors that are read are downloaded.

    huggingface_hub and its HTTP client raise many types.
    """
    import safetensors.torch
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, not listed
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    header = HfApi().parse_safetensors_file_metadata(name, filename, revision=revision)
    url = hf_hub_url(name, filename, revision=revision)

    def fetch(first: int, length: int) -> bytes:
        headers = {**build_hf_headers(), "range": f"bytes={first}-{first + length - 1}"}
        response = get_session().get(url, headers=headers, follow_redirects=True)
        hf_raise_for_status(response)
        return response.content

    def read(tensor: str) -> Tensor:
        info = header.tensors[tensor]
        # Offsets are relative to the end of the header, whose length the first 8 bytes are.
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


def _json(path: Path) -> dict[str, Any]:
    with readable(f"{path}: not a JSON object"):
        content: dict[str, Any] = {**json.loads(read_text(path))}
    return content
