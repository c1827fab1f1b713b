"""Find the token embeddings of a model, and the dimension that indexes tokens in each.

The docstring of :func:`embedding_parameters` states the rule.
"""

import inspect
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from coupled_adam.optim.matrices import (
    OF_ANYTHING_ELSE,
    OF_HEADS,
    OF_TOKEN_HEADS,
    OF_TOKENS,
    Matrix,
    Parameters,
    listed,
    mark_blocks,
    matching,
    matrices_of,
    not_of_the_model,
    own_parameters,
)

Couple = Literal["both", "input", "output"]
Embeddings = Parameters | Mapping[str, int]

_GETTERS = {
    "get_input_embeddings": "input",
    "get_per_layer_input_embeddings": "input",  # Gemma 3n and 4
    "get_output_embeddings": "output",
}
_CONFIGURED = re.compile("(?!type_)(\\w+_)?vocab_size")  # type_vocab_size counts segments


def embedding_parameters(
    model: nn.Module,
    *,
    couple: Couple = "both",
    embeddings: Embeddings | None = None,
    vocab_size: int | Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """Find the trainable token embeddings of a model, which :func:`param_groups` couples.

    The rule, of which each step leaves what it does not answer to the next:

    1. *Getters and ties.* What ``get_input_embeddings()`` and ``get_output_embeddings()`` of the
       model and its submodules return is a token embedding, and so is an ``nn.Embedding`` whose
       matrix another kind of module shares. The numbers of their rows, and ``vocab_size`` in the
       model's configuration, are the sizes V of vocabularies. The argument ``vocab_size`` replaces
       them. If both sides, input and output, have their embedding, the search for this V ends here.
    2. *Names.* What is named for something else (positions, token types, adapters, ...) is no token
       embedding. An ``nn.Embedding`` that is named for tokens (``wte``, ``embed_tokens``, ...) or
       a linear layer that is named for them (``lm_head``, ``unembed``, ...) is one, and says V if
       nothing else has said it.
    3. *Blocks.* Nothing in a block that is repeated, as in ``layers.3.mlp``, is one.
    4. *Sizes.* What is left and has V rows is one: an ``nn.Embedding``, an ``nn.Linear``, or a
       hand-written matrix, which may also have V columns. If nothing has said V, it is the number
       of rows of the largest ``nn.Embedding``, and a warning calls it a guess unless there is a
       linear layer of this size.
    5. *Doubt.* If step 4 leaves several that cannot all be one, an error asks for ``embeddings``.
       If there are token embeddings already, a warning names what else looks like one.

    If a parametrization such as ``weight_norm`` has replaced a weight, its original matrices count
    in its place.

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
        UserWarning: if matrices that are not coupled look like token embeddings, or if the size of
            the vocabulary is only a guess.
    """
    coupled, _ = coupled_matrices(
        model, couple=couple, embeddings=embeddings, vocab_size=vocab_size
    )
    return {m.name: m.parameter for m in coupled}


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
    given_sizes = _given_sizes(vocab_size)
    matrices = matrices_of(model)
    if embeddings is not None:
        coupled = _named_outright(
            model, matrices, embeddings, given_sizes or _configured_sizes(model)
        )
    else:
        for warning in _find(model, matrices, given_sizes):
            warnings.warn(warning, stacklevel=3)
        coupled = [m for m in matrices if m.sides and (couple == "both" or couple in m.sides)]
        if couple != "both" and (tied := [m for m in coupled if len(m.sides) > 1]):
            raise ValueError(
                f"couple={couple!r}, but {tied[0]} is input and output embedding at once: leave "
                "couple out, or untie the two"
            )
    coupled = [m for m in coupled if m.parameter.requires_grad]
    for m in coupled:
        check_not_tensor_parallel(m.parameter, m.vocab_dim, str(m))
    return coupled, [m for m in matrices if m.sides or "embedding" in m.kinds]


def matrices_of_size(
    parameters: Iterable[tuple[str, Tensor]], vocab_size: int | Iterable[int]
) -> dict[Tensor, int]:
    """Find the token embeddings among the parameters of an unknown model.

    These are the matrices with V rows or V columns, except for those that are named for something
    else, or as in a block that is repeated.

    Returns:
        A dict from each of them to the dimension that indexes tokens.

    Raises:
        ValueError: if no matrix has the size ``vocab_size``, or if there are more than can be token
            embeddings: some with V rows and others with V columns, as hidden layers have, or three
            of the same shape without names.
    """
    matrices = [Matrix(name, p) for name, p in parameters if p.dim() == 2]
    mark_blocks(matrices, {})
    for n in sorted(_given_sizes(vocab_size)):
        fitting = [m for m in matrices if m.fits(n)]
        if not fitting:
            largest = sorted(matrices, key=lambda m: -max(m.shape))
            raise ValueError(
                f"vocab_size={n}: none of the parameters that were passed is a matrix with {n} "
                f"rows or columns. The largest matrices: {listed(largest) or 'none'}. Pass the "
                "number of rows of the embedding matrix, padding included"
            )
        unnamed = [m for m in fitting if m.name.startswith("parameter ")]
        if len(unnamed) > 2:
            raise ValueError(
                f"vocab_size={n}: {len(unnamed)} matrices have this size, so hidden layers must be "
                f"among them: {listed(unnamed)}. Pass names, as in model.named_parameters(), or "
                "coupled_adam.param_groups(model)"
            )
        _search(matrices, n)
        if not any(m.sides for m in fitting):
            raise ValueError(
                f"vocab_size={n}: the matrices of this size are named for something else, or as in "
                f"a repeated block: {listed(fitting)}. If one of them embeds tokens, put it into a "
                "param group with 'coupled': True"
            )
    return {m.parameter: m.vocab_dim for m in matrices if m.sides}


def check_not_tensor_parallel(p: Tensor, vocab_dim: int, name: str) -> None:
    """Raise ValueError if Megatron's tensor parallelism has split a parameter by its rows."""
    if not getattr(p, "tensor_model_parallel", False):
        return
    if getattr(p, "partition_dim", None) != 1 - vocab_dim:
        raise ValueError(
            f"cannot couple {name}: according to its tensor_model_parallel=True, this rank holds "
            "only a part of the vocabulary, but coupling averages over all of it. Make it a "
            "DTensor (torch.distributed.tensor.parallel.parallelize_module); or, if this rank does "
            "hold all of it, set tensor_model_parallel=False on the parameter"
        )


def _find(model: nn.Module, matrices: list[Matrix], given_sizes: set[int]) -> list[str]:
    """Set ``sides`` and ``vocab_dim`` of the token embeddings; return the warnings to issue."""
    stated_sizes = given_sizes or _configured_sizes(model)
    sizes = {n for n in stated_sizes if any(m.fits(n) for m in matrices)}
    if given_sizes - sizes:
        tables = [m for m in matrices if "embedding" in m.kinds]
        raise ValueError(
            f"vocab_size={_spelled(given_sizes - sizes)}: no embedding or linear layer of the "
            f"model has this size. Its nn.Embedding weights: {listed(tables) or 'none'}"
        )
    has_getters = _ask_getters(model, matrices, stated_sizes)
    for m in matrices:
        if m.is_tied:
            m.sides = {"input", "output"}
        # It belongs to another vocabulary.
        if m.sides and given_sizes and m.tokens not in given_sizes:
            m.sides.clear()
    warned: list[str] = []
    if not given_sizes:
        sizes |= {m.tokens for m in matrices if m.sides}
    if not sizes and not has_getters:
        sizes, warned = _sizes_by_name(matrices), []
    if not sizes and not has_getters:
        sizes, warned = _guess_sizes(matrices)
    for n in sorted(sizes):
        _search(matrices, n, has_getters)
    if alike := [
        m for m in matrices if m.parameter.requires_grad and _looks_alike(m, matrices, stated_sizes)
    ]:
        warned.append(
            f"not coupled, although they may be token embeddings by their sizes: {listed(alike)}. "
            "If they are, pass embeddings= with all matrices to couple"
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
            configs |= {id(c): c for c in (config, *_options(config).values())}
    return {
        n
        for config in configs.values()
        for key, n in _options(config).items()
        if _CONFIGURED.fullmatch(str(key)) and isinstance(n, int) and n > 1
    }


def _options(config: Any) -> Mapping[Any, Any]:
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _ask_getters(model: nn.Module, matrices: list[Matrix], sizes: set[int]) -> bool:
    """Set ``sides`` of what the getters return; return whether the model has any."""
    by_parameter = {m.parameter: m for m in matrices}
    has_getters = False
    for module in model.modules():
        for getter, side in _GETTERS.items():
            if not _is_getter(getattr(module, getter, None)):
                continue
            has_getters = True
            may_fail = module is not model or "per_layer" in getter
            for p in _weights(_call(getattr(module, getter), may_fail)):
                m = by_parameter.get(p)
                # The "input embeddings" of a vision or audio encoder are a projection of patches.
                if m is None or (side == "input" and m.kinds == {"linear"}):
                    continue
                if m.shape[0] == 1:  # the Decision Transformer has a GPT-2 without tokens
                    continue
                # FSMT returns the decoder's table, and has a head beside it.
                m.sides.add("input" if m.kinds == {"embedding"} else side)
                if m.kinds == {"own"} and m.shape[0] not in sizes and m.shape[1] in sizes:
                    m.vocab_dim = 1
    return has_getters


def _is_getter(getter: Any) -> bool:
    """Whether it can be called as in ``transformers``, without arguments."""
    if not callable(getter):
        return False
    try:
        inspect.signature(getter).bind()
    except (TypeError, ValueError):
        return False
    return True


def _call(getter: Any, may_fail: bool) -> Any:
    try:
        return getter()
    except NotImplementedError:  # transformers raises this in submodels without such embeddings
        return None
    except AttributeError:  # and some inherit a getter for what they do not have
        if not may_fail:
            raise
        return None


def _weights(embedding: Any) -> Iterator[Tensor]:
    """The weights of what a getter returns: one embedding module, or a list of several."""
    if isinstance(embedding, nn.ModuleList | list | tuple):
        for module in embedding:
            yield from _weights(module)
    elif isinstance(embedding, nn.Module) and parametrize.is_parametrized(embedding):
        yield from own_parameters(embedding)
    elif isinstance(weight := getattr(embedding, "weight", None), Tensor):
        yield weight


def _sizes_by_name(matrices: list[Matrix]) -> set[int]:
    """The numbers of rows of what is named for tokens: embeddings, and heads about as large."""
    open_to_names = [m for m in matrices if not m.in_block and not m.is_named(OF_ANYTHING_ELSE)]
    tables = [m for m in open_to_names if "embedding" in m.kinds]
    heads = [m for m in open_to_names if m.kinds == {"linear"} and m.is_named(OF_TOKEN_HEADS)]
    sizes = {m.shape[0] for m in tables if m.is_named(OF_TOKENS)}
    for m in heads:
        if near := [t.shape[0] for t in tables if _near(t.shape[0], m.shape[0])]:
            sizes |= {m.shape[0], *near}
    return sizes


def _near(n: int, other: int) -> bool:
    """Whether two sizes may be of one vocabulary, with and without padding."""
    return 20 * abs(n - other) <= max(n, other)


def _guess_sizes(matrices: list[Matrix]) -> tuple[set[int], list[str]]:
    """Guess that the vocabulary is as large as the largest ``nn.Embedding``.

    Returns:
        The sizes, and the warnings to issue.

    Raises:
        ValueError: if it is not clear that the largest embeds tokens.
    """
    unclear = [m for m in matrices if not m.in_block and not m.is_named(OF_ANYTHING_ELSE)]
    tables = [m for m in unclear if "embedding" in m.kinds]
    layers = [m for m in unclear if "embedding" not in m.kinds]
    rows = sorted({m.shape[0] for m in tables}, reverse=True)
    # Layers with as many rows as others have columns are hidden ones.
    heads = {n: [m for m in layers if m.fits(n)] for n in rows}
    with_head = [n for n in rows if heads[n] and not _is_width(heads[n], n)]
    sizes = set(rows[:1])
    hint = (
        f"pass vocab_size={_spelled(sizes)} if this is correct, otherwise the correct number, or "
        "all sizes if there are several vocabularies"
    )
    guess = f"The vocabulary size may be {_spelled(sizes)}, but the model has {listed(tables)}"
    if with_head and with_head[0] not in sizes:
        raise ValueError(f"cannot tell which nn.Embedding embed tokens. {guess}: {hint}")
    if sizes and not with_head:
        return sizes, [f"it is only a guess that {listed(tables[:1])} embeds tokens: {hint}"]
    return sizes, []


def _is_width(matrices: list[Matrix], n: int) -> bool:
    """Whether there are matrices with n rows and matrices with n columns, as in hidden layers."""
    return any(m.shape[0] == n for m in matrices) and any(m.shape[1] == n for m in matrices)


def _search(matrices: list[Matrix], n: int, has_getters: bool = False) -> None:
    """Mark the token embeddings for a vocabulary of size n by names, blocks and sizes.

    Raises:
        ValueError: if token embeddings cannot be told apart from other matrices.
    """
    marked = [m for m in matrices if m.sides and m.tokens == n]
    if _sides(marked) == {"input", "output"}:
        return
    fitting = [
        m
        for m in matrices
        if m.fits(n) and not (m.sides or m.in_block or m.is_named(OF_ANYTHING_ELSE))
    ]
    tables = [m for m in fitting if "embedding" in m.kinds]
    layers = [m for m in fitting if "embedding" not in m.kinds]
    pair = len(layers) == 2 and not marked and not tables
    unclear = []

    # One table embeds the input. It consists of several matrices if it is parametrized.
    if len(tables) > 1:
        tables = [m for m in tables if m.is_named(OF_TOKENS)] or tables
    if len({m.modules[0] for m in tables}) > 1:
        unclear += tables
    else:
        for m in tables:
            m.take(n, {"input"})

    # Where hidden layers have this size, too, only a name can tell a head from them. In models with
    # getters projections of images and sounds are called heads as well.
    if _is_width(layers, n) and not pair:
        layers = [m for m in layers if m.is_named(OF_HEADS)] or layers
    if any(n in m.shape for m in matrices if m.in_block and m.modules):
        heads = [m for m in layers if m.is_named_head]
        heads = [m for m in heads if not has_getters or m.is_named(OF_TOKEN_HEADS)]
        unclear += [m for m in layers if m not in heads]
        layers = heads

    only_head = len(layers) == 1 and layers[0].is_named_head  # it may be square
    if only_head or not _is_width(layers, n):
        unclear += _take_layers(layers, n, _sides(marked + tables))
    elif pair:
        for m in layers:  # hand-written, or a projection of one-hot tokens and a head
            is_head = (m.shape[0] == n) == ("linear" in m.kinds)
            m.take(n, {"output"} if is_head else {"input"})
    else:
        unclear += layers

    # What is sure is enough, as a warning will name the rest.
    marked += [m for m in tables if m.sides and m.is_named(OF_TOKENS)]
    if unclear and not marked and not has_getters:
        raise ValueError(
            f"cannot tell which of these matrices embed tokens, as all have the vocabulary's size "
            f"{n}: {listed(unclear)}. "
            + (
                f"Name all that do, e.g. embeddings=[{unclear[0].name!r}, ...]"
                if unclear[0].modules
                else "Put all that do into a param group with 'coupled': True, or pass "
                "coupled_adam.param_groups(model)"
            )
        )


def _take_layers(layers: list[Matrix], n: int, sides: set[str]) -> list[Matrix]:
    """Mark linear layers, and a lone hand-written matrix if a side is missing; return the rest."""
    linear = [m for m in layers if "linear" in m.kinds]
    handwritten = [m for m in layers if "linear" not in m.kinds]
    for m in linear:
        if m.shape[0] == n or not m.modules:
            m.take(n, {"output"})
    missing = {"input", "output"} - sides - _sides(linear)
    if missing and len(handwritten) == 1:
        handwritten[0].take(n, missing)
        return []
    return handwritten


def _looks_alike(m: Matrix, matrices: list[Matrix], stated_sizes: set[int]) -> bool:
    """Whether a matrix that is not coupled looks like a token embedding nevertheless."""
    if m.sides or m.is_named(OF_ANYTHING_ELSE) or m.kinds == {"layer"}:
        return False
    is_table, rows = "embedding" in m.kinds, m.shape[0]
    sizes = {other.tokens for other in matrices if other.sides}
    if any(m.fits(n) for n in sizes):
        return is_table or not m.in_block or m.is_named(OF_HEADS)
    if m.in_block:
        return False
    # The same vocabulary with other padding, or several in one table.
    if any(_near(rows, n) for n in sizes) or (
        is_table and any(rows % n == 0 for n in stated_sizes)
    ):
        return True
    # Another vocabulary: a table and a layer of the same size, or a table that is named or large.
    unmarked = [o for o in matrices if not (o.sides or o.in_block or o.is_named(OF_ANYTHING_ELSE))]
    if any(
        o.shape[0] == rows and {*o.kinds, *m.kinds} == {"embedding", "linear"} for o in unmarked
    ):
        return True
    if not is_table:
        return False
    return m.is_named(OF_TOKENS) if stated_sizes else any(16 * rows >= n for n in sizes)


def _sides(matrices: list[Matrix]) -> set[str]:
    return {side for m in matrices for side in m.sides}


def _spelled(sizes: set[int]) -> str:
    return str(*sizes) if len(sizes) == 1 else str(tuple(sorted(sizes, reverse=True)))


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
    matches = matching(model, entry, "embeddings")
    if isinstance(entry, nn.Module):
        of_module = set(own_parameters(entry))  # without a head's bias
        matches = {n: p for n, p in matches.items() if p in of_module and p in matrices}
    if not matches:
        raise not_of_the_model(entry, "embeddings", "matrix")
    for name, p in matches.items():
        if p not in matrices:
            raise ValueError(
                f"embeddings={entry!r} matches {name!r} of shape {list(p.shape)}, "
                "which is not a matrix [V, H]: use a more specific name"
            )
    return list(matches.values())
