"""Adam's state in and out: what checkpoints of torch and of DeepSpeed's ZeRO contain."""

import warnings
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.matrix import OPTIONS
from coupled_adam.optim.param_groups import INITIAL
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
    fit_state,
    has_momentum,
    is_lean,
    layout_of,
    moment_dtype,
)

State = dict[str, Tensor]

FLAT_NU = "exp_avg_sq_column"
"""LEAN's nu in the state dict of pieces, whose ``exp_avg_sq`` is Adam's: for each element."""

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
            if not loaded["coupled"]:
                _check_shapes(loaded, index, state[key], {"exp_avg_sq": p.shape})
                continue
            state[key], moments[p] = _converted(loaded, index, state.get(key, {}))
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
    for name, value in state.items():
        if name in MOMENTS and sharded.is_dtensor(value) != sharded.is_dtensor(p):
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: the parameter is a "
                f"{layout_of(p)}, but its {name} is a {layout_of(value)}. {HOW_TO_LOAD}"
            )
    if p in flat.shards_of(group):
        step = _step_of_ranks(state, flat.shards_of(group)[p], p)
        averages = _flat_averages(group, index, state, step)
        if averages and not state:
            state = {}
            fit_state(group, index, state)
            state["step"].fill_(step)  # otherwise this rank would begin LEAN anew
    else:
        if missing := {"step", "exp_avg_sq"} - state.keys():
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: it has no "
                f"{', '.join(sorted(missing))}. Was it saved by Adam or Coupled Adam?"
            )
        averages = _averages(group, p, state)
    # What is not Adam's is the user's, and stays.
    unneeded = {FLAT_NU, *MOMENTS} - needed.keys()
    state = {name: value for name, value in {**state, **averages}.items() if name not in unneeded}
    shapes = {name: entry_shape(group, p, dim) for name, dim in needed.items()}
    _check_shapes(group, index, state, shapes)
    return state, averages


def _check_shapes(group: Group, index: int, state: State, shapes: dict[str, torch.Size]) -> None:
    for name, shape in shapes.items():
        if name in state and state[name].shape != shape:
            raise ValueError(
                f"cannot load the state of {describe(group, index)}: its {name} has the shape "
                f"{list(state[name].shape)}, but must have {list(shape)} where "
                f"coupled={group['coupled']}. Does the checkpoint belong to this model, with the "
                "parameters in the same order?"
            )


def _averages(group: Group, p: Tensor, state: State) -> State:
    """The second moments of a loaded state, on the parameter's device, in float32 or wider."""
    step, needed = state["step"], entries(group)
    names = {*SECOND_MOMENTS, ROW_MOMENT, MEAN_UPDATE} & state.keys()
    moments = {name: state[name].to(moment_dtype(p)) for name in names}
    nu, is_complete = moments["exp_avg_sq"], needed.keys() <= {*state, "exp_avg"}
    if is_lean(group) and nu.shape == p.shape:
        moments |= _lean_of_adam(group, nu, step)
    elif is_lean(group) and not is_complete:
        moments |= _lean_of_means(group, p, moments, step)
    elif not is_lean(group) and ROW_MOMENT in moments:  # of LEAN
        mean = sharded.full_tensor(moments[ROW_MOMENT].mean())
        share = mean / _mean_of_columns(nu) * _correction(group, step, 0)
        moments["exp_avg_sq"] = nu * (share / _correction(group, step, 1))
    averages = {}
    for name, dim in needed.items():
        if dim is None:
            continue
        if name not in moments and name == "max_exp_avg_sq":
            moments[name] = moments["exp_avg_sq"].clone()
        value = moments.get(name)
        if value is None:  # no mean update yet
            averages[name] = sharded.zero_moment(p, dim, moment_dtype(p))
            continue
        if value.shape == p.shape:  # of Adam, or of pieces
            value = sharded.mean_over(value, dim)
        if value.shape == entry_shape(group, p, dim):
            averages[name] = sharded.place_moment(value, p, dim).to(p.device)
    return averages


def _lean_of_adam(group: Group, v: Tensor, step: Any) -> State:
    """LEAN's r_i = mean_j v_ij, and nu_j, the mean of v_ij over rows with a gradient, of Adam."""
    vocab_dim = group["vocab_dim"]
    means = {
        ROW_MOMENT: sharded.mean_over(v, 1 - vocab_dim),
        "exp_avg_sq": sharded.mean_over(v, vocab_dim),
    }
    return _lean_of_means(group, v, means, step)


def _lean_of_means(group: Group, p: Tensor, moments: State, step: Any) -> State:
    """The same where only means over rows and columns are known, as if v were their product.

    Without a mean of each row, all rows have the mean of all.
    """
    nu, rows, dtype = moments["exp_avg_sq"], moments.get(ROW_MOMENT), moment_dtype(p)
    if rows is None:
        mean = sharded.full_tensor(nu.mean()).to(p.device)
        rows = sharded.zero_moment(p, 1 - group["vocab_dim"], dtype) + mean
    r = rows / _correction(group, step, 0)
    return {
        ROW_MOMENT: r * _correction(group, step, 1),
        "exp_avg_sq": nu * (_nu_share(r, nu) * _correction(group, step, 1)),
    }


def _nu_share(r: Tensor, nu: Tensor) -> float:
    """The mean of the r_i that are not 0, relative to the mean of nu."""
    count = max(sharded.full_tensor((r > 0).sum()).item(), 1)
    total: float = sharded.full_tensor(r.sum()).item()
    return total / count / _mean_of_columns(nu)


def _mean_of_columns(nu: Tensor) -> float:
    """The mean of nu; not 0 before the first gradient, since nu is divided by it."""
    mean: float = sharded.full_tensor(nu.mean()).item()
    return mean or 1.0


def _correction(group: Group, step: Any, more: int) -> float:
    """1 - beta2^t, in LEAN of one gradient more, since it passes over the first one twice."""
    beta2 = float(group["betas"][1])
    return 1 - beta2 ** (float(step) + more) or 1.0


def _step_of_ranks(state: State, shards: list[flat.FlatShard], p: Tensor) -> float:
    """The step that the ranks have loaded, but for those that have no piece, which have none."""
    loaded = [float(state["step"]), 1.0] if "step" in state else [0.0, 0.0]
    wide = torch.float32 if p.device.type == "mps" else torch.float64
    total = torch.tensor(loaded, dtype=wide, device=p.device)
    summed = sharded.add_up(total, sharded.ranks_of(shards[0].process_group))
    return summed[0].item() / (summed[1].item() or 1.0)


def _flat_averages(group: Group, index: int, state: State, step: float) -> State:
    """The second moments of pieces, of which this rank may have none; empty if no rank has any."""
    p, vocab_dim = group["params"][index], group["vocab_dim"]
    shards, means = flat.shards_of(group)[p], {}
    for name, dim in entries(group).items():
        if dim is None or name == MEAN_UPDATE:
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
        mean = flat.mean_over(values, shards, dim, p)
        if mean is not None:
            means[name] = mean.to(moment_dtype(p))
    if not means or not is_lean(group):
        return means
    features = [shard.shape[1 - vocab_dim] for shard in shards]
    tokens = [shard.shape[vocab_dim] for shard in shards]
    rows = means[ROW_MOMENT] / _correction(group, step, 0)
    of_matrices = zip(rows.split(tokens), means["exp_avg_sq"].split(features))
    nus = [nu * _nu_share(r, nu) for r, nu in of_matrices]
    correction = _correction(group, step, 1)
    averages = {ROW_MOMENT: rows * correction, "exp_avg_sq": torch.cat(nus) * correction}
    if group["zero_sum"]:
        averages[MEAN_UPDATE] = torch.zeros_like(averages["exp_avg_sq"])
    # What LEAN itself has saved is exact.
    for name, key in (("exp_avg_sq", FLAT_NU), (MEAN_UPDATE, MEAN_UPDATE)):
        values = state.get(key)
        mean = flat.mean_over(None if values is None else values.to(p.device), shards, vocab_dim, p)
        if mean is not None and name in averages:
            averages[name] = mean.to(moment_dtype(p))
    return averages


def to_adam_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of Coupled Adam to one that ``torch.optim.Adam(W)`` can load.

    The shared second moment [H] is copied to each of the V rows, in the dtype of ``exp_avg``, and
    the coupling options are removed from the groups. LEAN's moments become r_i nu_j / mean(nu). A
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
        left_out = (*OPTIONS, "flat_shards", *INITIAL)
        groups.append({name: value for name, value in group.items() if name not in left_out})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread(state: State, group: Group) -> State:
    """A state of Coupled Adam as Adam's, with moments [V, H]; empty if V cannot be told from it."""
    ours = {ROW_MOMENT, MEAN_UPDATE, FLAT_NU}
    adam = {name: value for name, value in state.items() if name not in ours}
    vocab_dim, rows, exp_avg = group["vocab_dim"], state.get(ROW_MOMENT), state.get("exp_avg")
    if exp_avg is None and rows is None:
        return {}
    for name in SECOND_MOMENTS:
        # State dicts of flattened matrices have Adam's layout already.
        if name in state and (exp_avg is None or state[name].shape != exp_avg.shape):
            moment = state[name].unsqueeze(vocab_dim)
            if rows is not None:
                moment = _relative(state[name], group, state["step"]).unsqueeze(vocab_dim)
                moment = moment * rows.unsqueeze(1 - vocab_dim)
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
                state[key] = _spread_pieces(state[key], group, p, shards[p])
        groups.append({name: value for name, value in saved.items() if name != "flat_shards"})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread_pieces(state: State, group: Group, p: Tensor, shards: list[flat.FlatShard]) -> State:
    """The state of pieces as Adam's, with moments for each of their elements."""
    ours = {ROW_MOMENT, MEAN_UPDATE}
    adam = {name: value for name, value in state.items() if name not in ours}
    adam.setdefault("exp_avg", torch.zeros_like(p))
    vocab_dim = group["vocab_dim"]
    if ROW_MOMENT in state:
        features = [shard.shape[1 - vocab_dim] for shard in shards]
        relative = torch.cat(
            [_relative(nu, group, state["step"]) for nu in adam["exp_avg_sq"].split(features)]
        )
        rows = flat.spread(state[ROW_MOMENT].to(p.dtype), shards, 1 - vocab_dim, p)
        adam[FLAT_NU] = flat.spread(adam["exp_avg_sq"], shards, vocab_dim, p)
        adam["exp_avg_sq"] = flat.spread(relative, shards, vocab_dim, p) * rows
        if MEAN_UPDATE in state:
            adam[MEAN_UPDATE] = flat.spread(state[MEAN_UPDATE], shards, vocab_dim, p)
        return adam
    for name in adam.keys() & {*SECOND_MOMENTS}:
        adam[name] = flat.spread(adam[name], shards, vocab_dim, p).to(p.dtype)
    return adam


def _relative(nu: Tensor, group: Group, step: Any) -> Tensor:
    """LEAN's nu relative to its mean, for Adam's v_ij = r_i nu_j / mean(nu)."""
    ratio = _correction(group, step, 0) / _correction(group, step, 1)
    return nu * (ratio / _mean_of_columns(nu))
