"""The matrices of a model, and what their names, modules and blocks say of each; without torch."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Words in the names of what may have V rows that are not tokens.
_NO_TOKENS = re.compile(
    "(pos|position|positional|wpe|pe|ctx|context|rel|relative|distance|rotary|time|timestep|"
    "type|segment|seg|class|label|cls|lang|row|column|patch|query|queries|bias|scale|"
    "expert|router|gate|hash|codebook|code|quantizer|quantize|"
    "lora|adalora|vblora|hada|lokr|ia3|vera|oft|boft|adapter|prompt|prefix)s?"
)
# The last words of the name of a head.
_HEAD = re.compile(r"(^|[._])(heads?|logits|unembed)(_dense)?(\.\d+)?(\.\w+)?$")
# Words of which that is likely only.
_MAYBE_NO_TOKENS = re.compile(
    "(abs|rel|sin)?(pos|position|time|type|segment|seg)(emb|enc)?[a-z]*|(temporal|speaker)[a-z]*"
)


@dataclass(eq=False)
class ModelMatrix:
    """A parameter with two dimensions.

    Attributes:
        parameter: anything with a shape.
        kinds: the kinds of the modules that hold it, two if it is tied: "table", "linear" or
            "hand-written"; empty if they are not known.
        classes: the names of their classes.
        has_sparse_gradients: whether all of them say so; a dense head makes a tied matrix dense.
        blocks: the beginnings of its name that are blocks, such as ``layers.3.``.
        sides: "input", "output" or both for a token embedding; empty for any other matrix.
        vocab_dim: the dimension that indexes tokens.
    """

    name: str
    parameter: Any
    kinds: set[str] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)
    has_sparse_gradients: bool = False
    blocks: set[str] = field(default_factory=set)
    sides: set[str] = field(default_factory=set)
    vocab_dim: int = 0

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)}"

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return tuple(self.parameter.shape)

    @property
    def tokens(self) -> int:
        """The number of tokens, if it is a token embedding."""
        return self.shape[self.vocab_dim]

    @property
    def width(self) -> int:
        """The other dimension."""
        return self.shape[1 - self.vocab_dim]

    @property
    def is_tied(self) -> bool:
        """Whether a table shares it with a module of another kind, as with a head."""
        return self.kinds > {"table"}

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

    @property
    def is_named_as_head(self) -> bool:
        """Whether the last words of its name say that it is a head."""
        return _HEAD.search(self.name) is not None

    @functools.cached_property
    def is_doubtful(self) -> bool:
        """Whether its name, or the class of a holder, rather speaks of something else."""
        return any(map(_MAYBE_NO_TOKENS.fullmatch, self._words()))

    def _words(self) -> list[str]:
        # The end of the name only: what is further up describes the whole model.
        names = [*self.classes, *self.name.split(".")[-3:]]
        return [word for name in names for word in words(name)]


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


@functools.cache
def words(name: str) -> list[str]:
    """From GPTPosEmb, tok_emb and lm-head to gpt, pos, emb, tok, emb, lm and head."""
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*", name)
    return [word.lower() for word in found]
