"""The param groups of a model: which parameters are coupled, and which have weight decay."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.optim.find_embeddings import (
    Couple,
    Parameters,
    Tables,
    find_embeddings,
    listed,
    matrices_of_size,
    resolve,
    warn,
)

Group = dict[str, Any]
Embeddings = str | Mapping[str, Any]

LEAN: dict[str, Any] = {
    "betas": (0.0, 0.99),
    "row_exponent": 0.75,
    "zero_sum": True,
    "lr_factor": 2.0,
}
"""The variant that keeps no matrix of state: ``CoupledAdamW(model, embeddings="lean")``.

Its state of an embedding matrix V x H is V + 2 H numbers, where AdamW's is 2 V x H. It is not in
arXiv 2502.08441; docs/study/14-wrong.md compares it with AdamW at its best betas. A training that
is short for its model needs another rate: ``embeddings=LEAN | {"lr_factor": 4}``.
"""

_NAMED: dict[str, dict[str, Any]] = {"coupled": {}, "lean": LEAN}
_OPTIONS = {"lr", "lr_factor", "betas", "eps", "weight_decay", "second_moment_scale"}
_OPTIONS |= {"row_exponent", "zero_sum", "stochastic_rounding"}
_SHOWN = ("weight_decay", "lr", "lr_factor", "betas", "row_exponent", "zero_sum")
"""Options in the table of the groups."""


class ParamGroups(list[Group]):
    """A list of param groups for an optimizer that prints as a table of the parameters.

    Attributes:
        frozen: for each parameter that is left out because it is frozen, the group that it would be
            in.
    """

    def __init__(self, groups: Iterable[Group], frozen: Mapping[Tensor, Group]) -> None:
        super().__init__(groups)
        self.frozen = frozen

    def __repr__(self) -> str:
        """A row for each parameter, and the total."""
        rows = [("parameter", "shape", "group", "state saved")]
        total = 0
        for group in self:
            options = {key: group[key] for key in _SHOWN if group.get(key) is not None}
            shown = [
                f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in options.items()
            ]
            label = ", ".join(shown) or "the optimizer's options"
            if group["coupled"]:
                label += ", coupled" + (" by columns" if group.get("vocab_dim") else "")
            for name, p in zip(group["param_names"], group["params"]):
                saved = _state_saved(group, p) if group["coupled"] else 0
                total += saved
                shape = " x ".join(map(str, p.shape))
                rows.append((name, shape, label, f"{saved:,} B" if saved else ""))
        rows.append(("total", "", "", f"{total:,} B"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {label:<{widths[2]}}  {saved:>{widths[3]}}"
            for name, shape, label, saved in rows
        ]
        rule = "-" * sum((*widths, 6))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _state_saved(group: Group, p: Tensor) -> int:
    """How many bytes of optimizer state coupling a matrix saves compared with AdamW."""
    vocab_dim = group.get("vocab_dim", 0)
    vectors: int = p.shape[1 - vocab_dim]
    if group.get("row_exponent") or group.get("zero_sum"):
        vectors += p.shape[vocab_dim]
    if group.get("zero_sum"):
        vectors += p.shape[1 - vocab_dim]
    has_momentum = group.get("betas", (0.9,))[0] != 0
    matrices = (1 if has_momentum else 2) * p.nbytes
    return matrices - vectors * torch.promote_types(p.dtype, torch.float32).itemsize


def param_groups(
    model: nn.Module,
    embeddings: Embeddings = "coupled",
    *,
    head_lr: float | None = None,
    weight_decay: float | None = None,
    embedding_weight_decay: float = 0.0,
    couple: Couple = "both",
    tables: Tables | None = None,
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
        model: any module, also on the meta device.
        embeddings: how the coupled matrices are updated. ``"coupled"`` is the algorithm of the
            paper and ``"lean"`` is :data:`coupled_adam.LEAN`. A mapping has options of the coupled
            matrices alone, instead of the optimizer's: ``lr``, ``lr_factor`` (a multiple of
            the optimizer's learning rate; schedulers keep the ratio), ``betas``, ``eps``,
            ``weight_decay``, ``second_moment_scale``, ``row_exponent``, ``zero_sum`` and
            ``stochastic_rounding``, as in :class:`coupled_adam.CoupledAdamW`.
        head_lr: the learning rate of output embeddings that are not tied to the input embeddings,
            coupled or not, instead of ``lr`` and ``lr_factor``.
        weight_decay: the weight decay of matrices other than embeddings.
        embedding_weight_decay: the weight decay of embeddings, coupled or not.
        couple: which embeddings to couple if input and output embeddings are not tied: ``"both"``,
            ``"input"`` or ``"output"``.
        tables: the matrices to couple, as in :func:`embedding_parameters`; by default they are
            found automatically.
        vocab_size: the number of rows of the token embeddings, if it cannot be found automatically.
        exclude: parameters to leave out, for example because another optimizer updates them: one
            or several modules (with all their parameters), parameters, parameter names, or glob
            patterns over names such as ``"*.experts.*"``.

    Returns:
        A list of groups to pass to the optimizer: the matrices that decay, the rest, and last the
        coupled matrices (those stored as [H, V], and an untied head with a rate of its own, in
        groups of their own). Each has ``params``, ``param_names`` and ``coupled``, and whichever of
        ``vocab_dim`` and the options above is not left to the optimizer. The list prints as a table
        with each parameter's name, shape and group, and the number of bytes of optimizer state that
        coupling saves compared with AdamW. Other optimizers of torch can take it, too, such as
        AdamW for comparison: they ignore options that they do not have, and raise an error where
        ``lr_factor`` has left ``lr`` to Coupled Adam.

    Raises:
        TypeError: as in :func:`embedding_parameters`.
        ValueError: for an unknown name or option in ``embeddings``, for a negative weight decay or
            learning rate, for a ``head_lr`` where there is no head or it is tied, if an entry of
            ``exclude`` matches no parameter, or as in :func:`embedding_parameters`.

    Warns:
        UserWarning: as in :func:`embedding_parameters`; and if there is nothing to couple, because
            token embeddings are frozen (as with LoRA), or were not found.

    Example:
        >>> groups = param_groups(model, "lean")
        >>> print(groups)
        >>> optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    """
    options = embedding_options(embeddings)
    coupled_decay = options.pop("weight_decay", embedding_weight_decay)
    for option, value in (
        ("lr", options.get("lr")),
        ("head_lr", head_lr),
        ("weight_decay", weight_decay),
        ("embedding_weight_decay", embedding_weight_decay),
    ):
        if value is not None and not value >= 0:
            raise ValueError(f"Invalid {option} value: {value} (must be 0 or more)")
    if "lr_factor" in options:
        options.setdefault("lr", None)  # an error in an optimizer that does not know lr_factor
    coupled, all_embeddings = find_embeddings(
        model, couple=couple, tables=tables, vocab_size=vocab_size
    )
    if tables is None and not any(m.parameter.requires_grad for m in coupled):
        frozen_ones = [m for m in all_embeddings if m.sides and not m.parameter.requires_grad]
        warn(
            "no param group is coupled, as the token embeddings are frozen: " + listed(frozen_ones)
            if frozen_ones
            else "no param group is coupled, as no token embeddings were found: if the model has "
            "any, pass vocab_size= with the number of their rows, or tables="
        )
    embedding_of = {m.parameter: m for m in (*coupled, *all_embeddings)}
    if head_lr is not None and not any(m.is_head for m in embedding_of.values()):
        there = "no output embedding was found or named"
        if tied := [m for m in embedding_of.values() if m.is_tied]:
            there = f"the head is tied to the input embedding {tied[0].name!r}"
        raise ValueError(
            f"head_lr={head_lr}, but {there}: pass embeddings= with lr or lr_factor instead"
        )
    left_out = resolve(model, exclude, "exclude")
    norms = {  # which may have matrices
        p
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
        for p in module.parameters(recurse=False)
    }
    groups: dict[tuple[Any, ...], Group] = {}
    frozen: dict[Tensor, Group] = {}
    for name, p in model.named_parameters():
        if p in left_out:
            continue
        m = embedding_of.get(p)
        # weight_norm's magnitudes [V, 1] are vectors.
        is_vector = p.dim() < 2 or p in norms or name.split(".")[-1] == "bias" or 1 in p.shape
        is_hidden = m is None and not is_vector
        group: Group = {"params": [], "param_names": [], "coupled": m in coupled}
        decay = weight_decay if is_hidden else 0.0 if m is None else embedding_weight_decay
        if m is not None and m in coupled:
            group |= options
            decay = coupled_decay
            if m.vocab_dim:
                group["vocab_dim"] = m.vocab_dim
        has_head_lr = head_lr is not None and m is not None and m.is_head
        if has_head_lr:
            group.pop("lr_factor", None)
            group["lr"] = head_lr
        if decay is not None:
            group["weight_decay"] = decay
        # The first group's learning rate is the one that frameworks log: the optimizer's own.
        key = (m in coupled, has_head_lr, group.get("vocab_dim", 0), not is_hidden, decay or 0.0)
        group = groups.setdefault(key, group) if p.requires_grad else frozen.setdefault(p, group)
        group["params"].append(p)
        group["param_names"].append(name)
    return ParamGroups((groups[key] for key in sorted(groups)), frozen)


def embedding_options(embeddings: Embeddings) -> dict[str, Any]:
    """The options of coupled matrices that a name or a mapping stands for.

    Raises:
        ValueError: if the name or an option is unknown.
    """
    named = _NAMED.get(embeddings) if isinstance(embeddings, str) else embeddings
    if not isinstance(named, Mapping):
        raise ValueError(
            f"Invalid embeddings value: {embeddings!r} ({', '.join(map(repr, _NAMED))}, or a "
            "mapping of options such as coupled_adam.LEAN | {'lr_factor': 4}; matrices to couple "
            "are named in tables=)"
        )
    if unknown := sorted({*named} - _OPTIONS):
        raise ValueError(
            f"embeddings={dict(named)}: {', '.join(unknown)} is none of {sorted(_OPTIONS)}. "
            "Matrices to couple are named in tables="
        )
    options = dict(named)
    if isinstance(options.get("betas"), list):  # as YAML has them
        options["betas"] = tuple(options["betas"])
    return options


INITIAL = ("initial_lr_factor", "initial_beta1")
"""What :func:`begin` lets a group remember, which no other optimizer needs."""


def begin(group: Group, defaults: Mapping[str, Any]) -> None:
    """Replace a group's ``lr_factor`` by a rate, and let it remember what it was built with.

    Args:
        group: the group.
        defaults: the optimizer's options, for all that the group does not say.

    Raises:
        ValueError: if the factor is not positive and finite, or if there is a rate as well.
    """
    if "lr_factor" in group:
        factor = group["lr_factor"]
        if not 0 < factor < math.inf:
            raise ValueError(f"Invalid lr_factor: {factor} (must be positive and finite)")
        if group.get("lr") is not None:
            raise ValueError(
                f"a param group has both lr={group['lr']} and lr_factor={factor}: leave one of "
                "the two out"
            )
        del group["lr_factor"]
        group |= {"lr": factor * defaults["lr"], "initial_lr_factor": factor}
    options = {**defaults, **group}
    is_lean = options["coupled"] and (options["row_exponent"] or options["zero_sum"])
    if is_lean and not isinstance(options["betas"][0], Tensor):
        group["initial_beta1"] = options["betas"][0]


def warn_of_lost_options(groups: list[Group], warned: set[str]) -> None:
    """Warn if a scheduler or a loop has undone what a coupled group was built with.

    Those that set one learning rate for all groups remove a group's factor, and those that cycle
    momentum give one to groups that were built without.

    Args:
        groups: an optimizer's param groups.
        warned: what the optimizer has warned of, which is not said again.
    """
    for group in groups:
        factor, lr, beta1 = group.get("initial_lr_factor", 1), group["lr"], group["betas"][0]
        # The value of a tensor is not asked for, since it may be on an accelerator.
        if factor != 1 and "lr" not in warned and not isinstance(lr, Tensor) and lr != 0:
            others = [other["lr"] for other in groups if not other["coupled"]]
            if others and all(not isinstance(x, Tensor) and x == lr for x in others):
                warned.add("lr")
                warn(
                    f"the coupled group was built with {factor:g} times the learning rate of the "
                    f"others, but now has theirs, {lr:g}. In a loop, set group['lr'] = lr * "
                    "group.get('initial_lr_factor', 1); OneCycleLR takes a list, max_lr=[lr * "
                    "group.get('initial_lr_factor', 1) for group in optimizer.param_groups]"
                )
        begins = group.get("initial_beta1") == 0 and not isinstance(beta1, Tensor) and beta1 != 0
        if begins and "betas" not in warned:
            warned.add("betas")
            warn(
                f"the coupled group was built without momentum, but betas[0] is {beta1:g} now, "
                "which brings back a matrix of state: pass cycle_momentum=False to the scheduler"
            )


def arriving(group: Group, others: list[Group], frozen: Mapping[Tensor, Group]) -> list[Group]:
    """What to add to an optimizer for a group that arrives later.

    It has names if the other groups have, as nobody knows that :func:`param_groups` has given them
    some. Token embeddings that were frozen before come in coupled groups of their own.

    Args:
        group: the group, as in torch.
        others: the optimizer's groups.
        frozen: as in :class:`ParamGroups`.
    """
    if not others or not isinstance(group, dict) or isinstance(group["params"], set | dict):
        return [group]  # of which torch refuses all that is no group
    params = [group["params"]] if isinstance(group["params"], Tensor) else [*group["params"]]
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    names = group.pop("param_names", None)
    if names is None and "param_names" in others[0] and all(map(torch.is_tensor, params)):
        first = sum(len(other["params"]) for other in others)
        names = [
            frozen[p]["param_names"][0] if p in frozen else f"parameter {i}"
            for i, p in enumerate(params, first)
        ]
    params = params if names is None else [*zip(names, tensors)]
    arrived = []
    group["params"] = rest = []
    for param, p in zip(params, tensors):
        if "coupled" in group or not frozen.get(p, {}).get("coupled"):
            rest.append(param)
            continue
        own = {**frozen[p], **group, "params": [param]}
        del own["param_names"]
        if "lr" in group and "lr_factor" in own:
            own["lr"] = own.pop("lr_factor") * group["lr"]
        arrived.append(own)
    return [*arrived, group] if rest or not arrived else arrived


def couple_by_size(
    groups: Iterable[Group], vocab_size: int | Iterable[int], embeddings: Embeddings
) -> list[Group]:
    """Move the matrices with V rows or V columns to coupled groups with otherwise equal options.

    Args:
        groups: an optimizer's param groups.
        vocab_size: the number V of rows of the token embeddings, including padding; several numbers
            for several vocabularies.
        embeddings: as in :func:`param_groups`; ``lr_factor`` multiplies the learning rate of the
            group that a matrix comes from.

    Returns:
        Up to three groups instead of each: first what is left of all of them, then those with
        matrices [V, H] and [H, V].

    Raises:
        ValueError: if no matrix of the groups has this size, if hidden layers must be among those
            that have, or as :func:`embedding_options`.
    """
    options = embedding_options(embeddings)
    members = []
    for group in groups:
        names = group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
        members.append((group, [*zip(names, group["params"])]))
    vocab_dims = matrices_of_size(itertools.chain(*(named for _, named in members)), vocab_size)
    split = []
    for dim, (group, named) in itertools.product((None, 0, 1), members):
        moved = [(name, p) for name, p in named if vocab_dims.get(p) == dim]
        if not moved:
            continue
        new = {**group, "params": [p for _, p in moved]}
        if "param_names" in group:
            new["param_names"] = [name for name, _ in moved]
        if dim is not None:
            del new["lr"]
            new |= {**options, "coupled": True, "vocab_dim": dim}
            begin(new, group)
            new.setdefault("lr", group["lr"])
        split.append(new)
    return split
