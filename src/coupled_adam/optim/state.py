"""The optimizer state of a coupled parameter: what it consists of, and its creation and checks."""

import math
import warnings

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _device_dtype_check_for_fused, _get_scalar_dtype

from coupled_adam.optim import flat, sharded
from coupled_adam.optim.checks import Group, describe, layout_of

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""The entries that have the shape [V, H] in Adam, and [H] in Coupled Adam."""

ROW_MOMENT = "exp_avg_sq_row"
"""LEAN's entry of shape [V]."""

MEAN_UPDATE = "mean_update"
"""LEAN's entry of shape [H] with ``zero_sum``."""

MOMENTS = {"exp_avg", *SECOND_MOMENTS, ROW_MOMENT, MEAN_UPDATE}
"""All entries that a group's options may need."""

HOW_TO_LOAD = (
    "To load a state into a model that is sharded in another way, use "
    "torch.distributed.checkpoint, or its set_optimizer_state_dict(..., "
    "options=StateDictOptions(full_state_dict=True))"
)


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


def is_lean(group: Group) -> bool:
    """Whether a group is coupled and updated by LEAN."""
    return bool(group["coupled"] and (group["row_exponent"] != 0 or group["zero_sum"]))


def has_momentum(group: Group) -> bool:
    """Whether a coupled matrix has a first moment; a tensor's value is not asked for."""
    beta1 = group["betas"][0]
    return isinstance(beta1, Tensor) or beta1 != 0


def entry_shape(group: Group, p: Tensor, dim: int | None) -> torch.Size:
    """The shape of an entry for ``p``, or for all matrices of which ``p`` holds pieces."""
    if dim is None:
        return p.shape
    if p.dim() == 1:
        return torch.Size([sum(shard.shape[1 - dim] for shard in flat.shards_of(group)[p])])
    return p.shape[1 - dim : 2 - dim]


def moment_dtype(p: Tensor) -> torch.dtype:
    """The dtype of second moments: float32 or wider."""
    return torch.promote_types(p.dtype, torch.float32)


def fit_state(group: Group, index: int, state: dict[str, Tensor]) -> None:
    """Create the state of a parameter that has none, or check that it fits the group's options.

    A new state is all zeros, with the second moments in float32 or wider. Momentum may begin and
    end between two steps; entries that are not the optimizer's are left alone.

    Raises:
        RuntimeError: if an entry is missing or does not fit. Nothing has been changed.
    """
    p, dims = group["params"][index], entries(group)
    is_new = not state.keys() & MOMENTS
    if not is_new:
        for name, dim in dims.items():
            if name in state:
                _check_entry(group, index, name, state[name], dim)
        exponent = group["row_exponent"]
        unfit = {*dims} ^ (state.keys() & MOMENTS)
        if unfit - {"exp_avg"} or group.get("initial_row_exponent", exponent) != exponent:
            raise RuntimeError(
                f"the state of {describe(group, index)} is that of other options: its param group "
                "has been changed after the first step. "
                "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
            )
    if state.keys() >= {"step", *dims} and not (MOMENTS - dims.keys()) & state.keys():
        return  # at all steps but the first
    if is_new:
        _refuse_capture(group, index)
        _warn_of_rows_without_gradient(group, index)
        state.setdefault("step", _zero_step(group, p))
    for name in MOMENTS - dims.keys():
        state.pop(name, None)
    for name, dim in dims.items():
        if name in state:
            continue
        if dim is None:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif p.dim() == 1:  # pieces of matrices
            shape = entry_shape(group, p, dim)
            state[name] = torch.zeros(shape, dtype=moment_dtype(p), device=p.device)
        else:
            state[name] = sharded.zero_moment(p, dim, moment_dtype(p))


def _zero_step(group: Group, p: Tensor) -> Tensor:
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
    shape = entry_shape(group, p, dim)
    if value.device != p.device:
        raise RuntimeError(
            f"{describe(group, index)} is on {p.device}, but {name} in its optimizer state is on "
            f"{value.device}. optimizer.load_state_dict(optimizer.state_dict()) moves the state"
        )
    if value.shape != shape:
        raise RuntimeError(
            f"the state of {describe(group, index)} has {name} {list(value.shape)}; the shape "
            f"must be {list(shape)}. If 'coupled' was set after the first step, "
            "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        )
    if value.dtype.itemsize < p.dtype.itemsize:  # every step would round to it
        raise RuntimeError(
            f"{describe(group, index)} is {p.dtype}, but {name} in its optimizer state is "
            f"{value.dtype}. optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        )
    if type(p) in sharded.PLAIN and type(value) in sharded.PLAIN:  # nearly always
        return
    if not (
        sharded.same_layout(p, value) if dim is None else sharded.moment_is_placed(value, p, dim)
    ):
        raise RuntimeError(
            f"{describe(group, index)} is a {layout_of(p)}, but its state is laid out differently: "
            f"{name} is a {layout_of(value)}. {HOW_TO_LOAD}"
        )


def _refuse_capture(group: Group, index: int) -> None:
    """Raise RuntimeError if a CUDA graph is captured: each replay would make the state anew."""
    # Fake tensors may be on a GPU where there is none, and nothing to ask.
    is_cuda = group["params"][index].is_cuda and torch.cuda.is_available()
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first step of {describe(group, index)} is captured in a CUDA graph, in which its "
            "state cannot be made and its kernels cannot be compiled: take a step before the "
            "capture"
        )


def _warn_of_rows_without_gradient(group: Group, index: int) -> None:
    """Warn if most rows have no gradient, and the shared second moment averages over them.

    The other rows then move too far: by Adam's steps times the root of V over their number.
    """
    p = group["params"][index]
    grad = p.grad
    if grad is None or grad.is_meta or type(grad) is not Tensor:
        return
    if p.dim() == 1 or ROW_MOMENT in entries(group):
        return
    rows = p.shape[group["vocab_dim"]]
    active = grad.count_nonzero(1 - group["vocab_dim"]).count_nonzero()
    if isinstance(active, FakeTensor) or active == 0 or active > rows / 10:
        return
    warnings.warn(
        f"in the first step only {active} of the {rows} rows of {describe(group, index)} have a "
        "gradient. The shared second moment averages over all rows, so these move up to "
        f"{math.sqrt(rows / int(active)):.0f} times as far as with Adam, until more rows have had "
        "one. With zero_sum=True or row_exponent=0.5 the average leaves out rows that never had a "
        "gradient; or warm the learning rate up",
        stacklevel=2,
    )
