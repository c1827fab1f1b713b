"""The param groups of a model: which parameters are coupled, and which have weight decay."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

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
Embeddings = Literal["coupled", "lean"] | Mapping[str, Any]

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


class ParamGroups(list[Group]):
    """A list of param groups that prints a line for each parameter: name, shape and options."""

    def __repr__(self) -> str:
        lines = []
        for group in self:
            options = {key: value for key, value in group.items() if "param" not in key}
            shown = ", ".join(f"{key}={value}" for key, value in options.items())
            for name, p in zip(group["param_names"], group["params"]):
                shape = " x ".join(map(str, p.shape))
                lines.append(f"{name:<40} {shape:>14}  {shown}")
        return "\n".join(lines)


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
        groups of their own). Each has ``params``, ``param_names``, ``coupled``, and whichever of
        the options above is not left to the optimizer. The list prints as a table. Other optimizers
        of torch can take it, too, such as AdamW for comparison: they ignore options that they do
        not have, and raise an error where ``lr_factor`` has left ``lr`` to Coupled Adam.

    Raises:
        TypeError: as in :func:`embedding_parameters`.
        ValueError: for an unknown name or option in ``embeddings``, for a ``head_lr`` where there
            is no head or it is tied, if an entry of ``exclude`` matches no parameter, or as in
            :func:`embedding_parameters`.

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
    if "lr_factor" in options:
        options.setdefault("lr", None)  # an error in an optimizer that does not know lr_factor
    coupled, all_embeddings = find_embeddings(
        model, couple=couple, tables=tables, vocab_size=vocab_size
    )
    if tables is None and not any(m.parameter.requires_grad for m in coupled):
        frozen = [m for m in all_embeddings if m.sides and not m.parameter.requires_grad]
        why = f"the token embeddings are frozen: {listed(frozen)}"
        if not frozen:
            why = "no token embeddings were found: if there are any, pass vocab_size= or tables="
        warn(f"no param group is coupled, as {why}")
    embedding_of = {m.parameter: m for m in (*coupled, *all_embeddings)}
    if head_lr is not None and not any(m.is_head for m in embedding_of.values()):
        raise ValueError(
            f"head_lr={head_lr}, but no output embedding of its own was found or named: pass "
            "embeddings= with lr or lr_factor instead"
        )
    left_out = resolve(model, exclude, "exclude")
    groups: dict[tuple[Any, ...], Group] = {}
    for name, p in model.named_parameters():
        if p in left_out or not p.requires_grad:
            continue
        m = embedding_of.get(p)
        # weight_norm's magnitudes [V, 1] are vectors.
        is_vector = p.dim() < 2 or name.split(".")[-1] == "bias" or 1 in p.shape
        is_hidden = m is None and not is_vector
        group: Group = {"params": [], "param_names": [], "coupled": m in coupled}
        decay = weight_decay if is_hidden else 0.0 if m is None else embedding_weight_decay
        if m is not None and m in coupled:
            group |= {**options, "vocab_dim": m.vocab_dim}
            decay = coupled_decay
        has_head_lr = head_lr is not None and m is not None and m.is_head
        if has_head_lr:
            group.pop("lr_factor", None)
            group["lr"] = head_lr
        if decay is not None:
            group["weight_decay"] = decay
        # The first group's learning rate is the one that frameworks log: the optimizer's own.
        key = (m in coupled, has_head_lr, group.get("vocab_dim", 0), not is_hidden, decay or 0.0)
        group = groups.setdefault(key, group)
        group["params"].append(p)
        group["param_names"].append(name)
    return ParamGroups(groups[key] for key in sorted(groups))


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


def begin(group: Group, defaults: Mapping[str, Any]) -> None:
    """Replace a group's ``lr_factor`` by a rate, and let the group remember the factor.

    Args:
        group: the group.
        defaults: options of which ``lr`` is multiplied.

    Raises:
        ValueError: if the factor is not positive and finite, or if there is a rate as well.
    """
    if "lr_factor" not in group:
        return
    factor = group["lr_factor"]
    if group.get("lr") is not None or not 0 < factor < math.inf:
        raise ValueError(
            f"Invalid lr_factor: {factor} with lr={group.get('lr')} (a positive number, and no lr)"
        )
    del group["lr_factor"]
    group |= {"lr": factor * defaults["lr"], "initial_lr_factor": factor}


def warn_of_lost_factor(groups: list[Group]) -> bool:
    """Warn if a loop or a scheduler sets one rate for all groups, and return whether it does."""
    for group in groups:
        factor, lr = group.get("initial_lr_factor", 1), group["lr"]
        # The value of a tensor is not asked for, since it may be on an accelerator.
        if factor == 1 or isinstance(lr, Tensor) or lr == 0:
            continue
        others = [other["lr"] for other in groups if not other["coupled"]]
        if others and all(not isinstance(x, Tensor) and x == lr for x in others):
            warn(
                f"the coupled group was built with {factor:g} times the learning rate of the "
                f"others, but now has theirs, {lr:g}. In a loop, set group['lr'] = lr * "
                "group.get('initial_lr_factor', 1); OneCycleLR takes a list, max_lr=[lr * "
                "group.get('initial_lr_factor', 1) for group in optimizer.param_groups], and "
                "cycle_momentum=False"
            )
            return True
    return False


def name_parameters(group: Group, others: list[Group]) -> None:
    """Give a group that is added later names if the others have some, as torch demands."""
    params = group["params"]
    if isinstance(params, set) or not others or "param_names" not in others[0]:
        return
    group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    if not any(isinstance(p, tuple) for p in params):
        group.setdefault("param_names", [f"parameter {i}" for i in range(len(params))])


def couple_by_size(
    groups: list[Group], vocab_size: int | Iterable[int], embeddings: Embeddings
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
        ValueError: as :func:`embedding_options` and :func:`matrices_of_size`.
    """
    options = embedding_options(embeddings)
    numbers = [f"parameter {i}" for i in range(max(len(group["params"]) for group in groups))]
    named = [[*zip(group.get("param_names", numbers), group["params"])] for group in groups]
    vocab_dims = matrices_of_size(itertools.chain(*named), vocab_size)
    split = []
    for dim, (group, members) in itertools.product((None, 0, 1), [*zip(groups, named)]):
        moved = [(name, p) for name, p in members if vocab_dims.get(p) == dim]
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
