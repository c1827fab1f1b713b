"""Another optimizer beside Coupled Adam, ``core=`` or Muon: two optimizers' updates, in one.

The same file is the program of each rank.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import decoders
from cores import OneByte, assert_same_state, beside, go_on, loss_of, on_ranks, train
from coupled_adam import LEAN, CoupledAdamW, MuonWithCoupledAdam, param_groups, to_adam_state_dict
from decoders import assert_same_parameters
from processes import run_cases, run_on_ranks

V, H = 12, 8
CORES = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "OneByte": functools.partial(OneByte, lr=1e-2),
}
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)


def decoder(tied=False, dtype=torch.float32):
    return decoders.decoder(tied, V, H).to(dtype)


@every_core
def test_it_is_two_optimizers(core):
    """Bit for bit, with clipping and a schedule for all; what does not decay does not."""
    model, other = decoder(), decoder()
    optimizer = beside(model, core)
    groups = param_groups(other, LEAN | {"lr_factor": 4})
    both = [
        core([group for group in groups if not group["coupled"]]),
        CoupledAdamW([group for group in groups if group["coupled"]], lr=1e-3),
    ]

    def schedule(o):
        return torch.optim.lr_scheduler.CosineAnnealingLR(o, 12)

    train(model, optimizer, range(8), [schedule(optimizer)], clip=0.5)
    train(other, both, range(8), [schedule(o) for o in both], clip=0.5)
    assert_same_parameters(model, other)
    assert [g["lr"] for g in optimizer.param_groups] == [
        g["lr"] for o in both for g in o.param_groups
    ]
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.core.param_groups[0] is optimizer.param_groups[0]
    assert optimizer.param_groups[1]["weight_decay"] == 0  # of biases and norms


HAS_MUON = hasattr(torch.optim, "Muon")  # from torch 2.9 on
BUILDS = {name: functools.partial(beside, core=core) for name, core in CORES.items()}
BUILDS |= {"Muon": MuonWithCoupledAdam} if HAS_MUON else {}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@every_build
@pytest.mark.parametrize("through", ["state_dict", "pickle", "deepcopy"])
def test_saved_in_the_middle(build, through):
    """It goes on to the bit, in bfloat16 too; the core's states are as the core has them."""
    whole, cut = (decoder(True, torch.bfloat16) for _ in range(2))
    optimizer, resumed = build(whole), build(cut)
    train(whole, optimizer, range(6))
    train(cut, resumed, range(3))
    cut, resumed = go_on(through, cut, resumed, build)
    train(cut, resumed, range(3, 6))
    assert_same_parameters(whole, cut)
    assert_same_state(optimizer, resumed)
    assert resumed.defaults == optimizer.defaults  # for groups that arrive later
    if isinstance(optimizer.core, OneByte):
        state = optimizer.state[whole.block[0].weight]
        assert (state["sign"].dtype, state["scale"].dtype) == (torch.uint8, torch.float64)


around_every_core = pytest.mark.parametrize(
    "build", [functools.partial(BUILDS[n], fused=True) for n in BUILDS if n in ("AdamW", "Muon")]
)


@around_every_core
def test_what_replaces_groups_and_states(build):
    """Loops and wrappers assign both, as Lightning does when it resumes; the core follows."""
    model, other = decoder(), decoder()
    optimizers = [build(m) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers):
        train(m, optimizer, range(2))
    optimizers[0].param_groups = [dict(group) for group in optimizers[0].param_groups]
    optimizers[0].state = copy.copy(optimizers[0].state)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    for m, optimizer in zip((model, other), optimizers):
        train(m, optimizer, range(2, 4))
    assert_same_parameters(model, other)


@around_every_core
def test_grad_scaler_closures_and_hooks(build):
    """An overflow skips both; a closure is called once, and so is a hook."""
    model, other = decoder(), decoder()
    optimizer = build(model)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            model.block[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert seen == ["step", "step"]
    plain = build(other)

    def closure():
        seen.append("closure")
        plain.zero_grad()
        loss = loss_of(other, step)
        loss.backward()
        return loss

    step = 0
    assert plain.step(closure) > 0
    step = 2
    assert plain.step(closure) > 0
    assert seen == ["step", "step", "closure", "closure"]
    assert_same_parameters(model, other)


def test_hooks_see_the_states_as_they_are_saved():
    model = decoder()
    optimizer = beside(model, CORES["OneByte"])
    train(model, optimizer, range(1))
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(saved["state"][0]))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: seen.append(saved["state"][0]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert [[*state] for state in seen] == [["packed"], ["packed"]]


@every_core
def test_states_before_the_first_step(core):
    """They are there, nothing else has changed, and a training begins as it does without them."""
    model, other = decoder(), decoder()
    optimizer, plain = beside(model, core), beside(other, core)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    optimizer.init_state()
    assert {*optimizer.state} == {*model.parameters()}
    assert optimizer.state_dict()["param_groups"] == groups
    assert_same_parameters(model, other)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.init_state()
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    if core is not CORES["OneByte"]:  # which counts
        train(other, plain, range(2))
        assert_same_parameters(model, other)


def test_train_and_eval_reach_the_core():
    class Switching(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    optimizer = beside(decoder(), lambda groups: Switching(groups, lr=0.1))
    optimizer.train()
    assert optimizer.core.mode == "train"
    optimizer.eval()
    assert optimizer.core.mode == "eval"
    for plain in (CoupledAdamW(decoder()), beside(decoder(), CORES["SGD"])):
        plain.train()
        plain.eval()


def test_nothing_to_couple_and_groups_added_later():
    """A frozen table leaves all to the core; a group that is added has AdamW."""
    model = decoder(tied=True)
    model.embed.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen"):
        optimizer = beside(model, CORES["SGD"])
    assert all("core" in group for group in optimizer.param_groups)
    extra = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("extra", extra)], "weight_decay": 0.0})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, [0])
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    assert {*optimizer.state[extra]} == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("first", model.block[0].weight)]})


@around_every_core
def test_back_to_adamw(build):
    """The embeddings' state is converted; AdamW begins the others anew."""
    model = decoder()
    optimizer = build(model)
    train(model, optimizer, range(2))
    adamw = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups])
    with pytest.warns(UserWarning, match=r"states of torch\.(AdamW|Muon) are left out"):
        adamw.load_state_dict(to_adam_state_dict(optimizer.state_dict()))
    of_core = {p for g in optimizer.param_groups if "core" in g for p in g["params"]}
    assert {*adamw.state} == {*model.parameters()} - of_core
    groups = adamw.param_groups
    assert not any({"core", "ns_steps", "momentum", "nesterov"} & g.keys() for g in groups)
    train(model, adamw, [2])
    assert adamw.state[model.block[0].weight]["step"] == 1
    assert adamw.state[model.embed.weight]["step"] == 3


def checkpoints_that_do_not_fit():
    model = decoder()
    optimizer = beside(model, CORES["SGD"])
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    adafactor = beside(decoder(), CORES["Adafactor"])
    plain = CoupledAdamW(decoder(), embeddings="lean")
    wrong = copy.deepcopy(saved)
    wrong["state"][wrong["param_groups"][-1]["params"][0]]["exp_avg_sq"] = torch.zeros(3)
    return {
        "another core": (adafactor, saved, r"by torch.SGD in the .* by torch.Adafactor in the opt"),
        "none here": (plain, saved, r"torch.SGD in the checkpoint, but by CoupledAdam\(W\)"),
        "none there": (optimizer, plain.state_dict(), r"CoupledAdam\(W\) in the .* by torch.SGD"),
        "a damaged state": (optimizer, wrong, "cannot load the state"),
    }


@pytest.mark.parametrize("name", ["another core", "none here", "none there", "a damaged state"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(name):
    optimizer, saved, message = checkpoints_that_do_not_fit()[name]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer, before)
    optimizer.step()


ELSEWHERE = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    ("core", "error", "message"),
    [
        (torch.optim.SGD, TypeError, r"core=lambda groups: SGD\(groups, lr=0.001\)"),
        (torch.optim.SGD([ELSEWHERE]), TypeError, r"core=SGD must be a function of param groups"),
        (lambda _: torch.optim.SGD([ELSEWHERE]), ValueError, "other parameters .* of 1, 0 of whi"),
        (lambda groups: torch.optim.SGD(groups[:1]), ValueError, "of 2, 2 of which .* the 6 in"),
    ],
)
def test_errors(core, error, message):
    with pytest.raises(error, match=message):
        CoupledAdamW(decoder(), core=core)


def test_parameters_and_the_number_of_tokens():
    """Which say what is the core's, without a model."""
    model, other = decoder(), decoder()
    options = {"embeddings": "lean", "core": CORES["SGD"], "embedding_weight_decay": 0.01}
    train(model, CoupledAdamW(model, 1e-3, **options), range(3))
    del options["embedding_weight_decay"]
    named = CoupledAdamW(other.named_parameters(), 1e-3, vocab_size=V, **options)
    train(other, named, range(3))
    assert_same_parameters(model, other)
    assert "core" in named.param_groups[0]


def test_parameters_need_not_say_what_a_core_needs():
    for given in (decoder().parameters(), decoder().named_parameters()):
        with pytest.raises(ValueError, match="core= needs the model instead of parameters"):
            CoupledAdamW(given, core=CORES["SGD"])
    with pytest.raises(ValueError, match="core= has nothing to update"):
        CoupledAdamW(nn.Embedding(9, 4), core=CORES["SGD"])


@pytest.mark.filterwarnings("error")
def test_one_optimizer_for_each_parameter():
    """As offloading wrappers make them: the groups say themselves that they are not coupled."""
    model, other = decoder(), decoder()
    options = {"embeddings": "lean", "steps": 1000}
    single = []
    for group in param_groups(model, **options):
        shared = {key: group[key] for key in group.keys() - {"params", "param_names"}}
        single += [CoupledAdamW([{"params": [p], **shared}], lr=1e-3) for p in group["params"]]
    train(model, single, range(3))
    train(other, CoupledAdamW(other, lr=1e-3, **options), range(3))
    assert_same_parameters(model, other)


def test_adamw_for_the_embeddings():
    """With their rate, betas and decay, torch's AdamW to the bit; beside a core, too."""
    model, other = decoder(), decoder()
    tables = [other.embed.weight, other.head.weight]
    core = CORES["SGD"]
    optimizer = CoupledAdamW(
        model, lr=1e-3, embeddings="adamw", steps=7500, embedding_weight_decay=0.3, core=core
    )
    groups = param_groups(other, exclude=tables, tables=())
    both = [
        core(groups),
        torch.optim.AdamW(tables, lr=4e-3, betas=(0.0, 0.999), weight_decay=0.3),
    ]
    train(model, optimizer, range(5))
    train(other, both, range(5))
    assert_same_parameters(model, other)
    assert optimizer.param_groups[-1]["lr_factor_from"] == "steps=7500"
    assert not any(group["coupled"] for group in optimizer.param_groups)


@pytest.mark.parametrize("optimizer", [CoupledAdamW, *[MuonWithCoupledAdam] * HAS_MUON])
def test_adamw_by_size_and_beside_muon(optimizer):
    """The tables keep AdamW in each case; without ``steps=`` their rate is twice the others'."""
    for given in (decoder(), decoder().named_parameters()):
        made = optimizer(given, lr=1e-3, embeddings="adamw", vocab_size=V)
        *_, group = (g for g in made.param_groups if "embed.weight" in g["param_names"])
        assert (group["coupled"], group["lr"], group["betas"]) == (False, 2e-3, (0.0, 0.999))
        (head,) = (g for g in made.param_groups if "head.weight" in g["param_names"])
        assert (head["lr"], "ns_steps" in head) == (2e-3, False)


def test_no_embeddings_is_no_way_to_update_them():
    with pytest.raises(ValueError, match=r"embeddings value: None .*'adamw', or a mapping"):
        CoupledAdamW(decoder(), embeddings=None)


def sharded(build, fresh=None, **tolerance):
    """FSDP2, of which a rank has few rows or none: the sums that ranks of LEAN add are complete."""
    on_ranks((decoder(), decoder()), fully_shard, build, fresh, **tolerance)


def muon(lr, **embeddings):
    return functools.partial(MuonWithCoupledAdam, lr=lr, embeddings=embeddings)


CASES = {
    name: functools.partial(sharded, BUILDS[name], rtol=1e-4, atol=1e-5)
    for name in ("AdamW", "SGD")
}
if HAS_MUON:  # which iterates in bfloat16, where another order of sums can be seen
    bfloat16 = {"rtol": 2e-3, "atol": 2e-4}
    for name, rule in {"Muon": {"lr_factor": 3}, "Muon and LEAN": LEAN}.items():
        fresh = muon(5.0, **rule | {"lr_factor": 7})
        CASES[name] = functools.partial(sharded, muon(1e-3, **rule), fresh, **bfloat16)


def test_sharded():
    run_on_ranks(2, __file__, CASES)


if __name__ == "__main__":
    run_cases(CASES)
