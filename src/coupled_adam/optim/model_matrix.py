"""The matrices of a model, and what their names, modules and blocks say of each."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from coupled_adam.optim.roles import words

# Words in the names of what may have V rows that are not tokens.
_NO_TOKENS = re.compile(
    "(pos|position|positional|wpe|pe|ctx|context|rel|relative|distance|rotary|time|timestep|"
    "type|segment|seg|class|label|cls|lang|row|column|patch|query|queries|bias|scale|"
    "expert|router|gate|hash|codebook|code|quantizer|quantize|"
    "lora|adalora|vblora|hada|lokr|ia3|vera|oft|boft|adapter|prompt|prefix)s?"
)
# Words of which that is likely only.
_MAYBE_NO_TOKENS = re.compile(
    "(abs|rel|sin)?(pos|position|time|type|segment|seg)(emb|enc)?[a-z]*|(temporal|speaker)[a-z]*"
)


@dataclass(eq=False)
class ModelMatrix:
    """A parameter with two dimensions.

    Attributes:
        holders: the modules that hold it, two or more if it is tied; empty if they are not known.
        blocks: the beginnings of its name that are blocks, such as ``layers.3.``.
        sides: "input", "output" or both for a token embedding; empty for any other matrix.
        vocab_dim: the dimension that indexes tokens.
    """

    name: str
    parameter: Tensor
    holders: list[nn.Module] = field(default_factory=list)
    blocks: set[str] = field(default_factory=set)
    sides: set[str] = field(default_factory=set)
    vocab_dim: int = 0

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)}"

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.parameter.shape

    @property
    def tokens(self) -> int:
        """The number of tokens, if it is a token embedding."""
        return self.shape[self.vocab_dim]

    @functools.cached_property
    def kinds(self) -> set[str]:
        """The kinds of its holders: "table", "linear" or "hand-written"."""
        return {_kind(module) for module in self.holders}

    @property
    def is_tied(self) -> bool:
        """Whether a table shares it with a module of another kind, as with a head."""
        return self.kinds > {"table"}

    @property
    def has_sparse_gradients(self) -> bool:
        """Whether all modules that hold it say so; a dense head of a tied matrix makes it dense."""
        return self.kinds == {"table"} and all(m.sparse for m in self.holders)

    @property
    def is_head(self) -> bool:
        """Whether it is an output embedding of tokens, and not tied to an input embedding."""
        if self.sides:
            return self.sides == {"output"}
        # tables= names it, and what hand-written code stores as [H, V] follows the hidden states.
        return "table" not in self.kinds and ("linear" in self.kinds or self.vocab_dim == 1)

    @functools.cached_property
    def may_embed_tokens(self) -> bool:
        """Whether its name, or the class of a holder, allows it.

        Magnitudes [V, 1], as ``weight_norm`` has them, embed nothing.
        """
        return 1 not in self.shape and not any(map(_NO_TOKENS.fullmatch, self._words()))

    @functools.cached_property
    def is_doubtful(self) -> bool:
        """Whether its name, or the class of a holder, rather speaks of something else."""
        return any(map(_MAYBE_NO_TOKENS.fullmatch, self._words()))

    def _words(self) -> list[str]:
        # The end of the name only: what is further up describes the whole model.
        names = [*(type(m).__name__ for m in self.holders), *self.name.split(".")[-3:]]
        return [word for name in names for word in words(name)]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "table"
    return "linear" if isinstance(module, nn.Linear) else "hand-written"


def matrices_of(model: nn.Module) -> list[ModelMatrix]:
    """All parameters with two dimensions, and the modules that hold them."""
    named = model.named_parameters()
    matrices: dict[Tensor, ModelMatrix] = {p: ModelMatrix(n, p) for n, p in named if p.dim() == 2}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            if p in matrices:
                matrices[p].holders.append(module)
        # It is then not known which of the vectors were matrices and should have weight decay.
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding | nn.Linear) and weight is not None and weight.dim() < 2:
            raise ValueError(
                f"'{name}.weight' has the shape {list(weight.shape)}: it was flattened by a "
                "wrapper (FSDP1, ZeRO-3). Use one that keeps matrices, such as FSDP2: "
                "torch.distributed.fsdp.fully_shard"
            )
    # What may be a pipeline: an nn.Sequential, and the model itself.
    modules = model.named_modules()
    sequences = {"", *(name for name, module in modules if isinstance(module, nn.Sequential))}
    find_blocks(matrices.values(), sequences)
    return list(matrices.values())


def find_blocks(matrices: Iterable[ModelMatrix], sequences: set[str] | None = None) -> None:
    """Set ``blocks``: the items of lists around a layer.

    What may also be a pipeline, whose stages differ, has blocks only if another item has a matrix
    of the same name.

    Args:
        matrices: all matrices of a model.
        sequences: the names of modules that may be pipelines; by default all may be.
    """
    # The items of a list that have a matrix of the same name, by what is before and after the
    # item's number: ("layers", "mlp.weight") has those of layers.0.mlp.weight, layers.1.mlp.weight.
    items: dict[tuple[str, str], list[tuple[ModelMatrix, str]]] = {}
    for m in matrices:
        components = m.name.split(".")
        for i, component in enumerate(components[:-2]):  # not heads.0.weight
            if component.isdigit():
                before, item, after = (
                    ".".join(x) for x in (components[:i], components[: i + 1], components[i + 1 :])
                )
                items.setdefault((before, after), []).append((m, f"{item}."))
    # A list with one item is taken for a list of blocks, unless it may be a pipeline.
    for (before, _), alike in items.items():
        if len(alike) > 1 or not (sequences is None or before in sequences):
            for m, item in alike:
                m.blocks.add(item)


def listed(matrices: list[ModelMatrix]) -> str:
    """The names and shapes of the first five, for messages."""
    more = f" and {len(matrices) - 5} more" if len(matrices) > 5 else ""
    return ", ".join(map(str, matrices[:5])) + more
