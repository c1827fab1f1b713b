"""The matrices of a model: what holds each of them, what its name says, whether it is in a block.

And the parameters that users name.
"""

import dataclasses
import difflib
import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from coupled_adam.optim.flat import FlatShard, of_fsdp1

Parameters = nn.Module | Tensor | str | Iterable[nn.Module | Tensor | str]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}

# Words in the names of modules and parameters, in the singular.
OF_TOKENS = re.compile(
    "token|tok|word|wte|vocab|vocabulary|char|character|byte|text|src|tgt|source|target"
)
OF_TOKEN_HEADS = re.compile("lm|mlm|unembed|unembedding|logit|vocab|vocabulary|generator")
OF_HEADS = re.compile(f"head|{OF_TOKEN_HEADS.pattern}")  # maybe of a classifier
OF_ANYTHING_ELSE = re.compile(
    # positions in time and space
    "pos|position|positional|wpe|rel|relative|distance|rotary|time|timestep|step|row|column|patch|"
    # kinds
    "type|segment|seg|class|label|cls|lang|language|style|emotion|domain|task|user|"
    # parts of layers, and the codes of sounds and images
    "bias|expert|router|gate|query|queries|codebook|code|quantizer|quantize|"
    # adapters, whose factors have V rows, too
    "lora|adalora|vblora|hada|lokr|ia3|vera|oft|boft|adapter|prompt|prefix"
)
_SILENT = re.compile(
    "weight|emb|embed|embedding|embedder|table|lut|linear|proj|projection|layer|module|default|"
    "original[01]?|orig|base|to|save|fsdp|wrapped|mod|checkpoint"
)


@dataclasses.dataclass(eq=False)
class Matrix:
    """A parameter with two dimensions.

    Attributes:
        name: its name in the model.
        parameter: the parameter itself.
        in_block: whether it is inside of one of several blocks with the same names and shapes.
        shard: the piece of the matrix that FSDP1 has left in the parameter; None if it is whole.
        modules: the modules that hold it; two or more for a tied matrix, none if only the
            parameter is known.
        sides: "input", "output" or both for a token embedding; empty for any other matrix.
        vocab_dim: the dimension that indexes tokens.
    """

    name: str
    parameter: Tensor
    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    sides: set[str] = dataclasses.field(default_factory=set)
    vocab_dim: int = 0
    in_block: bool = False
    shard: FlatShard | None = None

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)}"

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.parameter.shape if self.shard is None else torch.Size(self.shard.shape)

    @property
    def kinds(self) -> set[str]:
        """The kinds of its modules.

        They are "embedding", "linear", "own" (hand-written) or "layer" (any other layer of torch).
        A parameter without modules counts as "linear": only its size can tell what it is.
        """
        return {_kind(module) for module in self.modules} or {"linear"}

    @property
    def is_tied(self) -> bool:
        """Whether modules of several kinds share it, as input and output embedding do."""
        return len(self.kinds - {"layer"}) > 1

    @property
    def is_head(self) -> bool:
        """Whether it is an output embedding of tokens, and not tied to an input embedding."""
        if self.sides:
            return self.sides == {"output"}
        # It was named outright: what hand-written code stores as [H, V] follows the hidden states.
        return "embedding" not in self.kinds and ("linear" in self.kinds or self.vocab_dim == 1)

    @property
    def tokens(self) -> int:
        """The number of tokens, if it is a token embedding."""
        return self.shape[self.vocab_dim]

    @functools.cached_property
    def words(self) -> set[str]:
        """What its name, or the class of a hand-written module that holds it, says it is for."""
        module_words = {
            word for m in self.modules if _kind(m) != "layer" for word in _words(type(m).__name__)
        }
        for component in reversed(self.name.split(".")):
            if words := {word for word in _words(component) if not _SILENT.fullmatch(word)}:
                return module_words | words
        return module_words

    def is_named(self, words: re.Pattern[str]) -> bool:
        """Whether its name has one of these words."""
        return any(words.fullmatch(word) for word in self.words)

    @property
    def is_named_head(self) -> bool:
        """Whether it is a linear layer whose name says that it is a head over tokens."""
        is_square = self.shape[0] == self.shape[1]  # as projections are that are called heads
        return "linear" in self.kinds and self.is_named(OF_TOKEN_HEADS if is_square else OF_HEADS)

    def fits(self, n: int) -> bool:
        """Whether it may be a token embedding for a vocabulary of n tokens."""
        if self.kinds == {"layer"}:
            return False
        return n == self.shape[0] if "embedding" in self.kinds else n in self.shape

    def take(self, n: int, sides: set[str]) -> None:
        """Mark it as a token embedding for a vocabulary of n tokens."""
        self.sides, self.vocab_dim = sides, 0 if self.shape[0] == n else 1


def matrices_of(model: nn.Module) -> list[Matrix]:
    """All parameters with two dimensions, and the modules that hold them.

    Raises:
        ValueError: if a wrapper has flattened the matrices.
    """
    shards = of_fsdp1(model)
    _check_not_flattened(model, shards)
    all_parameters = (Matrix(name, p, shard=shards.get(p)) for name, p in model.named_parameters())
    matrices = {m.parameter: m for m in all_parameters if len(m.shape) == 2}
    for module in model.modules():
        for p in own_parameters(module):
            if p in matrices:
                matrices[p].modules.append(module)
    classes = {
        _without_wrappers(name): type(module)
        for name, module in model.named_modules()
        if _kind(module) == "own"
    }
    mark_blocks([*matrices.values()], classes)
    return list(matrices.values())


def mark_blocks(matrices: list[Matrix], classes: Mapping[str, type]) -> None:
    """Set ``in_block``, for an only element of a list, and for elements that are alike.

    These have an equal matrix, or the same class. A matrix in a block has a name such as
    ``blocks.0.module.weight``. In ``heads.0.weight`` the element is the layer itself, and a list of
    layers is no stack of blocks.
    """
    lists: defaultdict[str, dict[str, set[object]]] = defaultdict(dict)
    inside: defaultdict[tuple[str, str], list[Matrix]] = defaultdict(list)
    for m in matrices:
        path = _without_wrappers(m.name).split(".")
        for at, number in enumerate(path[:-1]):
            if not number.isdigit():
                continue
            container = ".".join(path[:at])
            features = lists[container].setdefault(number, set())
            if len(path) > at + 2:
                features.add((".".join(path[at + 1 :]), m.shape))
                features.add(classes.get(".".join(path[: at + 1]), object()))
                inside[container, number].append(m)
    for (container, number), within in inside.items():
        other_elements = [of for key, of in lists[container].items() if key != number]
        if not other_elements or any(lists[container][number] & of for of in other_elements):
            for m in within:
                m.in_block = True


def _without_wrappers(name: str) -> str:
    """The name of a module or parameter as it was before FSDP, PEFT or a parametrization."""
    name = re.sub(r"\.parametrizations\.\w+\.original\d?$", ".weight", name)
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters, including the originals of its parametrized weights."""
    if isinstance(module, parametrize.ParametrizationList):
        return
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for originals in module.parametrizations.values():
            yield from originals.parameters(recurse=False)


def _words(name: str) -> list[str]:
    """The words of a name in snake or camel case, in lower case, and their singular."""
    name = re.sub("^weight_[gv]$", "weight", name)  # of weight_norm
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+[0-9]*|[A-Z]+", name)
    return [form for word in words for form in (word.lower(), word.lower().removesuffix("s"))]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear"
    origin = type(module).__module__
    of_torch = origin.startswith("torch.nn.") and origin != nn.ModuleDict.__module__
    return "layer" if of_torch else "own"


def listed(matrices: list[Matrix]) -> str:
    """The names and shapes of the first five, for messages."""
    most = 5
    more = f" and {len(matrices) - most} more" if len(matrices) > most else ""
    return ", ".join(map(str, matrices[:most])) + more


def _check_not_flattened(model: nn.Module, shards: dict[Tensor, FlatShard]) -> None:
    """Raise ValueError for a model in which FSDP1 or ZeRO-3 has flattened matrices to vectors.

    It is then no longer known which of the vectors were matrices and should have weight decay,
    except for those of which FSDP1 has kept the shapes.
    """
    flattened: set[Tensor] = set()
    for module in model.modules():
        if _kind(module) in ("embedding", "linear"):
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() < 2 and weight not in shards:
                flattened.add(weight)
    for name, p in model.named_parameters():
        if p in flattened or getattr(p, "_is_flat_param", False):
            raise ValueError(
                f"{name!r} has the shape {list(p.shape)}: it was flattened by a wrapper (FSDP1, "
                "ZeRO-3), so that matrices and biases cannot be told apart. Pass "
                "use_orig_params=True to FullyShardedDataParallel, or use a wrapper that keeps "
                "matrices, such as FSDP2: torch.distributed.fsdp.fully_shard"
            )


def resolve(model: nn.Module, entries: Parameters, argument: str) -> set[Tensor]:
    """The parameters that modules, parameters, names and patterns refer to.

    Raises:
        ValueError: if an entry of the argument refers to no parameter of the model.
    """
    resolved: set[Tensor] = set()
    for entry in [entries] if isinstance(entries, nn.Module | Tensor | str) else entries:
        parameters = matching(model, entry, argument)
        if not parameters:
            raise not_of_the_model(entry, argument, "parameter")
        resolved.update(parameters.values())
    return resolved


def matching(model: nn.Module, entry: nn.Module | Tensor | str, argument: str) -> dict[str, Tensor]:
    """All parameters of a model that an entry of an argument refers to, by their names."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(entry, str):
        wanted = {entry} if isinstance(entry, Tensor) else set(entry.parameters())
        return {n: p for n, p in parameters.items() if p in wanted}
    matches = {n: p for n, p in parameters.items() if fnmatch.fnmatchcase(n, entry)}
    if not matches:
        near = difflib.get_close_matches(entry, parameters, n=3, cutoff=0.3)
        hint = f"did you mean {near}?" if near else "see model.named_parameters()"
        raise ValueError(f"{argument}={entry!r} matches no parameter of the model: {hint}")
    return matches


def not_of_the_model(entry: object, argument: str, kind: str) -> ValueError:
    """The error for an entry of an argument that has no such thing of the model."""
    return ValueError(
        f"{argument} contains a {type(entry).__name__} that holds no {kind} of this model: pass "
        "the module itself, or a parameter's name"
    )
