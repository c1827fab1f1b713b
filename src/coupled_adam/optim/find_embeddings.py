"""The token embeddings of a torch model: what it says of its matrices, for the search."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from coupled_adam.optim.embedding_search import given_sizes, search
from coupled_adam.optim.model_matrix import ModelMatrix, find_blocks
from coupled_adam.optim.named_parameters import Tables, matching, several

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
    given = given_sizes(vocab_size)
    matrices = matrices_of(model)
    if tables is not None:
        coupled = _named_in_tables(model, matrices, tables, given or _configured_sizes(model))
    else:
        stated = given or _configured_sizes(model)
        has_getters = _ask_getters(model, matrices, stated)
        fix = "param_groups(model, tables={'NAME': 0, ...}): 0 for a matrix [V, H], 1 for [H, V]"
        search(matrices, given, stated, has_getters, fix)
        coupled = [m for m in matrices if m.sides and (couple == "both" or couple in m.sides)]
        if couple != "both" and (tied := [m for m in coupled if len(m.sides) > 1]):
            raise ValueError(
                f"couple={couple!r}, but {tied[0]} is input and output embedding at once: leave "
                "couple out, or untie the two"
            )
    return coupled, [m for m in matrices if m.sides or "table" in m.kinds]


def _configured_sizes(model: nn.Module) -> set[int]:
    """The vocabulary sizes in the configurations of the model and its submodules, also nested."""
    configs: dict[int, Any] = {}  # by id, as all modules of a model may share one
    for module in model.modules():
        with contextlib.suppress(Exception):  # a property may raise anything
            configs[id(module.config)] = module.config
    outer = [options for config in configs.values() for options in _options_in(config)]
    nested = [x for _, x in outer if isinstance(x, Mapping) or hasattr(x, "__dict__")]
    inner = [options for value in nested for options in _options_in(value)]
    return {
        n
        for key, n in (*outer, *inner)
        if _VOCAB_SIZE.fullmatch(str(key)) and isinstance(n, int) and n > 1
    }


def _options_in(config: Any) -> Iterator[tuple[Any, Any]]:
    """The options of a configuration, but for those that OmegaConf, for example, cannot resolve."""
    mapping = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    with contextlib.suppress(Exception):
        for key in mapping:
            with contextlib.suppress(Exception):
                yield key, mapping[key]


def matrices_of(model: nn.Module) -> list[ModelMatrix]:
    """All parameters with two dimensions, and the modules that hold them."""
    named = model.named_parameters()
    matrices: dict[Tensor, ModelMatrix] = {p: ModelMatrix(n, p) for n, p in named if p.dim() == 2}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            if m := matrices.get(p):
                is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
                is_sparse = is_table and module.sparse
                m.has_sparse_gradients = is_sparse and (m.has_sparse_gradients or not m.kinds)
                is_linear = isinstance(module, nn.Linear)
                m.kinds.add("table" if is_table else "linear" if is_linear else "hand-written")
                m.classes.append(type(module).__name__)
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


def _ask_getters(model: nn.Module, matrices: list[ModelMatrix], sizes: set[int]) -> bool:
    """Set ``sides`` of what the getters return, first in the list; return whether there are any."""
    by_parameter = {m.parameter: m for m in matrices}
    returned_first: dict[ModelMatrix, None] = {}
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
            returned_first[m] = None
            # FSMT returns the decoder's table as output, and has a head beside it.
            m.sides.add("input" if m.kinds == {"table"} else side)
            # What a hand-written module does with its matrix is not known, but its size tells.
            if m.kinds == {"hand-written"} and m.shape[0] not in sizes and m.shape[1] in sizes:
                m.vocab_dim = 1
    matrices[:] = dict.fromkeys([*returned_first, *matrices])
    return has_getters


def _weights(embedding: Any) -> Iterator[Tensor]:
    """The weights of what a getter returns: one embedding module, or a list of several."""
    if isinstance(embedding, nn.ModuleList | list | tuple):
        for module in embedding:
            yield from _weights(module)
    elif isinstance(weight := getattr(embedding, "weight", None), Tensor):
        yield weight


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
