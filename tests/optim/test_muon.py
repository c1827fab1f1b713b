"""Muon for hidden matrices, Coupled Adam beside it; ``test_core.py`` has what any core must do."""

import copy
import inspect

import pytest
import torch
from torch import nn

import decoders
from cores import train
from coupled_adam import CoupledAdamW, MuonWithCoupledAdam, param_groups
from decoders import assert_same_parameters

V, H = 12, 8

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


def decoder(tied=False):
    return decoders.decoder(tied, V, H).float()


def hidden_of(model):
    return [model.block[0].weight, model.block[2].weight]


BETWEEN = {
    "row_exponent": 0.5,
    "zero_sum": True,
    "betas": (0.8, 0.5),
    "second_moment_scale": 0.5,
    "lr": 0.2,
}


def test_it_is_two_optimizers():
    """Bit for bit, in nanochat's loop: it sets rates, momentum and decay by keys of its own."""
    model, other = decoder(), decoder()
    optimizer = MuonWithCoupledAdam(
        model,
        lr=0.02,
        adjust_lr_fn="original",
        betas=(0.8, 0.95),
        weight_decay=0.2,
        adam_lr=3e-3,
        embeddings=BETWEEN,
        head_lr=4e-3,
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 3e-3, 0.2, 4e-3]
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["block.0.weight", "block.2.weight"],
        ["norm.weight", "norm.bias", "block.0.bias", "block.2.bias"],
        ["embed.weight"],
        ["head.weight"],
    ]
    hidden = hidden_of(other)
    groups = param_groups(other, BETWEEN, head_lr=4e-3, weight_decay=0.2, exclude=hidden)
    both = [torch.optim.Muon(hidden, lr=0.02), CoupledAdamW(groups, lr=3e-3, betas=(0.8, 0.95))]
    groups = [group for o in (optimizer, *both) for group in o.param_groups]
    for group in groups:
        kind = "muon" if "ns_steps" in group else "adamw"
        group |= {"kind": kind, "initial_lr": group["lr"]}
    for step in range(4):
        now = {"momentum": 0.85 + 0.03 * step, "weight_decay": 0.2 - 0.05 * step}
        for group in groups:
            group["lr"] = group["initial_lr"] * (1 - step / 4)
            group |= now if group["kind"] == "muon" else {}
        train(model, optimizer, [step])
        train(other, both, [step])
    assert_same_parameters(model, other)
    assert optimizer.state[model.embed.weight]["exp_avg_sq"].shape == (H,)


def own_groups(optimizer, states):
    """A state dict with the states of other optimizers, by parameter, and the own groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: states[p] for i, p in enumerate(params) if p in states}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def test_the_checkpoints_of_two_optimizers():
    """Loaded into one, which goes on as the two do."""
    model, other = decoder(tied=True), decoder(tied=True)
    hidden = hidden_of(other)
    both = [
        torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        CoupledAdamW(param_groups(other, weight_decay=0.1, exclude=hidden), lr=1e-3),
    ]
    train(other, both, range(3))
    model.load_state_dict(other.state_dict())
    of_other = {**both[0].state, **both[1].state}
    states = {p: of_other[q] for p, q in zip(model.parameters(), other.parameters())}
    optimizer = MuonWithCoupledAdam(model)
    optimizer.load_state_dict(copy.deepcopy(own_groups(optimizer, states)))
    train(model, optimizer, [3, 4])
    train(other, both, [3, 4])
    assert_same_parameters(model, other)


def test_a_checkpoint_of_an_older_version():
    """It goes on to the bit, and what is saved next is of today."""
    whole, cut = decoder(), decoder()
    optimizer, before = (MuonWithCoupledAdam(m) for m in (whole, cut))
    train(whole, optimizer, range(5))
    train(cut, before, range(3))
    saved = copy.deepcopy(before.state_dict())
    # As commit ce6c4db2 had Muon's groups, before there was a core: with all options of AdamW.
    muons, adamws, *_ = saved["param_groups"]
    del muons["core"]
    saved["param_groups"][0] = {**adamws, "decoupled_weight_decay": True, **muons}
    resumed = MuonWithCoupledAdam(cut)
    resumed.load_state_dict(saved)
    train(cut, resumed, range(3, 5))
    assert_same_parameters(whole, cut)
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_state_of_the_other_optimizer():
    model = decoder()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, [0])
    optimizer = MuonWithCoupledAdam(model)
    with pytest.raises(ValueError, match=r"'block.0.weight' .* it has no momentum_buffer.*adamw="):
        optimizer.load_state_dict(own_groups(optimizer, adamw.state))
    adamw.state[model.block[0].bias] = {"momentum_buffer": torch.zeros(H)}
    only_bias = {model.block[0].bias: adamw.state[model.block[0].bias]}
    with pytest.raises(ValueError, match=r"'block.0.bias' .* it has no step"):
        optimizer.load_state_dict(own_groups(optimizer, only_bias))


@pytest.mark.parametrize("given", ["parameters", "named", "groups"])
def test_a_list_of_parameters(given):
    """As with the model, but for the decay of vectors: Muon's hidden matrices, coupled tables."""
    model, other = decoder(), decoder()
    params = {
        "parameters": other.parameters(),
        "named": other.named_parameters(),
        "groups": [
            {"params": [p for p in other.parameters() if p.dim() == 2]},
            {"params": [p for p in other.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
    }[given]
    options = {"embeddings": BETWEEN | {"weight_decay": 0.0}, "vocab_size": V, "lr": 0.01}
    by_model = MuonWithCoupledAdam(model, weight_decay=0.0, **options)
    by_list = MuonWithCoupledAdam(params, weight_decay=0.0, **options)
    for m, optimizer in ((model, by_model), (other, by_list)):
        assert [len(g["params"]) for g in optimizer.param_groups if "ns_steps" in g] == [2]
        train(m, optimizer, range(2))
    assert_same_parameters(model, other)


def test_the_rates_of_a_list():
    """A group that has half of the rate has it in both halves."""
    model = decoder()
    groups = [
        {"params": model.embed.parameters()},
        {"params": [*model.block.parameters(), *model.norm.parameters()], "lr": 0.05},
        {"params": model.head.parameters()},
    ]
    optimizer = MuonWithCoupledAdam(
        groups, lr=0.4, adam_lr=0.1, vocab_size=V, adjust_lr_fn="original"
    )
    rates = [("ns_steps" in g, g["lr"]) for g in optimizer.param_groups]
    assert rates == [
        (is_muons, pytest.approx(lr))
        for is_muons, lr in ((False, 0.1), (True, 0.2), (False, 0.05), (False, 0.1))
    ]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    assert optimizer.param_groups[-1]["lr"] == 0.1
    named = MuonWithCoupledAdam(model.named_parameters(), vocab_size=V, adamw="block.2.*")
    assert named.param_groups[0]["param_names"] == ["block.0.weight"]


def test_torchs_options():
    """All of them, with torch's result."""
    model, other = decoder(), decoder()
    given = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "ns_coefficients": (3, -3.2, 1.2)}
    optimizer = MuonWithCoupledAdam(model, lr=0.01, ns_eps=1e-3, weight_decay=0.2, **given)
    muon = torch.optim.Muon(
        hidden_of(other),
        lr=0.01,
        eps=1e-3,
        weight_decay=0.2,
        adjust_lr_fn="match_rms_adamw",
        **given,
    )
    train(model, optimizer, [0])
    train(other, muon, [0])
    assert all(map(torch.equal, hidden_of(model), hidden_of(other)))
    torchs = inspect.signature(torch.optim.Muon).parameters.keys()
    renamed = {"params", "eps"}  # eps is Adam's, and ns_eps torch's
    assert torchs - renamed <= inspect.signature(MuonWithCoupledAdam).parameters.keys()


def test_an_older_torch(monkeypatch):
    monkeypatch.delattr("torch.optim.Muon")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.9 or later"):
        MuonWithCoupledAdam(decoder())


def test_another_muon(monkeypatch):
    """Which is torch's here, by another name, and needs no torch that has one."""
    model, other = decoder(), decoder()
    torchs = torch.optim.Muon
    optimizer = MuonWithCoupledAdam(model, lr=0.01, weight_decay=0.2)
    monkeypatch.delattr("torch.optim.Muon")
    another = MuonWithCoupledAdam(
        other,
        lr=0.01,
        weight_decay=0.2,
        muon=lambda groups: torchs(groups, lr=7.0, adjust_lr_fn="match_rms_adamw"),
    )
    assert [*another.param_groups[0]][:4] == ["params", "param_names", "lr", "weight_decay"]
    for m, o in ((model, optimizer), (other, another)):
        train(m, o, range(3))
    assert_same_parameters(model, other)


def test_a_schedule_that_reads_the_defaults():
    model = decoder()
    optimizer = MuonWithCoupledAdam(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    train(model, optimizer, range(1))
    first = [group["lr"] for group in optimizer.param_groups]
    for _ in range(4):
        schedule.step()
    assert all(group["lr"] != lr for group, lr in zip(optimizer.param_groups, first))
    train(model, optimizer, range(1, 2))


def test_the_number_of_steps_chooses_leans_rate():
    """Relative to ``adam_lr``, of a model and of its parameters: half of that without Muon."""
    options = {"adam_lr": 1e-3, "embeddings": "lean", "steps": 2400}
    named = decoder(tied=True).named_parameters()
    for optimizer in (
        MuonWithCoupledAdam(decoder(tied=True), lr=0.02, **options),
        MuonWithCoupledAdam(named, lr=0.02, vocab_size=V, **options),
    ):
        (group,) = (g for g in optimizer.param_groups if g["coupled"])
        assert group["lr"] == pytest.approx(6.25e-3)
        assert group["lr_factor_from"] == "steps=2400 beside Muon"
    for steps, factor in ((600, 16), (2400, 6.25), (20_000, 1)):
        groups = param_groups(decoder(tied=True), "lean", steps=steps, beside_muon=True)
        assert groups[-1]["lr_factor"] == factor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "original"}, r"'original' makes lr=0.02 a rate for Muon alone.*adam_lr="),
        ({"adjust_lr_fn": "rms", "adam_lr": 1.0}, "rms is not supported"),
        ({"adamw": "embed.wieght"}, r"adamw='embed.wieght' matches no parameter.*'embed.weight'"),
        ({"adamw": "*"}, r"no matrix for Muon beside the embeddings and adamw='\*'"),
        ({"adam_lr": "3e-4"}, "Invalid adam_lr: '3e-4' .*not text"),
        ({"embeddings": "leen"}, "Invalid embeddings value: 'leen'"),
        ({"steps": 2400}, "steps=2400 is for embeddings='lean'"),
        ({"params": ()}, r"needs the model .* or vocab_size="),
        ({"params": (), "vocab_size": V, "head_lr": 0.1}, "head_lr: only with a model"),
        ({"params": (), "vocab_size": V + 1}, r"vocab_size=13: .*this size: none"),
        ({"params": (), "vocab_size": V, "adamw": "nothing*"}, r"adamw='nothing\*' matches no"),
    ],
)
def test_errors(options, message):
    """Of a model, or of its parameters."""
    model = decoder(tied="params" not in options)
    params = {"params": model.named_parameters() if "params" in options else model}
    with pytest.raises((ValueError, TypeError), match=message):
        MuonWithCoupledAdam(**{"lr": 0.02, **options, **params})
