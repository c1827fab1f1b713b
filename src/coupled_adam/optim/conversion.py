"""Adam's state in and out: what checkpoints of torch contain."""

import warnings
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim import sharded
from coupled_adam.optim.matrix import OPTIONS
from coupled_adam.optim.state import (
    HOW_TO_LOAD,
    MEAN_UPDATE,
    MOMENTS,
    ROW_MOMENT,
    SECOND_MOMENTS,
    Group,
    check_group,
    describe,
    entries,
    entry_shape,
    has_momentum,
    is_lean,
    layout_of,
    moment_dtype,
)

State = dict[str, Tensor]


def from_adam(
    param_groups: list[Group], state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, State]]:
    """Convert a state dict of Adam or of a Coupled Adam to the layout of an optimizer's groups.

    Options that are missing in the saved groups are taken from the optimizer's groups. The second
    moments [V, H] of coupled parameters are replaced by their mean over the vocabulary.

    Args:
        param_groups: the optimizer's param groups.
        state_dict: the state dict to load; it is not changed.

    Returns:
        The converted state dict, and the second moments [H] of each coupled parameter, on the
        parameter's device and in float32 or wider.

    Raises:
        ValueError: if a state does not fit its parameter.
    """
    saved_groups = [dict(group) for group in state_dict["param_groups"]]
    if [len(g["params"]) for g in param_groups] != [len(g["params"]) for g in saved_groups]:
        return state_dict, {}  # torch raises an error that says what is wrong
    state = dict(state_dict["state"])
    moments: dict[Tensor, State] = {}
    for number, (group, saved) in enumerate(zip(param_groups, saved_groups)):
        saved.pop("flat_shards", None)  # the optimizer's own are put back
        _complete_options(number, group, saved)
        loaded = {**group, **saved, "params": group["params"]}
        check_group(loaded)
        for index, (key, p) in enumerate(zip(saved["params"], group["params"])):
            if loaded["coupled"] and state.get(key):
                state[key], moments[p] = _converted(loaded, index, state[key])
    return {**state_dict, "state": state, "param_groups": saved_groups}, moments


def _complete_options(number: int, group: Group, saved: Group) -> None:
    """Add the options that a saved group lacks; warn of those that make it another optimizer."""
    if "betas" not in saved:
        raise ValueError(
            f"param group {number} of the checkpoint has no betas: set_optimizer_state_dict drops "
            "options if the checkpoint's groups differ from the optimizer's. Pass it the "
            "checkpoint's 'state' together with the 'param_groups' of "
            "get_optimizer_state_dict(model, optimizer)"
        )
    for name in OPTIONS:
        saved.setdefault(name, group[name])
    differing = [n for n in ("coupled", "row_exponent", "zero_sum") if saved[n] != group[n]]
    if has_momentum(saved) != has_momentum(group):
        differing.append("betas")
    for name in differing:
        if name == "coupled" or saved["coupled"]:
            warnings.warn(
                f"param group {number} was constructed with {name}={group[name]}, but the "
                f"checkpoint has {name}={saved[name]}, which is used from now on, as for every "
                f"option. To keep the constructed value, set {name!r} in the checkpoint's group "
                "before loading",
                stacklevel=2,
            )


def _converted(group: Group, index: int, state: State) -> tuple[State, State]:
    """A loaded state as its coupled group needs it, and its second moments again."""
    p, needed = group["params"][index], entries(group)
    # Pieces of flattened matrices need the state of such pieces, with the same options.
    required = {"step", *needed} - {"exp_avg"} if p.dim() == 1 else {"step", "exp_avg_sq"}
    averages: State = {}
    problems = [f"it has no {name}" for name in sorted(required - state.keys())]
    if "exp_avg_sq_row" in state:
        problems = [
            "its exp_avg_sq_row is that of a LEAN that counted the first gradient twice. Load the "
            "model's weights alone, and begin with a new optimizer"
        ]
    problems += [
        f"its {name} is a {layout_of(value)}, but the parameter is a {layout_of(p)}. {HOW_TO_LOAD}"
        for name, value in state.items()
        if name in MOMENTS and sharded.is_dtensor(value) != sharded.is_dtensor(p)
    ]
    if not problems:
        averages = _averages(group, p, state)
        unneeded = MOMENTS - needed.keys()  # what is neither Adam's nor ours stays
        state = {n: value for n, value in {**state, **averages}.items() if n not in unneeded}
        shapes = {name: entry_shape(group, p, dim) for name, dim in needed.items()}
        problems = [
            f"its {name} has the shape {list(state[name].shape)}, but must have {list(shape)}. "
            "Does the checkpoint belong to this model, with the parameters in the same order?"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ]
    if problems:
        raise ValueError(f"cannot load the state of {describe(group, index)}: {problems[0]}")
    return state, averages


def _averages(group: Group, p: Tensor, state: State) -> State:
    """The second moments of a loaded state, on the parameter's device, in float32 or wider."""
    vocab_dim, dtype = group["vocab_dim"], moment_dtype(p)
    names = {*SECOND_MOMENTS, ROW_MOMENT, MEAN_UPDATE} & state.keys()
    moments = {name: state[name].to(dtype) for name in names}
    nu = moments["exp_avg_sq"]
    if is_lean(group) and ROW_MOMENT not in moments:
        if nu.shape == p.shape:  # of Adam
            rows, nu = sharded.mean_over(nu, 1 - vocab_dim), sharded.mean_over(nu, vocab_dim)
        else:  # of Coupled Adam: nothing tells the rows apart
            mean = sharded.full_tensor(nu.mean()).to(p.device)
            rows = sharded.zero_moment(p, 1 - vocab_dim, dtype) + mean
        # LEAN's nu is a mean over the rows that have had a gradient.
        active = max(sharded.full_tensor((rows > 0).sum()).item(), 1)
        moments |= {ROW_MOMENT: rows, "exp_avg_sq": nu * (len(rows) / active)}
    elif not is_lean(group) and ROW_MOMENT in moments:  # of LEAN
        mean = sharded.full_tensor(moments[ROW_MOMENT].mean())
        moments["exp_avg_sq"] = nu * (mean / _mean_of_columns(nu))
    averages = {}
    for name, dim in entries(group).items():
        if dim is None:
            continue
        if name not in moments:  # it begins now
            averages[name] = sharded.zero_moment(p, dim, dtype)
            continue
        value = moments[name]
        if value.shape == p.shape and p.dim() == 2:  # of Adam
            value = sharded.mean_over(value, dim)
        if value.shape == entry_shape(group, p, dim):
            averages[name] = sharded.place_moment(value, p, dim).to(p.device)
    return averages


def _mean_of_columns(nu: Tensor) -> float:
    """The mean of nu; not 0 before the first gradient, since nu is divided by it."""
    mean: float = sharded.full_tensor(nu.mean()).item()
    return mean or 1.0


def to_adam_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of Coupled Adam to one that ``torch.optim.Adam(W)`` can load.

    The shared second moment [H] is copied to each of the V rows, in the dtype of ``exp_avg``, and
    the coupling options are removed from the groups. LEAN's moments become r_i nu_j / mean(nu).
    ``second_moment_scale`` is lost. Without momentum the first moment is filled with zeros. A state
    without ``exp_avg`` and ``row_exp_avg_sq``, which does not say how many rows there are, is left
    out: Adam begins this matrix anew.

    Args:
        state_dict: as returned by ``CoupledAdam(W).state_dict()``; it is not changed.

    Returns:
        A new state dict. It shares the tensors of uncoupled parameters with the given one.

    Raises:
        ValueError: if the state is that of pieces of flattened matrices.
    """
    state = dict(state_dict["state"])
    groups = []
    for group in state_dict["param_groups"]:
        if group.get("flat_shards"):
            raise ValueError(
                "the state dict has pieces of flattened matrices, as of DeepSpeed's ZeRO 1 and 2: "
                "only the state of whole matrices can be converted"
            )
        for key in group["params"]:
            if group.get("coupled") and state.get(key):
                state[key] = _spread(state[key], group)
        left_out = (*OPTIONS, "flat_shards", "initial_lr_factor")
        groups.append({name: value for name, value in group.items() if name not in left_out})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread(state: State, group: Group) -> State:
    """A state of Coupled Adam as Adam's, with moments [V, H]; empty if V cannot be told from it."""
    adam = {name: value for name, value in state.items() if name not in (ROW_MOMENT, MEAN_UPDATE)}
    vocab_dim, rows, exp_avg = group["vocab_dim"], state.get(ROW_MOMENT), state.get("exp_avg")
    if exp_avg is None and rows is None:
        return {}
    for name in state.keys() & {*SECOND_MOMENTS}:
        moment = state[name].unsqueeze(vocab_dim)
        if rows is not None:  # of LEAN: v_ij = r_i nu_j / mean(nu)
            moment = moment / _mean_of_columns(state[name])
            moment = moment * rows.unsqueeze(1 - vocab_dim)
        adam[name] = moment if exp_avg is None else torch.empty_like(exp_avg).copy_(moment)
    adam.setdefault("exp_avg", torch.zeros_like(adam["exp_avg_sq"]))
    return adam
