"""Read the embedding matrices of models, however they were trained, and nothing else of them.

They are found by the tensor names that are common in the various families of models.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coupled_adam.embeddings.weights import SUFFIXES, Weights, open_file, open_hub_file, readable
from coupled_adam.runs import CHECKPOINTS, MODEL, by_step, inner_runs, is_run
from coupled_adam.text.hub import hub_error, is_hub_id, reach_hub

# The names of the families of models. T5's and BART's "shared" is first, since they have it beside
# the embed_tokens of both sides.
_INPUTS = """
    shared wte embed_tokens word_embeddings tok_embeddings token_embedding embed_in word_embedding
    tokens_embed backbone.embeddings backbone.embedding model.embeddings rwkv.embeddings emb
"""
_OUTPUTS = """
    lm_head embed_out cls.predictions.decoder lm_head.decoder generator_lm_head lm_loss proj_out
    output_layer output head
"""
_INPUT_ENDINGS = tuple(f".{name}.weight" for name in _INPUTS.split())
_OUTPUT_ENDINGS = tuple(f".{name}.weight" for name in _OUTPUTS.split())
Role = Literal["input", "output", "tied", "embeddings"]
_HEADS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "PreTraining")


@dataclasses.dataclass(frozen=True)
class EmbeddingMatrix:
    """An embedding matrix of a model.

    Attributes:
        matrix: [V, H], in the dtype it is stored in, on the CPU.
        role: ``"input"`` or ``"output"``; ``"tied"`` if one matrix is both; ``"embeddings"`` if the
            file does not tell.
        tensor: its name in the file; empty if the file holds a single array.
        config: the model's config.json; empty if there is none.
    """

    matrix: Tensor
    role: Role
    tensor: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def load_embeddings(
    source: str | Path, *, tensor: str | None = None, revision: str | None = None
) -> list[EmbeddingMatrix]:
    """Find and read the input and output embeddings of a model: two matrices, or a single one.

    Args:
        source: a model's folder in Hugging Face format (sharded or not), or its id on the hub; a
            ``.safetensors``, ``.npy``, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt`` file; a run or a
            checkpoint of this package.
        tensor: the name of the tensor to read, if the embeddings have an unusual name.
        revision: a branch, tag or commit of a model on the hub.

    Raises:
        FileNotFoundError: if there is no such file, folder or model.
        OSError: if a file cannot be read.
        ValueError: if a file is damaged or needs unpickling, or has no embeddings with a known
            name.
    """
    path = Path(source)
    if path.is_dir():
        weights = _open_folder(path)
    elif path.is_file():
        weights = open_file(path)
    elif is_hub_id(str(source)) and path.suffix not in SUFFIXES:
        weights = _open_hub(str(source), revision)
    else:
        raise FileNotFoundError(f"{source}: there is no such file, folder or model")
    return _find(weights, tensor)


def model_embeddings(model: nn.Module) -> dict[str, Tensor]:
    """The ``"output"`` embeddings [V, H] of a transformers model, and ``"input"`` if they differ.

    The model may be inside another module; nothing if there is none.
    """
    # The model may be wrapped, by DDP or a LightningModule: the outermost that knows is asked.
    for module in model.modules():
        weights = {}
        for role in ("output", "input"):
            getter = getattr(module, f"get_{role}_embeddings", None)
            with contextlib.suppress(NotImplementedError):  # of models without a text
                if callable(getter) and (layer := getter()) is not None:
                    weights[role] = layer.weight
        if weights:
            is_tied = weights.get("output") is weights.get("input")
            return {"output": weights["output"]} if is_tied else weights
    return {}


def _find(weights: Weights, tensor: str | None) -> list[EmbeddingMatrix]:
    """Choose the tensors that are embeddings."""
    matrices = {name: shape for name, shape in weights.shapes.items() if len(shape) == 2}
    largest = sorted(matrices.items(), key=lambda item: (-math.prod(item[1]), item[0]))
    listed = ", ".join(f"{name} {list(shape)}" for name, shape in largest[:8])
    if tensor is not None:
        if tensor not in matrices:
            raise ValueError(f"{weights.source} has no matrix {tensor!r}; it contains {listed}")
        return [_read(weights, tensor, "embeddings")]
    inputs, output = _named(matrices, _INPUT_ENDINGS), _named(matrices, _OUTPUT_ENDINGS)
    if inputs and output:
        (tokens, width), (rows, width_of_head) = matrices[inputs], matrices[output]
        if width != width_of_head or rows < tokens / 2:  # it is the head of a classifier
            output = None
    if inputs and output:
        first, second = _read(weights, inputs, "input"), _read(weights, output, "output")
        # Some files hold a tied matrix under both names.
        if first.matrix.shape == second.matrix.shape and torch.equal(first.matrix, second.matrix):
            return [dataclasses.replace(first, role="tied")]
        return [first, second]
    if inputs:
        return [_read(weights, inputs, "tied" if _is_tied(weights.config) else "input")]
    if output:
        return [_read(weights, output, "output")]
    if len(matrices) == 1:
        return [_read(weights, next(iter(matrices)), "embeddings")]
    hint = f"name one of {listed}" if matrices else "there are no matrices in it"
    raise ValueError(f"{weights.source}: no embeddings under a known name; {hint}")


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a model that has only input embeddings uses them for its output, too."""
    has_head = any(head in str(config.get("architectures")) for head in _HEADS)
    # Models with images have the configuration of their text in a part.
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return has_head and all(part.get("tie_word_embeddings", True) for part in parts)


def _named(matrices: Mapping[str, tuple[int, ...]], endings: tuple[str, ...]) -> str | None:
    """The matrix with the first of the known names that occurs, after any module prefix."""
    for ending in endings:
        matches = [name for name in sorted(matrices) if f".{name}".endswith(ending)]
        if matches:
            # If there are several, as in a model that contains a smaller one, take the largest.
            return max(matches, key=lambda name: math.prod(matrices[name]))
    return None


def _read(weights: Weights, name: str, role: Role) -> EmbeddingMatrix:
    matrix = weights.read(name)
    if not matrix.numel():
        raise ValueError(f"{weights.source}: {name or 'the array'} {list(matrix.shape)} is empty")
    # The numbers of 8 bits and less mean nothing without the scales that belong to them.
    if not matrix.is_floating_point() or matrix.itemsize == 1:
        raise ValueError(
            f"{weights.source}: {name} is quantised ({str(matrix.dtype).removeprefix('torch.')}); "
            "floating-point numbers of 16 bits or more are needed"
        )
    return EmbeddingMatrix(matrix, role, name, weights.config)


def _open_folder(folder: Path) -> Weights:
    if is_run(folder):
        if (folder / MODEL).exists():
            return _open_folder(folder / MODEL)
        # While a run is being trained, its last checkpoint is what there is.
        checkpoints = by_step(folder / CHECKPOINTS)
        if not checkpoints:
            raise ValueError(f"{folder} is a run that has neither a model nor a checkpoint yet")
        last = checkpoints[max(checkpoints)]
        return _open_folder(last) if last.is_dir() else open_file(last)
    if (folder / ".metadata").exists():
        raise ValueError(
            f"{folder} is a distributed checkpoint, whose index is a pickle: convert it with "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} NEW.pt"
        )
    config = _json(folder / "config.json") if (folder / "config.json").exists() else {}
    # safetensors first, which execute no code and are read in part.
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.exists():
            return _join(str(folder), _json(index), lambda file: open_file(folder / file), config)
        if (folder / name).exists():
            opened = open_file(folder / name)
            return dataclasses.replace(opened, source=str(folder), config=config)
    if runs := inner_runs(folder):
        raise ValueError(f"{folder} is not a model, but holds runs: name one, such as {runs[0]}")
    raise ValueError(
        f"{folder} has no weights that can be read: no model.safetensors (or its index), and no "
        "pytorch_model.bin"
    )


def _join(
    source: str,
    index: Mapping[str, Any],
    open_shard: Callable[[str], Weights],
    config: Mapping[str, Any],
) -> Weights:
    """Join a model's shards; only shards that may contain embeddings are opened."""
    with readable(f"{source}: not an index of weights"):
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
    known = {f for n, f in files.items() if f".{n}".endswith(_INPUT_ENDINGS + _OUTPUT_ENDINGS)}
    # Without a known name in the index any of them may have the embeddings.
    opened = [open_shard(file) for file in sorted(known or {*files.values()})]
    shards = {name: shard for shard in opened for name in shard.shapes}
    shapes = {name: shard.shapes[name] for name, shard in shards.items()}
    return Weights(source, shapes, lambda name: shards[name].read(name), config)


def _open_hub(name: str, revision: str | None) -> Weights:
    """Open a model on the hub; only the bytes of its embeddings are downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError

    reach_hub()

    def download(filename: str) -> dict[str, Any]:
        try:
            return _json(Path(huggingface_hub.hf_hub_download(name, filename, revision=revision)))
        except RemoteEntryNotFoundError:
            return {}

    try:
        config, index = download("config.json"), download("model.safetensors.index.json")
        if index:
            return _join(name, index, lambda file: open_hub_file(name, file, revision), config)
        weights = open_hub_file(name, "model.safetensors", revision)
        return dataclasses.replace(weights, source=name, config=config)
    except ValueError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise FileNotFoundError(
            f"{name}: there is no such file or folder here, nor a model on the hub that can be "
            f"read ({hub_error(error)})"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    with readable(f"{path}: not a JSON object"):
        content: dict[str, Any] = {**json.loads(path.read_text(encoding="utf-8"))}
    return content
