"""The optimizer state of a coupled parameter: creation, checks, and conversion from and to Adam's.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import (
    _device_dtype_check_for_fused,
    _get_capturable_supported_devices,
    _get_scalar_dtype,
)

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.matrix import OPTIONS
from coupled_adam.optim.token_embeddings import check_not_tensor_parallel

_METHOD = ("coupled", "row_exponent", "zero_sum")
"""Options that make it another optimizer: a checkpoint does not change them without a warning."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""The states that have the shape [V, H] in Adam, and [H] in Coupled Adam."""

ROW_MOMENT = "exp_avg_sq_row"
"""The state of shape [V] that ``row_exponent`` and ``zero_sum`` add."""

_ALWAYS_SAVED = ("lr", "betas", "eps", "weight_decay")

Group = dict[str, Any]


def fit_state(group: Group, index: int, state: dict[str, Tensor]) -> None:
    """Give a state exactly the entries that the group's options need.

    A new state is all zeros, with the second moments in float32 or wider. Options may change
    between two steps, and then an entry that is no longer needed is dropped, since nobody would
    keep it up to date. One that is needed from now on begins: ``exp_avg`` at zero,
    ``exp_avg_sq_row`` with the mean of ``exp_avg_sq`` for all tokens, and ``max_exp_avg_sq`` with
    ``exp_avg_sq``.

    Raises:
        RuntimeError: if an entry that stays does not fit the parameter. Nothing has been changed.
    """
    p, dims = group["params"][index], _dims(group)
    for name, dim in dims.items():
        if name in state:
            _check_entry(group, index, name, state[name], dim)
    if state.keys() == {"step", *dims}:
        return
    is_new = not state
    if is_new:
        _warn_of_rows_without_gradient(group, index)
        if group["fused"]:
            _device_dtype_check_for_fused(p)
        on_device = (group["capturable"] or group["fused"]) and not p.is_cpu
        dtype = _get_scalar_dtype(is_fused=group["fused"])
        # On a CPU a constant, whose value can be read even under FakeTensorMode.
        state["step"] = (
            torch.zeros((), dtype=dtype, device=p.device)
            if on_device
            else torch.tensor(0.0, dtype=dtype)
        )
    for name in {"exp_avg", *SECOND_MOMENTS, ROW_MOMENT} - dims.keys():
        state.pop(name, None)
    for name, dim in dims.items():
        if name in state:
            continue
        if dim is None:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            continue
        state[name] = _zero_moment(group, p, dim)
        if not is_new and name == ROW_MOMENT:
            state[name] += sharded.full_tensor(state["exp_avg_sq"].mean())
        elif not is_new:
            state[name].copy_(state["exp_avg_sq"])


def _dims(group: Group) -> dict[str, int | None]:
    """The entries of a coupled matrix's state, but for the step.

    Each is a mean over a dimension of the matrix, or for None has the matrix's shape.
    """
    vocab_dim: int = group["vocab_dim"]
    dims: dict[str, int | None] = {"exp_avg": None} if has_momentum(group) else {}
    dims["exp_avg_sq"] = vocab_dim
    if group["amsgrad"]:
        dims["max_exp_avg_sq"] = vocab_dim
    if group["row_exponent"] != 0 or group["zero_sum"]:
        dims[ROW_MOMENT] = 1 - vocab_dim
    return dims


def has_momentum(group: Group) -> bool:
    """Whether a coupled matrix has a first moment; a tensor's value is not asked for."""
    beta1 = group["betas"][0]
    return isinstance(beta1, Tensor) or beta1 != 0


def _zero_moment(group: Group, p: Tensor, dim: int) -> Tensor:
    if p in flat.shards_of(group):
        shape = _moment_shape(group, p, dim)
        return torch.zeros(shape, dtype=_moment_dtype(p), device=p.device)
    return sharded.zero_moment(p, dim, _moment_dtype(p))


def _moments(group: Group) -> dict[str, int]:
    """The second moments of a coupled matrix, and the dimension over which each is averaged."""
    return {name: dim for name, dim in _dims(group).items() if dim is not None}


def check_group(group: Group) -> None:
    """Raise ValueError for options out of range, or parameters that cannot be coupled."""
    check_options(group)
    _check_flat_shards(group)
    if group["coupled"]:
        for index, p in enumerate(group["params"]):
            _check_matrix(group, index)
            check_not_tensor_parallel(p, group["vocab_dim"], _describe(group, index))


def check_options(group: Group, read_tensors: bool = True) -> None:
    """Raise ValueError for options out of range.

    Args:
        group: the param group.
        read_tensors: whether to wait for the values of tensors on a device.
    """
    if not isinstance(group["coupled"], bool):
        raise ValueError(f"Invalid coupled value: {group['coupled']!r} (True or False)")
    if not 0.0 < group["second_moment_scale"] < math.inf:
        raise ValueError(
            f"Invalid second_moment_scale: {group['second_moment_scale']} "
            "(must be positive and finite)"
        )
    if not 0.0 <= group["row_exponent"] <= 1.0:
        raise ValueError(
            f"Invalid row_exponent: {group['row_exponent']} (must be between 0, Coupled Adam, and "
            "1, a step size of its own for each token)"
        )
    if not isinstance(group["zero_sum"], bool):
        raise ValueError(f"Invalid zero_sum: {group['zero_sum']!r} (True or False)")
    if group["vocab_dim"] not in (0, 1):
        raise ValueError(
            f"Invalid vocab_dim: {group['vocab_dim']!r} (0 for matrices [V, H], 1 for [H, V])"
        )
    if not isinstance(group["stochastic_rounding"], bool):
        raise ValueError(
            f"Invalid stochastic_rounding: {group['stochastic_rounding']!r} (True or False)"
        )
    if not group["coupled"]:
        return
    if group["stochastic_rounding"] and group["differentiable"]:
        raise ValueError(
            "stochastic_rounding=True is not differentiable: construct the optimizer with "
            "differentiable=False"
        )
    if group["amsgrad"] and group["row_exponent"] != 0:
        raise ValueError(
            f"row_exponent={group['row_exponent']} is not defined with amsgrad=True, whose running "
            "maximum is taken of the shared moment only: set one of them to its default"
        )
    # torch checks these only for the constructor's arguments, not for those of a group.
    if not group["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
    if (read_tensors or not isinstance(group["lr"], Tensor)) and not group["lr"] >= 0.0:
        raise ValueError(f"Invalid learning rate: {group['lr']}")
    for index, beta in enumerate(group["betas"]):
        if (read_tensors or not isinstance(beta, Tensor)) and not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def check_parameter(group: Group, index: int) -> None:
    """Raise ValueError or RuntimeError if a parameter cannot be updated.

    :func:`check_group` has checked the parameters already, but wrappers may replace them later.
    """
    p = group["params"][index]
    _check_matrix(group, index)
    grad = p.grad
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"cannot couple {_describe(group, index)}: its gradient is sparse, but coupling "
            "averages over all rows. Construct the embedding with sparse=False"
        )
    if sharded.is_dtensor(grad) != sharded.is_dtensor(p):
        raise RuntimeError(
            f"cannot couple {_describe(group, index)}: it is a {_kind(p)}, but its gradient is a "
            f"{_kind(grad)}. Make both DTensors, or both whole tensors"
        )
    if group["capturable"] and p.device.type not in _get_capturable_supported_devices():
        raise RuntimeError(
            f"capturable=True needs a device of {_get_capturable_supported_devices()}, "
            f"but {_describe(group, index)} is on {p.device}. Construct with capturable=False"
        )


def _check_entry(group: Group, index: int, name: str, value: Tensor, dim: int | None) -> None:
    """Raise RuntimeError if an entry of a state does not fit; ``dim`` as :func:`_dims` says it."""
    p = group["params"][index]
    shape = p.shape if dim is None else _moment_shape(group, p, dim)
    if value.device != p.device:
        raise RuntimeError(
            f"{_describe(group, index)} is on {p.device}, but {name} in its optimizer state is on "
            f"{value.device}. optimizer.load_state_dict(optimizer.state_dict()) moves the state"
        )
    if value.shape != shape:
        raise RuntimeError(
            f"the state of {_describe(group, index)} has {name} {list(value.shape)}; the shape "
            f"must be {list(shape)}. If 'coupled' was set after the first step, "
            "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        )
    if not (
        sharded.same_layout(p, value) if dim is None else sharded.moment_is_placed(value, p, dim)
    ):
        raise RuntimeError(
            f"{_describe(group, index)} is a {_kind(p)}, but its state is laid out differently: "
            f"{name} is a {_kind(value)}. {_HOW_TO_LOAD}"
        )


def _warn_of_rows_without_gradient(group: Group, index: int) -> None:
    """Warn if most rows have no gradient, and the shared second moment averages over them.

    The other rows then move too far: by Adam's steps times the root of V over their number.
    """
    p = group["params"][index]
    grad = p.grad
    if grad is None or grad.is_meta or type(grad) is not Tensor or ROW_MOMENT in _dims(group):
        return
    if p in flat.shards_of(group):
        return
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a captured step must not wait for the device
    rows = p.shape[group["vocab_dim"]]
    active = grad.count_nonzero(1 - group["vocab_dim"]).count_nonzero()
    if isinstance(active, FakeTensor) or active == 0 or active > rows / 10:
        return
    warnings.warn(
        f"in the first step only {active} of the {rows} rows of {_describe(group, index)} have a "
        "gradient. The shared second moment averages over all rows, so these move up to "
        f"{math.sqrt(rows / int(active)):.0f} times as far as with Adam, until more rows have had "
        "one. With zero_sum=True or row_exponent=0.5 the average leaves out rows that never had a "
        "gradient; or warm the learning rate up",
        stacklevel=2,
    )


def from_adam(
    param_groups: list[Group], state_dict: dict[str, Any]
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Tensor]]]:
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
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for number, (group, saved) in enumerate(zip(param_groups, saved_groups)):
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
        fitted = {**group, **saved, "params": group["params"]}
        check_group(fitted)
        if saved["coupled"] and has_momentum(group) != has_momentum(saved):
            warnings.warn(
                f"param group {number} was constructed with betas={group['betas']}, but the "
                f"checkpoint has betas={saved['betas']}, which are used from now on, as every "
                "option is, and decide whether the group has momentum. To keep the constructed "
                "ones, set them in the checkpoint's group before loading",
                stacklevel=2,
            )
        for index, (key, p) in enumerate(zip(saved["params"], group["params"])):
            is_flat = p in flat.shards_of(fitted)
            if not state.get(key) and not (is_flat and saved["coupled"]):
                continue
            for name, value in state.get(key, {}).items():
                if name != "step" and sharded.is_dtensor(value) != sharded.is_dtensor(p):
                    raise ValueError(
                        f"cannot load the state of {_describe(fitted, index)}: the parameter is a "
                        f"{_kind(p)}, but its {name} is a {_kind(value)}. {_HOW_TO_LOAD}"
                    )
            if is_flat and saved["coupled"]:
                state[key], moments[p] = _flat_averages(fitted, index, state.get(key, {}))
            elif saved["coupled"]:
                if missing := {"step", "exp_avg_sq"} - state[key].keys():
                    raise ValueError(
                        f"cannot load the state of {_describe(fitted, index)}: it has no "
                        f"{', '.join(sorted(missing))}. Was it saved by Adam or Coupled Adam?"
                    )
                moments[p] = _averages(fitted, index, state[key])
                state[key] = {**state[key], **moments[p]}
            if saved["coupled"] and not has_momentum(fitted):
                state[key] = {k: v for k, v in state[key].items() if k != "exp_avg"}
            shapes = {name: value.shape for name, value in state[key].items() if name != "step"}
            _check_shapes(fitted, index, shapes)
    return {**state_dict, "state": state, "param_groups": saved_groups}, moments


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
            if not group["coupled"] or p not in shards or not state.get(key):
                continue
            adam = {name: value for name, value in state[key].items() if name != ROW_MOMENT}
            # FSDP1 gathers a state of all parameters that it has flattened into one, or of none.
            adam.setdefault("exp_avg", torch.zeros_like(p))
            relative: Tensor | float = 1.0
            if ROW_MOMENT in state[key]:
                tokens = [shard.shape[group["vocab_dim"]] for shard in shards[p]]
                rows = torch.cat([_relative(r) for r in state[key][ROW_MOMENT].split(tokens)])
                relative = flat.spread(rows, shards[p], 1 - group["vocab_dim"], p)
            for name in SECOND_MOMENTS:
                if name in adam:
                    moment = flat.spread(adam[name], shards[p], group["vocab_dim"], p)
                    adam[name] = (moment * relative).to(p.dtype)
            state[key] = adam
        groups.append({name: value for name, value in saved.items() if name != "flat_shards"})
    return {**state_dict, "state": state, "param_groups": groups}


def _spread(state: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
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


def _relative(rows: Tensor) -> Tensor:
    """The rows' moments relative to their mean."""
    # All zeros before the first gradient: then nothing has to be divided.
    return rows / rows.mean().clamp(min=torch.finfo(rows.dtype).tiny)


_HOW_TO_LOAD = (
    "To load a state into a model that is sharded in another way, use "
    "torch.distributed.checkpoint, or its set_optimizer_state_dict(..., "
    "options=StateDictOptions(full_state_dict=True))"
)


def _kind(tensor: Tensor) -> str:
    """Describe a tensor's layout in an error message."""
    if not sharded.is_dtensor(tensor):
        return "whole tensor"
    return f"DTensor with placements {tensor.placements}"  # type: ignore[attr-defined]


def _moment_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _moment_shape(group: Group, p: Tensor, dim: int) -> torch.Size:
    """The shape of a mean over a dimension of ``p``, or of all matrices of which it has pieces."""
    if (shards := flat.shards_of(group).get(p)) is not None:
        return torch.Size([sum(shard.shape[1 - dim] for shard in shards)])
    return torch.Size([p.shape[1 - dim]])


def _averages(group: Group, index: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reduce loaded second moments, on the parameter's device, to float32 or wider."""
    p = group["params"][index]
    dtype = _moment_dtype(p)
    averages = {}
    for name, dim in _moments(group).items():
        value = state.get(name, state.get("exp_avg_sq") if name == ROW_MOMENT else None)
        if value is None:
            continue
        value = value.to(dtype)
        if value.shape == p.shape:
            value = sharded.mean_over(value, dim)
        elif name not in state:  # no row had a moment of its own: each starts with the mean of all
            mean = sharded.full_tensor(value.mean()).to(p.device)
            value = sharded.zero_moment(p, dim, dtype) + mean
        averages[name] = sharded.place_moment(value, p, dim).to(p.device)
    return averages


def _flat_averages(
    group: Group, index: int, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reduce the loaded second moments of pieces, of which this rank may have none.

    Returns:
        The state in Coupled Adam's layout, and the second moments again. Both are empty if no rank
        has loaded a state.
    """
    p = group["params"][index]
    averages = {}
    for name, dim in _moments(group).items():
        values = state.get("exp_avg_sq" if name == ROW_MOMENT else name)
        if values is not None and values.shape != p.shape:
            raise ValueError(
                f"cannot load the state of {_describe(group, index)}: its {name} has the shape "
                f"{list(values.shape)}, but a piece of a flattened matrix needs a number for each "
                f"of its elements, {list(p.shape)}. To load a checkpoint of whole matrices, "
                "convert it with coupled_adam.to_adam_state_dict before the wrapper cuts it"
            )
        if values is not None:
            values = values.to(p.device)
        means = flat.mean_over(values, flat.shards_of(group)[p], dim, p)
        if means is not None:
            averages[name] = means.to(_moment_dtype(p))
    if averages and not state:  # of an empty piece, for which wrappers save nothing
        state = {}
        fit_state(group, index, state)
    return {**state, **averages}, averages


def _describe(group: Group, index: int) -> str:
    """Describe a parameter by its name and shape in an error message."""
    shape = list(group["params"][index].shape)
    names = group.get("param_names", ())
    if len(names) == len(group["params"]):  # a wrapper may have put one tensor in place of several
        return f"{names[index]!r} {shape}"
    return f"parameter {index} {shape} of its group"


def _check_flat_shards(group: Group) -> None:
    if group.get("flat_shards") is None:
        return
    if len(group["flat_shards"]) != len(group["params"]):
        raise ValueError(
            f"flat_shards has {len(group['flat_shards'])} entries for {len(group['params'])} "
            "parameters: give one for each, None for a whole parameter"
        )
    if group["coupled"] and group["differentiable"]:
        raise ValueError(
            "differentiable=True is not supported for pieces of flattened matrices: leave out "
            "differentiable, or flat_shards"
        )


def _check_pieces(group: Group, index: int, shards: list[flat.FlatShard]) -> None:
    """Raise ValueError if a flat parameter does not hold the pieces that ``flat_shards`` says."""
    p = group["params"][index]
    for shard in shards:
        problem = None
        end = p.numel() if shard.numel is None else shard.start + shard.numel
        if len(shard.shape) != 2 or min(shard.shape) < 1:
            problem = "only matrices [V, H] can be coupled"
        elif p.dim() != 1 or not p.is_floating_point() or sharded.is_dtensor(p):
            problem = (
                f"the parameter must be a real, plain tensor with one dimension, not a {p.dtype} "
                f"{_kind(p)} of shape {list(p.shape)}"
            )
        elif not 0 <= shard.start <= end <= p.numel():
            problem = f"the parameter has {p.numel()} elements"
        elif not 0 <= shard.offset <= shard.shape[0] * shard.shape[1] - (end - shard.start):
            problem = f"{end - shard.start} elements do not fit into the matrix at this offset"
        if problem:
            raise ValueError(f"cannot couple {_describe(group, index)} as {shard}: {problem}")


def _check_matrix(group: Group, index: int) -> None:
    p = group["params"][index]
    if (shards := flat.shards_of(group).get(p)) is not None:
        _check_pieces(group, index, shards)
        return
    partial = sharded.is_dtensor(p) and any(placed.is_partial() for placed in p.placements)
    if p.dim() == 2 and p.numel() > 0 and p.is_floating_point() and not partial:
        return
    if partial:
        problem = (
            f"it is a {_kind(p)}, and a partial sum cannot be updated. "
            "Redistribute it to Shard or Replicate"
        )
    elif p.dim() == 1:
        problem = (
            "only matrices [V, H] can be coupled. Move it to a group without coupled=True; or, if "
            "a wrapper has flattened a matrix into it, make the param groups of the model that "
            "FSDP1 has wrapped with use_orig_params=True, call "
            "coupled_adam.deepspeed.couple(engine) for ZeRO 1 and 2, or use a wrapper that keeps "
            "matrices (FSDP2)"
        )
    elif p.dim() != 2:
        problem = "only matrices [V, H] can be coupled. Move it to a group without coupled=True"
    elif p.numel() == 0:
        problem = "it is empty. Move it to a group without coupled=True"
    else:
        problem = f"its dtype is {p.dtype}, but coupling needs a real floating-point dtype"
    raise ValueError(f"cannot couple {_describe(group, index)}: {problem}")


def _check_shapes(group: Group, index: int, shapes: dict[str, torch.Size]) -> None:
    p = group["params"][index]
    for name, shape in shapes.items():
        dim = _dims(group).get(name) if group["coupled"] else None
        expected = p.shape if dim is None else _moment_shape(group, p, dim)
        if shape != expected:
            raise ValueError(
                f"cannot load the state of {_describe(group, index)}: its {name} has the shape "
                f"{list(shape)}, but must have {list(expected)} where coupled={group['coupled']}. "
                "Does the checkpoint belong to this model, with the parameters in the same order?"
            )
