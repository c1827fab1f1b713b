"""Adam's state in and out: what checkpoints of torch, FSDP1 and ZeRO contain."""

import warnings
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.checks import Group, check_group, describe, layout_of
from coupled_adam.optim.matrix import OPTIONS
from coupled_adam.optim.state import (
    HOW_TO_LOAD,
    MOMENTS,
    ROW_MOMENT,
    SECOND_MOMENTS,
    entries,
    entry_shape,
    fit_state,
    has_momentum,
    moment_dtype,
)

State = dict[str, Tensor]

_METHOD = ("coupled", "row_exponent", "zero_sum")
"""Options that make it another optimizer: a checkpoint does not change them without a warning."""

_ALWAYS_SAVED = ("lr", "betas", "eps", "weight_decay")


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
        _complete_options(number, group, saved)
        loaded = {**group, **saved, "params": group["params"]}
        check_group(loaded)
        for index, (key, p) in enumerate(zip(saved["params"], group["params"])):
            # Of an empty piece wrappers save nothing, but its rank takes part in the sums.
            is_piece = loaded["coupled"] and p in flat.shards_of(loaded)
            if not state.get(key) and not is_piece:
                continue
            state[key], averages = _converted(loaded, index, state.get(key, {}))
            if loaded["coupled"]:
                moments[p] = averages
    return {**state_dict, "state": state, "param_groups": saved_groups}, moments


def _complete_options(number: int, group: Group, saved: Group) -> None:
    """Add the options that a saved group lacks; warn of those that make it another optimizer."""
    if missing := [name for name in _ALWAYS_SAVED if name not in saved]:
        raise ValueError(
            f"param group {number} of the checkpoint has no {missing}: "
            "set_optimizer_state_dict drops them if the checkpoint's groups differ from the "
            "optimizer's. Pass it the checkpoint's 'state' together with the 'param_groups' of "
            "get_optimizer_state_dict(model, optimizer)"
        )
    for name in OPTIONS:
        saved.setdefault(name, group[name])
    for name in _METHOD:
        matters = name == "coupled" or saved["coupled"]
        if matters and saved[name] != group[name]:
            warnings.warn(
                f"param group {number} was constructed with {name}={group[name]}, but the "
                f"checkpoint has {name}={saved[name]}, which is used from now on, as for every "
                f"option. To keep the constructed value, delete {name!r} from the checkpoint's "
                "group before loading",
                stacklevel=2,
            )
    if saved["coupled"] and has_momentum(group) != has_momentum(saved):
        warnings.warn(
            f"param group {number} was constructed with betas={group['betas']}, but the "
            f"checkpoint has betas={saved['betas']}, which are used from now on, as every "
            "option is, and decide whether the group has momentum. To keep the constructed "
            "ones, set them in the checkpoint's group before loading",
            stacklevel=2,
        )


def _converted(group: Group, index: int, state: State) -> tuple[State, State]:
    """A loaded state as the group needs it, and if that is coupled, its second moments again."""
    p = group["params"][index]
    for name, value in state.items():
        if name != "step" and sharded.is_dtensor(value) != sharded.is_dtensor(p):
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: the parameter is a "
                f"{layout_of(p)}, but its {name} is a {layout_of(value)}. {HOW_TO_LOAD}"
            )
    averages: State = {}
    if group["coupled"] and p in flat.shards_of(group):
        averages = _flat_averages(group, index, state)
        if averages and not state:
            state = {}
            fit_state(group, index, state)
    elif group["coupled"]:
        if missing := {"step", "exp_avg_sq"} - state.keys():
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: it has no "
                f"{', '.join(sorted(missing))}. Was it saved by Adam or Coupled Adam?"
            )
        averages = _averages(group, index, state)
    unneeded = MOMENTS - entries(group).keys() if group["coupled"] else set()
    state = {name: value for name, value in {**state, **averages}.items() if name not in unneeded}
    _check_shapes(group, index, state)
    return state, averages


def _averages(group: Group, index: int, state: State) -> State:
    """Reduce loaded second moments, on the parameter's device, to float32 or wider."""
    p = group["params"][index]
    dtype = moment_dtype(p)
    averages = {}
    for name, dim in entries(group).items():
        value = state.get(name, state.get("exp_avg_sq") if name == ROW_MOMENT else None)
        if value is None or dim is None:
            continue
        value = value.to(dtype)
        if value.shape == p.shape:
            value = sharded.mean_over(value, dim)
        elif name not in state:  # no row had a moment of its own: each starts with the mean of all
            mean = sharded.full_tensor(value.mean()).to(p.device)
            value = sharded.zero_moment(p, dim, dtype) + mean
        averages[name] = sharded.place_moment(value, p, dim).to(p.device)
    return averages


def _flat_averages(group: Group, index: int, state: State) -> State:
    """The same for pieces, of which this rank may have none; empty if no rank has a state."""
    p = group["params"][index]
    averages = {}
    for name, dim in entries(group).items():
        if dim is None:
            continue
        values = state.get("exp_avg_sq" if name == ROW_MOMENT else name)
        if values is not None and values.shape != p.shape:
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: its {name} has the shape "
                f"{list(values.shape)}, but a piece of a flattened matrix needs a number for each "
                f"of its elements, {list(p.shape)}. To load a checkpoint of whole matrices, "
                "convert it with coupled_adam.to_adam_state_dict before the wrapper cuts it"
            )
        values = None if values is None else values.to(p.device)
        means = flat.mean_over(values, flat.shards_of(group)[p], dim, p)
        if means is not None:
            averages[name] = means.to(moment_dtype(p))
    return averages


def _check_shapes(group: Group, index: int, state: State) -> None:
    p = group["params"][index]
    dims = entries(group) if group["coupled"] else {}
    for name, value in state.items():
        expected = entry_shape(group, p, dims.get(name))
        if name != "step" and value.shape != expected:
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: its {name} has the shape "
                f"{list(value.shape)}, but must have {list(expected)} where "
                f"coupled={group['coupled']}. Does the checkpoint belong to this model, with the "
                "parameters in the same order?"
            )


def to_adam_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of Coupled Adam to one that ``torch.optim.Adam(W)`` can load.

    The shared second moment [H] is copied to each of the V rows, in the dtype of ``exp_avg``, and
    the coupling options are removed from the groups. With ``row_exponent`` or ``zero_sum`` each
    row's copy is multiplied by the row's average squared gradient relative to that of all rows. A
    ``second_moment_scale`` other than 1 is lost, as it is applied in the update and is not
    contained in the moment.

    Without momentum (``betas[0] == 0``) the first moment is filled with zeros: Adam continues
    exactly where its betas stay as they are, and with short steps at first where a momentum begins.
    A state without ``exp_avg`` and ``exp_avg_sq_row``, which does not say how many rows there are,
    is left out with a warning, and Adam begins this matrix anew.

    Args:
        state_dict: as returned by ``CoupledAdam(W).state_dict()``; it is not changed.

    Returns:
        A new state dict. It shares the tensors of uncoupled parameters with the given one.
    """
    state = dict(state_dict["state"])
    groups = []
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            if group.get("coupled") and state.get(key):
                state[key] = _spread(state[key], group)
                if not state[key]:
                    warnings.warn(
                        f"the state of parameter {key} has neither exp_avg nor {ROW_MOMENT}, and "
                        "is left out: Adam begins this matrix anew",
                        stacklevel=2,
                    )
        left_out = (*OPTIONS, "flat_shards")
        groups.append({name: value for name, value in group.items() if name not in left_out})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread(state: State, group: Group) -> State:
    """A state of Coupled Adam as Adam's, with moments [V, H]; empty if V cannot be told from it."""
    adam = {name: value for name, value in state.items() if name != ROW_MOMENT}
    vocab_dim, rows, exp_avg = group["vocab_dim"], state.get(ROW_MOMENT), state.get("exp_avg")
    if exp_avg is None and rows is None:
        return {}
    for name in SECOND_MOMENTS:
        # State dicts of flattened matrices have Adam's layout already.
        if name in state and (exp_avg is None or state[name].shape != exp_avg.shape):
            moment = state[name].unsqueeze(vocab_dim)
            if rows is not None:
                moment = moment * _relative(rows).unsqueeze(1 - vocab_dim)
            adam[name] = moment if exp_avg is None else torch.empty_like(exp_avg).copy_(moment)
    adam.setdefault("exp_avg", torch.zeros_like(adam["exp_avg_sq"]))
    return adam


def without_shards(param_groups: list[Group], state_dict: dict[str, Any]) -> dict[str, Any]:
    """Give the pieces of flattened matrices Adam's layout, and leave out ``flat_shards``.

    Args:
        param_groups: the optimizer's param groups.
        state_dict: its state dict; it is not changed.
    """
    state = dict(state_dict["state"])
    groups = []
    for group, saved in zip(param_groups, state_dict["param_groups"]):
        shards = flat.shards_of(group)
        for key, p in zip(saved["params"], group["params"]):
            if group["coupled"] and p in shards and state.get(key):
                state[key] = _spread_pieces(state[key], group["vocab_dim"], p, shards[p])
        groups.append({name: value for name, value in saved.items() if name != "flat_shards"})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread_pieces(state: State, vocab_dim: int, p: Tensor, shards: list[flat.FlatShard]) -> State:
    """The state of pieces as Adam's, with moments for each of their elements."""
    adam = {name: value for name, value in state.items() if name != ROW_MOMENT}
    # FSDP1 gathers a state of all parameters that it has flattened into one, or of none.
    adam.setdefault("exp_avg", torch.zeros_like(p))
    relative: Tensor | float = 1.0
    if ROW_MOMENT in state:
        tokens = [shard.shape[vocab_dim] for shard in shards]
        rows = torch.cat([_relative(r) for r in state[ROW_MOMENT].split(tokens)])
        relative = flat.spread(rows, shards, 1 - vocab_dim, p)
    for name in adam.keys() & {*SECOND_MOMENTS}:
        adam[name] = (flat.spread(adam[name], shards, vocab_dim, p) * relative).to(p.dtype)
    return adam


def _relative(rows: Tensor) -> Tensor:
    """The rows' moments relative to their mean."""
    # All zeros before the first gradient: then nothing has to be divided.
    return rows / rows.mean().clamp(min=torch.finfo(rows.dtype).tiny)
