"""A param group's options: their checks, and what schedules and loops do to them.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import difflib
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from coupled_adam.optim.lean import Rate
from coupled_adam.optim.warn import warn

Group = dict[str, Any]

OPTIONS: dict[str, Any] = {
    "coupled": False,
    "second_moment_scale": 1.0,
    "row_exponent": 0.0,
    "zero_sum": False,
    "vocab_dim": 0,
    "stochastic_rounding": False,
}
"""The options of a param group that torch.optim.Adam does not have, with their defaults."""


# What each number must be: its least and its largest value, and whether it may be a tensor with one
# element, whose value is not asked for, since it may be on an accelerator. Schedules may end just
# below zero, by rounding. Arguments of param_groups and of MuonWithCoupledAdam are among these.
_ZERO, _POSITIVE, _LARGEST = -1e-6, 5e-324, sys.float_info.max
_RATE = (_ZERO, _LARGEST, True, "a number from 0 on, or a tensor with one element")
_RATES = ("lr", "head_lr", "adam_lr", "eps", "weight_decay", "embedding_weight_decay")
_NUMBERS: dict[str, tuple[float, float, bool, str]] = {
    **dict.fromkeys(_RATES, _RATE),
    "lr_factor": (_POSITIVE, _LARGEST, False, "a positive number, and no lr"),
    "betas": (0.0, math.nextafter(1.0, 0.0), True, "two numbers from 0 on and below 1"),
    "second_moment_scale": (_POSITIVE, _LARGEST, False, "must be positive and finite"),
    "row_exponent": (0.0, 1.0, False, "must be between 0, Coupled Adam, and 1"),
}
_FLAGS = ("coupled", "zero_sum", "stochastic_rounding", "amsgrad", "maximize", "capturable")
_CHOICES: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys((*_FLAGS, "differentiable"), ((True, False), "True or False")),
    **dict.fromkeys(("foreach", "fused"), ((True, False, None), "True, False or None")),
    "vocab_dim": ((0, 1), "0 for matrices [V, H], 1 for [H, V]"),
}


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError for an option that is no number, or out of range.

    Args:
        options: a group's options, or some of them; those of other optimizers are not checked.
        where: for the message, where they stand.
    """
    for name, (least, most, may_be_tensor, meaning) in _NUMBERS.items():
        value = options.get(name)
        if name not in options or (name == "lr_factor" and value is None):  # None: LEAN's own
            continue
        values = as_pair(value) if name == "betas" else (value,)
        for x in values if isinstance(values, tuple) else (value, None):  # no pair, so no betas
            if may_be_tensor and isinstance(x, Tensor) and x.numel() == 1:
                continue
            if isinstance(x, Real) and not isinstance(x, bool) and least <= float(x) <= most:
                continue
            if isinstance(x, str):
                meaning += ", and not text; YAML takes 1e-8 for text, but 1.0e-8 for a number"
            raise ValueError(f"Invalid {name}: {value!r}{where} ({meaning})")
    for name, (choices, meaning) in _CHOICES.items():
        value = options.get(name, choices[0])
        if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in choices):
            raise ValueError(f"Invalid {name}: {value!r}{where} ({meaning})")


def as_pair(value: Any) -> Any:
    """The two of a tuple, a list of YAML, an array, ... as a tuple; or the value as it is."""
    has_two = hasattr(value, "__getitem__") and hasattr(value, "__len__") and len(value) == 2
    return tuple(value) if has_two and not isinstance(value, str | Mapping) else value


def refuse_unknown(
    given: Iterable[str],
    known: Collection[str],
    where: str,
    error: type[TypeError | ValueError] = TypeError,
) -> None:
    """Raise an error for the name of an option that is none, and say which is like it."""
    for name in sorted({*given} - {*known}):
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {near}?" if near else f"there are {sorted(known)}"
        raise error(f"{where} has no option {name!r}: {hint}")


def complete(group: Group, defaults: Mapping[str, Any]) -> None:
    """Check the options that a group has, and give it those that it does not have.

    Instead of ``lr`` it may have ``lr_factor``, a multiple of the default; None is LEAN's own
    factor, unless there is a rate. Schedules set the rates and betas of all groups; so a group
    remembers its factor (:class:`~coupled_adam.optim.lean.Rate`), for :func:`warn_of_lost_factor`,
    and that it began without momentum, for :func:`warn_of_momentum`.

    Raises:
        ValueError: if an option is out of range, or if there are both a factor and a rate.
    """
    if "lr_factor" in group and group.get("lr") is None:
        group.pop("lr", None)  # param_groups has left it to this function
    check_options(group)  # what it does not have was checked where it entered
    if "lr_factor" in group:
        factor = group["lr_factor"]
        if factor is not None and "lr" in group:
            raise ValueError(
                f"Invalid lr_factor: {factor!r} with lr={group['lr']} (a positive number, and no "
                "lr)"
            )
        del group["lr_factor"]
        if "lr" not in group:
            rate = Rate.of(factor)
            group.setdefault("lr_factor_from", rate.source)
            group |= {"lr": rate.factor * defaults["lr"], "initial_lr_factor": rate.factor}
    for name, value in defaults.items():
        group.setdefault(name, value)
    group["betas"] = as_pair(group["betas"])
    # Whether momentum begins later; a group that is loaded may say so of other betas
    group.pop("initial_beta1", None)
    if group["coupled"] and not has_momentum(group):
        group["initial_beta1"] = 0.0


def has_momentum(group: Group) -> bool:
    """Whether a coupled matrix has a first moment; a tensor's value is not asked for."""
    beta1 = group["betas"][0]
    return isinstance(beta1, Tensor) or beta1 != 0


def is_lean(group: Group) -> bool:
    """Whether a group is coupled and updated by LEAN."""
    return bool(group["coupled"] and (group["row_exponent"] != 0 or group["zero_sum"]))


def embeds_tokens(group: Group) -> bool:
    """Whether a group is one of token embeddings, coupled or not."""
    return group["coupled"] or "embeds_tokens" in group


def warn_of_momentum(group: Group) -> None:
    """Warn once if a schedule has given a group its momentum, and so a matrix of state."""
    if group.pop("initial_beta1", None) is not None:
        warn(
            "the coupled group was built with beta1 = 0, which needs no first moment, but now has "
            f"betas={group['betas']}, and keeps one of V x H numbers. CyclicLR, OneCycleLR and "
            "DeepSpeed's OneCycle set betas: pass cycle_momentum=False"
        )


def warn_of_lost_factor(groups: list[Group]) -> bool:
    """Warn if a loop or a schedule takes a group's factor away, and return whether it does."""
    for group in groups:
        factor, lr = group.get("initial_lr_factor", 1), group["lr"]
        # The value of a tensor is not asked for, since it may be on an accelerator.
        if factor == 1 or isinstance(lr, Tensor) or lr == 0:
            continue
        others = [other for other in groups if not other["coupled"]]
        rates = [other["lr"] for other in others]
        if not rates or Tensor in map(type, rates):
            continue
        # A schedule that knows the groups keeps their ratio, and so gives the others another rate.
        built = f"the coupled group was built with {factor:g} times the learning rate of the others"
        if rates.count(lr) == len(rates):
            warn(
                f"{built}, but now has theirs, {lr:g}. In a loop, set group['lr'] = lr * "
                "group.get('initial_lr_factor', 1); OneCycleLR takes a list, max_lr=[lr * "
                "group.get('initial_lr_factor', 1) for group in optimizer.param_groups]"
            )
            return True
        if "initial_lr" in group and all(
            2 * _share_of_rate(group) < _share_of_rate(other) for other in others
        ):
            warn(
                f"{built}, but a schedule has taken more than half of that factor away: it leads "
                "all rates to the same number, as CosineAnnealingLR's eta_min does. Give LambdaLR "
                "one function for all groups instead"
            )
            return True
    return False


def _share_of_rate(group: Group) -> float:
    """What a schedule of torch has left of a group's rate; NaN without one."""
    return float(group["lr"] / (group.get("initial_lr") or math.nan))


def warn_of_more_steps(groups: list[Group], states: Mapping[Tensor, Any]) -> bool:
    """Warn if there were clearly more steps than a rate is for, and return whether there were."""
    for group in groups:
        if "lr_factor_from" not in group or not (steps := Rate.in_group(group).steps):
            continue
        state = states.get(group["params"][0]) if group["params"] else None
        # A count that is on an accelerator is not asked for.
        if state and state["step"].is_cpu and state["step"] > 1.1 * steps:
            warn(
                f"{group['lr_factor_from']} chose the embeddings' learning rate, "
                f"{group['initial_lr_factor']:g} times that of the others, but this is step "
                f"{int(state['step'])}: steps= is the number of optimizer steps of the whole "
                "training"
            )
            return True
    return False
