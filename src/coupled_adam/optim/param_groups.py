"""The param groups of a model: which parameters are coupled, and which have weight decay."""

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from typing_extensions import TypedDict  # which torch depends on

from coupled_adam.optim.embedding_search import matrices_of_size
from coupled_adam.optim.find_embeddings import Couple, find_embeddings
from coupled_adam.optim.lean import ADAMW, LEAN, Rate
from coupled_adam.optim.model_matrix import ModelMatrix, listed
from coupled_adam.optim.named_parameters import Parameters, Tables, resolve
from coupled_adam.optim.options import (
    OPTIONS,
    Group,
    as_pair,
    check_options,
    complete,
    refuse_unknown,
)
from coupled_adam.optim.roles import DECAYING, Role, roles_of
from coupled_adam.optim.state import sparse_problem
from coupled_adam.optim.warn import warn

Embeddings = Literal["coupled", "lean", "adamw"] | Mapping[str, Any]

# What a group may leave to the optimizer, for checks before there is one.
_COMPLETE: dict[str, Any] = {
    **OPTIONS,
    **dict.fromkeys(("differentiable", "capturable"), False),
    "betas": (0.9, 0.999),
}
_NAMED: dict[str, dict[str, Any]] = {"coupled": {}, "lean": LEAN, "adamw": ADAMW}
# What embeddings= may set. Not vocab_dim, which the search for the matrices sets.
_OPTIONS = {"coupled", "lr", "lr_factor", "betas", "eps", "weight_decay", "second_moment_scale"}
_OPTIONS |= {"row_exponent", "zero_sum", "stochastic_rounding"}


class GroupOptions(TypedDict, total=False):
    """Arguments of :func:`param_groups` that the optimizers pass on to it."""

    beside_muon: bool
    head_lr: float | None
    embedding_weight_decay: float
    couple: Couple
    tables: Tables | None
    exclude: Parameters


class ParamGroups(list[Group]):
    """A list of param groups that prints each parameter: name, shape, role and options."""

    def __init__(self, groups: Iterable[Group], roles: Mapping[Tensor, Role]) -> None:
        super().__init__(groups)
        self.roles = roles

    def __repr__(self) -> str:
        lines = []
        for group in self:
            options = shown(group, {"vocab_dim": 0})
            for name, p in named_parameters(group):
                shape = " x ".join(map(str, p.shape))
                lines.append(f"{name:<40} {shape:>14}  {self.roles.get(p, ''):<11}  {options}")
        return "\n".join(lines)


def param_groups(
    model: nn.Module,
    embeddings: Embeddings = "coupled",
    *,
    steps: int | None = None,
    beside_muon: bool = False,
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
    weight decay. Biases, norms and what has a single row or column, such as the score of a reward
    model, never have any, however many dimensions they are stored with, and nor has what the model
    marks, by ``p._no_weight_decay = True`` or by a method ``no_weight_decay()`` as in timm. All
    other matrices, stacks of matrices and convolutions have the optimizer's. What a parameter is
    follows from the class of its module, and in modules that are written by hand from the last
    words of its name. Frozen parameters are left out. In the experiments of arXiv 2502.08441
    learned positions do have weight decay. What is not given here is the optimizer's.

    Args:
        model: any module, also on the meta device.
        embeddings: how the coupled matrices are updated. ``"coupled"`` is the algorithm of the
            paper, ``"lean"`` is :data:`coupled_adam.LEAN`, and ``"adamw"`` couples nothing: it is
            AdamW with betas 0, 0.999 and the rate of LEAN. A mapping has options of these matrices
            alone: ``lr_factor`` (a multiple of the optimizer's learning rate; schedulers keep the
            ratio), ``lr``, ``betas``, ``eps``, ``weight_decay``, ``coupled``,
            ``second_moment_scale``, ``row_exponent``, ``zero_sum`` and ``stochastic_rounding``.
        steps: the number of optimizer steps of the whole training, from which the ``lr_factor`` of
            ``"lean"`` and ``"adamw"`` follows (:func:`lean_lr_factor`). It is for training from
            scratch: finetuning wants other factors.
        beside_muon: whether Muon updates the hidden matrices; ``steps`` chooses a lower rate then.
        head_lr: the learning rate of output embeddings that are not tied to the input embeddings,
            coupled or not, instead of ``lr`` and ``lr_factor``.
        weight_decay: the weight decay of matrices other than embeddings.
        embedding_weight_decay: the weight decay of embeddings, coupled or not.
        couple, tables, vocab_size: which matrices, as in :func:`embedding_parameters`.
        exclude: parameters to leave out, for example because another optimizer updates them: one
            or several modules (with all their parameters), parameters, parameter names, or glob
            patterns over names such as ``"*.experts.*"``.

    Returns:
        A list of groups to pass to the optimizer: the matrices that decay, the rest, and last the
        coupled matrices. In groups of their own are those stored as [H, V], an untied head with a
        rate of its own, and tables with ``sparse=True``, which are updated without ``zero_sum`` and
        weight decay. Each group has ``params``, ``param_names``, ``coupled``, and what is not left
        to the optimizer. The list prints as a table. Other optimizers of torch can take it, too:
        they ignore options that they do not have, and raise an error where ``lr_factor`` has left
        ``lr`` to Coupled Adam.

    Raises:
        TypeError, ValueError: as in :func:`embedding_parameters`; or for an option that is unknown,
            out of range, or without effect on this model; or if ``embeddings`` would move rows of
            a table with ``sparse=True`` that have no gradient.

    Warns:
        UserWarning: as in :func:`embedding_parameters`; if there is nothing to couple; and if it is
            not clear what a parameter is, which then has weight decay.

    Examples:
        >>> groups = param_groups(model, "lean", steps=10_000)
        >>> print(groups)
        >>> optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    """
    # 1. The options, checked before the model is searched
    options = dict(embedding_options(embeddings, steps, beside_muon=beside_muon))
    given = {"head_lr": head_lr, "weight_decay": weight_decay}
    given["embedding_weight_decay"] = embedding_weight_decay
    check_options({name: value for name, value in given.items() if value is not None})
    # With embeddings={"weight_decay": ...}, coupled matrices may differ from other embeddings.
    coupled_decay = options.pop("weight_decay", embedding_weight_decay)
    if "lr_factor" in options:
        options.setdefault("lr", None)  # an error in an optimizer that does not know lr_factor
    # 2. The embeddings of the model, and whether any of them can be coupled
    coupled, all_embeddings = find_embeddings(
        model, couple=couple, tables=tables, vocab_size=vocab_size
    )
    if (tables is None or coupled) and not any(m.parameter.requires_grad for m in coupled):
        frozen = coupled or [m for m in all_embeddings if m.sides]
        frozen = [m for m in frozen if not m.parameter.requires_grad]
        why = f"the token embeddings are frozen: {listed(frozen)}"
        if not frozen:
            why = (
                "no token embeddings were found: if there are any, pass vocab_size=, or name them "
                "in param_groups(model, tables=...)"
            )
        if steps is not None:
            raise ValueError(f"steps={steps} has no effect, as {why}")
        if frozen or vocab_size is None:  # otherwise the search has said so
            warn(f"no param group is coupled, as {why}")
    embedding_of = {m.parameter: m for m in coupled}
    roles = roles_of(
        model,
        {
            m.parameter: "head" if m.is_head else "embedding"
            for m in (*coupled, *all_embeddings)
            if m.sides or m in coupled
        },
    )
    if head_lr is not None and "head" not in roles.values():
        raise ValueError(
            f"head_lr={head_lr}, but no output embedding of its own was found or named: pass "
            "embeddings= with lr or lr_factor instead"
        )
    # With all their names, as exclude= may have any name of a tied parameter.
    left_out = resolve(dict(model.named_parameters(remove_duplicate=False)), exclude, "exclude")
    unknown = [
        ModelMatrix(name, p)
        for name, p in model.named_parameters()
        if roles[p] == "unknown" and p.requires_grad and p not in left_out
    ]
    if unknown:
        warn(
            f"it is not clear what these parameters are: {listed(unknown)}. They have the weight "
            "decay of matrices, and are not for Muon; p._no_weight_decay = True exempts one"
        )
    # 3. A group for the parameters of each kind, those that have all options in common
    groups: dict[tuple[Any, ...], Group] = {}
    for name, p in model.named_parameters():
        if p in left_out or not p.requires_grad:
            continue
        role = roles[p]
        group: Group = {"params": [], "param_names": [], "coupled": p in embedding_of}
        if embedding := embedding_of.get(p):
            decay = coupled_decay
            group |= {"vocab_dim": embedding.vocab_dim, **options}
            if embedding.has_sparse_gradients:  # what would move all rows is left out
                decay = 0.0
                group |= {"zero_sum": False, "weight_decay": decay, "sparse": True}
                if problem := sparse_problem(_COMPLETE | group, p):
                    raise ValueError(f"{embedding} {problem}")
        elif role in ("embedding", "head", "positions"):
            decay = embedding_weight_decay
        else:
            decay = weight_decay if role in DECAYING else 0.0
        has_head_lr = head_lr is not None and role == "head"
        if has_head_lr:
            for option in ("lr_factor", "lr_factor_from"):
                group.pop(option, None)
            group["lr"] = head_lr
        if decay is not None:  # None leaves it to the optimizer, and so sets nothing
            group["weight_decay"] = decay
        # In the order of the groups: coupled ones last, and hidden matrices first, since the rate
        # that frameworks log is the first group's, which should be the optimizer's own.
        is_sparse = "sparse" in group
        key = (
            *(p in embedding_of, has_head_lr, is_sparse, group.get("vocab_dim", 0)),
            *(role not in DECAYING, decay or 0.0),
        )
        group = groups.setdefault(key, group)
        group["params"].append(p)
        group["param_names"].append(name)
    return ParamGroups([groups[key] for key in sorted(groups)], roles)


GROUP_OPTIONS = {*inspect.signature(param_groups).parameters} - {"model", "weight_decay"}
"""What says how a model is grouped; the weight decay is the optimizer's."""


class _Resolved(dict[str, Any]):
    """What :func:`embedding_options` has made, which it takes as it is."""


def embedding_options(
    embeddings: Embeddings, steps: int | None = None, *, beside_muon: bool = False
) -> dict[str, Any]:
    """The options of coupled matrices that a name or a mapping stands for, with their rate.

    Raises:
        ValueError: for what is unknown or out of range, or ``steps`` that cannot say the rate.
    """
    if isinstance(embeddings, _Resolved):
        return embeddings
    if beside_muon and steps is None:
        raise ValueError(f"{beside_muon=} changes what steps= chooses: pass steps=, too")
    named = _NAMED.get(embeddings) if isinstance(embeddings, str) else embeddings
    if not isinstance(named, Mapping):
        raise ValueError(
            f"Invalid embeddings value: {embeddings!r} ({', '.join(map(repr, _NAMED))}, or a "
            "mapping of options such as coupled_adam.LEAN | {'lr_factor': 4}; matrices to couple "
            "are named in param_groups(model, tables=...))"
        )
    refuse_unknown(named, _OPTIONS, f"embeddings={dict(named)}", ValueError)
    check_options(named, " in embeddings=")
    options = _Resolved(named)
    if is_adamw := options.get("coupled") is False:
        options["embeds_tokens"] = True  # which nothing else in the group says
    if "betas" in options:
        options["betas"] = as_pair(options["betas"])
    # The rate: given, by a factor, or by the number of steps
    factor = options.pop("lr_factor", None)
    if "lr" in options and factor is not None:
        raise ValueError(f"embeddings={dict(named)}: leave out one of lr and lr_factor")
    if steps is not None:
        rate = Rate.of(None, steps, beside_muon=beside_muon)
        if "lr" in options or factor is not None:
            raise ValueError(
                f"steps={steps} says the embeddings' learning rate, and so does "
                f"embeddings={dict(named)}: leave out one of them"
            )
        if not (is_adamw or options.get("row_exponent") or options.get("zero_sum")):
            raise ValueError(
                f"steps={steps} is for embeddings='lean' and 'adamw': no rule for the learning "
                f"rate of embeddings={embeddings!r} is known (docs/study/rate.md). Leave out steps="
            )
    elif "lr_factor" in named and "lr" not in options:
        rate = Rate.of(factor)
    else:
        return options
    options |= {"lr_factor": rate.factor, "lr_factor_from": rate.source}
    return options


def named_parameters(group: Group) -> list[tuple[str, Tensor]]:
    """The parameters of a group by their names, or by their numbers if they have none."""
    params = group["params"]
    numbered = [f"parameter {i}" for i in range(len(params))]
    return [*zip(group.get("param_names", numbered), params)]


def names_of(group: Group) -> str:
    """The names of a group's parameters, with the items of a list as one: ``h.*.weight (12)``."""
    if "param_names" not in group:
        return f"{(n := len(group['params']))} parameter{'s' * (n > 1)}"
    patterns = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in group["param_names"])
    return ", ".join(name + f" ({n})" * (n > 1) for name, n in patterns.items())


def shown(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The options that are not the defaults, for print; the rate says what has chosen it."""
    inner = {"params", "param_names", "initial_lr", "initial_beta1"}
    texts = {k: f"{k}={x}" for k, x in options.items() if str(x) != str(defaults.get(k))}
    if "initial_lr_factor" in options:
        texts["lr"] = f"lr={options['lr']} ({Rate.in_group(options)})"
        inner |= {"initial_lr_factor", "lr_factor_from"}
    return ", ".join(texts[k] for k in texts if k not in inner) or "the defaults"


def subgroups(group: Group, kind_of: Callable[[str, Tensor], Hashable]) -> dict[Any, Group]:
    """A group for each kind of a group's parameters, with otherwise equal options."""
    by_kind: dict[Any, Group] = {}
    for name, p in named_parameters(group):
        empty: Group = {key: [] for key in ("params", "param_names") if key in group}
        subgroup = by_kind.setdefault(kind_of(name, p), {**group, **empty})
        subgroup["params"].append(p)
        if "param_names" in group:  # torch has names in all groups, or in none
            subgroup["param_names"].append(name)
    return by_kind


def couple_by_size(
    groups: list[Group], vocab_size: int | Iterable[int], options: Mapping[str, Any]
) -> list[Group]:
    """Move the matrices with V rows or V columns to coupled groups with otherwise equal options.

    Args:
        groups: an optimizer's param groups.
        vocab_size: V, or several numbers for several vocabularies.
        options: what the coupled groups have instead; ``lr_factor`` multiplies the learning rate of
            the group that a matrix comes from.

    Returns:
        Up to three groups in the place of each: what is left of it, matrices [V, H], and [H, V].
    """
    if any(group["coupled"] for group in groups):
        raise ValueError(
            f"vocab_size={vocab_size} finds the matrices to couple, but the param groups say "
            "themselves which are coupled, and how: leave out vocab_size= and embeddings="
        )
    # Over all groups at once, as a head may be in another group than its table.
    named = itertools.chain(*map(named_parameters, groups))
    matrices = [ModelMatrix(name, p) for name, p in named if p.dim() == 2]
    vocab_dims = {m.parameter: m.vocab_dim for m in matrices_of_size(matrices, vocab_size)}
    result = []
    for group in groups:
        by_vocab_dim = subgroups(group, lambda _, p: vocab_dims.get(p, -1))  # -1: stays uncoupled
        for dim, subgroup in sorted(by_vocab_dim.items()):
            if dim >= 0:
                # Without a rate, so that complete() takes options' lr, or lr_factor times group's.
                del subgroup["lr"]
                subgroup |= {"coupled": True, "vocab_dim": dim, **options}
                complete(subgroup, group)
            result.append(subgroup)
    return result
