"""What becomes of a state when a vocabulary grows or shrinks, or rows stand for other tokens."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.optim import row_sparse, sharded
from coupled_adam.optim.core import is_cores
from coupled_adam.optim.options import Group, is_lean
from coupled_adam.optim.state import ROW_COUNT, ROW_MOMENT, ROW_STEP, SECOND_MOMENTS, describe


def follow(groups: list[Group], states: MutableMapping[Tensor, Any], model: nn.Module) -> None:
    """Put a model's parameters in the place of those of the same names, with states of their sizes.

    Raises:
        ValueError: as :meth:`coupled_adam.CoupledAdam.follow` says; nothing has been changed then.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    # 1. What has been replaced, and whether all of it can be followed
    replaced: list[tuple[Group, int, Tensor, dict[str, Any]]] = []
    for group in groups:
        names = group.get("param_names", ())
        if len(names) != len(group["params"]):
            raise ValueError(
                "the param groups have no names: build the optimizer from the model, from "
                "param_groups(model), or from model.named_parameters()"
            )
        for index, (name, old) in enumerate(zip(names, group["params"])):
            new = named.get(name)
            if new is None:
                raise ValueError(f"{name!r} is no parameter of the model any more")
            state = {} if is_cores(group) else states.get(old, {})
            before = _shape_of(group, old, state)
            if new is not old or new.shape != before:
                _check(group, index, new)
                replaced.append((group, index, new, _resized(group, before, new, state)))
    # 2. The change
    for group, index, new, state in replaced:
        states.pop(group["params"][index], None)
        group["params"][index] = new
        if state:
            states[new] = state


def _rows_dim(group: Group) -> int:
    """The dimension that may grow."""
    return int(group["vocab_dim"] if group["coupled"] else 0)


def _check(group: Group, index: int, new: Tensor) -> None:
    """Raise ValueError if a parameter differs from that of a group in more than its rows."""
    old, dim = group["params"][index], _rows_dim(group)
    kept = [tuple(n for i, n in enumerate(x.shape) if i != dim) for x in (old, new)]
    if is_cores(group):
        problem = "core= updates it, whose states may be of any shape"
    elif sharded.is_dtensor(old) or sharded.is_dtensor(new) or group.get("flat_shards"):
        problem = "it is sharded: resize the model before it is"
    elif old.dim() != new.dim() or kept[0] != kept[1]:
        problem = f"it has another shape now, {list(new.shape)}, in more than its number of rows"
    elif old.dtype != new.dtype or old.device != new.device:
        problem = f"it is {new.dtype} on {new.device} now, and was {old.dtype} on {old.device}"
    else:
        return
    raise ValueError(f"cannot follow {describe(group, index)}: {problem}")


def _shape_of(group: Group, p: Tensor, state: dict[str, Any]) -> torch.Size:
    """The shape that a state is of, as rows may have been added to the parameter in place."""
    if "exp_avg" in state and state["exp_avg"].dim() == p.dim():
        return torch.Size(state["exp_avg"].shape)
    sizes = list(p.shape)
    if ROW_MOMENT in state and p.dim() == 2:
        sizes[_rows_dim(group)] = len(state[ROW_MOMENT])
    return torch.Size(sizes)


def _resized(group: Group, shape: torch.Size, new: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A state of another shape with as many rows as the new parameter; new ones are zeros."""
    dim = _rows_dim(group)
    before, after = shape[dim] if shape else 1, new.shape[dim] if shape else 1
    resized = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if value.shape == shape and name != "step":  # a matrix, or the moments of a bias
            resized[name] = _with_rows(value, after, dim)
        elif name in (ROW_MOMENT, ROW_STEP):
            resized[name] = _with_rows(value, after, 0)
        elif name in SECOND_MOMENTS and group["coupled"] and not is_lean(group):
            # An average over all rows, of which the new ones have had no gradient
            resized[name] = value * (before / after) if after > before else value.clone()
    if ROW_STEP in resized:
        resized[ROW_STEP][before:] = int(state["step"])
    return resized


def _with_rows(value: Tensor, rows: int, dim: int) -> Tensor:
    """A tensor with another length of a dimension, cut or filled up with zeros."""
    shape = list(value.shape)
    shape[dim] = rows
    resized = torch.zeros(shape, dtype=value.dtype, device=value.device)
    kept = min(rows, value.shape[dim])
    resized.narrow(dim, 0, kept).copy_(value.narrow(dim, 0, kept))
    return resized


def forget_rows(
    groups: list[Group],
    states: MutableMapping[Tensor, Any],
    p: Tensor,
    rows: Tensor | Iterable[int],
) -> None:
    """Forget rows of a parameter in its state.

    Raises:
        ValueError: as :meth:`coupled_adam.CoupledAdam.forget_rows` says.
    """
    # 1. Where it is, and whether it has these rows
    place = next(((g, i) for g in groups for i, x in enumerate(g["params"]) if x is p), None)
    if place is None:
        raise ValueError(f"the {list(p.shape)} parameter is none of the optimizer's")
    group, index = place
    if is_cores(group) or group.get("flat_shards") or p.dim() != 2:
        raise ValueError(
            f"cannot forget rows of {describe(group, index)}: the optimizer must update it itself, "
            "as a matrix, neither by core= nor in DeepSpeed's pieces"
        )
    dim = _rows_dim(group)
    given = rows if isinstance(rows, Tensor) else [*rows]
    numbers = torch.as_tensor(given, device=p.device).unique()
    outside = numbers[(numbers < 0) | (numbers >= p.shape[dim])]
    is_integer = not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if len(outside) or (len(numbers) and not is_integer):
        raise ValueError(
            f"rows={outside.tolist() or numbers.dtype} must be integers from 0 to "
            f"{p.shape[dim] - 1}, of rows of {describe(group, index)}"
        )
    # 2. This rank's part of them
    own = numbers.long() - sharded.global_offset(p)[dim]
    own = own[(own >= 0) & (own < sharded.to_local(p).shape[dim])]
    state = states.get(p, {})
    if ROW_COUNT in state:
        row_sparse.forget(state[ROW_MOMENT], state[ROW_COUNT], own)
        return
    for name, value in state.items():
        if name == ROW_MOMENT or value.shape == p.shape:
            sharded.to_local(value).index_fill_(0 if name == ROW_MOMENT else dim, own, 0)
