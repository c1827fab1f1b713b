"""Read the embedding matrices of models, however they were trained, and nothing else of them.

They are found by the tensor names that are common in the various families of models.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coupled_adam.embeddings.weights import SUFFIXES, Weights, open_file, open_hub_file, readable
from coupled_adam.runs import CHECKPOINTS, MODEL, by_step, inner_runs, is_run
from coupled_adam.text.hub import hub_error, is_hub_id, reach_hub

# The names of layers in the families of models, after any prefix.
_INPUTS = """
    shared wte embed_tokens word_embeddings tok_embeddings token_embedding token_embeddings embed_in
    word_embedding tokens_embed input_embedding token_emb tok_emb tok emb embed backbone.embeddings
    backbone.embedding model.embeddings rwkv.embeddings transformer.embeddings transformer.w
"""
_OUTPUTS = """
    lm_head embed_out cls.predictions.decoder lm_head.decoder generator_lm_head lm_loss unembed
    output_projection output_layer to_logits pred_layer.proj head.decoder lm_head.out_proj
    lm_head.w_out
"""
_INPUT_ENDINGS = tuple(f".{name}" for name in _INPUTS.split())
_OUTPUT_ENDINGS = tuple(f".{name}" for name in _OUTPUTS.split())
# So other layers are called, too: these count only beside input embeddings.
_VAGUE_ENDINGS = (".output", ".head", ".proj_out")
# What PEFT and x-transformers put around a layer, as in embed_tokens.base_layer.weight.
_WRAPPER = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)$|(?<=emb)\.emb$")
_PACKED = re.compile(r"\.(qweight|weight_packed)$")
_POSITIONS = re.compile(r"(^|[._])(pos|positions?|positional|wpe)([._]|$)")
_IN_A_BLOCK = re.compile(r"\.\d+\.")
_SIDE = re.compile(r"(?:^|[._])(encoder|decoder|src|tgt|trg)(?=[._])")
_SIDES = {"src": "encoder", "tgt": "decoder", "trg": "decoder"}
_HAS_HEAD = re.compile(
    "CausalLM|LMHead|MaskedLM|ConditionalGeneration|PreTraining|MTModel|EncoderDecoderModel|"
    "GenerationDecoder|SpeechToText|TextToText"
)
# What these learn before finetuning needs no head with a row for each token.
_HAS_NO_HEAD = re.compile("(Electra|Funnel|Splinter)ForPreTraining")
_LISTED = 8
Role = Literal["input", "output", "tied", "embeddings"]


@dataclasses.dataclass(frozen=True)
class EmbeddingMatrix:
    """An embedding matrix of a model.

    Attributes:
        matrix: [V, H], in the dtype it is stored in, on the CPU.
        role: ``"input"`` or ``"output"``; ``"tied"`` if one matrix is both; ``"embeddings"`` if the
            file does not tell.
        tensor: its name in the file; empty if the file holds a single array.
        config: the model's config.json; empty if there is none.
        left_out: what else in the file may be embeddings, each with the reason why it is not read.
    """

    matrix: Tensor
    role: Role
    tensor: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()

    @property
    def side(self) -> str:
        """``"encoder"`` or ``"decoder"`` if its name says so; otherwise empty."""
        return _side(self.tensor)


def load_embeddings(
    source: str | Path, *, tensor: str | None = None, revision: str | None = None
) -> list[EmbeddingMatrix]:
    """Find and read the embeddings of a model: input and output, or one matrix that is both.

    A decoder whose table is not its encoder's has a matrix more.

    Args:
        source: a model's folder in Hugging Face format (sharded or not), or its id on the hub; a
            ``.safetensors``, ``.npy``, ``.bin``, ``.pt``, ``.pth`` or ``.ckpt`` file; a run or a
            checkpoint of this package.
        tensor: the name of the tensor to read, if the embeddings have an unusual name; or of the
            part of the file that has them, such as ``"ema"``.
        revision: a branch, tag or commit of a model on the hub.

    Raises:
        FileNotFoundError: if there is no such file, folder or model.
        OSError: if a file cannot be read.
        ValueError: if a file is damaged or needs unpickling; if it has no embeddings with a known
            name, or several whose numbers differ, which the message lists.
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
    """Choose the tensors that are embeddings, and give them their roles."""
    shapes = {name: shape for name, shape in weights.shapes.items() if len(shape) == 2}
    if tensor is not None and tensor not in shapes:
        part = {name: shape for name, shape in shapes.items() if name.startswith(f"{tensor}.")}
        if not part:
            raise ValueError(
                f"{weights.source} has no matrix {tensor!r}; it contains {_listed(shapes)}"
            )
        shapes = part
    is_known = any(_is_table(name) or _is_head(name, _OUTPUT_ENDINGS) for name in shapes)
    if tensor in shapes or (len(shapes) == 1 and not is_known):
        (name,) = [tensor] if tensor in shapes else shapes
        return [EmbeddingMatrix(_read(weights, name), "embeddings", name, weights.config)]
    left_out: dict[str, str] = {}
    inputs = _distinct(weights, [name for name in shapes if _is_table(name)], left_out)
    named = [name for name in shapes if _is_head(name, _OUTPUT_ENDINGS)]
    if inputs and not named:
        named = [name for name in shapes if _is_head(name, _VAGUE_ENDINGS)]
    # A head has a row for each token, or some more or fewer; those of classifiers have not.
    tokens = max(map(len, inputs.values()), default=0)
    for name in [name for name in named if shapes[name][0] < tokens / 2]:
        if not _PACKED.search(name):
            left_out[name] = f"has too few rows for {tokens} tokens"
            named.remove(name)
    outputs = _distinct(weights, named, left_out)
    if not inputs and not outputs:
        reasons = [f"{name} {reason}" for name, reason in left_out.items()]
        hint = f"choose one with --tensor: {_listed(shapes)}" if shapes else "no matrices in it"
        raise ValueError(
            f"{weights.source}: "
            + ("; ".join(reasons) or f"no embeddings under a known name; {hint}")
        )
    # Under an unknown name there may be further embeddings.
    sizes = {len(matrix) for matrix in (*inputs.values(), *outputs.values())}
    for name, (rows, _) in shapes.items():
        known = _is_table(name) or name in named or _POSITIONS.search(name)
        if rows in sizes and not known and not _IN_A_BLOCK.search(name):
            left_out.setdefault(name, "has a row for each token, but no known name")
    phrases = tuple(f"{n} {[*shapes[n]]} {reason}" for n, reason in left_out.items())
    return [
        EmbeddingMatrix(matrix, role, name, weights.config, phrases[:_LISTED])
        for name, matrix, role in _with_roles(inputs, outputs, {*named}, weights.config)
    ]


def _with_roles(
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    heads: Collection[str],
    config: Mapping[str, Any],
) -> list[tuple[str, Tensor, Role]]:
    """The names, matrices [V, H] and roles; ``heads`` are also those that cannot be read."""
    # Some files hold a tied matrix under both names.
    tied = {
        name: [head for head, output in outputs.items() if _is_equal(matrix, output)]
        for name, matrix in inputs.items()
    }
    if not (inputs and heads) and _is_tied(config):
        tied[[*inputs, *outputs][-1]] = ["the head"]  # of the decoder, which is the last
    twice = {head for names in tied.values() for head in names}
    roles: list[tuple[str, Tensor, Role]] = [
        (name, matrix, "tied" if tied[name] else "input") for name, matrix in inputs.items()
    ]
    roles += [
        (name, matrix, "tied" if name in tied else "output")
        for name, matrix in outputs.items()
        if name not in twice
    ]
    return roles


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a model that has only one matrix uses it for its input and its output."""
    architectures = str(config.get("architectures"))
    has_head = _HAS_HEAD.search(architectures) and not _HAS_NO_HEAD.search(architectures)
    # transformers ties if any part says so, and older versions have not saved what is true.
    parts = config_parts(config)
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return bool(has_head) and any(said or [True])


def config_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configuration, and its part for the text or the decoder of a model that has one."""
    parts = (config, config.get("text_config"), config.get("decoder"))
    return [part for part in parts if isinstance(part, Mapping)]


def _layer(name: str) -> str:
    """The layer that a tensor belongs to, with a dot before each part of its name."""
    return "." + _WRAPPER.sub("", _PACKED.sub("", name).removesuffix(".weight"))


def _is_table(name: str) -> bool:
    is_other = _POSITIONS.search(_layer(name)) or _IN_A_BLOCK.search(name)
    return _layer(name).endswith(_INPUT_ENDINGS) and not is_other


def _is_head(name: str, endings: tuple[str, ...]) -> bool:
    return _layer(name).endswith(endings) and not _IN_A_BLOCK.search(name)


def _side(name: str) -> str:
    sides = _SIDE.findall(name)
    return _SIDES.get(sides[0], sides[0]) if sides else ""


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices have the same bits, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(matrix.contiguous().view(torch.uint8) for matrix in (one, other)))


def _distinct(
    weights: Weights, names: Sequence[str], left_out: dict[str, str]
) -> dict[str, Tensor]:
    """The matrices that differ, a decoder's last; what cannot be read goes to ``left_out``.

    A checkpoint may hold a model, its average and its gradients: several matrices that differ, and
    are not an encoder's and a decoder's, are a ValueError.
    """
    matrices: dict[str, Tensor] = {}
    for name in sorted(names, key=lambda name: ("", "encoder", "decoder").index(_side(name))):
        matrix = weights.read(name)
        if reason := _why_unusable(matrix):
            left_out[name] = reason
        elif not any(_is_equal(matrix, other) for other in matrices.values()):
            matrices[name] = matrix
    if len({*map(_side, matrices)}) < len(matrices):
        listed = _listed({name: matrix.shape for name, matrix in matrices.items()})
        raise ValueError(
            f"{weights.source} has several embeddings whose numbers differ: {listed}; choose one "
            "with --tensor (tensor= in Python), by its name or the beginning of it"
        )
    return matrices


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    """The largest matrices, with their shapes."""
    largest = sorted(shapes.items(), key=lambda item: (-math.prod(item[1]), item[0]))
    return ", ".join(f"{name} {list(shape)}" for name, shape in largest[:_LISTED])


def _read(weights: Weights, name: str) -> Tensor:
    matrix = weights.read(name)
    if reason := _why_unusable(matrix):
        raise ValueError(f"{weights.source}: {name or 'the array'} {reason}")
    return matrix


def _why_unusable(matrix: Tensor) -> str:
    """What a matrix lacks; empty if it can be measured."""
    if not matrix.numel():
        return f"{list(matrix.shape)} is empty"
    # The numbers of 8 bits and less mean nothing without the scales that belong to them.
    if not matrix.is_floating_point() or matrix.itemsize == 1:
        dtype = str(matrix.dtype).removeprefix("torch.")
        return f"is quantised ({dtype}); floating-point numbers of 16 bits or more are needed"
    return ""


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
    # In the order of transformers. An index may be stale, of an earlier save in several files.
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            opened = open_file(folder / name)
            return dataclasses.replace(opened, source=str(folder), config=config)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _join(str(folder), _json(index), lambda file: open_file(folder / file), config)
    raise ValueError(f"{folder} {_what_it_is(folder)}")


def _what_it_is(folder: Path) -> str:
    """What a folder without weights that can be read holds instead, and what to name."""
    if runs := inner_runs(folder):
        return f"is not a model, but holds runs: name one, such as {runs[0]}"
    if snapshots := sorted(folder.glob("**/snapshots/*")):
        return f"is a cache of the Hugging Face hub: name a model in it, such as {snapshots[0]}"
    if (folder / "adapter_config.json").exists():
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"holds an adapter of {base} alone: name that model, or one that peft's "
            "merge_and_unload has made of the two"
        )
    if (folder / "modules.json").exists():
        inner = [path.parent for path in sorted(folder.glob("*/*.safetensors"))]
        where = f": name the part with the embeddings, such as {inner[0]}" if inner else ""
        return f"is a model of sentence-transformers{where}"
    names = sorted(f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir())
    if shards := [name for name in names if re.search(r"-\d+-of-\d+\.", name)]:
        return f"holds shards, such as {shards[0]}, but not the index.json that says what is where"
    listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
    return (
        "has no weights that can be read: no model.safetensors or pytorch_model.bin, nor an index "
        f"of one; it holds {listed or 'nothing'}"
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
    endings = (*_OUTPUT_ENDINGS, *_VAGUE_ENDINGS)
    known = {file for name, file in files.items() if _is_table(name) or _is_head(name, endings)}
    # Without a known name in the index any of them may have the embeddings.
    opened = [open_shard(file) for file in sorted(known or {*files.values()})]
    shards = {name: shard for shard in opened for name in shard.shapes}
    shapes = {name: shard.shapes[name] for name, shard in shards.items()}
    return Weights(source, shapes, lambda name: shards[name].read(name), config)


def _open_hub(name: str, revision: str | None) -> Weights:
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
            weights = open_hub_file(name, "model.safetensors", revision)
        except EntryNotFoundError:
            index = download("model.safetensors.index.json")
            if not index:
                raise
            return _join(name, index, lambda file: open_hub_file(name, file, revision), config)
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
