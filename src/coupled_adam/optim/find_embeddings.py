"""Which matrices of a model embed tokens, and which of their dimensions indexes tokens.

The docstring of :func:`embedding_parameters` states the rule. Nothing is guessed: what the rule
leaves open is an error that asks, or is named in a warning.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from coupled_adam.optim.model_matrix import ModelMatrix, find_blocks, listed, matrices_of
from coupled_adam.optim.named_parameters import Tables, matching, several
from coupled_adam.optim.warn import warn

Couple = Literal["both", "input", "output"]

_GETTERS = {
    "get_input_embeddings": "input",
    "get_per_layer_input_embeddings": "input",  # Gemma 3n and 4
    "get_output_embeddings": "output",
}
_VOCAB_SIZE = re.compile(r"(?!type_)(\w+_)?vocab_size")  # type_vocab_size counts segments


def embedding_parameters(
    model: nn.Module,
    *,
    couple: Couple = "both",
    tables: Tables | None = None,
    vocab_size: int | Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Find the trainable token embeddings of a model, which :func:`param_groups` couples.

    The rule:

    1. *Getters and ties.* What ``get_input_embeddings()`` and ``get_output_embeddings()`` of the
       model and its submodules return is a token embedding, and so is an ``nn.Embedding`` whose
       matrix another kind of module shares.
    2. *Sizes.* The numbers V of tokens are given as ``vocab_size``. Otherwise they are those of
       step 1 and ``vocab_size`` in the model's configuration. If there is none, the only
       ``nn.Embedding`` tells it. The largest of several must have a partner, an ``nn.Linear`` with
       as many rows.
    3. *Rows.* Every ``nn.Embedding`` and every ``nn.Linear`` with exactly V rows is one, unless it
       is named for something else (positions, token types, adapters, ...). Linear layers in a block
       that is repeated, as in ``layers.3.mlp``, are none. Where V is the width of hidden layers,
       too, it is not clear which linear layers are heads. Every table with ``sparse=True`` is one,
       whatever its name and size.
    4. *Doubt.* If nothing is clear, an error asks for ``tables`` or ``vocab_size``. If something
       is, one warning names what else looks like a token embedding.

    A tied matrix appears once, and biases are never included. Per-layer embeddings (Gemma 3n, Gemma
    4) are input embeddings.

    Args:
        model: any module, also on the meta device.
        couple: ``"both"``, or ``"input"`` or ``"output"`` to return only these embeddings of a
            model that does not tie them.
        tables: the matrices to couple, which replaces the search above: one or several modules,
            parameters, parameter names, or glob patterns over parameter names such as
            ``"*.wte.weight"``. A mapping from names or patterns also gives the dimension that
            indexes tokens: ``{"embed.W_E": 0, "unembed.W_U": 1}``.
        vocab_size: the number of rows of the token embeddings, including padding; several numbers
            for several vocabularies.

    Returns:
        A dict from names to parameters.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if token embeddings cannot be told apart from other matrices; if an argument
            does not fit the model, or another argument; if ``couple`` is not ``"both"`` although a
            matrix is input and output embedding at once; if a wrapper (FSDP1, ZeRO-3) has flattened
            the model's matrices.

    Warns:
        UserWarning: if matrices that are not coupled look like token embeddings.
    """
    coupled, _ = find_embeddings(model, couple=couple, tables=tables, vocab_size=vocab_size)
    return {m.name: m.parameter for m in coupled if m.parameter.requires_grad}


def find_embeddings(
    model: nn.Module,
    *,
    couple: Couple,
    tables: Tables | None,
    vocab_size: int | Iterable[int] | None,
) -> tuple[list[ModelMatrix], list[ModelMatrix]]:
    """Return the matrices to couple, frozen or not, and all embeddings, of tokens or not."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.ParameterList):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if couple not in ("both", "input", "output"):
        raise ValueError(f"Invalid couple value: {couple!r} ('both', 'input' or 'output')")
    if tables is not None and couple != "both":
        raise ValueError(
            f"couple={couple!r} cannot be combined with tables=, which already names the matrices "
            "to couple: leave one of the two out"
        )
    given = _given_sizes(vocab_size)
    matrices = matrices_of(model)
    if tables is not None:
        coupled = _named_in_tables(model, matrices, tables, given or _configured_sizes(model))
    else:
        if alike := _search(model, matrices, given):
            _warn_of(alike, "name all matrices to couple in param_groups(model, tables=...)")
        coupled = [m for m in matrices if m.sides and (couple == "both" or couple in m.sides)]
        if couple != "both" and (tied := [m for m in coupled if len(m.sides) > 1]):
            raise ValueError(
                f"couple={couple!r}, but {tied[0]} is input and output embedding at once: leave "
                "couple out, or untie the two"
            )
    return coupled, [m for m in matrices if m.sides or "table" in m.kinds]


def _given_sizes(vocab_size: int | Iterable[int] | None) -> set[int]:
    """The sizes in ``vocab_size``; none for None. ValueError if one is no positive integer."""
    if vocab_size is None:
        return set()
    sizes = {*vocab_size} if isinstance(vocab_size, Iterable) else {vocab_size}
    if not sizes or not all(isinstance(n, Integral) and n > 0 for n in sizes):
        raise ValueError(
            f"Invalid vocab_size value: {vocab_size!r} (must be one or several positive integers)"
        )
    return sizes


def _configured_sizes(model: nn.Module) -> set[int]:
    """The vocabulary sizes in the configurations of the model and its submodules, also nested."""
    configs: dict[int, Any] = {}  # by id, as all modules of a model may share one
    for module in model.modules():
        with contextlib.suppress(Exception):  # a property may raise anything
            configs[id(module.config)] = module.config
    return {
        n
        for options in map(_readable, configs.values())
        for nested in [options, *map(_readable, filter(_has_options, options.values()))]
        for key, n in nested.items()
        if _VOCAB_SIZE.fullmatch(str(key)) and isinstance(n, int) and n > 1
    }


def _has_options(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "__dict__")


def _readable(config: Any) -> dict[Any, Any]:
    """The options of a configuration, but for those that OmegaConf, for example, cannot resolve."""
    options: dict[Any, Any] = {}
    with contextlib.suppress(Exception):
        mapping = config if isinstance(config, Mapping) else vars(config)
        for key in mapping:
            with contextlib.suppress(Exception):
                options[key] = mapping[key]
    return options


def _search(model: nn.Module, matrices: list[ModelMatrix], given: set[int]) -> list[ModelMatrix]:
    """Set ``sides`` and ``vocab_dim`` of the token embeddings; return what else looks like one.

    The steps are those of the rule in :func:`embedding_parameters`.
    """
    stated = given or _configured_sizes(model)
    # 1. Getters and ties
    has_getters = _ask_getters(model, matrices, stated)
    for m in matrices:
        if m.is_tied:
            m.sides = {"input", "output"}
    # 2. Sizes: given, of step 1, or configured where a table or a head has as many rows
    possible = [m for m in matrices if m.may_embed_tokens or m.has_sparse_gradients]
    tables = [m for m in possible if "table" in m.kinds]
    layers = [m for m in possible if "linear" in m.kinds and m not in tables]
    rows = {m.shape[0] for m in (*tables, *(m for m in layers if not m.blocks))}
    sizes = {m.tokens for m in matrices if m.sides} | (stated & rows)
    if missing := given - sizes:
        tables = [m for m in matrices if "table" in m.kinds]
        if not sizes and not tables and not _any_is_near(matrices, missing):
            _warn_of_a_stage(missing)
            return []
        hint = ""
        if any(isinstance(m, nn.Embedding) and is_parametrized(m) for m in model.modules()):
            hint = ". Those with a parametrization have other names: pass tables= with them"
        raise ValueError(
            f"vocab_size={', '.join(map(str, sorted(missing)))}: no embedding or linear layer of "
            f"the model has this size. Its nn.Embedding weights: {listed(tables) or 'none'}{hint}"
        )
    # Of how many layers a number is the width: columns are no tokens.
    widths = Counter(m.shape[1] for m in matrices if m.kinds & {"table", "linear"})
    if not sizes and not has_getters:
        # A table of hashes is larger than the vocabulary, and need not tell its size.
        if dense := [m for m in tables if not m.has_sparse_gradients]:
            sizes = _size_of_the_tables(dense, layers, widths)
        else:
            sizes = {m.shape[0] for m in tables} & {m.shape[0] for m in layers if not m.blocks}
    # 3. Rows
    for m in tables:
        is_of_tokens = m.shape[0] in sizes and not m.is_doubtful
        if not m.sides and (is_of_tokens or m.has_sparse_gradients):
            m.sides = {"input"}
            for other in layers:  # what has a table of its own is a model of an ensemble, no block
                other.blocks = {b for b in other.blocks if not m.name.startswith(b)}
    for m in layers:
        if m.shape[0] in sizes - widths.keys() and not m.sides and not m.blocks:
            m.sides = {"output"}
    # 4. Doubt. Another vocabulary may be larger and, where only a pair has told the size, smaller.
    least = math.inf if given else 1 if stated else 1 / 16
    alike = _alike(possible, sizes, widths, least)
    if alike and not has_getters and not any(m.sides for m in matrices):
        raise ValueError(_cannot_tell(alike))
    return alike


def _any_is_near(matrices: Iterable[ModelMatrix], sizes: set[int]) -> bool:
    """Whether a matrix has nearly so many rows or columns, as with another padding."""
    return any(abs(x - n) <= max(n / 20, 2) for m in matrices for x in m.shape for n in sizes)


def _warn_of_a_stage(sizes: set[int]) -> None:
    warn(
        f"vocab_size={', '.join(map(str, sorted(sizes)))}: no matrix has nearly so many rows, so "
        "nothing is coupled. Ignore this warning on a pipeline rank without embeddings"
    )


def _ask_getters(model: nn.Module, matrices: list[ModelMatrix], sizes: set[int]) -> bool:
    """Set ``sides`` of what the getters return; return whether the model has any."""
    by_parameter = {m.parameter: m for m in matrices}
    has_getters = False
    for module, (name, side) in itertools.product(model.modules(), _GETTERS.items()):
        try:
            getter = getattr(module, name)
        except Exception:  # there is none, or a property that raises anything
            continue
        try:
            returned = getter()
        except TypeError:  # it takes arguments, so it is something else
            continue
        except Exception:  # inherited by a model that has none
            returned = None
        has_getters = True
        for p in _weights(returned):
            m = by_parameter.get(p)
            # Not of two dimensions, or a head with a single score, as of a reward model.
            if m is None or m.shape[0] == 1:
                continue
            # The "input embeddings" of an encoder of images or sounds are a projection.
            if side == "input" and "linear" in m.kinds and "table" not in m.kinds:
                continue
            # FSMT returns the decoder's table as output, and has a head beside it.
            m.sides.add("input" if m.kinds == {"table"} else side)
            # What a hand-written module does with its matrix is not known, but its size tells.
            if m.kinds == {"hand-written"} and m.shape[0] not in sizes and m.shape[1] in sizes:
                m.vocab_dim = 1
    return has_getters


def _weights(embedding: Any) -> Iterator[Tensor]:
    """The weights of what a getter returns: one embedding module, or a list of several."""
    if isinstance(embedding, nn.ModuleList | list | tuple):
        for module in embedding:
            yield from _weights(module)
    elif isinstance(weight := getattr(embedding, "weight", None), Tensor):
        yield weight


def _size_of_the_tables(
    tables: list[ModelMatrix], layers: list[ModelMatrix], widths: Counter[int]
) -> set[int]:
    """The rows of the only table, or of the largest one if a head has as many.

    Raises:
        ValueError: if the largest of several has no such partner, or another is as large.
    """
    rows = sorted(m.shape[0] for m in tables if not m.is_doubtful)
    if len(rows) < 2:
        return {*rows}
    n = rows[-1]
    # A size that is also the width of layers would make hidden layers heads.
    has_head = any(m.shape[0] == n and not m.blocks for m in layers)
    if has_head and rows.count(n) == 1 and n not in widths:
        return {n}
    raise ValueError(_cannot_tell(sorted(tables, key=lambda m: -m.shape[0])))


def _alike(
    matrices: list[ModelMatrix], sizes: set[int], widths: Counter[int], least: float
) -> list[ModelMatrix]:
    """The matrices that are not coupled and look like token embeddings nevertheless.

    A table with other numbers of rows does if it has ``least`` rows, times the largest V.
    """
    known = {side: {m.tokens for m in matrices if side in m.sides} for side in ("input", "output")}
    # What is frozen would not be coupled anyway, and without a size nothing can be compared.
    rest = [m for m in matrices if not m.sides and m.parameter.requires_grad] if sizes else []
    tables = [m for m in rest if "table" in m.kinds and not m.blocks]
    others = {m.shape[0] for m in tables if m.shape[0] >= least * max(sizes)}

    def looks_alike(m: ModelMatrix) -> bool:
        (rows, columns), is_table = m.shape, "table" in m.kinds
        may_be_tokens = is_table or rows not in widths
        # Of these sizes no table, or no head, has been found; it may be padded.
        open_sizes = sizes - known["input" if is_table else "output"]
        is_near = rows >= columns and any(20 * abs(rows - n) <= n for n in open_sizes)
        # The first that applies decides, from what is certain by its kind to what only its size
        # suggests.
        rules = {
            "hand-written, in which either dimension may be V": (
                m.kinds.isdisjoint({"table", "linear"}),
                not m.blocks and not sizes.isdisjoint(m.shape),
            ),
            "a table of V rows, of which the name is doubtful": (is_table and rows in sizes, True),
            "in a block, as heads that predict several tokens ahead are": (
                bool(m.blocks),
                rows in sizes and may_be_tokens and rows > columns,
            ),
            "a layer of V columns, of one-hot tokens if it is the only one": (
                not is_table and columns in sizes and columns > rows,
                widths[columns] == 1,
            ),
            "a size": (True, is_near or (may_be_tokens and rows in others)),
        }
        return next(verdict for applies, verdict in rules.values() if applies)

    return list(filter(looks_alike, rest))


def _warn_of(alike: list[ModelMatrix], fix: str) -> None:
    warn(f"not coupled, although they may be token embeddings: {listed(alike)}. If they are, {fix}")


def _cannot_tell(matrices: list[ModelMatrix]) -> str:
    return (
        f"cannot tell which of these matrices embed tokens: {listed(matrices)}. Pass vocab_size= "
        "with the number of tokens, padding included, or name all that do in param_groups(model, "
        f"tables={{{matrices[0].name!r}: 0, ...}}), 0 for a matrix [V, H] and 1 for [H, V]"
    )


def _named_in_tables(
    model: nn.Module, matrices: list[ModelMatrix], tables: Tables, sizes: set[int]
) -> list[ModelMatrix]:
    """The matrices that ``tables`` names, with their ``vocab_dim``."""
    by_parameter = {m.parameter: m for m in matrices}
    parameters = dict(model.named_parameters(remove_duplicate=False))  # any name of a tied one
    dims: dict[ModelMatrix, int] = {}
    for entry in several(tables):
        for name, p in matching(parameters, entry, "tables").items():
            if p not in by_parameter:
                raise ValueError(
                    f"tables={entry!r} matches {name!r} of shape {list(p.shape)}, which is not a "
                    "matrix [V, H]: use a more specific name"
                )
            m = by_parameter[p]
            dim = tables[entry] if isinstance(tables, Mapping) else _vocab_dim(m, sizes)
            # Two entries may match one matrix, if they agree.
            if dim not in (0, 1) or dims.setdefault(m, dim) != dim:
                raise ValueError(
                    f"tables={tables!r} must give one dimension for {m}, that which indexes "
                    "tokens: 0 for a matrix [V, H], 1 for [H, V]"
                )
            m.vocab_dim = dim
    return [m for m in matrices if m in dims]


def _vocab_dim(m: ModelMatrix, sizes: set[int]) -> int:
    """The dimension of a token embedding that indexes tokens, by its module or by its size."""
    if "table" in m.kinds:
        return 0
    if dims := [dim for dim, length in enumerate(m.shape) if length in sizes]:
        return dims[0]
    if "linear" in m.kinds:
        return 0
    raise ValueError(
        f"cannot tell which dimension of {m} indexes tokens: pass vocab_size=, or "
        f"tables={{{m.name!r}: 0}} for a matrix [V, H], 1 for [H, V]"
    )


def matrices_of_size(
    parameters: Iterable[tuple[str, Tensor]], vocab_size: int | Iterable[int]
) -> dict[Tensor, int]:
    """Find the token embeddings among the parameters of an unknown model.

    These are the matrices with V rows or V columns, except for those that are named for something
    else, or as in a block that is repeated.

    Returns:
        A dict from each of them to the dimension that indexes tokens.

    Raises:
        ValueError: if there is none of a size, or more than a table and a head.
    """
    matrices = [ModelMatrix(name, p) for name, p in parameters if p.dim() == 2]
    find_blocks(matrices)
    possible = [m for m in matrices if m.may_embed_tokens and not m.blocks]
    vocab_dims: dict[Tensor, int] = {}
    doubtful: list[ModelMatrix] = []
    sizes = _given_sizes(vocab_size)
    if not _any_is_near(matrices, sizes):
        _warn_of_a_stage(sizes)
        return {}
    for n in sorted(sizes):
        candidates = [m for m in possible if n in m.shape]
        unlike = {m for m in candidates if m.is_doubtful or _is_factor(m, n, matrices)}
        doubtful += unlike
        # More than a table and a head: there are hidden layers of this width, too.
        dims = {m: int(m.shape[0] != n) for m in candidates if m not in unlike}
        if not 1 <= len(dims) <= 2:
            raise ValueError(
                f"vocab_size={n}: matrices that may embed tokens and have this size: "
                f"{listed([*dims]) or 'none'}. Pass the model, or model.named_parameters(), or put "
                "those that embed tokens into a param group with 'coupled': True"
            )
        vocab_dims |= {m.parameter: dim for m, dim in dims.items()}
    if doubtful:
        _warn_of(doubtful, "put them into a param group with 'coupled': True")
    return vocab_dims


def _is_factor(m: ModelMatrix, n: int, matrices: Iterable[ModelMatrix]) -> bool:
    """Whether a matrix with n rows or columns rather is a factor of an adapter of such a matrix.

    It then is far narrower than the layers, and lies below the layer that it adapts, by its name.
    """
    width = math.prod(m.shape) // n
    others = [max(x.shape) for x in matrices if n not in x.shape]
    wider = [math.prod(x.shape) // n for x in matrices if n in x.shape]
    is_narrow = 4 * width <= max(min(others, default=0), *wider)
    path = m.name.removesuffix(".weight").split(".")
    # PEFT's adapters are called so, and what it trains as a whole is called something else before.
    is_pefts = path[-1] == "default" and path[-2:-1] != ["modules_to_save"]
    return is_pefts or (is_narrow and len(path) > 2)
