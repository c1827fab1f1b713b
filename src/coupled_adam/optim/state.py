"""The optimizer state of a coupled parameter: creation, checks, and conversion from and to Adam's.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _device_dtype_check_for_fused,
    _get_capturable_supported_devices,
    _get_scalar_dtype,
)

from coupled_adam.optim import sharded
from coupled_adam.optim.token_embeddings import check_not_tensor_parallel

OPTIONS = ("coupled", "second_moment_scale", "vocab_dim", "stochastic_rounding")
"""Options of a param group that torch.optim.Adam does not have."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""The states that have the shape [V, H] in Adam, and [H] in Coupled Adam."""

_ALWAYS_SAVED = ("lr", "betas", "eps", "weight_decay")

Group = dict[str, Any]


def new_state(group: Group, p: Tensor) -> dict[str, Tensor]:
    """The state before the first step: all zeros, the second moments [H] in float32 or wider."""
    if group["fused"]:
        _device_dtype_check_for_fused(p)
    on_device = group["capturable"] or group["fused"]
    dtype = _get_scalar_dtype(is_fused=group["fused"])
    state = {
        # On a CPU a constant, whose value can be read even under FakeTensorMode.
        "step": torch.zeros((), dtype=dtype, device=p.device)
        if on_device and not p.is_cpu
        else torch.tensor(0.0, dtype=dtype),
        "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
    }
    for name in SECOND_MOMENTS if group["amsgrad"] else SECOND_MOMENTS[:1]:
        state[name] = sharded.zero_moment(p, group["vocab_dim"], _moment_dtype(p))
    return state


def check_group(group: Group) -> None:
    """Raise ValueError for coupling options out of range, or parameters that cannot be coupled."""
    if not isinstance(group["coupled"], bool):
        raise ValueError(f"Invalid coupled value: {group['coupled']!r} (True or False)")
    if not 0.0 < group["second_moment_scale"] < math.inf:
        raise ValueError(
            f"Invalid second_moment_scale: {group['second_moment_scale']} "
            "(must be positive and finite)"
        )
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
    # torch checks these only for the constructor's arguments, not for those of a group.
    if not group["lr"] >= 0.0:
        raise ValueError(f"Invalid learning rate: {group['lr']}")
    if not group["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    for index, p in enumerate(group["params"]):
        _check_matrix(group, index)
        check_not_tensor_parallel(p, group["vocab_dim"], _describe(group, index))


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


def check_state(group: Group, index: int, state: dict[str, Tensor]) -> None:
    """Raise RuntimeError if an existing state does not fit its parameter."""
    p = group["params"][index]
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    if exp_avg.device != p.device or exp_avg_sq.device != p.device:
        raise RuntimeError(
            f"{_describe(group, index)} is on {p.device}, but its optimizer state is on "
            f"{exp_avg.device}. optimizer.load_state_dict(optimizer.state_dict()) moves the state"
        )
    if exp_avg.shape != p.shape or exp_avg_sq.shape != _moment_shape(group, p):
        raise RuntimeError(
            f"the state of {_describe(group, index)} has exp_avg {list(exp_avg.shape)} and "
            f"exp_avg_sq {list(exp_avg_sq.shape)}; the shapes must be {list(p.shape)} and "
            f"{list(_moment_shape(group, p))}. If 'coupled' was set after the first step, "
            "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        )
    if not (
        sharded.same_layout(p, exp_avg)
        and sharded.moment_is_placed(exp_avg_sq, p, group["vocab_dim"])
    ):
        raise RuntimeError(
            f"{_describe(group, index)} is a {_kind(p)}, but its state is laid out differently: "
            f"exp_avg is a {_kind(exp_avg)}, exp_avg_sq a {_kind(exp_avg_sq)}. {_HOW_TO_LOAD}"
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
        if saved["coupled"] != group["coupled"]:
            warnings.warn(
                f"param group {number} was constructed with coupled={group['coupled']}, but the "
                f"checkpoint has coupled={saved['coupled']}, which is used from now on, as for "
                "every option. To keep the constructed value, delete 'coupled' from the "
                "checkpoint's group before loading",
                stacklevel=2,
            )
        fitted = {**group, **saved, "params": group["params"]}
        check_group(fitted)
        for index, (key, p) in enumerate(zip(saved["params"], group["params"])):
            if not state.get(key):
                continue
            for name, value in state[key].items():
                if name != "step" and sharded.is_dtensor(value) != sharded.is_dtensor(p):
                    raise ValueError(
                        f"cannot load the state of {_describe(fitted, index)}: the parameter is a "
                        f"{_kind(p)}, but its {name} is a {_kind(value)}. {_HOW_TO_LOAD}"
                    )
            if saved["coupled"]:
                moments[p] = {
                    name: _average(fitted, index, name, state[key][name])
                    for name in SECOND_MOMENTS
                    if name in state[key]
                }
                state[key] = {**state[key], **moments[p]}
            shapes = {name: value.shape for name, value in state[key].items() if name != "step"}
            _check_shapes(fitted, index, shapes)
    return {**state_dict, "state": state, "param_groups": saved_groups}, moments


def to_adam_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of Coupled Adam to one that ``torch.optim.Adam(W)`` can load.

    The shared second moment [H] is copied to each of the V rows, in the dtype of ``exp_avg``, and
    the coupling options are removed from the groups. A ``second_moment_scale`` other than 1 is
    lost, as it is applied in the update and is not contained in the moment.

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
                exp_avg = state[key]["exp_avg"]
                rows = {
                    name: torch.empty_like(exp_avg).copy_(value.unsqueeze(group["vocab_dim"]))
                    for name, value in state[key].items()
                    if name in SECOND_MOMENTS
                }
                state[key] = {**state[key], **rows}
        groups.append({name: value for name, value in group.items() if name not in OPTIONS})
    return {**state_dict, "state": state, "param_groups": groups}


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


def _moment_shape(group: Group, p: Tensor) -> torch.Size:
    return p.shape[1:] if group["vocab_dim"] == 0 else p.shape[:1]


def _average(group: Group, index: int, name: str, value: Tensor) -> Tensor:
    """Reduce a loaded second moment to [H], on the parameter's device, in float32 or wider."""
    p = group["params"][index]
    if value.shape == p.shape:
        value = sharded.mean_over_tokens(value.to(_moment_dtype(p)), group["vocab_dim"])
    value = sharded.place_moment(value, p, group["vocab_dim"])
    return value.to(p.device, _moment_dtype(p))


def _describe(group: Group, index: int) -> str:
    """Describe a parameter by its name and shape in an error message."""
    shape = list(group["params"][index].shape)
    if "param_names" in group:
        return f"{group['param_names'][index]!r} {shape}"
    return f"parameter {index} {shape} of its group"


def _check_matrix(group: Group, index: int) -> None:
    p = group["params"][index]
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
            "a wrapper has flattened a matrix into it (FSDP1, ZeRO), use one that does not (FSDP2)"
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
        shared = group["coupled"] and name in SECOND_MOMENTS
        expected = _moment_shape(group, p) if shared else p.shape
        if shape != expected:
            raise ValueError(
                f"cannot load the state of {_describe(group, index)}: its {name} has the shape "
                f"{list(shape)}, but must have {list(expected)} where coupled={group['coupled']}. "
                "Does the checkpoint belong to this model, with the parameters in the same order?"
            )
