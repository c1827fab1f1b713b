"""A param group's options: their checks, and what schedules and loops do to them.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from coupled_adam.optim.lean import LEAN_LR_FACTOR
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


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_choice(value: Any) -> bool:
    return value is None or _is_flag(value)


def _from_zero(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value < math.inf


def _positive(value: Any) -> bool:
    return _is_number(value) and 0.0 < value < math.inf


def _is_rate(value: Any) -> bool:
    # The value of a tensor is not asked for, since it may be on an accelerator. Schedules may end
    # just below zero, by rounding.
    if isinstance(value, Tensor):
        return value.numel() == 1
    return _is_number(value) and -1e-6 < value < math.inf


def _are_betas(value: Any) -> bool:
    pair = as_pair(value)
    if not isinstance(pair, tuple):
        return False
    return all(b.numel() == 1 if isinstance(b, Tensor) else _from_zero(b) and b < 1 for b in pair)


def as_pair(value: Any) -> Any:
    """The two of a tuple, a list of YAML, an array, ... as a tuple; or the value as it is."""
    has_two = hasattr(value, "__getitem__") and hasattr(value, "__len__") and len(value) == 2
    return tuple(value) if has_two and not isinstance(value, str | Mapping) else value


# What each option must be. Arguments of param_groups and of MuonWithCoupledAdam are among them, so
# that they are checked, and refused, in the same way.
_FLAGS = ["coupled", "zero_sum", "stochastic_rounding"]
_FLAGS += ["amsgrad", "maximize", "capturable", "differentiable"]
_RATE = (_is_rate, "a number from 0 on, or a tensor with one element")
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _RATE,
    "head_lr": _RATE,
    "adam_lr": _RATE,
    "lr_factor": (lambda x: x is None or _positive(x), "a positive number, and no lr"),
    "betas": (_are_betas, "two numbers from 0 on and below 1"),
    "eps": _RATE,
    "weight_decay": _RATE,
    "embedding_weight_decay": _RATE,
    **dict.fromkeys(_FLAGS, (_is_flag, "True or False")),
    **dict.fromkeys(("foreach", "fused"), (_is_choice, "True, False or None")),
    "second_moment_scale": (_positive, "must be positive and finite"),
    "row_exponent": (
        lambda x: _from_zero(x) and x <= 1,
        "must be between 0, Coupled Adam, and 1",
    ),
    "vocab_dim": (
        lambda x: _is_number(x) and x in (0, 1),
        "0 for matrices [V, H], 1 for [H, V]",
    ),
}


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError for an option that is no number, or out of range.

    Args:
        options: a group's options, or some of them; those of other optimizers are not checked.
        where: for the message, where they stand.
    """
    for name, (is_valid, meaning) in _VALID.items():
        if name not in options or is_valid(options[name]):
            continue
        value = options[name]
        # Betas may hold text, too.
        pair = as_pair(value)
        values = pair if isinstance(pair, tuple) else [value]
        if any(isinstance(x, str) for x in values):
            meaning += ", and not text; YAML takes 1e-8 for text, but 1.0e-8 for a number"
        raise ValueError(f"Invalid {name}: {value!r}{where} ({meaning})")


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
    """Give a group the options that it does not have, and check all that it has.

    Instead of ``lr`` it may have ``lr_factor``, a multiple of the default; None is LEAN's own
    factor, unless there is a rate. Schedules set the rates
    and betas of all groups; so a group remembers its factor, for :func:`warn_of_lost_factor`, and
    that it began without momentum, for :func:`warn_of_momentum`.

    Raises:
        ValueError: if an option is out of range, or if there are both a factor and a rate.
    """
    # 1. The rate; checked here, since the factor is no option of the group afterwards
    if "lr_factor" in group:
        factor, lr = group["lr_factor"], group.get("lr")
        if factor is not None and (lr is not None or not _positive(factor)):
            raise ValueError(
                f"Invalid lr_factor: {factor!r} with lr={lr} (a positive number, and no lr)"
            )
        del group["lr_factor"]
        if lr is None:
            group.setdefault("lr_factor_from", "default" if factor is None else "given")
            factor = LEAN_LR_FACTOR if factor is None else factor
            group |= {"lr": factor * defaults["lr"], "initial_lr_factor": factor}
    # 2. All that is missing
    for name, value in defaults.items():
        group.setdefault(name, value)
    check_options(group)
    group["betas"] = as_pair(group["betas"])
    # 3. Whether momentum begins later; a group that is loaded may say so of other betas
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
        if rates.count(lr) == len(rates):
            warn(
                f"the coupled group was built with {factor:g} times the learning rate of the "
                f"others, but now has theirs, {lr:g}. In a loop, set group['lr'] = lr * "
                "group.get('initial_lr_factor', 1); OneCycleLR takes a list, max_lr=[lr * "
                "group.get('initial_lr_factor', 1) for group in optimizer.param_groups]"
            )
            return True
        if "initial_lr" in group and all(
            2 * _share_of_rate(group) < _share_of_rate(other) for other in others
        ):
            warn(
                f"the coupled group was built with {factor:g} times the learning rate of the "
                "others, but a schedule has taken more than half of that factor away: it leads all "
                "rates to the same number, as CosineAnnealingLR's eta_min does. Give LambdaLR one "
                "function for all groups instead"
            )
            return True
    return False


def _share_of_rate(group: Group) -> float:
    """What a schedule of torch has left of a group's rate; NaN without one."""
    return float(group["lr"] / (group.get("initial_lr") or math.nan))


def warn_of_more_steps(groups: list[Group], states: Mapping[Tensor, Any]) -> bool:
    """Warn if there were clearly more steps than a rate is for, and return whether there were."""
    for group in groups:
        steps = re.match(r"steps=(\d+)", str(group.get("lr_factor_from", "")))
        if not steps or not group["params"] or not (state := states.get(group["params"][0])):
            continue
        # A count that is on an accelerator is not asked for.
        if state["step"].is_cpu and state["step"] > 1.1 * int(steps[1]):
            warn(
                f"{steps[0]} chose the embeddings' learning rate, {group['initial_lr_factor']:g} "
                f"times that of the others, but this is step {int(state['step'])}: steps= is the "
                "number of optimizer steps of the whole training"
            )
            return True
    return False
