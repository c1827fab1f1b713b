"""Whether a group's options are in range, and whether its parameters can be coupled.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_capturable_supported_devices

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.find_embeddings import check_not_tensor_parallel

Group = dict[str, Any]


def check_group(group: Group) -> None:
    """Raise ValueError for options out of range, or parameters that cannot be coupled."""
    check_options(group)
    _check_flat_shards(group)
    if group["coupled"]:
        for index, p in enumerate(group["params"]):
            _check_matrix(group, index)
            check_not_tensor_parallel(p, group["vocab_dim"], describe(group, index))


def check_options(group: Group) -> None:
    """Raise ValueError for options of Coupled Adam that are out of range; torch's are torch's."""
    for name in ("coupled", "zero_sum", "stochastic_rounding"):
        if not isinstance(group[name], bool):
            raise ValueError(f"Invalid {name}: {group[name]!r} (True or False)")
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
    if group["vocab_dim"] not in (0, 1):
        raise ValueError(
            f"Invalid vocab_dim: {group['vocab_dim']!r} (0 for matrices [V, H], 1 for [H, V])"
        )
    if not group["coupled"]:
        return
    if group["stochastic_rounding"] and group["differentiable"]:
        raise ValueError(
            "stochastic_rounding=True is not differentiable: construct the optimizer with "
            "differentiable=False"
        )
    if group["amsgrad"] and (group["row_exponent"] != 0 or group["zero_sum"]):
        raise ValueError(
            "amsgrad=True is not defined with row_exponent or zero_sum: construct with "
            "amsgrad=False, or leave these two out"
        )


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
            f"cannot couple {describe(group, index)}: its gradient is sparse, but coupling "
            "averages over all rows. Construct the embedding with sparse=False"
        )
    if sharded.is_dtensor(grad) != sharded.is_dtensor(p):
        raise RuntimeError(
            f"cannot couple {describe(group, index)}: it is a {layout_of(p)}, but its gradient "
            f"is a {layout_of(grad)}. Make both DTensors, or both whole tensors"
        )
    if group["capturable"] and p.device.type not in _get_capturable_supported_devices():
        raise RuntimeError(
            f"capturable=True needs a device of {_get_capturable_supported_devices()}, "
            f"but {describe(group, index)} is on {p.device}. Construct with capturable=False"
        )


def _check_matrix(group: Group, index: int) -> None:
    p = group["params"][index]
    if group.get("flat_shards") and (shards := flat.shards_of(group).get(p)) is not None:
        _check_pieces(group, index, shards)
        return
    partial = sharded.is_dtensor(p) and any(placed.is_partial() for placed in p.placements)
    is_supported = p.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if p.dim() == 2 and p.numel() > 0 and is_supported and not partial:
        return
    if partial:
        problem = (
            f"it is a {layout_of(p)}, and a partial sum cannot be updated. "
            "Redistribute it to Shard or Replicate"
        )
    elif p.dim() == 1:
        problem = (
            "only matrices [V, H] can be coupled. Move it to a group without coupled=True; or, if "
            "a wrapper has flattened a matrix into it, call coupled_adam.deepspeed.couple(engine) "
            "for DeepSpeed's ZeRO 1 and 2, or use a wrapper that keeps matrices (FSDP2)"
        )
    elif p.dim() != 2:
        problem = "only matrices [V, H] can be coupled. Move it to a group without coupled=True"
    elif p.numel() == 0:
        problem = "it is empty. Move it to a group without coupled=True"
    else:
        problem = (
            f"its dtype is {p.dtype}, but coupling needs float64, float32, bfloat16 or float16. "
            "Move it to a group without coupled=True"
        )
    raise ValueError(f"cannot couple {describe(group, index)}: {problem}")


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
                f"{layout_of(p)} of shape {list(p.shape)}"
            )
        elif not 0 <= shard.start <= end <= p.numel():
            problem = f"the parameter has {p.numel()} elements"
        elif not 0 <= shard.offset <= shard.shape[0] * shard.shape[1] - (end - shard.start):
            problem = f"{end - shard.start} elements do not fit into the matrix at this offset"
        if problem:
            raise ValueError(f"cannot couple {describe(group, index)} as {shard}: {problem}")


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


def describe(group: Group, index: int) -> str:
    """Describe a parameter by its name and shape in an error message."""
    shape = list(group["params"][index].shape)
    names = group.get("param_names", ())
    if len(names) == len(group["params"]):  # a wrapper may have put one tensor in place of several
        return f"{names[index]!r} {shape}"
    return f"parameter {index} {shape} of its group"


def layout_of(tensor: Tensor) -> str:
    """Describe a tensor's layout in an error message."""
    if not sharded.is_dtensor(tensor):
        return "whole tensor"
    return f"DTensor with placements {tensor.placements}"  # type: ignore[attr-defined]
