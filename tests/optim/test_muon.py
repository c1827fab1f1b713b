"""Muon for hidden matrices and Coupled Adam beside it: two optimizers' updates, one optimizer.

The same file is the program of each rank.
"""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import decoders
from cores import assert_same_state, go_on, loss_of, on_ranks, train
from coupled_adam import LEAN, CoupledAdamW, MuonWithCoupledAdam, param_groups, to_adam_state_dict
from decoders import assert_same_parameters
from processes import run_cases, run_on_ranks

V, H = 12, 8

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


def decoder(tied=False):
    return decoders.decoder(tied, V, H).float()


BETWEEN = {"row_exponent": 0.5, "zero_sum": True, "second_moment_scale": 0.5, "lr": 0.2}


def test_it_is_two_optimizers():
    """Bit for bit, with separate rates that a schedule scales alike."""
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
    hidden = [other.block[0].weight, other.block[2].weight]
    groups = param_groups(other, BETWEEN, head_lr=4e-3, weight_decay=0.2, exclude=hidden)
    both = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.2),
        CoupledAdamW(groups, lr=3e-3, betas=(0.8, 0.95)),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, *both)]
    for step in range(3):
        train(model, optimizer, [step])
        schedules[0].step()
        loss_of(other, step).backward()
        for o, schedule in zip(both, schedules[1:]):
            o.step()
            o.zero_grad()
            schedule.step()
    assert_same_parameters(model, other)
    assert [g["lr"] for g in optimizer.param_groups] == [lr / 8 for lr in (0.02, 3e-3, 0.2, 4e-3)]
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["block.0.weight", "block.2.weight"],
        ["norm.weight", "norm.bias", "block.0.bias", "block.2.bias"],
        ["embed.weight"],
        ["head.weight"],
    ]
    assert optimizer.state[model.embed.weight]["exp_avg_sq"].shape == (H,)


def test_in_nanochats_loop():
    """It sets each group's rate, and momentum and decay of Muon's, by keys that groups get once."""
    model, other = decoder(), decoder()
    options = {"embeddings": LEAN | {"lr": 0.2}, "adam_lr": 3e-3, "weight_decay": 0.2}
    optimizer = MuonWithCoupledAdam(model, lr=0.02, adjust_lr_fn="original", **options)
    for group in optimizer.param_groups:
        group |= {"kind": "muon" if "core" in group else "adamw", "initial_lr": group["lr"]}
    hidden = [other.block[0].weight, other.block[2].weight]
    muon = torch.optim.Muon(hidden, lr=0.02)
    rest = CoupledAdamW(param_groups(other, options["embeddings"], exclude=hidden), lr=3e-3)
    rates = [group["lr"] for group in rest.param_groups]
    for step in range(4):
        now = {"momentum": 0.85 + 0.03 * step, "weight_decay": 0.2 - 0.05 * step}
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 4)
            if group["kind"] == "muon":
                group |= now
        muon.param_groups[0] |= now | {"lr": 0.02 * (1 - step / 4)}
        for group, rate in zip(rest.param_groups, rates):
            group["lr"] = rate * (1 - step / 4)
        for m, optimizers in ((model, [optimizer]), (other, [muon, rest])):
            loss_of(m, step).backward()
            for o in optimizers:
                o.step()
            m.zero_grad(set_to_none=True)
    assert_same_parameters(model, other)


def own_groups(optimizer, states):
    """A state dict with the states of other optimizers, by parameter, and the own groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: states[p] for i, p in enumerate(params) if p in states}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def test_the_checkpoints_of_two_optimizers():
    """Loaded into one, which goes on as the two do."""
    model, other = decoder(tied=True), decoder(tied=True)
    hidden = [other.block[0].weight, other.block[2].weight]
    both = [
        torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        CoupledAdamW(param_groups(other, weight_decay=0.1, exclude=hidden), lr=1e-3),
    ]

    def step(seed):
        loss_of(other, seed).backward()
        for o in both:
            o.step()
            o.zero_grad()

    for seed in range(3):
        step(seed)
    model.load_state_dict(other.state_dict())
    of_other = {**both[0].state, **both[1].state}
    states = {p: of_other[q] for p, q in zip(model.parameters(), other.parameters())}
    optimizer = MuonWithCoupledAdam(model)
    optimizer.load_state_dict(copy.deepcopy(own_groups(optimizer, states)))
    train(model, optimizer, [3, 4])
    for seed in (3, 4):
        step(seed)
    assert_same_parameters(model, other)


# Of Muon's matrices, as commit ce6c4db2 saved it, before there was a core.
OLDER_GROUP = {
    "param_names": ["block.0.weight", "block.2.weight"],
    "coupled": False,
    "second_moment_scale": 1.0,
    "row_exponent": 0.0,
    "zero_sum": False,
    "vocab_dim": 0,
    "stochastic_rounding": False,
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-07,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
    "params": [0, 1],
}


def test_a_checkpoint_of_an_older_version():
    """It goes on to the bit, and what is saved next is of today."""
    whole, cut = decoder(), decoder()
    optimizer, before = (MuonWithCoupledAdam(m) for m in (whole, cut))
    train(whole, optimizer, range(5))
    train(cut, before, range(3))
    saved = copy.deepcopy(before.state_dict())
    saved["param_groups"][0] = OLDER_GROUP
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


def test_back_to_adamw():
    """Muon's momentum is left out, and torch's AdamW begins its matrices anew."""
    model = decoder()
    optimizer = MuonWithCoupledAdam(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    adamw = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups])
    with pytest.warns(UserWarning, match=r"states of torch\.Muon are left out"):
        adamw.load_state_dict(to_adam_state_dict(saved))
    hidden = model.block[0].weight
    assert {*adamw.state} == {*optimizer.state} - {*optimizer.param_groups[0]["params"]}
    assert not {"ns_steps", "momentum", "nesterov"} & adamw.param_groups[0].keys()
    train(model, adamw, [2])
    assert adamw.state[hidden]["step"] == 1
    assert adamw.state[model.embed.weight]["step"] == 3


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
    named = MuonWithCoupledAdam(model.named_parameters(), vocab_size=V, adamw="block.2.*")
    assert named.param_groups[0]["param_names"] == ["block.0.weight"]


def test_torchs_options():
    """All of them, with torch's result."""
    model, other = decoder(), decoder()
    given = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "ns_coefficients": (3, -3.2, 1.2)}
    optimizer = MuonWithCoupledAdam(model, lr=0.01, ns_eps=1e-3, weight_decay=0.2, **given)
    muon = torch.optim.Muon(
        [other.block[0].weight, other.block[2].weight],
        lr=0.01,
        eps=1e-3,
        weight_decay=0.2,
        adjust_lr_fn="match_rms_adamw",
        **given,
    )
    train(model, optimizer, [0])
    train(other, muon, [0])
    for i in (0, 2):
        assert torch.equal(model.block[i].weight, other.block[i].weight)
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


def test_which_matrices():
    """Frozen ones neither; those named are updated by AdamW; weight decay stays with them."""
    model = decoder(tied=True)
    model.block[2].weight.requires_grad_(False)
    model.router = nn.Linear(H, 3)
    optimizer = MuonWithCoupledAdam(model, adamw=[model.router])
    assert optimizer.param_groups[0]["param_names"] == ["block.0.weight"]
    decays = {
        name: g["weight_decay"] for g in optimizer.param_groups for name in g.get("param_names")
    }
    assert decays["router.weight"] == 0.1
    assert decays["embed.weight"] == decays["router.bias"] == 0
    assert "block.2.weight" not in decays


@pytest.mark.parametrize("through", ["state_dict", "pickle", "deepcopy"])
def test_saved_in_the_middle(through):
    whole, cut = decoder(tied=True), decoder(tied=True)
    train(whole, MuonWithCoupledAdam(whole), range(6))
    optimizer = MuonWithCoupledAdam(cut)
    train(cut, optimizer, range(3))
    cut, optimizer = go_on(through, cut, optimizer, lambda m: MuonWithCoupledAdam(m, lr=7.0))
    train(cut, optimizer, range(3, 6))
    assert_same_parameters(whole, cut)


def test_what_does_not_fit_changes_nothing():
    model = decoder()
    optimizer = MuonWithCoupledAdam(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    index = wrong["param_groups"][-1]["params"][0]
    wrong["state"][index]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"cannot load the state"):
        optimizer.load_state_dict(wrong)
    coupled = CoupledAdamW(model)
    with pytest.raises(ValueError, match=r"group 0 .*CoupledAdam\(W\) in the che.* torch.Muon in"):
        optimizer.load_state_dict(coupled.state_dict())
    with pytest.raises(ValueError, match=r"group 0 .* torch.Muon in the che.* CoupledAdam\(W\) in"):
        coupled.load_state_dict(before)
    assert not coupled.state
    assert_same_state(optimizer, before)
    train(model, optimizer, [2])  # still one state
    assert optimizer.state[model.embed.weight]["step"] == 3


def test_a_group_added_later():
    model = decoder()
    optimizer = MuonWithCoupledAdam(model, adam_lr=0.5)
    extra = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("extra", extra)], "weight_decay": 0.0})
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    torch.testing.assert_close(extra.detach(), torch.full((4, 4), 0.5))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    torch.testing.assert_close(extra.detach(), torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"more than one parameter group"):
        optimizer.add_param_group({"params": [("first", model.block[0].weight)]})


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
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MuonWithCoupledAdam(decoder(tied=True), lr=0.02, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, r"needs the model .* or vocab_size="),
        ({"vocab_size": V, "head_lr": 0.1}, TypeError, "head_lr: only with a model"),
        ({"vocab_size": V + 1}, ValueError, r"vocab_size=13: .*this size: none"),
        ({"vocab_size": V, "adamw": "nothing*"}, ValueError, r"adamw='nothing\*' matches no"),
    ],
)
def test_errors_of_a_list(options, error, message):
    with pytest.raises(error, match=message):
        MuonWithCoupledAdam(decoder().named_parameters(), **options)


def sharded(embeddings):
    """FSDP2, of which a rank has few rows or none: the sums that ranks of LEAN add are complete."""
    on_ranks(
        (decoder(), decoder()),
        fully_shard,
        lambda m: MuonWithCoupledAdam(m, lr=1e-3, embeddings=embeddings),
        lambda m: MuonWithCoupledAdam(m, lr=5.0, embeddings={**embeddings, "lr_factor": 7}),
        # Muon iterates in bfloat16, where another order of sums can be seen.
        rtol=2e-3,
        atol=2e-4,
    )


CASES = {
    "sharded": lambda: sharded({"lr_factor": 3}),
    "sharded, LEAN": lambda: sharded(LEAN),
}


def test_sharded():
    run_on_ranks(2, __file__, CASES)


if __name__ == "__main__":
    run_cases(CASES)
