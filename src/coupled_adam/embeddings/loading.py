"""Read the embedding matrices of models, however they were trained, and nothing else of them.

They are found by the tensor names that are common in the various families of models.
"""

import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coupled_adam.embeddings.model_files import LISTED, open_model
from coupled_adam.embeddings.weights import Weights, readable
from coupled_adam.optim.find_embeddings import find_embeddings

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
    opened = open_model(source, revision, lambda name: _kind(name) not in ("block", ""))
    return _find(_with_mapped_rows(opened), tensor)


def model_embeddings(model: nn.Module) -> dict[str, Tensor]:
    """The ``"output"`` embeddings [V, H] of a model, and ``"input"`` if they differ.

    They are those of :func:`coupled_adam.embedding_parameters`, and of several the first, as the
    outermost module returns them. The model may be inside another module; nothing if there is none.
    """
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not clear is not measured
        found, _ = find_embeddings(model, couple="both", tables=None, vocab_size=None)
        sides = ("output", "input")
        first = {side: m for side in sides for m in reversed(found) if side in m.sides}
        weights = {s: m.parameter.T if m.vocab_dim else m.parameter for s, m in first.items()}
        is_tied = weights.get("output") is weights.get("input")
        return {"output": weights["output"]} if weights and is_tied else weights
    return {}


def _with_mapped_rows(weights: Weights) -> Weights:
    """The weights with a row for each token, where model2vec keeps one for several.

    Of token i it is the row mapping[i], times weights[i] if there are weights.
    """
    if len(weights.shapes.get("embeddings", ())) != 2 or "mapping" not in weights.shapes:
        return weights

    def read(name: str) -> Tensor:
        if name != "embeddings":
            return weights.read(name)
        with readable(f"{weights.source}: the mapping does not fit the embeddings"):
            matrix = weights.read(name).index_select(0, weights.read("mapping").long())
            if "weights" in weights.shapes:
                matrix = matrix.float() * weights.read("weights").float()[:, None]
        return matrix

    shape = (weights.shapes["mapping"][0], weights.shapes["embeddings"][1])
    return dataclasses.replace(weights, shapes={**weights.shapes, "embeddings": shape}, read=read)


def _find(weights: Weights, tensor: str | None) -> list[EmbeddingMatrix]:
    """Choose the tensors that are embeddings, and give them their roles."""
    shapes = {name: shape for name, shape in weights.shapes.items() if len(shape) == 2}
    # What the user names is a matrix, or a part of the file in which to look.
    if tensor is not None and tensor not in shapes:
        below = {name: shape for name, shape in shapes.items() if name.startswith(f"{tensor}.")}
        if not below:
            raise ValueError(
                f"{weights.source} has no matrix {tensor!r}; it contains {_listed(shapes)}"
            )
        shapes = below
    # 1. A matrix that is named, or the only one: nothing else is asked of it
    kinds = {name: _kind(name) for name in shapes}
    is_known = not {"table", "head"}.isdisjoint(kinds.values())
    if tensor in shapes or (len(shapes) == 1 and not is_known):
        (name,) = [tensor] if tensor in shapes else shapes
        matrix = weights.read(name)
        if reason := _why_unusable(matrix):
            raise ValueError(f"{weights.source}: {name or 'the array'} {reason}")
        return [EmbeddingMatrix(matrix, "embeddings", name, weights.config)]
    # 2. Tables are known by their names, and heads by their names and sizes
    inputs, left_out = _distinct(weights, [name for name in shapes if kinds[name] == "table"])
    heads = [name for name in shapes if kinds[name] == "head"]
    if inputs and not heads:
        heads = [name for name in shapes if kinds[name] == "maybe a head"]
    # A head has a row for each token, or some more or fewer; those of classifiers have not.
    tokens = max(map(len, inputs.values()), default=0)
    is_draft = any(name.split(".")[-1] == "d2t" for name in weights.shapes)
    for name in heads[:]:
        # Several numbers are packed into one, so that the size tells nothing.
        if is_draft or (shapes[name][0] < tokens / 2 and not _PACKED.search(name)):
            few = f"has too few rows for {tokens} tokens"
            left_out[name] = (
                "has the rows of a draft's tokens, which d2t names" if is_draft else few
            )
            heads.remove(name)
    outputs, unusable = _distinct(weights, heads)
    left_out |= unusable
    if not inputs and not outputs:
        reasons = [f"{name} {reason}" for name, reason in left_out.items()]
        hint = f"choose one with --tensor: {_listed(shapes)}" if shapes else "no matrices in it"
        raise ValueError(
            f"{weights.source}: "
            + ("; ".join(reasons) or f"no embeddings under a known name; {hint}")
        )
    # 3. Under an unknown name there may be further embeddings
    sizes = {len(matrix) for matrix in (*inputs.values(), *outputs.values())}
    for name, (rows, _) in shapes.items():
        known = kinds[name] in ("table", "block") or name in heads or _POSITIONS.search(name)
        if rows in sizes and not known:
            left_out.setdefault(name, "has a row for each token, but no known name")
    phrases = [f"{name} {[*shapes[name]]} {reason}" for name, reason in left_out.items()]
    return [
        EmbeddingMatrix(matrix, role, name, weights.config, tuple(phrases[:LISTED]))
        for name, matrix, role in _with_roles(inputs, outputs, {*heads}, weights.config)
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
        name: [head for head, output in outputs.items() if is_equal(matrix, output)]
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


def _kind(name: str) -> Literal["block", "table", "head", "maybe a head", ""]:
    """What the name of a tensor says: it is in a block, a table of tokens, a head, or unknown."""
    if _IN_A_BLOCK.search(name):
        return "block"
    # The layer that it belongs to, with a dot before each part of its name
    layer = "." + _WRAPPER.sub("", _PACKED.sub("", name).removesuffix(".weight"))
    if layer.endswith(_INPUT_ENDINGS) and not _POSITIONS.search(layer):
        return "table"
    if layer.endswith(_OUTPUT_ENDINGS):
        return "head"
    return "maybe a head" if layer.endswith(_VAGUE_ENDINGS) else ""


def _side(name: str) -> str:
    sides = _SIDE.findall(name)
    return _SIDES.get(sides[0], sides[0]) if sides else ""


def is_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two matrices have the same bits, NaN included."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(matrix.contiguous().view(torch.uint8) for matrix in (first, second)))


def _distinct(weights: Weights, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The matrices [V, H] that differ, a decoder's last; and why others cannot be used, by name.

    A checkpoint may hold a model, its average and its gradients: several matrices that differ, and
    are not an encoder's and a decoder's, are a ValueError.
    """
    matrices: dict[str, Tensor] = {}
    unusable: dict[str, str] = {}
    for name in sorted(names, key=lambda name: ("", "encoder", "decoder").index(_side(name))):
        matrix = weights.read(name)
        if reason := _why_unusable(matrix):
            unusable[name] = reason
        elif not any(is_equal(matrix, other) for other in matrices.values()):
            matrices[name] = matrix
    if len({*map(_side, matrices)}) < len(matrices):
        listed = _listed({name: matrix.shape for name, matrix in matrices.items()})
        raise ValueError(
            f"{weights.source} has several embeddings whose numbers differ: {listed}; choose one "
            "with --tensor (tensor= in Python), by its name or the beginning of it"
        )
    return matrices, unusable


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    """The largest matrices, with their shapes."""
    largest = sorted(shapes.items(), key=lambda item: (-math.prod(item[1]), item[0]))
    return ", ".join(f"{name} {list(shape)}" for name, shape in largest[:LISTED])


def _why_unusable(matrix: Tensor) -> str:
    """What a matrix lacks; empty if it can be measured."""
    if not matrix.numel():
        return f"{list(matrix.shape)} is empty"
    # The numbers of 8 bits and less mean nothing without the scales that belong to them.
    if not matrix.is_floating_point() or matrix.itemsize == 1:
        dtype = str(matrix.dtype).removeprefix("torch.")
        return f"is quantised ({dtype}); floating-point numbers of 16 bits or more are needed"
    return ""
