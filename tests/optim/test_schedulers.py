"""Schedulers and loops that set the learning rates and betas of all groups at once."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from coupled_adam import CoupledAdamW, MuonWithCoupledAdam


@pytest.fixture
def model():
    tied = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100, bias=False))
    tied[2].weight = tied[0].weight
    return tied


def warnings_of_steps(model, optimizer, before_step=lambda: None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.arange(10)).square().sum().backward()
            before_step()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def lean(model, **options):
    return CoupledAdamW(model, lr=1e-3, embeddings="lean", vocab_size=100, **options)


def set_all(optimizer, rate):
    """As a loop does that knows of one rate, or of the factor, too."""
    for group in optimizer.param_groups:
        group["lr"] = rate(group)


def test_one_rate_for_all_groups_is_named_once(model):
    optimizer = lean(model)
    (message,) = warnings_of_steps(model, optimizer, lambda: set_all(optimizer, lambda _: 5e-4))
    assert "2 times the learning rate of the others, but now has theirs, 0.0005" in message


RIGHT = {
    "a loop that multiplies the factor": (
        lean,
        lambda o: set_all(o, lambda group: 5e-4 * group.get("initial_lr_factor", 1)),
    ),
    "a schedule that scales": (lean, lambda o: LambdaLR(o, lambda step: 0.5)),
    "equal rates by choice": (lambda m: CoupledAdamW(m, lr=1e-3), lambda o: None),
    "a momentum that was there": (
        lambda m: CoupledAdamW(m, lr=1e-3),
        lambda o: CYCLES["CyclicLR"](o, [1e-3] * len(o.param_groups)),
    ),
}


@pytest.mark.parametrize(("make", "change"), RIGHT.values(), ids=RIGHT)
def test_nothing_is_said_where_all_is_right(make, change, model):
    optimizer = make(model)
    change(optimizer)
    assert warnings_of_steps(model, optimizer) == []
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[-1] == rates[0] * optimizer.param_groups[-1].get("initial_lr_factor", 1)


CYCLES = {
    "CyclicLR": lambda o, rates, **options: CyclicLR(o, [r / 10 for r in rates], rates, **options),
    "OneCycleLR": lambda o, rates, **options: OneCycleLR(o, rates, total_steps=10, **options),
}


@pytest.mark.parametrize("cycle", CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_schedule_that_gives_lean_a_momentum(model, cycle, resumed):
    """Named once, with what to pass; without momentum there is nothing to say."""
    optimizer = lean(model)
    rates = [1e-3 * group.get("initial_lr_factor", 1) for group in optimizer.param_groups]
    if resumed:  # in the middle of a training, after a pickle
        assert warnings_of_steps(model, optimizer) == []
        model, optimizer = copy.deepcopy((model, optimizer))
    cycle(optimizer, rates)
    (message,) = warnings_of_steps(model, optimizer)
    assert re.search(r"beta1 = 0, .* betas=\(0\.\d+, 0\.99\).*cycle_momentum=False", message)
    other = lean(model)
    cycle(other, rates, cycle_momentum=False)
    assert warnings_of_steps(model, other) == []
    assert "exp_avg" not in other.state[model[0].weight]


OPTIMIZERS = {
    "coupled": lambda model: CoupledAdamW(model, lr=1e-2),
    "lean": lambda model: CoupledAdamW(model, lr=1e-2, embeddings="lean"),
    "Muon": lambda model: MuonWithCoupledAdam(model, lr=1e-2),
}
CHANGES = {  # in the same step
    "nothing": lambda group: {},
    "betas": lambda group: {"betas": (group["betas"][0], 0.9)} if "betas" in group else {},
    "decay": lambda group: {"weight_decay": -1e-19} if group["weight_decay"] else {},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("when", ["first step", "later", "loaded"])
@pytest.mark.parametrize(
    ("name", "sparse"), [*((name, False) for name in OPTIMIZERS), ("lean", True)]
)
def test_a_rate_just_below_zero(name, sparse, when, change):
    """Schedules and loops leave it there, by rounding: as in torch, the training goes on."""
    results = []
    for rate in (1e-19, -1e-19):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 16, sparse=sparse), nn.Linear(16, 16))
        optimizer = OPTIMIZERS[name](model)
        if when != "first step":
            warnings_of_steps(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("initial_lr_factor", 1)
            group |= change(group)
        if when == "loaded":
            saved, optimizer = optimizer.state_dict(), OPTIMIZERS[name](model)
            optimizer.load_state_dict(saved)
        warnings_of_steps(model, optimizer)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


STEPS, SWITCH = 40, 25


def sequential(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])


def one_cycle(optimizer):
    peaks = [1e-3 * group.get("initial_lr_factor", 1) for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=STEPS, cycle_momentum=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
        sequential,
        one_cycle,
    ],
    ids=["cosine", "lambda", "step", "sequential", "one cycle"],
)
def test_a_scheduler_after_a_switch(make, model):
    """As docs/switching.md makes it: the rates of AdamW's at each step, times the factor."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = make(adamw)
    for _ in range(SWITCH):
        adamw.step()
        before.step()
    optimizer = CoupledAdamW(model, lr=1e-3, embeddings="lean")
    after = make(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(SWITCH):
            after.step()
    for _ in range(STEPS - SWITCH - 1):
        for group in optimizer.param_groups:
            expected = adamw.param_groups[0]["lr"] * group.get("initial_lr_factor", 1)
            assert group["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-15)
        for taken in (adamw, before, optimizer, after):
            taken.step()


@pytest.mark.parametrize("eta_min", [1e-4, 0.0])
def test_a_schedule_that_leads_all_rates_to_one_number(eta_min, model):
    """It is named within the run, once; with 0 at its end the ratio stays."""
    optimizer = lean(model, steps=100)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=eta_min)
    messages = []
    for _ in range(4):
        messages += warnings_of_steps(model, optimizer)
        for _ in range(3):
            schedule.step()
    named = ["16 times" in message and "eta_min" in message for message in messages]
    assert named == ([True] if eta_min else [])


@pytest.mark.parametrize("resumed", [False, True])
def test_more_steps_than_were_said(resumed, model):
    """Named once, by the count in the state; up to a tenth more are no mistake."""
    optimizer = lean(model, steps=3)
    assert warnings_of_steps(model, optimizer) == []
    if resumed:
        saved = optimizer.state_dict()
        optimizer = lean(model, steps=3)
        optimizer.load_state_dict(saved)
    messages = [*warnings_of_steps(model, optimizer), *warnings_of_steps(model, optimizer)]
    assert len(messages) == 1
    assert "steps=3 chose the embeddings' learning rate, 16 times" in messages[0]
