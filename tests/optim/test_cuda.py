"""The Triton kernels against the reference in float64, and whole steps on a GPU.

The first part also runs without a GPU, on CPU tensors in Triton's interpreter, if the environment
had TRITON_INTERPRET=1 from the start: test_triton.py does that. The rest is for GPUs alone.
"""

import os
from dataclasses import replace

import pytest
import torch
from records import DEVICE, LAYOUTS, record

from coupled_adam.optim import reference
from coupled_adam.optim.rounding import Noise, round_

HAS_GPU = DEVICE == "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, on overflow
on_device = pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="needs a GPU")

TENSORS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def in_float64(update):
    """The same, on the CPU."""
    names = [name for name in (*TENSORS, "grad") if getattr(update, name) is not None]
    return replace(
        update,
        **{name: getattr(update, name).to("cpu", torch.float64, copy=True) for name in names},
    )


def take_step(update, t=1.0):
    """Take it by the kernel, and compare with the reference from the same place."""
    update = replace(update, t=t)
    theirs = in_float64(update)
    for name in ("t", "factor", "skip", "lr"):
        value = getattr(theirs, name)
        if isinstance(value, torch.Tensor):
            setattr(theirs, name, value.to("cpu", torch.float64, copy=True))
    update.kernel.measure(update, True)
    update.kernel.apply(update)
    reference.measure(theirs, False)
    reference.apply(theirs)
    for name in TENSORS:
        mine, right = getattr(update, name), getattr(theirs, name)
        if right is None:
            continue
        eps = torch.finfo(mine.dtype).eps
        tolerance = eps if mine.dtype != torch.float32 else 20 * eps
        torch.testing.assert_close(
            mine.cpu().double(),
            right,
            rtol=tolerance,
            atol=tolerance * right.abs().mean().item(),  # where two numbers nearly cancel
            msg=lambda message, name=name: f"{name}: {message}",
        )
    return update


@on_device
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels(dtype, layout, vocab_dim):
    update = record(37, 11, dtype, layout, vocab_dim, amsgrad=True)
    for t in (1.0, 2.0, 3.0):
        update = take_step(update, t)


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 300), (300, 1), (9, 770), (1025, 3), (130, 257)], ids=str
)
def test_kernels_shapes(shape, layout):
    take_step(record(*shape, torch.float32, layout))


@on_device
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"second_moment_scale": 0.25, "amsgrad": True},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta2": 0.999999},
    ],
    ids=str,
)
def test_kernels_options(options):
    for t in (1.0, 1000.0):
        take_step(record(65, 130, torch.float32, **options), t)


@on_device
@pytest.mark.parametrize("factor", [0.3, -1.0, 0.0])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_kernels_read_numbers_on_the_device(factor, amsgrad):
    """The factor, the learning rate and the step, as numbers and as tensors: the same bits."""
    results = []
    for where in ("argument", "device"):
        update = record(40, 19, torch.float32, amsgrad=amsgrad)
        t = 7.0
        update.factor = factor
        if where == "device":
            update.factor, t = torch.tensor(factor, device=DEVICE), torch.tensor(t, device=DEVICE)
            update.lr = torch.tensor(1e-2, device=DEVICE)
        results.append(take_step(update, t))
    first, second = results
    assert torch.equal(first.exp_avg, second.exp_avg)
    assert torch.equal(first.exp_avg_sq, second.exp_avg_sq)
    torch.testing.assert_close(first.param, second.param, rtol=2e-7, atol=1e-9)


@on_device
def test_kernels_clipped_to_nothing():
    """Squares that overflow, of a gradient of which nothing is left, leave no trace."""
    for factor in (0.0, torch.tensor(0.0, device=DEVICE)):
        update = record(40, 19, torch.float32)
        before = update.exp_avg_sq.clone()
        update.grad[3, 2] = 1e20
        update.factor = factor
        update.kernel.measure(update, False)
        update.kernel.apply(update)
        assert update.param.isfinite().all()
        torch.testing.assert_close(update.exp_avg_sq, 0.95 * before)


@on_device
@pytest.mark.parametrize("noise", [None, Noise(1.0)])
def test_kernels_skip(noise):
    """Unless it is 0, nothing changes."""
    update = record(40, 19, torch.bfloat16, amsgrad=True)
    update.noise = noise
    before = [getattr(update, name).clone() for name in TENSORS]
    for skip in (1.0, 2.0):
        update.skip = torch.tensor(skip, device=DEVICE)
        update.t = torch.tensor(0.0, device=DEVICE)
        update.kernel.measure(update, False)
        update.kernel.apply(update)
        assert all(torch.equal(getattr(update, x), y) for x, y in zip(TENSORS, before))
    update.skip, update.noise = torch.tensor(0.0, device=DEVICE), None
    take_step(update)


@on_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_kernels_not_finite(bad):
    """What is not finite spoils what it spoils in the reference, no more and no less."""
    update = record(40, 19, torch.float32, amsgrad=True)
    update.grad[3, 2] = bad
    theirs = in_float64(update)
    for kernel, one in ((update.kernel, update), (reference, theirs)):
        kernel.measure(one, False)
        kernel.apply(one)
    for name in TENSORS:
        mine, right = getattr(update, name).cpu(), getattr(theirs, name)
        assert torch.equal(mine.isnan(), right.isnan()), name
        assert torch.equal(mine.isinf(), right.isinf()), name


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("t", [1, 5, 2**20, "tensor"])
def test_kernels_round_stochastically(t, layout):
    """To the bit as rounding.py; step sizes that are exact in any order of the sums."""
    step = torch.tensor(5.0, device=DEVICE) if t == "tensor" else float(t)
    update = record(70, 300, torch.bfloat16, layout, beta1=0.0, beta2=0.0, lr=1e-3)
    update.grad.copy_(torch.full_like(update.grad, 2.0**-7))
    update.noise, update.t = Noise(step, 5, 2), step
    decayed = update.param.float() * update.decay
    update.kernel.measure(update, False)
    update.kernel.apply(update)
    rate = torch.tensor(1e-3) / torch.tensor(2.0**-7 + 1e-8)
    values = decayed - rate.to(DEVICE) * update.exp_avg.float()
    expected = torch.empty_like(update.param)
    round_(expected, values, update.noise)
    assert torch.equal(update.param, expected)
    assert not torch.equal(expected, values.bfloat16())


@on_device
def test_kernels_give_the_same_bits_again():
    results = []
    for _ in range(3):
        update = record(600, 40, torch.float32)
        update.kernel.measure(update, False)
        update.kernel.apply(update)
        results.append([update.param, update.exp_avg, update.exp_avg_sq])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


@on_device
def test_kernels_tell_autograd():
    update = record(40, 19, torch.float32, amsgrad=True)
    before = [getattr(update, name)._version for name in TENSORS]
    update.kernel.measure(update, False)
    update.kernel.apply(update)
    assert all(getattr(update, x)._version > y for x, y in zip(TENSORS, before))


@on_device
def test_kernels_take_parts_without_rows_or_columns():
    """A rank that has none of the rows still updates nu from the sums of others."""
    update = record(4, 5, torch.float32)
    empty = {name: getattr(update, name)[:0] for name in ("param", "grad", "exp_avg")}
    update = replace(update, **empty)
    update.kernel.measure(update, False)
    assert update.sums.sum(0).tolist() == [0.0] * 5
    update.sums = torch.ones(5, device=DEVICE)
    before = update.exp_avg_sq.clone()
    update.kernel.apply(update)
    torch.testing.assert_close(update.exp_avg_sq, 0.95 * before + 0.05 / 4)
    for name in ("param", "grad", "exp_avg"):
        setattr(update, name, getattr(update, name)[:, :0])
    update.exp_avg_sq = update.exp_avg_sq[:0]
    update.kernel.measure(update, False)
    update.kernel.apply(update)
