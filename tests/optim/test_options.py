"""Options of groups and of embeddings=: refused before anything changes, kept, completed."""

import copy

import pytest
import torch
from torch import nn

from coupled_adam import LEAN, CoupledAdam, CoupledAdamW, MuonWithCoupledAdam, param_groups
from coupled_adam.optim.options import OPTIONS

V, H = 12, 4


def model():
    return nn.ModuleDict({"embed": nn.Embedding(V, H), "hidden": nn.Linear(H, H)})


def step(m, optimizer):
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


WRONG = [
    ({"lr": -1.0}, "Invalid lr: -1.0"),
    ({"lr": float("nan")}, "Invalid lr: nan"),
    ({"lr": None}, "Invalid lr: None"),
    ({"lr": "1e-3"}, "Invalid lr: '1e-3'.*not text; YAML takes 1e-8 for text, but 1.0e-8"),
    ({"betas": (0.9, 1.5)}, r"Invalid betas: \(0.9, 1.5\)"),
    ({"betas": (1.5, 0.9)}, "Invalid betas"),
    ({"betas": (0.9, 1.0)}, "Invalid betas"),
    ({"betas": (0.0, -0.5)}, "Invalid betas"),
    ({"betas": "ab"}, "Invalid betas: 'ab'"),
    ({"betas": ("0.9", 0.95)}, "Invalid betas.*not text"),
    ({"betas": 0.9}, "Invalid betas: 0.9"),
    ({"eps": -1.0}, "Invalid eps: -1.0"),
    ({"eps": "1e-8"}, "Invalid eps: '1e-8'.*1.0e-8"),
    ({"weight_decay": -1e9}, "Invalid weight_decay"),
    ({"weight_decay": "0"}, "Invalid weight_decay: '0'"),
    ({"second_moment_scale": 0}, "Invalid second_moment_scale"),
    ({"second_moment_scale": float("nan")}, "Invalid second_moment_scale: nan"),
    ({"second_moment_scale": "1"}, "Invalid second_moment_scale: '1'"),
    ({"row_exponent": 1.5}, "Invalid row_exponent: 1.5 .*between 0"),
    ({"row_exponent": float("nan")}, "Invalid row_exponent: nan"),
    ({"row_exponent": True}, "Invalid row_exponent: True"),
    ({"zero_sum": 1}, "Invalid zero_sum: 1"),
    ({"stochastic_rounding": "no"}, "Invalid stochastic_rounding: 'no'"),
]
GIVEN = {
    "constructor": lambda wrong: CoupledAdamW([nn.Parameter(torch.ones(V, H))], **wrong),
    "embeddings": lambda wrong: CoupledAdamW(model(), embeddings=wrong),
    "embeddings of a list": lambda wrong: CoupledAdamW(
        model().parameters(), vocab_size=V, embeddings=wrong
    ),
    "group": lambda wrong: CoupledAdamW(
        [{"params": [nn.Parameter(torch.ones(V, H))], "coupled": True, **wrong}]
    ),
    "group that is not coupled": lambda wrong: CoupledAdamW(
        [{"params": [nn.Parameter(torch.ones(3))], **wrong}]
    ),
    "added": lambda wrong: CoupledAdamW(model()).add_param_group(
        {"params": [nn.Parameter(torch.ones(3))], **wrong}
    ),
    "param_groups": lambda wrong: param_groups(model(), wrong),
    "Muon": lambda wrong: MuonWithCoupledAdam(model(), embeddings=wrong),
}
IN_EMBEDDINGS = ("embeddings", "embeddings of a list", "param_groups", "Muon")


@pytest.mark.parametrize("where", GIVEN)
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_option(where, wrong, message):
    """Wherever it stands, the error names the option, the value, and what it must be."""
    with pytest.raises(ValueError, match=message) as raised:
        GIVEN[where](wrong)
    assert ("in embeddings=" in str(raised.value)) == (where in IN_EMBEDDINGS)


FLAGS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("where", sorted(GIVEN.keys() - IN_EMBEDDINGS))
def test_a_flag_of_torchs_in_text(where, name):
    """As a command line has it: torch takes "false" for true, and would maximize the loss."""
    with pytest.raises(ValueError, match=f"Invalid {name}: 'false' .*True"):
        GIVEN[where]({name: "false"})


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - {"coupled", "vocab_dim"}))
def test_what_embeddings_sets_is_no_argument(option):
    """It would have no effect: the error shows the mapping to write."""
    value = 0.5 if isinstance(OPTIONS[option], float) else True
    match = rf"{option}={value} has no effect.*embeddings=LEAN \| {{'{option}': {value}}}"
    for embeddings in ({option: OPTIONS[option]}, {option: value}, LEAN | {option: value}):
        for given, more in (
            (model(), {"embeddings": embeddings}),
            (param_groups(model(), embeddings), {}),
            (model().parameters(), {"vocab_size": V, "embeddings": embeddings}),
        ):
            with pytest.raises(ValueError, match=match):
                CoupledAdamW(given, **more, **{option: value})


def test_groups_and_a_size_that_both_say_what_is_coupled():
    """The factor would be applied twice."""
    by_hand = [{"params": model()["embed"].weight, "coupled": True}]
    for groups in (param_groups(model(), "lean"), by_hand):
        for more in ({}, {"embeddings": "lean"}):
            with pytest.raises(ValueError, match=r"vocab_size=12 .*leave out vocab_size= and emb"):
                CoupledAdamW(groups, vocab_size=V, **more)


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize(
    ("name", "value"), [("coupled", True), ("coupled", False), ("vocab_dim", 1), ("vocab_dim", 0)]
)
def test_what_a_model_says_is_no_argument(cls, name, value):
    """It would have no effect: the error shows how matrices are named instead."""
    match = rf"{name}={value} has no effect.*leave it out.*tables=\{{'embed.W_E': 0"
    own = nn.Parameter(torch.ones(H, V))
    sized = {"vocab_size": V}
    for given, more in (
        (model(), {}),
        (model(), sized),
        (param_groups(model()), {}),
        ([own], sized),
    ):
        with pytest.raises(ValueError, match=match):
            cls(given, **{name: value}, **more)
    optimizer = cls([own], coupled=True, vocab_dim=1)  # but of parameters nothing else says it
    assert optimizer.param_groups[0]["vocab_dim"] == 1
    with pytest.raises(ValueError, match=f"Invalid {name}: 2"):
        cls(model(), **{name: 2})


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
def test_options_that_embeddings_leaves_open(cls):
    optimizer = cls(
        model(), embeddings={"betas": (0.0, 0.9)}, zero_sum=True, second_moment_scale=0.5
    )
    group = optimizer.param_groups[-1]
    assert (group["betas"], group["zero_sum"], group["second_moment_scale"]) == (
        (0, 0.9),
        True,
        0.5,
    )
    lean = cls(model(), embeddings="lean", stochastic_rounding=True).param_groups[-1]
    assert lean["stochastic_rounding"]


@pytest.mark.parametrize(
    ("steps", "factor"), [(1, 16.0), (1200, 16.0), (2400, 12.5), (10_000, 3.0), (10**6, 1.0)]
)
def test_steps_choose_leans_rate(steps, factor):
    """And say so in print and in a checkpoint, whose factor stays when it is loaded."""
    groups = param_groups(model(), "lean", steps=steps)
    assert f"lr_factor={factor}, lr_factor_from=steps={steps}" in str(groups)
    for optimizer in (
        CoupledAdamW(model(), lr=0.01, embeddings="lean", steps=steps),
        CoupledAdamW(groups, lr=0.01),
        CoupledAdamW(model(), lr=0.01, embeddings=LEAN | {"eps": 1e-6}, steps=steps),
        CoupledAdamW(model().parameters(), 0.01, vocab_size=V, embeddings="lean", steps=steps),
    ):
        (group,) = (g for g in optimizer.param_groups if g["coupled"])
        assert group["lr"] == factor * 0.01
        assert f"({factor:g} times the others', by steps={steps})" in str(optimizer)
    resumed = CoupledAdamW(model(), lr=0.01, embeddings="lean", steps=3000)
    optimizer = CoupledAdamW(model(), lr=0.01, embeddings="lean", steps=steps)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[-1]["lr"] == factor * 0.01
    assert resumed.param_groups[-1]["lr_factor_from"] == f"steps={steps}"


def test_where_leans_rate_comes_from_without_steps():
    for optimizer, factor, source in (
        (CoupledAdamW(model(), lr=1.0, embeddings="lean"), 2.0, "default"),
        (CoupledAdamW(model(), lr=1.0, embeddings=LEAN | {"betas": (0.5, 0.9)}), 2.0, "default"),
        (CoupledAdamW(model(), lr=1.0, embeddings=LEAN | {"lr_factor": 3}), 3, "given"),
        (CoupledAdamW(model(), lr=1.0, embeddings={"row_exponent": 0.5}), 1.0, None),
        (CoupledAdamW(model(), lr=1.0, embeddings=LEAN | {"lr": 0.5}), 0.5, None),
    ):
        group = optimizer.param_groups[-1]
        assert (group["lr"], group.get("lr_factor_from")) == (factor, source)


def frozen():
    m = model()
    m["embed"].requires_grad_(False)
    return m


ERRORS = [
    *(
        (
            lambda s=s: CoupledAdamW(model(), embeddings="lean", steps=s),
            rf"Invalid steps: {s!r} .*whole",
        )
        for s in (0, -3, 2.5, True, "100", float("nan"))
    ),
    (lambda: CoupledAdamW(model(), steps=10), "steps=10 is for embeddings='lean'"),
    (lambda: CoupledAdamW(model(), embeddings={"lr_factor": 3}, steps=10), "steps=10 says.*and so"),
    (
        lambda: CoupledAdamW(model(), embeddings=LEAN | {"lr": 3}, steps=10),
        "steps=10 says the embeddings' learning rate, and so does.*leave out one",
    ),
    (lambda: CoupledAdamW(model().parameters(), steps=10), "steps=10 says how.*pass the model"),
    (lambda: CoupledAdamW(param_groups(model(), "lean"), steps=10), r"param_groups\(model, 'lean'"),
    (lambda: CoupledAdamW(frozen(), embeddings="lean", steps=10), "steps=10 has no effect.*frozen"),
    (lambda: MuonWithCoupledAdam(model(), steps=10), "steps=10 is for embeddings='lean'"),
    (lambda: param_groups(model(), "lean", beside_muon=True), "beside_muon=True .*: pass steps="),
    (lambda: CoupledAdam(model(), lr_factor=4), r"write embeddings=\{'lr_factor': 4\}"),
    (lambda: CoupledAdamW(model(), lr_factor=4), r"write embeddings=\{'lr_factor': 4\}"),
    (lambda: param_groups(model(), {"lr": 0.1, "lr_factor": 2}), "leave out one of lr and lr_fac"),
    (lambda: param_groups(model(), head_lr=-1.0), "Invalid head_lr: "),
    (lambda: param_groups(model(), embedding_weight_decay="0.1"), "Invalid embedding_weight_decay"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def from_adamw(optimizer):
    """As if the pickle were one of AdamW."""
    m = model()
    adamw = torch.optim.AdamW(m.parameters(), lr=0.1)
    step(m, adamw)
    optimizer.__setstate__(adamw.__getstate__())
    return m


def appended(optimizer):
    m = model()
    optimizer.param_groups.append({"params": [*m.parameters()]})
    return m


def assigned(optimizer):
    m = model()
    optimizer.state.clear()
    optimizer.param_groups = [
        {"params": [m["embed"].weight], "coupled": True, "zero_sum": True},
        {"params": [*m["hidden"].parameters()], "lr": 0.5},
    ]
    return m


def assigned_with_a_factor(optimizer):
    m = model()
    optimizer.state.clear()
    optimizer.param_groups = [{"params": [m["embed"].weight], "coupled": True, **LEAN}]
    return m


@pytest.mark.parametrize("change", [from_adamw, appended, assigned, assigned_with_a_factor])
@pytest.mark.parametrize("use", ["step", "init_state", "state_dict", "load"])
def test_groups_from_elsewhere(change, use):
    """Options that they do not have are the defaults."""
    first = model()
    optimizer = CoupledAdamW(first, lr=0.25, betas=(0.8, 0.9))
    step(first, optimizer)
    m = change(optimizer)
    if use == "init_state":
        optimizer.init_state()
    elif use == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif use == "state_dict":
        optimizer.state_dict()
    step(m, optimizer)
    added = [
        g
        for g in optimizer.param_groups
        if any(p is q for p in g["params"] for q in m.parameters())
    ]
    for group in added:
        assert group.keys() >= {"coupled", "row_exponent", "betas", "fused"}
    lr = {"assigned_with_a_factor": [0.5], "assigned": [0.25, 0.5], "from_adamw": [0.1]}
    assert [g["lr"] for g in added] == lr.get(change.__name__, [0.25])


def test_a_wrong_group_that_is_appended():
    m = model()
    optimizer = CoupledAdamW(m)
    optimizer.param_groups.append({"params": [nn.Parameter(torch.ones(3))], "lr": "0.1"})
    before = copy.deepcopy(m.state_dict())
    with pytest.raises(ValueError, match=r"Invalid lr: '0\.1'"):
        step(m, optimizer)
    for name, value in m.state_dict().items():
        assert torch.equal(value, before[name])


def test_an_optimizer_is_printed_in_a_line_for_each_group():
    """Names of equal layers as one, and what is not the default."""
    blocks = nn.ModuleList(nn.ModuleDict({"mlp": nn.Linear(H, H)}) for _ in range(3))
    m = nn.ModuleDict({"embed": nn.Embedding(V, H), "h": blocks})
    optimizer = CoupledAdamW(m, lr=0.5, weight_decay=0.1, embeddings="lean", maximize=True)
    lean = "coupled=True, betas=(0.0, 0.99), row_exponent=0.75, zero_sum=True, weight_decay=0.0"
    assert str(optimizer).splitlines() == [
        "CoupledAdamW(lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1, maximize=True",
        "  h.*.mlp.weight (3): the defaults",
        "  h.*.mlp.bias (3): weight_decay=0.0",
        f"  embed.weight: {lean}, lr=1.0 (2 times the others', by default)",
        ")",
    ]


def test_printed_without_names():
    groups = param_groups(model())
    groups.append({"params": [nn.Parameter(torch.ones(3))], "lr": None, "vocab_dim": 0})
    assert repr(groups).splitlines()[-1].split() == ["parameter", "0", "3", "the", "defaults"]
    assert "None" not in repr(param_groups(model(), "lean"))
    assert "vocab_dim" not in repr(param_groups(model(), "lean"))


PUBLIC_CALLS = {
    "param_groups": lambda: param_groups(model(), "lean", steps=100),
    "CoupledAdam": lambda: CoupledAdam(model()),
    "CoupledAdamW": lambda: step(m := model(), CoupledAdamW(m, embeddings="lean")),
    "bfloat16": lambda: step(m := model().bfloat16(), CoupledAdamW(m, stochastic_rounding=True)),
    "Muon": lambda: step(m := model(), MuonWithCoupledAdam(m)),
    "state_dict": lambda: CoupledAdamW(model()).load_state_dict(CoupledAdamW(model()).state_dict()),
}


@pytest.mark.parametrize("call", PUBLIC_CALLS.values(), ids=PUBLIC_CALLS.keys())
def test_the_global_generator_is_left_alone(call, monkeypatch):
    """With the same seed a model has the same losses, whatever was called before."""
    made = [model() for _ in range(3)]
    monkeypatch.setitem(globals(), "model", lambda: made.pop())
    before = torch.get_rng_state()
    call()
    assert torch.equal(torch.get_rng_state(), before)
