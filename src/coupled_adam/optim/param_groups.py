"""Which parameters of a model are token embeddings, and the param groups that follow."""

import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Couple = Literal["both", "input", "output"]
Embeddings = nn.Module | Tensor | str | Iterable[nn.Module | Tensor | str]


class ParamGroups(list[dict[str, Any]]):
    """Param groups for an optimizer; printed, a table of what each parameter's group is."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "group", "state saved")]
        total = 0
        for group in self:
            label = f"weight_decay={group['weight_decay']:g}"
            if group["coupled"]:
                label += ", coupled"
            for name, p in zip(group["param_names"], group["params"]):
                saved = _state_saved(p) if group["coupled"] else 0
                total += saved
                shape = " x ".join(map(str, p.shape))
                rows.append((name, shape, label, f"{saved:,} B" if saved else ""))
        rows.append(("total", "", "", f"{total:,} B"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {group:<{widths[2]}}  {saved:>{widths[3]}}"
            for name, shape, group, saved in rows
        ]
        rule = "-" * sum((*widths, 6))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    embedding_weight_decay: float = 0.0,
    couple: Couple = "both",
    embeddings: Embeddings | None = None,
) -> ParamGroups:
    """Param groups for :class:`coupled_adam.CoupledAdamW`, as in the paper's experiments.

    Token embeddings are coupled. Matrices decay; biases, norms and embeddings (of tokens,
    positions, token types) do not. Frozen parameters are left out. Which matrices embed tokens is
    told by :func:`embedding_parameters`.

    Args:
        model: any module; also on the meta device.
        weight_decay: for matrices.
        embedding_weight_decay: for embeddings, coupled or not.
        couple: for a model whose input and output embeddings are not tied, which of them to couple.
        embeddings: the matrices to couple, named outright.

    Returns:
        At most three groups, each with ``params``, ``param_names``, ``weight_decay``, ``coupled``:
        a list to give to the optimizer. Printing it shows a table: name, shape, group, and the
        bytes of optimizer state that coupling saves against AdamW.

    Raises:
        TypeError, ValueError: a negative weight decay, or as in :func:`embedding_parameters`.

    Example:
        >>> groups = param_groups(model)
        >>> print(groups)
        >>> optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    """
    for option, value in (
        ("weight_decay", weight_decay),
        ("embedding_weight_decay", embedding_weight_decay),
    ):
        if not value >= 0:
            raise ValueError(f"Invalid {option} value: {value} (0 or more)")
    coupled = {
        id(p) for p in embedding_parameters(model, couple=couple, embeddings=embeddings).values()
    }
    inputs, outputs = ([], []) if embeddings is not None else _find_embeddings(model)
    embedded = coupled | {id(p) for p in (*inputs, *outputs)}
    undecayed: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embedded.add(id(module.weight))
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):  # their weights may be matrices
            undecayed.update(id(p) for p in module.parameters(recurse=False))

    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) in embedded:
            decay = embedding_weight_decay
        elif p.dim() < 2 or id(p) in undecayed or name.rpartition(".")[2] == "bias":
            decay = 0.0
        else:
            decay = weight_decay
        key = (id(p) in coupled, decay)
        empty = {"params": [], "param_names": [], "weight_decay": decay, "coupled": key[0]}
        group = groups.setdefault(key, empty)
        group["params"].append(p)
        group["param_names"].append(name)
    # Coupled first, then by falling decay: the same order for every model.
    return ParamGroups(groups[key] for key in sorted(groups, reverse=True))


def embedding_parameters(
    model: nn.Module, *, couple: Couple = "both", embeddings: Embeddings | None = None
) -> dict[str, Tensor]:
    """The trainable parameters that :func:`param_groups` couples, by name.

    Identity decides, not names. The matrices are, in this order:

    1. those that ``embeddings`` names;
    2. the weights that ``get_input_embeddings()`` and ``get_output_embeddings()`` of the model, or
       of a module in it, return (the convention of ``transformers``);
    3. a weight shared by an ``nn.Embedding`` and an ``nn.Linear``: tied embeddings;
    4. the weight of the ``nn.Embedding`` with as many rows as the output head, and the head, which
       is the ``nn.Linear`` that was registered last.

    A tied matrix appears once. Position and token-type embeddings are not among them.

    Args:
        model: any module; also on the meta device.
        couple: ``"input"`` or ``"output"`` to leave out the other one of an untied pair.
        embeddings: modules, parameters, parameter names, or globs over parameter names such as
            ``"*.wte.weight"``; one or several.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an entry of ``embeddings`` that matches nothing in the model, or not a matrix;
            several ``nn.Embedding`` with as many rows as the head; ``couple`` not one of the three,
            or not ``"both"`` together with ``embeddings``; no embeddings in a model whose matrices
            a wrapper has flattened.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if couple not in ("both", "input", "output"):
        raise ValueError(f"Invalid couple value: {couple!r} ('both', 'input' or 'output')")
    if embeddings is None:
        inputs, outputs = _find_embeddings(model)
        chosen = (inputs if couple != "output" else []) + (outputs if couple != "input" else [])
    elif couple == "both":
        if isinstance(embeddings, nn.Module | Tensor | str):
            embeddings = [embeddings]
        chosen = [p for entry in embeddings for p in _resolve(model, entry)]
    else:
        raise ValueError(
            f"couple={couple!r} has no meaning beside embeddings=, which names the matrices: "
            "leave one of the two out"
        )
    ids = {id(p) for p in chosen}
    found: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if id(p) in ids and p.requires_grad
    }
    if not found:
        _check_not_flattened(model)
    return found


def _find_embeddings(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Input and output embedding matrices; a tied one is in both."""
    inputs = _from_getters(model, "get_input_embeddings")
    outputs = _from_getters(model, "get_output_embeddings")
    if inputs or outputs:
        return inputs, outputs

    tables = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight.dim() == 2
    }
    heads = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    tied = [head for head in heads if id(head) in tables]
    if tied:
        return tied, tied
    if not heads:
        return [], []
    head = heads[-1]
    # A projection back to width H has as many rows as an H x H table: there, the shape must agree.
    matching = [
        table
        for table in tables.values()
        if table.shape[0] == head.shape[0]
        and (table.shape == head.shape or table.shape[0] != table.shape[1])
    ]
    if len(matching) > 1:
        names = [name for name, p in model.named_parameters() if any(p is m for m in matching)]
        raise ValueError(
            f"several nn.Embedding have {head.shape[0]} rows, as many as the output head: {names}. "
            f"Say which one embeds tokens, e.g. embeddings=[{names[0]!r}, ...]"
        )
    return (matching, [head]) if matching else ([], [])


def _check_not_flattened(model: nn.Module) -> None:
    """Raise ValueError for a model in which FSDP1 or ZeRO-3 has made vectors of matrices."""
    for name, p in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        vector = isinstance(owner, nn.Embedding) and p.dim() < 2
        if vector or getattr(p, "_is_flat_param", False):
            raise ValueError(
                f"no embedding matrix is left in the model: {name!r} is {list(p.shape)}, flattened "
                "by a wrapper (FSDP1, ZeRO-3). Use one that keeps matrices, such as FSDP2: "
                "torch.distributed.fsdp.fully_shard"
            )


def _from_getters(model: nn.Module, getter: str) -> list[Tensor]:
    found = []
    for module in model.modules():
        if not callable(getattr(module, getter, None)):
            continue
        try:
            embedding = getattr(module, getter)()
        except NotImplementedError:  # transformers: a part that has no such embedding
            continue
        weight = getattr(embedding, "weight", None)
        # The "input embedding" of a vision or audio part is a convolution or projection of patches.
        patches = getter == "get_input_embeddings" and isinstance(embedding, nn.Linear)
        if isinstance(weight, Tensor) and weight.dim() == 2 and not patches:
            found.append(weight)
    return found


def _resolve(model: nn.Module, entry: nn.Module | Tensor | str) -> list[Tensor]:
    """The matrices that one entry of ``embeddings`` stands for."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(entry, str):
        found = {n: p for n, p in parameters.items() if fnmatch.fnmatchcase(n, entry)}
        if not found:
            near = difflib.get_close_matches(entry, parameters, n=3, cutoff=0.3)
            hint = f"did you mean {near}?" if near else "see model.named_parameters()"
            raise ValueError(f"embeddings={entry!r} matches no parameter of the model: {hint}")
    else:
        own = [entry] if isinstance(entry, Tensor) else list(entry.parameters(recurse=False))
        found = {n: p for n, p in parameters.items() if any(p is o for o in own)}
        if isinstance(entry, nn.Module):
            found = {n: p for n, p in found.items() if p.dim() == 2}  # a head's bias is not meant
        if not found:
            what = type(entry).__name__
            raise ValueError(
                f"embeddings has a {what} that holds no matrix of this model: pass the embedding "
                "module itself, or a parameter's name"
            )
    for name, p in found.items():
        if p.dim() != 2:
            raise ValueError(
                f"embeddings={entry!r} matches {name!r} of shape {list(p.shape)}, "
                "which is not a matrix [V, H]: name the matrices more closely"
            )
    return list(found.values())


def _state_saved(p: Tensor) -> int:
    """Bytes of optimizer state of AdamW less those of Coupled Adam, for a matrix [V, H]."""
    width = torch.promote_types(p.dtype, torch.float32).itemsize
    return p.numel() * p.element_size() - p.shape[1] * width
