"""The core: another optimizer, which updates what :class:`CoupledAdam` leaves to it.

The two are one to everything outside: the core's param groups and states are among those of the
optimizer around it, which lends them to it (:func:`lend`) before each call.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from coupled_adam.optim.options import Group

Core = Callable[[list[dict[str, Any]]], Optimizer]
"""A function that makes an optimizer of param groups."""

MUON = "torch.Muon"
"""What groups say that ``torch.optim.Muon`` updates."""


def is_cores(group: Group) -> bool:
    """Whether the core updates a group."""
    # By an option, since groups are copied, saved and loaded, but keep their options.
    return "core" in group


def build(core: Core, groups: list[Group], lr: float | Tensor) -> Optimizer:
    """Make the core, and mark its groups.

    Args:
        core: what the user gave.
        groups: the param groups to make it of.
        lr: for a message, the rate of the optimizer around it.

    Raises:
        TypeError: if ``core`` is no function.
        ValueError: if there is nothing for it, or it has other parameters.
    """
    if not callable(core) or isinstance(core, type):
        name = core.__name__ if isinstance(core, type) else type(core).__name__
        raise TypeError(
            f"core={name} must be a function of param groups, which says the learning rate, too: "
            f"core=lambda groups: {name}(groups, lr={lr})"
        )
    given = [p for group in groups for p in group["params"]]
    if not given:
        raise ValueError("core= has nothing to update: all parameters are token embeddings")
    optimizer = core(groups)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if len(own) != len(given) or {*own} != {*given}:
        raise ValueError(
            f"core= made a {type(optimizer).__name__} of other parameters than it was given: of "
            f"{len(own)}, {len({*own} & {*given})} of which are among the {len(given)} in `groups`"
        )
    # Its name, for checkpoints; by the package, as modules move between versions.
    name = f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"
    for group in optimizer.param_groups:
        group |= {"core": name, "coupled": False}
    return optimizer


def lend(core: Optimizer, groups: list[Group], state: defaultdict[Tensor, Any]) -> Optimizer:
    """Give the core its groups and states among all that there are now, and return it."""
    # Wrappers and loops replace param_groups, the tensors in them, and state.
    core.param_groups = [group for group in groups if is_cores(group)]
    core.state = state
    return core


def step(core: Optimizer) -> None:
    """Take a step of the core; torch's hooks of all optimizers are called around ours alone."""
    taken: Any = type(core).step
    (taken.__wrapped__ if getattr(taken, "hooked", False) else taken)(core)


def lend_own_state(core: Optimizer) -> Optimizer:
    """Let the core see no other states than its own, as ``state_dict`` needs it; return it."""
    params = {p for group in core.param_groups for p in group["params"]}
    core.state = defaultdict(dict, {p: x for p, x in core.state.items() if p in params})
    return core


def load(core: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Let the core load its part of a checkpoint; return the rest, with the groups of all."""
    groups = [group for group in saved["param_groups"] if is_cores(group)]
    keys = {key for group in groups for key in group["params"]}
    states: dict[bool, dict[Any, Any]] = {True: {}, False: {}}
    for key, state in saved["state"].items():
        states[key in keys][key] = state
    core.load_state_dict({"state": states[True], "param_groups": groups})
    return {**saved, "state": states[False]}


def init_state(core: Optimizer) -> None:
    """Make the states that are missing, by a step with gradients of zero at a rate of zero."""
    # As torch.distributed.checkpoint does, but the step does not count.
    params = [p for group in core.param_groups for p in group["params"]]
    grads = [p.grad for p in params]
    options = [dict(group) for group in core.param_groups]
    without_state = {p for p in params if p.requires_grad and not core.state.get(p)}
    try:
        for p in params:
            p.grad = torch.zeros_like(p) if p in without_state else None
        for group in core.param_groups:
            lr = group["lr"]
            group["lr"] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
        core.step()
    finally:
        for p, grad in zip(params, grads):
            p.grad = grad
        for group, own in zip(core.param_groups, options):
            group.clear()
            group.update(own)
    for p in without_state:
        if "step" in (state := core.state[p]):
            state["step"] *= 0


def pickled(core: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """A core without what it is lent, and without hooks, as torch pickles optimizers."""
    # Not its own way, in which attributes such as bitsandbytes' are lost.
    left_out = ("param_groups", "state")
    return type(core), {
        name: value
        for name, value in vars(core).items()
        if name not in left_out and not name.endswith("_hooks")
    }


def unpickled(kind: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """What :func:`pickled` was of."""
    core = kind.__new__(kind)
    Optimizer.__setstate__(core, attributes | {"param_groups": [], "state": defaultdict(dict)})
    return core
