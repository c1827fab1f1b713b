"""Checkpoints of torch's optimizers and of other options: what they become, and what is refused."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from coupled_adam.optim import sharded
from coupled_adam.optim.core import MUON, is_cores
from coupled_adam.optim.options import (
    OPTIONS,
    Group,
    complete,
    has_momentum,
    is_lean,
)
from coupled_adam.optim.row_sparse import count_of, decayed
from coupled_adam.optim.state import (
    HOW_TO_LOAD,
    MEAN_UPDATE,
    MOMENTS,
    ROW_COUNT,
    ROW_MOMENT,
    ROW_STEP,
    SECOND_MOMENTS,
    check_group,
    describe,
    entries,
    entry_shape,
    first_moment_dtype,
    layout_of,
    moment_dtype,
    new_moment,
    sparse_problem,
)
from coupled_adam.optim.warn import warn

State = dict[str, Tensor]

SQUARES = {*SECOND_MOMENTS, ROW_MOMENT}

# The entries that each must have. Coupled Adam's may lack exp_avg, which begins with momentum.
_ADAMS, _COUPLEDS = ("step", "exp_avg", "exp_avg_sq"), ("step", "exp_avg_sq")
_MUONS = ("momentum_buffer",)
# What our groups have beside options.
_OWN = ("flat_shards", "sparse", "initial_lr_factor", "lr_factor_from", "initial_beta1")
_OWN += ("core", "embeds_tokens")  # type: ignore[assignment]
_MUON_OPTIONS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")


def adapt(
    groups: list[Group], state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, State]]:
    """Convert a state dict of Adam or of a Coupled Adam to what an optimizer's groups need.

    What the saved groups do not have is taken from the optimizer's.

    Args:
        groups: the optimizer's param groups.
        state_dict: the state dict to load; it is not changed.

    Returns:
        The converted state dict, and the second moments [H] and [V] of each coupled parameter, on
        the parameter's device and in float32 or wider.

    Raises:
        ValueError: if a group or a state is damaged, or does not fit the optimizer's.
    """
    saved_groups = [dict(group) for group in state_dict["param_groups"]]
    saved_sizes, sizes = ([len(group["params"]) for group in x] for x in (saved_groups, groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"the checkpoint has param groups of {saved_sizes} parameters, the optimizer of "
            f"{sizes}: load it into an optimizer with its groups, and transfer the state of each "
            "parameter, as in docs/switching.md, also for Trainer"
        )
    state = dict(state_dict["state"])
    moments: dict[Tensor, State] = {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups)):
        if "ns_steps" in saved:  # MuonWithCoupledAdam's, as earlier versions saved it
            saved.setdefault("core", MUON)
        if saved.get("core") != group.get("core"):
            theirs, ours = (x.get("core", "CoupledAdam(W)") for x in (saved, group))
            raise ValueError(
                f"param group {number} is updated by {theirs} in the checkpoint, but by {ours} in "
                "the optimizer. Load the states of the parameters that both update alike, with the "
                "'param_groups' of optimizer.state_dict(): see docs/switching.md"
            )
        if is_cores(group):  # of any options, which it checks itself
            saved |= {name: group[name] for name in group.keys() - saved.keys()}
        elif "betas" not in saved:
            raise ValueError(
                f"param group {number} of the checkpoint has no betas: set_optimizer_state_dict "
                "drops options if groups differ. Pass it the checkpoint's 'state' with the "
                "'param_groups' of get_optimizer_state_dict(model, optimizer)"
            )
        else:
            saved.pop("flat_shards", None)  # which are not saved, only that there are some
            complete(saved, group)
        # The checks and conversions need the parameters, where a checkpoint has their numbers.
        loaded = {**saved, "params": group["params"]}
        if not is_cores(group):
            check_group(loaded)
        for index, (key, p) in enumerate(zip(saved["params"], group["params"])):
            if state.get(key):  # what has never had a gradient has none
                state[key], second_moments = _adapted(loaded, index, state[key])
                if loaded["coupled"]:
                    moments[p] = second_moments
    _warn_of_changes(groups, saved_groups)
    return {**state_dict, "state": state, "param_groups": saved_groups}, moments


def check_structure(state_dict: Any) -> None:
    """Raise ValueError for what is no state dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not state_dict.keys() >= {"state", "param_groups"}:
        raise ValueError("this is no state dict, as of optimizer.state_dict()")


def _warn_of_changes(groups: list[Group], saved_groups: list[Group]) -> None:
    """Warn of options in a checkpoint that make the optimizer another one."""
    changes = []
    for number, (group, saved) in enumerate(zip(groups, saved_groups)):
        if is_cores(group):
            continue
        names = [
            name for name in ("coupled", "row_exponent", "zero_sum") if saved[name] != group[name]
        ]
        if has_momentum(saved) != has_momentum(group):
            names.append("betas")
        # The others have an effect in a coupled group only.
        names = [name for name in names if name == "coupled" or saved["coupled"]]
        own, loaded = (", ".join(f"{n}={g[n]}" for n in names) for g in (group, saved))
        if names:
            changes.append(
                f"param group {number} was constructed with {own}, but the checkpoint has {loaded}"
            )
    if changes:
        warn(
            f"{'; '.join(changes)}. The checkpoint's options are used from now on. To keep those "
            "that were constructed, load its 'state' with the 'param_groups' of "
            "optimizer.state_dict()"
        )


def _adapted(group: Group, index: int, state: State) -> tuple[State, State]:
    """A loaded state as its group needs it, and its second moments again, if it is coupled."""
    p = group["params"][index]
    try:
        if is_cores(group):
            if group["core"] == MUON:
                _check_names(state, _MUONS)
                _check_shapes(state, dict.fromkeys(_MUONS, p.shape))
            return state, {}
        _check_entries(state, p)
        if group["coupled"]:
            return _adapted_to_coupled(group, p, state)
        _check_names(state, _ADAMS)
        _check_shapes(state, dict.fromkeys(("exp_avg", *SECOND_MOMENTS), p.shape))
    except ValueError as error:
        message = f"cannot load the state of {describe(group, index)}: {error}"
        raise ValueError(message) from None
    return state, {}


def _adapted_to_coupled(group: Group, p: Tensor, state: State) -> tuple[State, State]:
    """A loaded state as a coupled group needs it, and its second moments again."""
    needed = entries(group)
    # 1. The second moments, converted; pieces of flattened matrices need those of such pieces
    is_whole = p.dim() == 2
    _check_names(state, _COUPLEDS if is_whole else ("step", *sorted(needed.keys() - {"exp_avg"})))
    names = state.keys() & MOMENTS - {"exp_avg"}
    moments = {name: state[name].to(moment_dtype(p)) for name in names}
    if is_whole:
        moments |= _converted(group, p, moments, state.get("exp_avg"))
    for name, dim in needed.items():
        if dim is not None and name not in moments:  # it begins now
            moments[name] = new_moment(group, p, dim)
    more: State = {}
    # 2. The first moment: what is not finite would reach all rows through LEAN's mean update
    if "exp_avg" in state and ROW_MOMENT in needed.keys() - state.keys():
        state = {**state, "exp_avg": state["exp_avg"].nan_to_num(0.0, 0.0, 0.0)}
    # In another dtype than the parameter's it comes back, as second moments do, after torch's cast
    dtype = first_moment_dtype(group, p)
    if "exp_avg" in state and "exp_avg" in needed and dtype != p.dtype:
        more["exp_avg"] = state["exp_avg"].to(p.device, dtype)
    # A table with sparse gradients, whose r decays on the way to options that update all rows
    if ROW_STEP in state:
        r, steps = moments[ROW_MOMENT], _row_steps(p, state)
        if sparse_problem(group, p):
            moments[ROW_MOMENT] = decayed(r, steps, float(state["step"]) + 1, group["betas"][1])
        else:
            more |= {ROW_STEP: steps.to(p.device), ROW_COUNT: count_of(r).to(p.device)}
        state = {n: x for n, x in state.items() if n not in (ROW_STEP, ROW_COUNT)}
    # 3. Entries that are not needed go, as fit_state refuses them; what is neither Adam's nor ours,
    # such as a wrapper's own, stays
    state = {n: x for n, x in {**state, **moments}.items() if n not in MOMENTS - needed.keys()}
    _check_shapes(state, {name: entry_shape(group, p, dim) for name, dim in needed.items()})
    moments = {
        name: sharded.place_moment(moments[name], p, dim).to(p.device)
        for name, dim in needed.items()
        if dim is not None
    } | more
    return {**state, **moments}, moments


def _row_steps(p: Tensor, state: State) -> Tensor:
    """The step of each row's last gradient, [V], in a loaded state."""
    steps = state[ROW_STEP]
    if not isinstance(steps, Tensor) or (steps.dtype, steps.shape) != (torch.int32, p.shape[:1]):
        raise ValueError(f"its {ROW_STEP} must be {[len(p)]} in int32, and is {steps!r:.60}")
    if steps.min() < 0 or steps.max() > state["step"]:
        raise ValueError(f"its {ROW_STEP} is out of range: the step is {state['step']!r}")
    return steps


def _check_entries(state: State, p: Tensor) -> None:
    """Raise ValueError if a loaded state is damaged, whatever its options are."""
    if "step" in state and not _is_count(state["step"]):
        raise ValueError(f"its step is {state['step']!r}, and must be a number from 0 on")
    for name in sorted(state.keys() & MOMENTS):
        value = state[name]
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not is_dense or not value.is_floating_point():
            raise ValueError(f"its {name} is no dense floating-point tensor, but {value!r:.80}")
        # Adam's second moments [V, H] may have NaN, which a conversion leaves out; a vector's would
        # be in a whole column. A first moment may be what it was when it was saved.
        is_vector = name != "exp_avg" and value.shape != p.shape
        if is_vector and _any(value.isnan()):
            raise ValueError(f"its {name} has NaN")
        if name in SQUARES and _any(value < 0):
            raise ValueError(f"its {name}, a mean of squares, has a negative number")
        if sharded.is_dtensor(value) != sharded.is_dtensor(p):
            raise ValueError(
                f"its {name} is a {layout_of(value)}, but the parameter is a {layout_of(p)}. "
                f"{HOW_TO_LOAD}"
            )


def _any(flags: Tensor) -> bool:
    """Whether any flag of this rank's part is set; fake tensors have none to check."""
    local = sharded.to_local(flags)
    return not (local.is_meta or isinstance(local, FakeTensor)) and bool(local.any())


def _is_count(step: Any) -> bool:
    if isinstance(step, Tensor):
        if step.is_meta or isinstance(step, FakeTensor):  # it has no value to check
            return True
        step = step.item() if step.numel() == 1 else None
    return isinstance(step, float | int) and 0 <= step < math.inf


def _check_names(state: State, required: Iterable[str]) -> None:
    """Raise ValueError if an entry is missing."""
    for name in required:
        if name not in state:
            hint = ": name it in adamw=, or leave out its state" if name in _MUONS else ""
            raise ValueError(f"it has no {name}{hint}")


def _check_shapes(state: State, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError if an entry has another shape."""
    for name, shape in shapes.items():
        if name in state and state[name].shape != shape:
            raise ValueError(
                f"its {name} has the shape {list(state[name].shape)}, but must have {list(shape)}. "
                "Does the checkpoint belong to this model, with the parameters in the same order?"
            )


def _converted(group: Group, p: Tensor, moments: State, exp_avg: Tensor | None) -> State:
    """The second moments of other options as the group's; empty if they are the group's.

    All of them are means of Adam's v [V, H]: r [V] over the columns, and nu [H] over the rows.
    """
    vocab_dim, nu, r = group["vocab_dim"], moments["exp_avg_sq"], moments.get(ROW_MOMENT)
    # 1. r and nu of what was saved
    if nu.shape == p.shape:  # Adam's
        means = {
            name: _mean(moments[name], vocab_dim)
            for name in moments.keys() & {*SECOND_MOMENTS}
            if moments[name].shape == p.shape
        }
        if not is_lean(group):
            return means
        r, nu = _mean(nu, 1 - vocab_dim), means["exp_avg_sq"]
    elif is_lean(group) == (r is not None):  # the group's own
        return {}
    elif r is None:  # Coupled Adam's, which does not tell the rows apart
        r = new_moment(group, p, 1 - vocab_dim) + _mean_of(nu)
        if exp_avg is not None:  # but those that never had a gradient have no momentum, either
            has_one = sharded.mean_over((exp_avg != 0).to(r.dtype), 1 - vocab_dim) > 0
            r = torch.where(has_one, r, 0.0)
    else:  # LEAN's: v_ij is r_i nu_j / mean(nu)
        # Without any gradient nu is 0, and stays 0; likewise in _adam_of_lean.
        return {"exp_avg_sq": nu * (_mean_of(r) / (_mean_of(nu) or 1.0))}
    # 2. LEAN's nu is the mean over the rows that have had a gradient. A column that has overflowed,
    # which Coupled Adam stops, has the mean of the others
    nu = nu * len(r) / max(sharded.full_tensor((r > 0).sum()).item(), 1)
    return {ROW_MOMENT: r, "exp_avg_sq": nu.nan_to_num(nan=(mean := _mean_of(nu)), posinf=mean)}


def _adam_of_lean(nu: Tensor, r: Tensor, vocab_dim: int) -> Tensor:
    """Adam's v_ij = r_i nu_j / mean(nu), [V, H] or [H, V]; what has overflowed stays infinite."""
    v = nu.unsqueeze(vocab_dim) / (_mean_of(nu) or 1.0) * r.unsqueeze(1 - vocab_dim)
    return v.nan_to_num(math.inf, math.inf)


def _mean(v: Tensor, dim: int) -> Tensor:
    """The means of what is finite over a dimension of a matrix, [H] or [V]."""
    # The share of what is finite; where nothing is, the mean is 0, not 0 / 0.
    share = sharded.mean_over(v.isfinite().to(v.dtype), dim).clamp(min=1 / v.shape[dim])
    return sharded.mean_over(v.nan_to_num(0.0, 0.0, 0.0), dim) / share


def _mean_of(vector: Tensor) -> float:
    """The mean of what is finite in a vector, [H] or [V]; 0 if nothing is."""
    values = sharded.full_tensor(vector)
    return float(values[values.isfinite()].mean().nan_to_num())


def to_adam_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of Coupled Adam to one that ``torch.optim.Adam(W)`` can load.

    The shared second moment [H] is copied to each of the V rows, in the dtype of ``exp_avg``, and
    the coupling options are removed from the groups. LEAN's moments become r_i nu_j / mean(nu).
    ``second_moment_scale`` is lost. Without momentum the first moment is filled with zeros. A state
    without ``exp_avg`` and ``row_exp_avg_sq``, which does not say how many rows there are, is left
    out, and so is, with a warning, that of a core, such as Muon's: Adam begins them anew.

    Args:
        state_dict: as returned by ``CoupledAdam(W).state_dict()``; it is not changed.

    Returns:
        A new state dict. Tensors that are not converted are those of the given one.

    Raises:
        ValueError: if it is no state dict, or the state is that of pieces of flattened matrices.
    """
    check_structure(state_dict)
    state = dict(state_dict["state"])
    groups = []
    if cores := {group["core"] for group in state_dict["param_groups"] if is_cores(group)}:
        warn(f"the states of {', '.join(sorted(cores))} are left out: Adam begins them anew")
    for group in state_dict["param_groups"]:
        if group.get("flat_shards"):
            raise ValueError(
                "the state dict has pieces of flattened matrices, as of DeepSpeed's ZeRO 1 and 2: "
                "only the state of whole matrices can be converted"
            )
        for key in group["params"]:
            if group.get("coupled") and state.get(key):
                state[key] = _spread(state[key], group)
            if is_cores(group):
                state.pop(key, None)
        # torch.optim.Adam would keep options that it does not know, and save them again.
        left_out = {*OPTIONS, *_OWN, *_MUON_OPTIONS}
        groups.append({name: value for name, value in group.items() if name not in left_out})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread(state: State, group: Group) -> State:
    """A state of Coupled Adam as Adam's, with moments [V, H]; empty if V cannot be told from it."""
    of_lean = (ROW_MOMENT, MEAN_UPDATE, ROW_STEP, ROW_COUNT)
    adam = {name: value for name, value in state.items() if name not in of_lean}
    vocab_dim, r, exp_avg = group["vocab_dim"], state.get(ROW_MOMENT), state.get("exp_avg")
    if r is not None and ROW_STEP in state:
        r = decayed(r, state[ROW_STEP], float(state["step"]) + 1, group["betas"][1])
    if exp_avg is None and r is None:
        return {}
    for name in state.keys() & {*SECOND_MOMENTS}:
        nu = state[name]  # [H]
        v = nu.unsqueeze(vocab_dim) if r is None else _adam_of_lean(nu, r, vocab_dim)
        # [V, H], in the dtype and with the strides of exp_avg, as Adam itself makes it.
        adam[name] = v if exp_avg is None else torch.empty_like(exp_avg).copy_(v)
    adam.setdefault("exp_avg", torch.zeros_like(adam["exp_avg_sq"]))
    return adam
