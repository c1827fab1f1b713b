"""Read the embedding matrices of models, however they were trained, and nothing else of them.

They are found by the tensor names that are common in the various families of models.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coupled_adam.embeddings.weights import (
    SUFFIXES,
    Weights,
    open_distributed,
    open_file,
    open_hub_file,
)
from coupled_adam.errors import printable
from coupled_adam.runs import CHECKPOINTS, MODEL, by_step, inner_runs, is_run
from coupled_adam.text.hub import hub_error, is_hub_id, reach_hub

# The names of the families of models. T5's and BART's "shared" is first, since they have it beside
# the embed_tokens of both sides.
_INPUTS = """
    shared wte embed_tokens word_embeddings tok_embeddings token_embedding embed_in word_embedding
    tokens_embed backbone.embeddings backbone.embedding model.embeddings rwkv.embeddings emb
    token_embd
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
        words: what the rows stand for, [V], of a file that says so itself.
    """

    matrix: Tensor
    role: Role
    tensor: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    words: Sequence[str] | None = dataclasses.field(default=None, repr=False)


def load_embeddings(
    source: str | Path, *, tensor: str | None = None, revision: str | None = None
) -> list[EmbeddingMatrix]:
    """Find and read the input and output embeddings of a model: two matrices, or a single one.

    Args:
        source: a model's folder in Hugging Face format (sharded or not), or its id on the hub; a
            ``.safetensors``, ``.npy``, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt`` file; vectors of
            word2vec, GloVe or fastText (``.txt``, ``.vec``, ``.bin``), or ``.gguf``; a run or a
            checkpoint of this package; a folder written by torch.distributed.checkpoint.
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
    listed = ", ".join(f"{n} {list(s)}" for n, s in sorted(matrices.items(), key=_largest)[:8])

    def read(name: str, role: Role) -> EmbeddingMatrix:
        matrix = _read(weights, name)
        words = weights.words if len(weights.words or ()) == len(matrix) else None
        return EmbeddingMatrix(matrix, role, name, weights.config or {}, words)

    if tensor is not None:
        if tensor not in matrices:
            hint = f"it contains {listed}" if any(matrices) else "its matrix has no name"
            raise ValueError(f"{weights.source} has no matrix {tensor!r}; {hint}")
        return [read(tensor, "embeddings")]
    inputs, output = _named(matrices, _INPUT_ENDINGS), _named(matrices, _OUTPUT_ENDINGS)
    if inputs and output and not _is_head(weights, inputs, output):
        output = None
    if inputs and output:
        first, second = read(inputs, "input"), read(output, "output")
        # Some files hold a tied matrix under both names.
        if first.matrix.shape == second.matrix.shape and torch.equal(first.matrix, second.matrix):
            return [dataclasses.replace(first, role="tied")]
        return [first, second]
    if inputs:
        return [read(inputs, "tied" if _is_tied(weights.config or {}) else "input")]
    if output:
        return [read(output, "output")]
    if len(matrices) == 1:
        return [read(next(iter(matrices)), "embeddings")]
    hint = f"name one of {listed}" if matrices else "there are no matrices in it"
    raise ValueError(f"{weights.source}: no embeddings under a known name; {hint}")


def _is_head(weights: Weights, inputs: str, output: str) -> bool:
    """Whether a matrix with the name of output embeddings has a row for each token; warn if not."""
    (tokens, width), (rows, width_of_head) = weights.shapes[inputs], weights.shapes[output]
    # A draft head has some of the tokens only, and a table that says which.
    is_draft = any(name.endswith("d2t") for name in weights.shapes)
    if width == width_of_head and rows >= tokens / 2 and not is_draft:
        return True
    text = (
        f"{weights.source}: the {rows} rows of {output} are not the {tokens} tokens of {inputs}, "
        f"and are left out; --tensor {output} measures them"
    )
    warnings.warn(printable(text), stacklevel=2)
    return False


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a model that has only input embeddings uses them for its output, too."""
    has_head = any(head in str(config.get("architectures")) for head in _HEADS)
    # Models with images have the configuration of their text in a part.
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return has_head and bool(all(said))


def _largest(item: tuple[str, tuple[int, ...]]) -> tuple[int, str]:
    return -item[1][0] * item[1][1], item[0]


def _named(matrices: Mapping[str, tuple[int, ...]], endings: tuple[str, ...]) -> str | None:
    """The matrix with the first of the known names that occurs, after any module prefix."""
    for ending in endings:
        matches = {name: matrices[name] for name in matrices if f".{name}".endswith(ending)}
        if matches:
            # If there are several, as in a model that contains a smaller one, take the largest.
            return min(matches.items(), key=_largest)[0]
    return None


def _read(weights: Weights, name: str) -> Tensor:
    shape = weights.shapes[name]
    if 0 in shape:  # without a byte of content, it can have any number of rows
        raise ValueError(f"{weights.source}: {name or 'the array'} {list(shape)} is empty")
    matrix = weights.read(name)
    # torch counts packed pairs of 4 bits among the floating-point numbers, but cannot convert them.
    packed = getattr(torch, "float4_e2m1fn_x2", None)  # from torch 2.8 on
    if not matrix.is_floating_point() or matrix.dtype is packed:
        raise ValueError(
            f"{weights.source}: {name} is quantised ({str(matrix.dtype).removeprefix('torch.')}); "
            "floating-point numbers are needed"
        )
    scales = [f"{name}{ending}" for ending in _SCALES if f"{name}{ending}" in weights.shapes]
    if scales and matrix.itemsize == 1:
        matrix = _scaled(weights, name, matrix, scales[0])
    # model2vec keeps one row for several tokens, and which one is a token's.
    if weights.shapes.get("mapping", ()) and len(weights.shapes["mapping"]) == 1:
        rows = weights.read("mapping").long()
        if rows.min() < 0 or rows.max() >= len(matrix):
            raise ValueError(f"{weights.source}: mapping names rows that {name} does not have")
        matrix = matrix[rows]
    return matrix


_SCALES = ("_scale_inv", "_scale")


def _scaled(weights: Weights, name: str, matrix: Tensor, scale_name: str) -> Tensor:
    """The numbers of an 8-bit matrix, in float32: each is multiplied by the scale of its block.

    There is a scale for all, for each row, or for each square block, of a size that the
    configuration says or that divides both sides alike.
    """
    scale = weights.read(scale_name).float()
    rows, columns = matrix.shape
    config = (weights.config or {}).get("quantization_config")
    said = config.get("weight_block_size") if isinstance(config, Mapping) else None
    if scale.numel() == 1 or tuple(scale.shape) in ((rows,), (rows, 1)):
        blocks = [[rows // len(scale.reshape(-1)), columns]]
    else:
        blocks = [said] if said else [[n, n] for n in (128, 64, 32)]
        blocks = [b for b in blocks if scale.shape == (-(-rows // b[0]), -(-columns // b[1]))]
    if not blocks:
        raise ValueError(
            f"{weights.source}: {name} {[rows, columns]} has scales {scale_name} "
            f"{list(scale.shape)} in an unknown layout: save the weights in bfloat16"
        )
    height, width = blocks[0]
    scale = scale.reshape(-(-rows // height), -(-columns // width))
    scaled = torch.empty(matrix.shape)
    for index, of_rows in enumerate(scale):
        chunk = slice(index * height, (index + 1) * height)
        scaled[chunk] = matrix[chunk].float() * of_rows.repeat_interleave(width)[:columns]
    return scaled


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
        return open_distributed(folder)
    config = _json(folder / "config.json") if (folder / "config.json").exists() else None
    # safetensors first, which execute no code and are read in part.
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.exists():
            files = _indexed(_json(index), index)
            return _join(str(folder), files, lambda file: _shard(folder / file), config)
        if (folder / name).exists():
            opened = open_file(folder / name)
            return dataclasses.replace(opened, source=str(folder), config=config)
    if runs := inner_runs(folder):
        raise ValueError(f"{folder} is not a model, but holds runs: name one, such as {runs[0]}")
    raise ValueError(
        f"{folder} has no weights that can be read: no model.safetensors (or its index), no "
        "pytorch_model.bin, no distributed checkpoint"
    )


def _shard(path: Path) -> Weights:
    if not path.exists():
        raise ValueError(f"{path.parent} lacks {path.name}, which its index names: download it")
    return open_file(path)


def _indexed(index: Mapping[str, Any], source: object) -> dict[str, str]:
    """The file of each tensor; files outside the folder of the index are refused."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{source}: not an index of weights: it has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+", file) or file.startswith("."):
            raise ValueError(f"{source}: {file!r} is not the name of a file beside it")
    return files


def _join(
    source: str,
    files: Mapping[str, str],
    open_shard: Callable[[str], Weights],
    config: Mapping[str, Any] | None,
) -> Weights:
    """Join a model's shards; only shards that may contain embeddings are opened."""
    embeddings = {
        name: file
        for name, file in files.items()
        if f".{re.sub('(_scale|_scale_inv)$', '', name)}".endswith(_INPUT_ENDINGS + _OUTPUT_ENDINGS)
    }
    # Without a known name in the index any of them may have the embeddings.
    opened = {file: open_shard(file) for file in sorted({*(embeddings or files).values()})}
    for name, file in embeddings.items():
        if name not in opened[file].shapes:
            raise ValueError(f"{source}: {name} is not in {file}, where the index has it")
    shards = {name: shard for shard in opened.values() for name in shard.shapes}
    shapes = {name: shard.shapes[name] for name, shard in shards.items()}
    return Weights(source, shapes, lambda name: shards[name].read(name), config)


def _open_hub(name: str, revision: str | None) -> Weights:
    """Open a model on the hub; only the bytes of its embeddings are downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError

    reach_hub()

    def download(filename: str) -> dict[str, Any] | None:
        try:
            return _json(Path(huggingface_hub.hf_hub_download(name, filename, revision=revision)))
        except RemoteEntryNotFoundError:
            return None

    try:
        config = download("config.json")
        index = download("model.safetensors.index.json")
        if index is not None:
            files = _indexed(index, f"{name}: model.safetensors.index.json")
            return _join(name, files, lambda file: open_hub_file(name, file, revision), config)
        weights = open_hub_file(name, "model.safetensors", revision)
        return dataclasses.replace(weights, source=name, config=config)
    except RemoteEntryNotFoundError:
        raise ValueError(
            f"{name} has no model.safetensors on the hub: download the model and pass its folder"
        ) from None
    except ValueError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise FileNotFoundError(
            f"{name}: there is no such file or folder here, nor a model on the hub that can be "
            f"read ({hub_error(error)})"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
