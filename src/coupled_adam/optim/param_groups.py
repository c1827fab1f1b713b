"""The param groups of a model: which parameters are coupled, and which have weight decay."""

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.optim.flat import of_fsdp1
from coupled_adam.optim.matrices import Parameters, listed, resolve
from coupled_adam.optim.token_embeddings import (
    Couple,
    Embeddings,
    coupled_matrices,
    matrices_of_size,
)

LEAN: dict[str, Any] = {
    "betas": (0.0, 0.99),
    "row_exponent": 0.75,
    "zero_sum": True,
    "lr_factor": 2.0,
}
"""The variant that keeps no matrix of state: ``param_groups(model, **LEAN)``.

Its state of an embedding matrix V x H is V + H numbers, where AdamW's is 2 V x H. It is not in
arXiv 2502.08441; docs/study/14-wrong.md compares it with AdamW at its best betas. A training that
is short for its model needs another rate: ``param_groups(model, **LEAN | {"lr_factor": 4})``.
"""

_SHOWN = ("weight_decay", "lr", "lr_factor", "betas", "row_exponent", "zero_sum")
"""Options in the table of the groups."""


class ParamGroups(list[dict[str, Any]]):
    """A list of param groups for an optimizer that prints as a table of the parameters."""

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {group:<{widths[2]}}  {saved:>{widths[3]}}"
            for name, shape, group, saved in rows
        ]
        rule = "-" * sum((*widths, 6))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        import html  # only here, as the optimizer needs nothing beyond torch

        header, *rows = self._rows()

        def line(texts: Iterable[str], tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)

        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """The header, a row for each parameter, and the total."""
        rows = [("parameter", "shape", "group", "state saved")]
        total = 0
        for group in self:
            options = {key: group[key] for key in _SHOWN if key in group}
            if "lr_factor" in options:
                del options["lr"]
            shown = [f"{key}={_spelled(value)}" for key, value in options.items()]
            label = ", ".join(shown) or "the optimizer's options"
            if group["coupled"]:
                label += ", coupled" + (" by columns" if group.get("vocab_dim") else "")
            shards = group.get("flat_shards") or [None] * len(group["params"])
            for name, p, shard in zip(group["param_names"], group["params"], shards):
                whole = p.shape if shard is None else shard.shape
                columns = whole[1 - group.get("vocab_dim", 0)] if group["coupled"] else 0
                saved = _state_saved(group, p, columns) if group["coupled"] else 0
                total += saved
                shape = " x ".join(map(str, whole))
                if shard is not None:
                    shape = f"{p.numel()} of {shape}"
                rows.append((name, shape, label, f"{saved:,} B" if saved else ""))
        return [*rows, ("total", "", "", f"{total:,} B")]


def _spelled(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    lr_factor: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    second_moment_scale: float | None = None,
    row_exponent: float | None = None,
    zero_sum: bool | None = None,
    head_lr: float | None = None,
    weight_decay: float | None = None,
    embedding_weight_decay: float = 0.0,
    couple: Couple = "both",
    embeddings: Embeddings | None = None,
    vocab_size: int | Iterable[int] | None = None,
    exclude: Parameters = (),
) -> ParamGroups:
    """Build the param groups of a model for :class:`coupled_adam.CoupledAdamW`.

    Token embeddings are coupled; :func:`embedding_parameters` documents how they are found. By
    default neither they nor other embeddings, such as those of positions and token types, have
    weight decay. Biases and norms never have any, and all other matrices have the optimizer's.
    Frozen parameters are left out. In the experiments of arXiv 2502.08441 learned positions do have
    weight decay; the other exemptions are the same there, with both optimizers.

    What is not given here, for the token embeddings or for all, is the optimizer's.

    Args:
        model: any module, also on the meta device, or wrapped by FSDP1 with
            ``use_orig_params=True``.
        lr: the learning rate of the coupled matrices alone. As with the options below, learned
            positions and all other parameters keep the optimizer's.
        lr_factor: the same relative to the learning rate of the optimizer. Learning-rate schedulers
            keep the ratio.
        betas, eps, second_moment_scale, row_exponent, zero_sum: as in
            :class:`coupled_adam.CoupledAdamW`, for the coupled matrices alone.
        head_lr: the learning rate of output embeddings that are not tied to the input embeddings,
            coupled or not, in the place of ``lr`` and ``lr_factor``.
        weight_decay: the weight decay of matrices other than embeddings.
        embedding_weight_decay: the weight decay of embeddings, coupled or not.
        couple: which embeddings to couple if input and output embeddings are not tied: ``"both"``,
            ``"input"`` or ``"output"``.
        embeddings: the matrices to couple, as in :func:`embedding_parameters`; by default they are
            found automatically.
        vocab_size: the number of rows of the token embeddings, if it cannot be found automatically.
        exclude: parameters to leave out, for example because another optimizer updates them: one
            or several modules (with all their parameters), parameters, parameter names, or glob
            patterns over names such as ``"*.experts.*"``.

    Returns:
        A list of groups to pass to the optimizer: coupled matrices first (also an untied head with
        a rate of its own, and matrices stored as [H, V], in groups of their own), then the matrices
        that decay, then the rest. Each has ``params``, ``param_names`` and ``coupled``, and
        whichever of ``vocab_dim``, ``flat_shards`` (if FSDP1 has flattened the matrices) and the
        options above is not left to the optimizer. The list prints as a table with each parameter's
        name, shape and group, and the number of bytes of optimizer state that coupling saves
        compared with AdamW. Other optimizers of torch can take it, too, such as AdamW for
        comparison: they ignore options that they do not have, except for ``lr_factor``, at which
        they raise an error.

    Raises:
        TypeError: as in :func:`embedding_parameters`.
        ValueError: for a negative weight decay or learning rate, for ``lr`` together with
            ``lr_factor``, for a ``head_lr`` where the head is tied, if an entry of ``exclude``
            matches no parameter, or as in :func:`embedding_parameters`.

    Warns:
        UserWarning: as in :func:`embedding_parameters`; and if there is nothing to couple, because
            token embeddings are frozen (as with LoRA), or were not found.

    Example:
        >>> groups = param_groups(model, **LEAN)
        >>> print(groups)
        >>> optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    """
    coupled, all_embeddings = coupled_matrices(
        model, couple=couple, embeddings=embeddings, vocab_size=vocab_size
    )
    if embeddings is None and not coupled:
        frozen = [m for m in all_embeddings if m.sides and not m.parameter.requires_grad]
        warnings.warn(
            "no param group is coupled, as the token embeddings are frozen: " + listed(frozen)
            if frozen
            else "no param group is coupled, as no token embeddings were found: if the model has "
            "any, pass vocab_size= with the number of their rows, or embeddings=",
            stacklevel=2,
        )
    for option, value in (
        ("lr", lr),
        ("head_lr", head_lr),
        ("weight_decay", weight_decay),
        ("embedding_weight_decay", embedding_weight_decay),
    ):
        if value is not None and not value >= 0:
            raise ValueError(f"Invalid {option} value: {value} (must be 0 or more)")
    if lr is not None and lr_factor is not None:
        raise ValueError(
            f"lr={lr} and lr_factor={lr_factor} both set the learning rate of the coupled "
            "matrices: leave one of the two out"
        )
    options = {
        "lr": lr if lr_factor is None else _LrFactor(),
        "lr_factor": lr_factor,
        "betas": betas,
        "eps": eps,
        "second_moment_scale": second_moment_scale,
        "row_exponent": row_exponent,
        "zero_sum": zero_sum,
    }
    options = {name: value for name, value in options.items() if value is not None}
    left_out = resolve(model, exclude, "exclude")
    embedding_of = {m.parameter: m for m in (*coupled, *all_embeddings)}
    if head_lr is not None and (tied := [m for m in embedding_of.values() if m.is_tied]):
        raise ValueError(
            f"head_lr={head_lr}, but the head is tied to the input embedding {tied[0].name!r}: "
            "pass lr= or lr_factor= instead"
        )
    norms = _norm_weights(model)
    shards = of_fsdp1(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p in left_out or not p.requires_grad:
            continue
        m, shard = embedding_of.get(p), shards.get(p)
        is_coupled = m in coupled
        vocab_dim = m.vocab_dim if m is not None and is_coupled else 0
        has_head_lr = head_lr is not None and m is not None and m.is_head
        shape = p.shape if shard is None else shard.shape
        is_vector = len(shape) < 2 or p in norms or name.rpartition(".")[2] == "bias"
        decay = embedding_weight_decay if m is not None else 0.0 if is_vector else weight_decay
        # Coupled groups first, then the matrices: the same order for every model.
        is_matrix = m is None and not is_vector
        key = (not is_coupled, vocab_dim, has_head_lr, not is_matrix, decay or 0.0)
        if key not in groups:
            group = groups[key] = {"params": [], "param_names": [], "coupled": is_coupled}
            group |= options if is_coupled else {}
            if vocab_dim:
                group["vocab_dim"] = vocab_dim
            if has_head_lr:
                group.pop("lr_factor", None)
                group["lr"] = head_lr
            if decay is not None:
                group["weight_decay"] = decay
            if shards:
                group["flat_shards"] = []
        groups[key]["params"].append(p)
        groups[key]["param_names"].append(name)
        if shards:
            groups[key]["flat_shards"].append(shard)
    return ParamGroups(groups[key] for key in sorted(groups))


def _norm_weights(model: nn.Module) -> set[Tensor]:
    """The weights of normalization layers, which may be matrices."""
    return {
        p
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
        for p in module.parameters(recurse=False)
    }


class _LrFactor:
    """The ``lr`` of a group with ``lr_factor``, until :func:`apply_lr_factor` replaces it.

    Optimizers that do not know ``lr_factor`` would ignore it. This makes them raise an error.
    """

    def _refuse(self, *_: object) -> Any:
        raise TypeError(
            "lr_factor is an option of CoupledAdam, CoupledAdamW and MuonWithCoupledAdam. For "
            "another optimizer give the embeddings' learning rate itself: param_groups(..., lr=)"
        )

    __mul__ = __rmul__ = __truediv__ = __neg__ = __float__ = __lt__ = __ge__ = _refuse


def apply_lr_factor(group: dict[str, Any], lr: float | Tensor) -> None:
    """Replace a group's ``lr_factor`` by a learning rate, given the optimizer's.

    Raises:
        ValueError: if it is not positive and finite, or if the group has a learning rate as well.
    """
    if "lr_factor" not in group:
        return
    if not 0 < group["lr_factor"] < math.inf:
        raise ValueError(f"Invalid lr_factor: {group['lr_factor']} (must be positive and finite)")
    if not isinstance(group.setdefault("lr", _LrFactor()), _LrFactor):
        raise ValueError(
            f"a param group has both lr={group['lr']} and lr_factor={group['lr_factor']}: leave "
            "one of the two out"
        )
    group["lr"] = group.pop("lr_factor") * lr


def couple_by_size(
    groups: Iterable[dict[str, Any]], vocab_size: int | Iterable[int], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Move the matrices with V rows or V columns to coupled groups with otherwise equal options.

    Args:
        groups: an optimizer's param groups.
        vocab_size: the number V of rows of the token embeddings, including padding; several numbers
            for several vocabularies.
        options: of the coupled groups, in place of those of the group that a matrix comes from;
            ``lr_factor`` multiplies that group's learning rate.

    Returns:
        Up to three groups in place of each: with matrices [V, H], with matrices [H, V], the rest.

    Raises:
        ValueError: if no matrix of the groups has this size, if some have V rows and others have
            V columns, as hidden layers have; if ``options`` has what is no option of a group, or
            both ``lr`` and ``lr_factor``.
    """
    groups = list(groups)
    possible = {"lr_factor", *groups[0]} - {"params", "param_names", "coupled", "vocab_dim"}
    if unknown := sorted({*options} - possible):
        raise ValueError(
            f"groups={dict(options)}: {', '.join(unknown)} is none of {sorted(possible)}"
        )
    members = [list(zip(_names(group), group["params"])) for group in groups]
    vocab_dims = matrices_of_size(itertools.chain(*members), vocab_size)
    split = []
    for group, named in zip(groups, members):
        for dim in (0, 1, None):
            moved = [(name, p) for name, p in named if vocab_dims.get(p) == dim]
            if not moved:
                continue
            new = {**group, "params": [p for _, p in moved]}
            if "param_names" in group:
                new["param_names"] = [name for name, _ in moved]
            if dim is not None:
                rate = new.pop("lr")
                new |= {**options, "coupled": True, "vocab_dim": dim}
                apply_lr_factor(new, rate)
                new.setdefault("lr", rate)
            split.append(new)
    return split


def _names(group: dict[str, Any]) -> list[str]:
    numbered = [f"parameter {index}" for index, _ in enumerate(group["params"])]
    names: list[str] = group.get("param_names", numbered)
    return names


def _state_saved(group: dict[str, Any], p: Tensor, columns: int) -> int:
    """How many bytes of optimizer state coupling a matrix saves compared with AdamW."""
    width = torch.promote_types(p.dtype, torch.float32).itemsize
    matrix = p.numel() * p.element_size()
    vectors = columns * width
    if group.get("row_exponent") or group.get("zero_sum"):
        vectors += p.numel() // columns * width
    has_momentum = group.get("betas", (0.9,))[0] != 0
    return (1 if has_momentum else 2) * matrix - vectors
