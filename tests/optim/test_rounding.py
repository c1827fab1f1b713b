"""Stochastic rounding: right in the mean, the same wherever it is done, and only if asked for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coupled_adam import CoupledAdamW
from coupled_adam.optim.kernels import blocks
from coupled_adam.optim.rounding import Noise, mix, round_
from optim.cases import CASES

LEAN = CASES["LEAN"]
BELOW = 2**-7  # of 1.0 and the next bfloat16


def rounded(values, noise):
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_(target, values, noise)
    return target


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_mean_and_independence(share, sign):
    """Each element goes up with the probability of its distance, whatever the others do."""
    values = torch.full((500, 400), sign * (1.0 + share * BELOW))
    ups = []
    for step in (1, 2, 1000):
        result = rounded(values, Noise(step)).float() * sign
        assert set(result.unique().tolist()) <= {1.0, 1.0 + BELOW}
        ups.append((result != 1.0).double())
    spread = (share * (1 - share)) ** 0.5
    for up in ups:
        assert abs(up.mean() - share) <= 5 * spread / 200_000**0.5
        assert (up.mean(0) - share).abs().max() <= 6 * spread / 500**0.5  # of each column
        assert (up.mean(1) - share).abs().max() <= 6 * spread / 400**0.5
    if share:
        centered = [up - share for up in ups]
        pairs = [centered[0][1:], centered[0][:, 1:], centered[1], centered[2]]
        others = [centered[0][:-1], centered[0][:, :-1], centered[0], centered[1]]
        for one, other in zip(pairs, others):
            assert abs((one * other).mean()) <= 5 * spread**2 / 199_000**0.5


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=50),
    st.integers(1, 2**31),
    st.integers(0, 2**33),
)
def test_any_value(numbers, step, row):
    """One of the two neighbours; what is a bfloat16, infinite or not a number stays so."""
    values = torch.tensor([numbers])
    (result,) = rounded(values, Noise(step, row)).double()
    for number, got in zip(values[0].double(), result):
        if number.isnan():
            assert got.isnan()
            continue
        toward_zero = (number.float().view(torch.int32) & -(2**16)).view(torch.float32)
        away = (toward_zero.view(torch.int32) + 2**16).view(torch.float32)
        if number == toward_zero:
            assert got == number
        else:
            assert got in (toward_zero.double(), away.double())


def test_part_of_a_matrix():
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    whole = rounded(values, Noise(3))
    part = rounded(values[7:20, 4:9], Noise(3, 7, 4))
    assert torch.equal(part, whole[7:20, 4:9])
    assert torch.equal(rounded(values, Noise(torch.tensor(3.0))), whole)
    assert mix(torch.tensor([1, 2**32 - 1])).tolist() == [mix(1), mix(2**32 - 1)]


def train(steps=8, dtype=torch.bfloat16, shape=(37, 30), resume_at=None, **options):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    options = {"lr": 1e-3, "weight_decay": 0.1, "coupled": True, **options}
    optimizer = CoupledAdamW([p], **options)
    for step in range(steps):
        p.grad = torch.randn(shape, generator=generator).to(dtype)
        if step == resume_at:
            state = optimizer.state_dict()
            optimizer = CoupledAdamW([p], **options)
            optimizer.load_state_dict(state)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("options", [{}, LEAN], ids=["coupled", "LEAN"])
def test_every_path_rounds_alike(options, vocab_dim, monkeypatch):
    """They differ where a product is rounded otherwise and the noise is just at the edge."""
    options = {**options, "vocab_dim": vocab_dim, "stochastic_rounding": True}
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 64)
    expected = train(fused=False, **options)
    actual = train(**options)
    assert (actual != expected).float().mean() < 0.01
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=1e-3)
    assert torch.equal(train(**options), actual)
    assert torch.equal(train(resume_at=4, **options), actual)


@pytest.mark.slow
def test_compiled_step():
    """torch.compile traces the reference, with the step in a tensor."""
    results = []
    for compiled in (False, True):
        p = torch.nn.Parameter(torch.ones(37, 30, dtype=torch.bfloat16))
        p.grad = torch.randn(37, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer = CoupledAdamW([p], coupled=True, stochastic_rounding=True, fused=False)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            step()
        results.append(p.detach())
    assert (results[0] != results[1]).float().mean() < 0.01


def test_small_updates_arrive():
    """Nothing moves when rounded to nearest; stochastically, what float32 moves in the mean."""
    p, others = torch.ones(200, 500), {}
    for dtype, stochastic in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        q = torch.nn.Parameter(p.to(dtype))
        options = {"coupled": True, "weight_decay": 0.0, "stochastic_rounding": stochastic}
        optimizer = CoupledAdamW([q], lr=1e-5, **options)
        for _ in range(50):
            q.grad = torch.full_like(q, -1.0)
            optimizer.step()
        others[dtype, stochastic] = (q.double() - 1).mean().item()
    assert others[torch.bfloat16, False] == 0
    moved = others[torch.float32, False]
    assert moved == pytest.approx(50e-5, rel=0.01)
    assert others[torch.bfloat16, True] == pytest.approx(moved, rel=0.06)  # 5 sigma of 6,400 ups


def test_no_other_dtype_is_rounded():
    assert torch.equal(
        train(dtype=torch.float32), train(dtype=torch.float32, stochastic_rounding=True)
    )


def test_refused():
    with pytest.raises(ValueError, match="Invalid stochastic_rounding: 1"):
        train(stochastic_rounding=1)
    with pytest.raises(ValueError, match="is not differentiable"):
        train(stochastic_rounding=True, differentiable=True)
