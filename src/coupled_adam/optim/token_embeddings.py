"""Find the token embeddings of a model, and the dimension that indexes tokens in each.

The docstring of :func:`embedding_parameters` states the rule.
"""

import dataclasses
import difflib
import fnmatch
import inspect
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from coupled_adam.optim.flat import FlatShard, of_fsdp1

Couple = Literal["both", "input", "output"]
Parameters = nn.Module | Tensor | str | Iterable[nn.Module | Tensor | str]
Embeddings = Parameters | Mapping[str, int]

_GETTERS = {
    "get_input_embeddings": "input",
    "get_per_layer_input_embeddings": "input",  # Gemma 3n and 4
    "get_output_embeddings": "output",
}
_CONFIGURED = ("vocab_size", "src_vocab_size", "tgt_vocab_size")


@dataclasses.dataclass(eq=False)
class Matrix:
    """A parameter with two dimensions.

    Attributes:
        name: its name in the model.
        parameter: the parameter itself.
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

    def fits(self, n: int) -> bool:
        """Whether it may be a token embedding for a vocabulary of n tokens."""
        if self.kinds == {"layer"}:
            return False
        return n == self.shape[0] if "embedding" in self.kinds else n in self.shape

    def take(self, n: int, sides: set[str]) -> None:
        """Mark it as a token embedding for a vocabulary of n tokens."""
        self.sides, self.vocab_dim = sides, 0 if self.shape[0] == n else 1


def embedding_parameters(
    model: nn.Module,
    *,
    couple: Couple = "both",
    embeddings: Embeddings | None = None,
    vocab_size: int | Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Find the trainable token embeddings of a model, which :func:`param_groups` couples.

    They are found as follows:

    1. The vocabulary size V is the argument ``vocab_size``. If it is not given, V is taken from the
       model's configuration (``model.config.vocab_size``, also in nested configurations) and from
       the number of rows of the weights that ``get_input_embeddings()`` and
       ``get_output_embeddings()`` return. If there are neither, V is the number of rows of the tied
       embedding, or else of the largest ``nn.Embedding``.
    2. Every matrix with V rows or V columns that belongs to an ``nn.Embedding``, an ``nn.Linear``
       or a hand-written module is a token embedding. If a parametrization such as ``weight_norm``
       has replaced such a weight, its original matrices count in its place.
    3. If other matrices have this size as well (for example, if there are as many positions as
       tokens, or V = H), only those are token embeddings that are tied or that the getters return,
       and a warning names the others. If there are no such matrices, an error asks for
       ``embeddings``.

    A tied matrix appears once, and biases are never included. Per-layer embeddings (Gemma 3n, Gemma
    4) are included, as their rows belong to tokens as well. They count as input embeddings, so
    ``couple="output"`` leaves them out.

    Args:
        model: any module, also on the meta device.
        couple: ``"both"``, or ``"input"`` or ``"output"`` to return only these embeddings of a
            model that does not tie them.
        embeddings: the matrices to couple, which replaces the search above: one or several modules,
            parameters, parameter names, or glob patterns over parameter names such as
            ``"*.wte.weight"``. A mapping from names or patterns also gives the dimension that
            indexes tokens: ``{"embed.W_E": 0, "unembed.W_U": 1}``.
        vocab_size: the number of rows of the token embeddings, including padding; several numbers
            for several vocabularies.

    Returns:
        A dict from names to parameters.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if token embeddings cannot be told apart from other matrices; if no matrix has
            the size ``vocab_size``; if ``couple`` is not ``"both"`` although a matrix is input and
            output embedding at once; if an entry of ``embeddings`` matches no parameter, or
            one that is not a matrix; if ``couple`` is not one of the three values, or not
            ``"both"`` although ``embeddings`` is given; if a wrapper (FSDP1 with
            ``use_orig_params=False``, ZeRO-3) has flattened the model's matrices; if
            Megatron's tensor parallelism has split
            a matrix by its rows.

    Warns:
        UserWarning: if some matrices have the size of the vocabulary but are not coupled, or if the
            vocabulary size is only a guess.
    """
    found, _ = coupled_matrices(model, couple=couple, embeddings=embeddings, vocab_size=vocab_size)
    return {m.name: m.parameter for m in found}


def coupled_matrices(
    model: nn.Module,
    *,
    couple: Couple,
    embeddings: Embeddings | None,
    vocab_size: int | Iterable[int] | None,
) -> tuple[list[Matrix], list[Matrix]]:
    """Return the trainable matrices to couple, and all embeddings, of tokens or anything else."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if couple not in ("both", "input", "output"):
        raise ValueError(f"Invalid couple value: {couple!r} ('both', 'input' or 'output')")
    if embeddings is not None and couple != "both":
        raise ValueError(
            f"couple={couple!r} cannot be combined with embeddings=, which already names the "
            "matrices to couple: leave one of the two out"
        )
    given = _given_sizes(vocab_size)
    shards = of_fsdp1(model)
    _check_not_flattened(model, shards)
    matrices = _matrices(model, shards)
    if embeddings is not None:
        coupled = _named_outright(model, matrices, embeddings, given or _configured_sizes(model))
    else:
        for warning in _find(model, matrices, given):
            warnings.warn(warning, stacklevel=3)
        coupled = [m for m in matrices if m.sides and (couple == "both" or couple in m.sides)]
        if couple != "both" and (both := [m for m in coupled if len(m.sides) > 1]):
            raise ValueError(
                f"couple={couple!r}, but {both[0]} is input and output embedding at once: leave "
                "couple out, or untie the two"
            )
    coupled = [m for m in coupled if m.parameter.requires_grad]
    for m in coupled:
        check_not_tensor_parallel(m.parameter, m.vocab_dim, str(m))
    return coupled, [m for m in matrices if m.sides or "embedding" in m.kinds]


def matrices_of_size(
    parameters: Iterable[tuple[str, Tensor]], vocab_size: int | Iterable[int]
) -> dict[Tensor, int]:
    """Find the token embeddings among named parameters of an unknown model by their size alone.

    Returns:
        A dict from each matrix with V rows or V columns to the dimension that indexes tokens.

    Raises:
        ValueError: if no matrix has the size ``vocab_size``, or if some have V rows and others have
            V columns, as hidden layers have.
    """
    matrices = [Matrix(name, p) for name, p in parameters if p.dim() == 2]
    for n in sorted(_given_sizes(vocab_size)):
        if not any(m.fits(n) for m in matrices):
            largest = sorted(matrices, key=lambda m: -max(m.shape))
            raise ValueError(
                f"vocab_size={n}: none of the parameters that were passed is a matrix with {n} "
                f"rows or columns. The largest matrices: {_listed(largest) or 'none'}. Pass the "
                "number of rows of the embedding matrix, padding included"
            )
        _choose(matrices, n)
    return {m.parameter: m.vocab_dim for m in matrices if m.sides}


def check_not_tensor_parallel(p: Tensor, vocab_dim: int, what: str) -> None:
    """Raise ValueError if Megatron's tensor parallelism has split a parameter by its rows."""
    if not getattr(p, "tensor_model_parallel", False):
        return
    if getattr(p, "partition_dim", None) != 1 - vocab_dim:
        raise ValueError(
            f"cannot couple {what}: according to its tensor_model_parallel=True, this rank holds "
            "only a part of the vocabulary, but coupling averages over all of it. Make it a "
            "DTensor (torch.distributed.tensor.parallel.parallelize_module); or, if this rank does "
            "hold all of it, set tensor_model_parallel=False on the parameter"
        )


def _matrices(model: nn.Module, shards: dict[Tensor, FlatShard]) -> list[Matrix]:
    """All parameters with two dimensions, and the modules that hold them."""
    found = (Matrix(name, p, shard=shards.get(p)) for name, p in model.named_parameters())
    matrices = {m.parameter: m for m in found if len(m.shape) == 2}
    for module in model.modules():
        for p in _own_parameters(module):
            if p in matrices:
                matrices[p].modules.append(module)
    return list(matrices.values())


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters, including the originals of its parametrized weights."""
    if isinstance(module, parametrize.ParametrizationList):
        return
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for originals in module.parametrizations.values():
            yield from originals.parameters(recurse=False)


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear"
    origin = type(module).__module__
    of_torch = origin.startswith("torch.nn.") and origin != nn.ModuleDict.__module__
    return "layer" if of_torch else "own"


def _find(model: nn.Module, matrices: list[Matrix], given: set[int]) -> list[str]:
    """Set ``sides`` and ``vocab_dim`` of the token embeddings; return the warnings to issue."""
    told = given or _configured_sizes(model)
    sizes = {n for n in told if any(m.fits(n) for m in matrices)}
    if given - sizes:
        tables = [m for m in matrices if "embedding" in m.kinds]
        raise ValueError(
            f"vocab_size={_spelled(given - sizes)}: no embedding or linear layer of the model has "
            f"this size. Its nn.Embedding weights: {_listed(tables) or 'none'}"
        )
    returned = _ask_getters(model, matrices, told)
    if not given:
        sizes |= {m.tokens for m in returned}
    warned: list[str] = []
    if not sizes:
        sizes, warned = _guess_sizes(matrices)
    for m in matrices:
        if m.sides and m.tokens not in sizes:  # it belongs to another vocabulary
            m.sides.clear()
    left = [m for n in sorted(sizes) for m in _choose(matrices, n) if m.parameter.requires_grad]
    if left:
        warned.append(
            f"not coupled, although as large as the vocabulary: {_listed(left)}. They do not seem "
            "to be token embeddings; if they are, pass embeddings= with all matrices to couple"
        )
    return warned


def _given_sizes(vocab_size: int | Iterable[int] | None) -> set[int]:
    if vocab_size is None:
        return set()
    sizes = {vocab_size} if isinstance(vocab_size, int) else set(vocab_size)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(
            f"Invalid vocab_size value: {vocab_size!r} (must be one or several positive integers)"
        )
    return sizes


def _configured_sizes(model: nn.Module) -> set[int]:
    """The vocabulary sizes in the configurations of the model and its submodules, also nested."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) not in configs:
            nested = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
            configs |= {id(c): c for c in (config, *nested.values())}
    values = (
        config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        for config in configs.values()
        for key in _CONFIGURED
    )
    return {n for n in values if isinstance(n, int) and n > 1}


def _ask_getters(model: nn.Module, matrices: list[Matrix], sizes: set[int]) -> list[Matrix]:
    """Call the model's getters; return the matrices that they return, with ``sides`` set."""
    by_parameter = {m.parameter: m for m in matrices}
    found = []
    for module in model.modules():
        for getter, side in _GETTERS.items():
            for p in _weights(_call(getattr(module, getter, None))):
                m = by_parameter.get(p)
                # The "input embeddings" of a vision or audio encoder are a projection of patches.
                if m is None or (side == "input" and m.kinds == {"linear"}):
                    continue
                m.sides.add(side)
                if m.kinds == {"own"} and m.shape[0] not in sizes and m.shape[1] in sizes:
                    m.vocab_dim = 1
                found.append(m)
    return found


def _call(getter: Any) -> Any:
    """Call a getter; None if it is not a getter as in ``transformers``."""
    if not callable(getter):
        return None
    try:
        inspect.signature(getter).bind()
    except (TypeError, ValueError):  # it needs arguments, so it is something else of that name
        return None
    try:
        return getter()
    except NotImplementedError:  # transformers raises this in submodels without such embeddings
        return None


def _weights(embedding: Any) -> Iterator[Tensor]:
    """The weights of what a getter returns: one embedding module, or a list of several."""
    if isinstance(embedding, nn.ModuleList | list | tuple):
        for one in embedding:
            yield from _weights(one)
    elif isinstance(embedding, nn.Module) and parametrize.is_parametrized(embedding):
        yield from _own_parameters(embedding)
    elif isinstance(weight := getattr(embedding, "weight", None), Tensor):
        yield weight


def _guess_sizes(matrices: list[Matrix]) -> tuple[set[int], list[str]]:
    """Guess the vocabulary size from the tied or else the largest ``nn.Embedding``.

    Returns:
        The sizes, and the warnings to issue.

    Raises:
        ValueError: if it is not clear that the largest embeds tokens.
    """
    tables = [m for m in matrices if "embedding" in m.kinds]
    rows = sorted({m.shape[0] for m in tables}, reverse=True)
    tied = {m.shape[0] for m in tables if "linear" in m.kinds}
    rest = [m for m in matrices if "embedding" not in m.kinds]
    with_head = [n for n in rows if _is_head_size(rest, n)]
    sizes = tied or set(rows[:1])
    # An embedding with at least half as many rows may be a second vocabulary.
    close = [n for n in rows if n not in sizes and 2 * n >= max(sizes)]
    hint = (
        f"pass vocab_size={_spelled(sizes)} if this is correct, otherwise the correct number, or "
        "all sizes if there are several vocabularies"
    )
    guess = f"The vocabulary size may be {_spelled(sizes)}, but the model has {_listed(tables)}"
    if not tied and (close or (with_head and with_head[0] not in sizes)):
        raise ValueError(f"cannot tell which nn.Embedding embed tokens. {guess}: {hint}")
    unsure = close or (len(rows) > 1 and not tied and not with_head)
    return sizes, [f"{guess}: {hint}"] if unsure else []


def _is_head_size(matrices: list[Matrix], n: int) -> bool:
    """Whether some of these matrices have this size, and it is not the width of hidden layers."""
    fitting = [m for m in matrices if m.fits(n)]
    return bool(fitting) and not _is_width(fitting, n)


def _is_width(matrices: list[Matrix], n: int) -> bool:
    """Whether there are matrices with n rows and matrices with n columns, as in hidden layers."""
    return any(m.shape[0] == n for m in matrices) and any(m.shape[1] == n for m in matrices)


def _choose(matrices: list[Matrix], n: int) -> list[Matrix]:
    """Mark the token embeddings for a vocabulary of size n.

    Returns:
        The matrices of this size that are not token embeddings.

    Raises:
        ValueError: if token embeddings cannot be told apart from other matrices.
    """
    fitting = [m for m in matrices if m.fits(n)]
    for m in fitting:
        if m.is_tied:
            m.sides = {"input", "output"}
    known = [m for m in fitting if m.sides]
    tables = [m for m in fitting if not m.sides and "embedding" in m.kinds]
    layers = [m for m in fitting if not m.sides and "embedding" not in m.kinds]
    unclear = []

    if "input" in _sides(known) or len({m.modules[0] for m in tables}) > 1:
        unclear += tables
    else:
        for m in tables:
            m.take(n, {"input"})

    one_each_way = len(layers) == 2 and all(m.shape[0] != m.shape[1] for m in layers)
    if not _is_width(layers, n):
        unclear += _take_layers(layers, n, _sides(known + tables))
    elif one_each_way and not known and not tables:
        # Hand-written matrices [V, H] and [H, V], or a projection of one-hot tokens and a head.
        for m in layers:
            is_head = (m.shape[0] == n) == ("linear" in m.kinds)
            m.take(n, {"output"} if is_head else {"input"})
    else:
        unclear += layers

    if unclear and not known:
        raise ValueError(
            f"cannot tell which of these matrices embed tokens, as all have the vocabulary's size "
            f"{n}: {_listed(unclear)}. "
            + (
                f"Name all that do, e.g. embeddings=[{unclear[0].name!r}, ...]"
                if unclear[0].modules
                else "Put all that do into a param group with 'coupled': True, or pass "
                "coupled_adam.param_groups(model)"
            )
        )
    return unclear + [m for m in matrices if m.kinds == {"layer"} and m.shape[0] == n]


def _take_layers(layers: list[Matrix], n: int, sides: set[str]) -> list[Matrix]:
    """Mark linear layers, and a lone hand-written matrix if a side is missing; return the rest."""
    linear = [m for m in layers if "linear" in m.kinds]
    own = [m for m in layers if "linear" not in m.kinds]
    for m in linear:
        m.take(n, {"output"} if m.shape[0] == n or "input" in sides else {"input"})
    missing = {"input", "output"} - sides - _sides(linear)
    if missing and len(own) == 1:
        own[0].take(n, missing)
        return []
    return own


def _sides(matrices: list[Matrix]) -> set[str]:
    return {side for m in matrices for side in m.sides}


def _listed(matrices: list[Matrix]) -> str:
    most = 5
    more = f" and {len(matrices) - most} more" if len(matrices) > most else ""
    return ", ".join(map(str, matrices[:most])) + more


def _spelled(sizes: set[int]) -> str:
    return str(*sizes) if len(sizes) == 1 else str(tuple(sorted(sizes, reverse=True)))


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


def _named_outright(
    model: nn.Module, matrices: list[Matrix], embeddings: Embeddings, sizes: set[int]
) -> list[Matrix]:
    """The matrices that ``embeddings`` names, with their ``vocab_dim``."""
    by_parameter = {m.parameter: m for m in matrices}
    dims: dict[Matrix, int] = {}
    if isinstance(embeddings, Mapping):
        for entry, dim in embeddings.items():
            if dim not in (0, 1):
                raise ValueError(
                    f"embeddings={{{entry!r}: {dim!r}}} must give the dimension that indexes "
                    "tokens: 0 for a matrix [V, H], 1 for [H, V]"
                )
            for p in _resolve(model, entry, by_parameter):
                m = by_parameter[p]
                if dims.setdefault(m, dim) != dim:
                    raise ValueError(
                        f"embeddings gives both 0 and 1 for {m} (the last time in {entry!r})"
                    )
    else:
        if isinstance(embeddings, nn.Module | Tensor | str):
            embeddings = [embeddings]
        for entry in embeddings:
            for p in _resolve(model, entry, by_parameter):
                dims[by_parameter[p]] = _vocab_dim(by_parameter[p], sizes)
    for m, dim in dims.items():
        m.vocab_dim = dim
    return [m for m in matrices if m in dims]


def _vocab_dim(m: Matrix, sizes: set[int]) -> int:
    """The dimension of a token embedding that indexes tokens, by its module or by its size."""
    if "embedding" in m.kinds:
        return 0
    if dims := [dim for dim, length in enumerate(m.shape) if length in sizes]:
        return dims[0]
    if "linear" in m.kinds:
        return 0
    raise ValueError(
        f"cannot tell which dimension of {m} indexes tokens: pass vocab_size=, or "
        f"embeddings={{{m.name!r}: 0}} for a matrix [V, H], 1 for [H, V]"
    )


def _resolve(
    model: nn.Module, entry: nn.Module | Tensor | str, matrices: Container[Tensor]
) -> list[Tensor]:
    """The matrices that one entry of ``embeddings`` refers to."""
    found = _matching(model, entry, "embeddings")
    if isinstance(entry, nn.Module):
        own = set(_own_parameters(entry))  # without a head's bias
        found = {n: p for n, p in found.items() if p in own and p in matrices}
    if not found:
        raise _not_of_the_model(entry, "embeddings", "matrix")
    for name, p in found.items():
        if p not in matrices:
            raise ValueError(
                f"embeddings={entry!r} matches {name!r} of shape {list(p.shape)}, "
                "which is not a matrix [V, H]: use a more specific name"
            )
    return list(found.values())


def resolve(model: nn.Module, entries: Parameters, argument: str) -> set[Tensor]:
    """The parameters that modules, parameters, names and patterns refer to.

    Raises:
        ValueError: if an entry of the argument refers to no parameter of the model.
    """
    found: set[Tensor] = set()
    for entry in [entries] if isinstance(entries, nn.Module | Tensor | str) else entries:
        matching = _matching(model, entry, argument)
        if not matching:
            raise _not_of_the_model(entry, argument, "parameter")
        found.update(matching.values())
    return found


def _matching(
    model: nn.Module, entry: nn.Module | Tensor | str, argument: str
) -> dict[str, Tensor]:
    """All parameters of a model that an entry of an argument refers to, by their names."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(entry, str):
        own = {entry} if isinstance(entry, Tensor) else set(entry.parameters())
        return {n: p for n, p in parameters.items() if p in own}
    found = {n: p for n, p in parameters.items() if fnmatch.fnmatchcase(n, entry)}
    if not found:
        near = difflib.get_close_matches(entry, parameters, n=3, cutoff=0.3)
        hint = f"did you mean {near}?" if near else "see model.named_parameters()"
        raise ValueError(f"{argument}={entry!r} matches no parameter of the model: {hint}")
    return found


def _not_of_the_model(entry: object, argument: str, what: str) -> ValueError:
    return ValueError(
        f"{argument} contains a {type(entry).__name__} that holds no {what} of this model: pass "
        "the module itself, or a parameter's name"
    )
