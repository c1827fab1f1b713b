"""What a coupled group and the state of its parameters must be.

A ``group`` is one of torch's param groups, ``{"params": [...], "lr": ..., ...}``.
"""

import math
import operator
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
from coupled_adam.optim.lean import check_momentum
from coupled_adam.optim.options import (
    Group,
    check_options,
    has_momentum,
    is_lean,
    warn_of_momentum,
)
from coupled_adam.optim.row_sparse import count_of
from coupled_adam.optim.warn import warn

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""The entries that have the shape [V, H] in Adam, and [H] in Coupled Adam."""

ROW_MOMENT = "row_exp_avg_sq"
"""LEAN's entry of shape [V]."""

MEAN_UPDATE = "mean_update"
"""LEAN's entry of shape [H] with ``zero_sum``."""

ROW_STEP, ROW_COUNT = "row_step", "row_count"
"""Entries of a table with sparse gradients, of shape [V] in int32 and 0-dim."""

MOMENTS = {"exp_avg", *SECOND_MOMENTS, ROW_MOMENT, MEAN_UPDATE}
"""All entries that a group's options may need."""

HOW_TO_LOAD = (
    "To load a state into a model that is sharded in another way, use "
    "torch.distributed.checkpoint, or its set_optimizer_state_dict(..., "
    "options=StateDictOptions(full_state_dict=True))"
)
_CHANGED = (
    "the model or the param group has been changed after the first step. "
    "optimizer.follow(model) takes over a vocabulary that has grown, and "
    "optimizer.load_state_dict(optimizer.state_dict()) other dtypes, devices and options"
)


def check_group(group: Group) -> None:
    """Raise ValueError for options of a coupled group, or parameters, that do not fit together."""
    if not group["coupled"]:
        return
    check_betas(group)
    if group["stochastic_rounding"] and group["differentiable"]:
        raise ValueError("stochastic_rounding=True is not differentiable: leave one of them out")
    if group["amsgrad"] and is_lean(group):
        raise ValueError(
            "amsgrad=True is not defined with row_exponent or zero_sum: construct with "
            "amsgrad=False, or leave these two out"
        )
    for index, p in enumerate(group["params"]):
        _check_matrix(group, index)
        # Megatron's mark of a parameter that it has split, and of the dimension it has split.
        is_split = getattr(p, "tensor_model_parallel", False)
        if is_split and getattr(p, "partition_dim", None) != 1 - group["vocab_dim"]:
            raise ValueError(
                f"cannot couple {describe(group, index)}: by its tensor_model_parallel=True this "
                "rank holds only a part of the vocabulary, but coupling averages over all of it. "
                "Make it a DTensor (torch.distributed.tensor.parallel.parallelize_module)"
            )


def check_betas(group: Group) -> None:
    """Raise ValueError if LEAN's momentum would grow where a row has no gradient any more."""
    beta1, beta2 = map(_readable, group["betas"])
    if group["row_exponent"] and beta1 and beta2 is not None:
        is_bfloat16 = any(p.dtype == torch.bfloat16 for p in group["params"])
        check_momentum(beta1, beta2, group["row_exponent"], is_bfloat16=is_bfloat16)


def _readable(beta: float | Tensor) -> float | None:
    """The value of a beta, or None if it is on an accelerator, or a compiler records it."""
    if not isinstance(beta, Tensor):
        return float(beta)
    if not beta.is_cpu or isinstance(beta, FakeTensor) or torch.compiler.is_compiling():
        return None
    return beta.item()


def check_parameter(group: Group, index: int) -> None:
    """Raise ValueError or RuntimeError if a parameter cannot be updated.

    :func:`check_group` has checked the parameters already, but wrappers may replace them later.
    """
    p = group["params"][index]
    # Loops and schedules may set them.
    check_options(group)
    check_betas(group)
    _check_matrix(group, index)
    if type(p) not in sharded.PLAIN and group["vocab_dim"] == 1 and not sharded.is_dtensor(p):
        raise RuntimeError(
            f"cannot couple {describe(group, index)} with vocab_dim=1: it is a "
            f"{type(p).__name__}, whose transpose may be a copy. Store it as [V, H]"
        )
    if p.grad is None:  # of this rank alone
        return
    # The arithmetic, which is in the dtype of the second moments, must hold the gradient's.
    is_held = torch.promote_types(p.grad.dtype, moment_dtype(p)) == moment_dtype(p)
    is_held = is_held and p.grad.is_floating_point()
    if p.grad.shape != p.shape or p.grad.device != p.device or not is_held:
        raise RuntimeError(
            f"cannot couple {describe(group, index)}: it is {p.dtype} on {p.device}, but its "
            f"gradient is {list(p.grad.shape)} in {p.grad.dtype} on {p.grad.device}. Give it the "
            "parameter's shape, device and dtype, or float32 for half precision"
        )
    if p.grad.layout != torch.strided:
        if problem := sparse_problem(group, p):
            raise RuntimeError(f"{describe(group, index)} {problem}")
        return
    if sharded.is_dtensor(p.grad) != sharded.is_dtensor(p):
        raise RuntimeError(
            f"cannot couple {describe(group, index)}: it is a {layout_of(p)}, but its gradient "
            f"is a {layout_of(p.grad)}. Make both DTensors, or both whole tensors"
        )
    if group["capturable"] and p.device.type not in _get_capturable_supported_devices():
        raise RuntimeError(f"capturable=True does not work on {p.device}: leave it out")


def sparse_problem(group: Group, p: Tensor) -> str | None:
    """Why a table of a group cannot have sparse gradients, and what to do; None if it can."""
    if p.grad is not None and p.grad.layout not in (torch.strided, torch.sparse_coo):
        return f"has a gradient of layout {p.grad.layout}. Make it torch.sparse_coo, or dense"
    if p.grad is not None and p.grad.is_sparse and p.grad.sparse_dim() != 1:
        return "has a gradient that is sparse in its columns, too. Make it one of whole rows"
    if not group["row_exponent"]:
        return (
            "has sparse gradients, but Coupled Adam averages over all rows. Use LEAN, "
            "embeddings='lean', or construct the embedding with sparse=False"
        )
    all_rows = "has sparse gradients, but {} moves all rows. Set {} in its group"
    if has_momentum(group):
        return all_rows.format(f"betas={group['betas']}", "betas=(0.0, ...)")
    if group["zero_sum"]:
        return all_rows.format("zero_sum=True", "zero_sum=False")
    if group["weight_decay"]:
        return all_rows.format(f"weight_decay={group['weight_decay']}", "weight_decay=0")
    if group["differentiable"] or group["capturable"]:
        return (
            "has sparse gradients, with which a step cannot be recorded. Leave out differentiable "
            "and capturable"
        )
    if group["vocab_dim"] or p.dim() != 2 or type(p) not in sharded.PLAIN:
        return "has sparse gradients, which only a whole matrix [V, H] can have"
    return None


# The options on which the checks of a matrix and the choice of its kernel depend; an itemgetter, as
# it is in every step.
_decisive = operator.itemgetter(
    *("row_exponent", "zero_sum", "amsgrad", "vocab_dim", "fused", "capturable", "eps"),
    *("second_moment_scale", "stochastic_rounding", "maximize", "weight_decay"),
)


def description(group: Group, p: Tensor, state: dict[str, Tensor]) -> tuple[Any, ...] | None:
    """All that the checks of a matrix and the choice of its kernel depend on.

    A step skips both if this is what it was in the step before: they are most of what a small
    matrix costs. None for what is not a whole matrix in plain tensors, or has betas in tensors: it
    is checked at every step.
    """
    grad, betas = p.grad, group["betas"]
    if grad is None or not {type(p), type(grad)} <= {*sharded.PLAIN} or p.dim() != 2:
        return None
    if grad.layout != torch.strided or group["differentiable"] or torch.compiler.is_compiling():
        return None
    if not {*map(type, betas)} <= {float, int}:
        return None
    layouts = [  # by all that is_plain_memory asks, too
        x
        if x is None
        else (type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg(), x._is_zerotensor())
        for x in (p, grad, *map(state.get, (*MOMENTS, ROW_STEP)))
    ]
    return tuple(betas), _decisive(group), *layouts


def _check_matrix(group: Group, index: int) -> None:
    """Raise ValueError for a parameter that is no matrix, nor holds pieces of some."""
    p = group["params"][index]
    if (shards := flat.shards_of(group).get(p)) is not None:
        for shard in shards:
            if not shard.fits(p):
                raise ValueError(
                    f"cannot couple {describe(group, index)} as {shard}: a piece must lie in a "
                    "parameter with one dimension, and in a matrix [V, H]"
                )
        return
    # Of a DTensor with partial placements no rank has the values, only a summand of them.
    is_partial = sharded.is_dtensor(p) and any(placed.is_partial() for placed in p.placements)
    is_supported = p.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if p.dim() == 2 and p.numel() > 0 and is_supported and not is_partial:
        return
    fix = "Move it to a group without coupled=True"
    if p.dim() == 1:
        fix += (
            "; or, if a wrapper has flattened a matrix into it, call "
            "coupled_adam.deepspeed.couple(engine) for DeepSpeed's ZeRO 1 and 2, or use a wrapper "
            "that keeps matrices (FSDP2)"
        )
    raise ValueError(
        f"cannot couple {describe(group, index)}: it must be a matrix [V, H], not empty, in "
        f"float64, float32, bfloat16 or float16, and is a {layout_of(p)} in {p.dtype}. {fix}"
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


def entries(group: Group) -> dict[str, int | None]:
    """What a coupled matrix's state consists of, but for the step.

    Each entry is a mean over a dimension of the matrix, or for None has the matrix's shape.
    """
    vocab_dim: int = group["vocab_dim"]
    dims: dict[str, int | None] = {"exp_avg": None} if has_momentum(group) else {}
    dims["exp_avg_sq"] = vocab_dim
    if group["amsgrad"]:
        dims["max_exp_avg_sq"] = vocab_dim
    if is_lean(group):
        dims[ROW_MOMENT] = 1 - vocab_dim
    if group["zero_sum"]:
        dims[MEAN_UPDATE] = vocab_dim
    return dims


def entry_shape(group: Group, p: Tensor, dim: int | None) -> torch.Size:
    """The shape of an entry for ``p`` [V, H], or for all matrices of which ``p`` holds pieces."""
    if dim is None:
        return p.shape
    # Of several matrices in one flat parameter, the vectors are one behind the other.
    return torch.Size([sum(shape[1 - dim] for shape in flat.shapes(group, p))])


def first_moment_dtype(group: Group, p: Tensor) -> torch.dtype:
    """The dtype of exp_avg: the parameter's, but float32 for LEAN in float16.

    There a small moment would be rounded to what it was, and never decay, while the row's weight
    grows.
    """
    is_stuck = p.dtype == torch.float16 and group["row_exponent"]
    return torch.float32 if is_stuck else p.dtype


def moment_dtype(p: Tensor) -> torch.dtype:
    """The dtype of second moments: float32 or wider."""
    return torch.promote_types(p.dtype, torch.float32)


def new_moment(group: Group, p: Tensor, dim: int) -> Tensor:
    """Zeros for a second moment, the mean of ``p`` [V, H] over a dimension: [H] or [V]."""
    if sharded.is_dtensor(p):
        return sharded.zero_moment(p, dim, moment_dtype(p))
    return torch.zeros(entry_shape(group, p, dim), dtype=moment_dtype(p), device=p.device)


def fit_state(group: Group, index: int, state: dict[str, Tensor]) -> None:
    """Create the state of a parameter that has none, or check that it fits the group's options.

    A new state is all zeros, with the second moments in float32 or wider. Momentum may begin and
    end between two steps; entries that are not the optimizer's are left alone.

    Raises:
        RuntimeError: if an entry is missing or does not fit. Nothing has been changed.
    """
    # 1. What is there
    p, dims = group["params"][index], entries(group)
    if state.keys() & MOMENTS:
        for name, dim in dims.items():
            if name in state:
                _check_entry(group, index, name, state[name], dim)
        # Missing, or too many. Only exp_avg may be: a schedule of betas begins and ends momentum.
        unfit = {*dims} ^ (state.keys() & MOMENTS)
        if unfit - {"exp_avg"}:
            raise RuntimeError(
                f"the state of {describe(group, index)} is that of other options: {_CHANGED}"
            )
    else:
        _refuse_capture(p)
        _warn_of_rows_without_gradient(group, index)
        state.setdefault("step", _zero_step(group, p))
    # 2. What ends, and what begins: momentum, or all of a new state; mostly nothing
    for name in MOMENTS - dims.keys():
        state.pop(name, None)
    for name, dim in dims.items():
        if name in state:
            continue
        if dim is None:
            warn_of_momentum(group)
            dtype = first_moment_dtype(group, p)
            state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        else:
            state[name] = new_moment(group, p, dim)
    _fit_row_steps(group, index, state)


def _fit_row_steps(group: Group, index: int, state: dict[str, Tensor]) -> None:
    """Create, or check, what the state of a table with sparse gradients has beside LEAN's.

    Up to now all rows have been updated in every step, if there were any.
    """
    p = group["params"][index]
    is_sparse = p.grad is not None and p.grad.layout == torch.sparse_coo
    if ROW_STEP not in state and not (is_sparse or group.get("sparse")):
        return
    if ROW_STEP not in state:
        r, steps = state[ROW_MOMENT], int(state["step"])
        state[ROW_STEP] = torch.full((len(p),), steps, dtype=torch.int32, device=p.device)
        state[ROW_COUNT] = count_of(r)
    if problem := sparse_problem(group, p):
        raise RuntimeError(f"{describe(group, index)} {problem}")
    for name, shape, dtype in (ROW_STEP, [len(p)], torch.int32), (ROW_COUNT, [], torch.int64):
        value = state.get(name)
        if value is None or ([*value.shape], value.dtype, value.device) != (shape, dtype, p.device):
            raise RuntimeError(
                f"{name} in the optimizer state of {describe(group, index)} must be {shape} in "
                f"{dtype} on {p.device}, and is {value!r:.60}: {_CHANGED}"
            )


def _zero_step(group: Group, p: Tensor) -> Tensor:
    """The step of a new state, in the dtype and on the device that torch's Adam gives it."""
    if group["fused"]:
        _device_dtype_check_for_fused(p)
    dtype = _get_scalar_dtype(is_fused=group["fused"])
    if (group["capturable"] or group["fused"]) and not p.is_cpu:
        return torch.zeros((), dtype=dtype, device=p.device)
    # On the CPU, whatever the default device: a constant, which even FakeTensorMode can read.
    return torch.tensor(0.0, dtype=dtype, device="cpu")


def _check_entry(group: Group, index: int, name: str, value: Tensor, dim: int | None) -> None:
    """Raise RuntimeError if an entry of a state does not fit; ``dim`` as in :func:`entries`."""
    p = group["params"][index]
    # In a narrower dtype every step would be rounded to it.
    least = first_moment_dtype(group, p) if dim is None else p.dtype
    is_narrow = value.dtype.itemsize < least.itemsize
    if value.device != p.device or value.shape != entry_shape(group, p, dim) or is_narrow:
        raise RuntimeError(
            f"{describe(group, index)} is {p.dtype} on {p.device}, but {name} in its optimizer "
            f"state is {list(value.shape)} in {value.dtype} on {value.device}: {_CHANGED}"
        )
    if type(p) in sharded.PLAIN and type(value) in sharded.PLAIN:  # nearly always
        return
    if not sharded.is_laid_out(value, p, dim):
        raise RuntimeError(
            f"{describe(group, index)} is a {layout_of(p)}, but its state is laid out differently: "
            f"{name} is a {layout_of(value)}. {HOW_TO_LOAD}"
        )


def _refuse_capture(p: Tensor) -> None:
    """Raise RuntimeError if a CUDA graph is captured: each replay would make the state anew."""
    # Fake tensors may be on a GPU where there is none, and nothing to ask.
    if p.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a first step makes the state, which no CUDA graph may do: take a step before the "
            "capture"
        )


def _warn_of_rows_without_gradient(group: Group, index: int) -> None:
    """Warn if most rows have no gradient, and the shared second moment averages over them.

    The other rows then move too far: by Adam's steps times the root of V over their number.
    """
    p = group["params"][index]
    grad = p.grad
    # Not for DTensors: to count their rows is a collective, and a rank may have no gradient.
    if type(grad) is not Tensor or grad.is_meta or grad.dim() != 2 or is_lean(group):
        return
    rows = p.shape[group["vocab_dim"]]
    active = grad.count_nonzero(1 - group["vocab_dim"]).count_nonzero()
    if isinstance(active, FakeTensor) or active == 0 or active > rows / 10:
        return
    warn(
        f"in the first step only {active} of the {rows} rows of {describe(group, index)} have a "
        f"gradient. The shared second moment averages over all rows, so these may move "
        f"{math.sqrt(rows / int(active)):.0f} times as far as with Adam. With zero_sum=True or "
        "row_exponent=0.5 the average leaves out rows that never had a gradient"
    )
