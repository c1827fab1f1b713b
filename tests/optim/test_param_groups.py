"""The groups made of a model's parameters, and their options."""

import warnings
from collections import UserList

import numpy as np
import pytest
import torch
from torch import nn

from coupled_adam import (
    LEAN,
    CoupledAdam,
    CoupledAdamW,
    MuonWithCoupledAdam,
    embedding_parameters,
    param_groups,
)
from coupled_adam.optim.param_groups import GROUP_OPTIONS, GroupOptions
from token_models import H, HandWritten, V, gpt2, llama


def test_nothing_found():
    """No group is coupled: param_groups says so, and the optimizer does not repeat it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert embedding_parameters(model) == {}
    with pytest.warns(UserWarning, match="no param group is coupled, as no token") as caught:
        groups = param_groups(model)
    assert not any(group["coupled"] for group in groups)
    CoupledAdamW(groups)
    CoupledAdamW(param_groups(model, tables=[]))  # as asked for
    with pytest.warns(UserWarning, match="Pass the model instead of parameters") as theirs:
        CoupledAdamW(model.parameters())
    assert {caught[0].filename, theirs[0].filename} == {__file__}


ERRORS = [
    ({"tables": "lm_haed.weight"}, r"matches no parameter.*did you mean \['lm_head.weight'"),
    ({"tables": ["lm_head.weight", "nothing*"]}, r"'nothing\*' matches no parameter"),
    ({"tables": nn.Embedding(V, H)}, "Embedding, which matches no"),
    ({"tables": torch.zeros(V, H)}, "Tensor, which matches no"),
    ({"tables": "*norm*"}, r"matches '.*norm.*' of shape \[16\], which is not a matrix"),
    ({"tables": "lm_head.weight", "couple": "input"}, "couple='input' cannot be combined"),
    ({"couple": "inputs"}, "Invalid couple value: 'inputs'"),
    ({"tables": {"lm_head.weight": 2}}, "must give one dimension for 'lm_head.weight'"),
    ({"tables": {"lm_head.weight": 0, "lm_*": 1}}, "must give one dimension for 'lm_head.weight'"),
    ({"vocab_size": (V, V + 1)}, r"vocab_size=41: no embedding .*'model.embed_tokens.weight'"),
    ({"vocab_size": 0}, "Invalid vocab_size value: 0"),
    ({"vocab_size": []}, "Invalid vocab_size value"),
    ({"embeddings": ["wte.weight"]}, r"Invalid embeddings value: \[.*param_groups\(model, tables="),
    ({"embeddings": "wte.weight"}, r"Invalid embeddings value: 'wte.weight' .*tables="),
    ({"embeddings": {"beta": 0}}, r"embeddings={'beta': 0} has no option 'beta': .*'betas'"),
    ({"embeddings": LEAN | {"lr_facter": 4}}, r"'lr_facter': did you mean \['lr_factor'\]"),
    ({"exclude": ["lm_haed.weight"]}, r"exclude='lm_haed.weight' .*\['lm_head.weight'"),
    ({"exclude": nn.Linear(2, 2)}, "exclude=a Linear, which matches no"),
    ({"tables": "model.embed_tokens.weight", "head_lr": 0.1}, "head_lr=0.1, but no output"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(llama(), **options)


def test_printed():
    """A line for each parameter, with its options."""
    model = gpt2()
    lines = repr(param_groups(model, "lean")).splitlines()
    assert len(lines) == len(list(model.named_parameters()))
    assert lines[-1].split()[:4] == ["transformer.wte.weight", "40", "x", "16"]
    assert "betas=(0.0, 0.99), row_exponent=0.75, zero_sum=True" in lines[-1]


def options_of(optimizer, *names):
    """The values of these options for each parameter."""
    groups = optimizer.param_groups
    return {n: tuple(map(group.get, names)) for group in groups for n in group["param_names"]}


def test_options_of_the_token_embeddings_alone():
    """Learned positions and all other parameters keep the optimizer's."""
    given = {
        "betas": (0.0, 0.99),
        "eps": 1e-6,
        "second_moment_scale": 0.5,
        "row_exponent": 0.5,
        "zero_sum": True,
    }
    groups = param_groups(gpt2(), {"lr": 0.3, **given})
    optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    seen = options_of(optimizer, "lr", *given)
    assert seen.pop("transformer.wte.weight") == (0.3, *given.values())
    assert "transformer.wpe.weight" in seen
    assert set(seen.values()) == {(6e-4, (0.9, 0.95), 1e-8, 1.0, 0.0, False)}


@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize("embeddings", ["lean", {"lr_factor": 2}], ids=str)
def test_a_factor_on_the_rate(number, embeddings):
    """The first group, which trainers log, has the user's; schedules and checkpoints keep it."""
    model, lr = gpt2(tie_word_embeddings=False), number(1e-2)
    optimizer = CoupledAdamW(param_groups(model, embeddings), lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        schedule.step()
    seen = {name: float(rate) for name, (rate,) in options_of(optimizer, "lr").items()}
    tables = [seen.pop("transformer.wte.weight"), seen.pop("lm_head.weight")]
    assert tables == pytest.approx([5e-3] * 2)
    assert [*seen.values()] == pytest.approx([2.5e-3] * len(seen))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(2.5e-3)
    saved = optimizer.state_dict()
    assert not any("lr_factor" in group for group in saved["param_groups"])
    other = CoupledAdamW(param_groups(model, embeddings), lr=lr)
    other.load_state_dict(saved)
    assert options_of(other, "lr") == options_of(optimizer, "lr")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 1, "lr_factor": 2}, "Invalid lr_factor: 2 with lr=1"),
        ({"lr_factor": 0}, "Invalid lr_factor: 0 "),
        ({"lr_factor": float("inf")}, "Invalid lr_factor: inf "),
    ],
    ids=str,
)
def test_a_group_with_a_wrong_factor_is_not_added(wrong, message):
    coupled = {"params": [nn.Parameter(torch.zeros(V, H))], "coupled": True}
    optimizer = CoupledAdamW([coupled], lr=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], **wrong})
    assert len(optimizer.param_groups) == 1


def test_optimizers_that_do_not_know_the_factor():
    """They would ignore it, and train at another rate."""
    model = gpt2()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=r"NoneType|must be real number|must be Number"):
        torch.optim.AdamW(param_groups(model, {"lr_factor": 4})).step()


@pytest.mark.parametrize(("given", "expected"), [(None, 0.03), (0.2, 0.2)])
def test_weight_decay_is_the_optimizers_unless_given(given, expected):
    """Of matrices only: embeddings, biases and norms have 0."""
    groups = param_groups(gpt2(), weight_decay=given)
    decays = options_of(CoupledAdamW(groups, weight_decay=0.03), "weight_decay")
    assert {decays[n] for n in decays if ".attn.c_" in n and "bias" not in n} == {(expected,)}
    assert {decays[n] for n in decays if "bias" in n or "ln" in n or "wt" in n} == {(0.0,)}


def layout(optimizer):
    """The shapes in each group, with what decides how it is updated."""
    return [
        (g["coupled"], g["vocab_dim"], g["weight_decay"], [tuple(p.shape) for p in g["params"]])
        for g in optimizer.param_groups
    ]


NAMED = {"wte": (V, H), "c_fc": (H, 4 * H), "c_proj": (4 * H, H), "ln": (H,), "lm_head": (V, H)}


UNEMBED = {**NAMED, "lm_head": (H, V)}


def named(shapes):
    return [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]


def test_from_a_plain_list():
    """Matrices with V rows, and with V columns, are coupled, each with its name."""
    for given in ((p for _, p in named(UNEMBED)), named(UNEMBED)):
        optimizer = CoupledAdamW(given, weight_decay=0.1, vocab_size=V)
        assert layout(optimizer) == [
            (False, 0, 0.1, [(H, 4 * H), (4 * H, H), (H,)]),
            (True, 0, 0.1, [(V, H)]),
            (True, 1, 0.1, [(H, V)]),
        ]
    names = [g["param_names"] for g in optimizer.state_dict()["param_groups"]]
    assert names == [["c_fc", "c_proj", "ln"], ["wte"], ["lm_head"]]


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
def test_from_groups(cls):
    """Their options stay; what LEAN says holds for the coupled matrices."""
    parameters = [p for _, p in named(UNEMBED)]
    given = [
        {"params": parameters[:3], "weight_decay": 0.3},
        {"params": (p for p in parameters[3:]), "lr": 5.0},
    ]
    optimizer = cls(
        given, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, vocab_size=V, embeddings=LEAN
    )
    assert layout(optimizer) == [
        (False, 0, 0.3, [(H, 4 * H), (4 * H, H)]),
        (True, 0, 0.3, [(V, H)]),
        (False, 0, 0.1, [(H,)]),
        (True, 1, 0.1, [(H, V)]),
    ]
    shown = ("lr", "betas", "row_exponent", "zero_sum", "initial_lr_factor")
    lean = ((0.0, 0.99), 0.75, True, 2.0)
    assert [tuple(map(g.get, shown)) for g in optimizer.param_groups] == [
        (0.1, (0.9, 0.95), 0.0, False, None),
        (0.2, *lean),
        (5.0, (0.9, 0.95), 0.0, False, None),
        (10.0, *lean),
    ]
    assert not any("lr_factor" in group for group in optimizer.param_groups)


def test_groups_keep_their_places():
    """What a scheduler has for each group still applies to it; the coupled one follows its own."""
    table, hidden, bias = (nn.Parameter(torch.ones(shape)) for shape in ((V, H), (H, H), (H,)))
    groups = [{"params": [table]}, {"params": [hidden, bias], "lr": 2.0}]
    optimizer = CoupledAdamW(groups, lr=1.0, vocab_size=V)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 0.25])
    assert [group["coupled"] for group in optimizer.param_groups] == [True, False]
    assert schedule.get_last_lr() == [0.5, 0.5]
    both = CoupledAdamW([{"params": [table, bias]}, {"params": [hidden]}], vocab_size=V)
    assert [g["params"] for g in both.param_groups] == [[bias], [table], [hidden]]


def test_a_doubtful_name_in_a_plain_list():
    parameters = named({"tok": (V, H), "posemb": (V, H), "c_fc": (H, 4 * H)})
    with pytest.warns(UserWarning, match=r"not coupled.*'posemb' \[40, 16\].*'coupled': True"):
        optimizer = CoupledAdamW(parameters, vocab_size=V)
    assert [g["param_names"] for g in optimizer.param_groups] == [["posemb", "c_fc"], ["tok"]]


def test_a_parameter_list_is_no_model():
    table, hidden = (nn.Parameter(torch.ones(shape)) for shape in ((V, H), (H, H)))
    parameters = nn.ParameterList([table, hidden])
    optimizer = CoupledAdamW(parameters, vocab_size=V)
    assert [g["params"] for g in optimizer.param_groups] == [[hidden], [table]]
    for given in (parameters, iter(parameters)):
        with pytest.raises(
            TypeError, match=r"model must be an nn\.Module, not (ParameterList|gen)"
        ):
            param_groups(given)


def test_frozen_matrices():
    """They are in no group; those that are named are said to be frozen."""
    untied, model = llama(), gpt2()
    untied.model.embed_tokens.weight.requires_grad_(False)
    *others, coupled = param_groups(untied)
    assert coupled["param_names"] == ["lm_head.weight"]
    assert not any("model.embed_tokens.weight" in group["param_names"] for group in others)
    model.transformer.wte.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"embeddings are frozen: 'transformer.wte.weight' \[40"):
        param_groups(model, tables="*.wte.weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param_groups(model, tables=[])  # nothing was to be coupled


def test_several_vocabularies_from_a_plain_list():
    parameters = named({"src": (V, H), "tgt": (V + 2, H), "out": (3, H)})
    optimizer = CoupledAdamW(parameters, vocab_size=(V, V + 2))
    assert [g["param_names"] for g in optimizer.param_groups] == [["out"], ["src", "tgt"]]


LAYERS = {f"layers.{i}.{n}.weight": (V, H) for i in range(2) for n in ("k_proj", "v_proj")}
LIST_ERRORS = [
    (NAMED, {"vocab_size": V + 1}, r"vocab_size=41: .* this size: none"),
    (LAYERS, {"vocab_size": V}, r"vocab_size=40: .* this size: none"),
    ({**NAMED, "up": (4 * H, H)}, {"vocab_size": 4 * H}, r"this size: 'c_fc' .*named_parameters"),
    (NAMED, {"vocab_size": 0}, r"Invalid vocab_size value: 0"),
    (NAMED, {"embeddings": "lean"}, r"embeddings='lean' .*pass the model .*or vocab_size="),
    (NAMED, {"vocab_size": V, "embeddings": {"vocab_dim": 1}}, r"no option 'vocab_dim'"),
    (NAMED, {"vocab_size": V, "embeddings": {"row_exponent": 3}}, r"Invalid row_exponent: 3"),
    (NAMED, {"vocab_size": V, "embeddings": {"lr_factor": -1}}, r"Invalid lr_factor: -1"),
]


@pytest.mark.parametrize(("shapes", "options", "message"), LIST_ERRORS)
def test_errors_from_a_plain_list(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        CoupledAdamW(named(shapes), **options)


def test_a_plain_list_of_layers_as_wide_as_the_vocabulary():
    """Names tell which are in blocks, or positions; without, more than two are refused."""
    model = llama(num_key_value_heads=2, head_dim=V // 2, num_hidden_layers=2)
    optimizer = CoupledAdamW(model.named_parameters(), vocab_size=V)
    assert optimizer.param_groups[1]["param_names"] == [*embedding_parameters(model)]
    assert not optimizer.param_groups[0]["coupled"]
    with pytest.raises(ValueError, match=r"this size: 'parameter 0' .*named_parameters"):
        CoupledAdamW(model.parameters(), vocab_size=V)


def rates(groups):
    return {name: group.get("lr") for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("choice", [{"lr": 0.3}, {"lr_factor": 300}], ids=str)
def test_a_rate_for_an_untied_head(choice):
    """In the place of the rate or the factor of the other coupled matrices."""
    model = gpt2(tie_word_embeddings=False)
    groups = param_groups(model, {"betas": (0.0, 0.99), **choice}, head_lr=0.004)
    optimizer = CoupledAdamW(groups, lr=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [
        pytest.approx(lr) for lr in (1e-3, 1e-3, 0.3, 0.004)
    ]
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.9, 0.9, 0, 0]


@pytest.mark.parametrize(
    "options", [{}, {"couple": "input"}, {"tables": ["tok.weight", "head.weight"]}], ids=str
)
def test_which_matrices_are_heads(options):
    """Found, or named outright; whether they are coupled or not."""
    groups = param_groups(HandWritten(tied=False), head_lr=7.0, vocab_size=V, **options)
    assert {name for name, lr in rates(groups).items() if lr} == {"head.weight"}


@pytest.mark.parametrize("build", [gpt2, lambda: llama().model], ids=["tied", "no head"])
def test_a_rate_for_a_head_that_is_not_there(build):
    with pytest.raises(ValueError, match=r"head_lr=0\.1, but no output embedding"):
        param_groups(build(), head_lr=0.1)


@pytest.mark.parametrize(
    "exclude",
    [
        "transformer.h.*",
        lambda model: model.transformer.h,
        lambda model: [*model.transformer.h.parameters()],
        lambda model: ["transformer.h.0.attn.*", model.transformer.h[0].mlp, "transformer.h.*"],
    ],
)
def test_excluded_parameters(exclude):
    model = gpt2()
    groups = param_groups(model, exclude=exclude if isinstance(exclude, str) else exclude(model))
    expected = {n for n, _ in model.named_parameters() if not n.startswith("transformer.h.")}
    assert set(rates(groups)) == expected


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize("embeddings", [None, "coupled", "lean", LEAN | {"lr_factor": 4}], ids=str)
def test_a_model(cls, embeddings):
    """The optimizer makes the groups, as param_groups does with the same word."""
    models = gpt2(0), gpt2(0)
    given = {} if embeddings is None else {"embeddings": embeddings}
    optimizers = (
        cls(models[0], lr=1e-2, weight_decay=0.1, **given),
        cls(param_groups(models[1], *given.values()), lr=1e-2, weight_decay=0.1),
    )
    assert layout(optimizers[0]) == layout(optimizers[1])
    for model, optimizer in zip(models, optimizers):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_a_model_whose_size_has_to_be_given():
    model = nn.ModuleDict({"embed": nn.Embedding(V, H), "types": nn.Embedding(2, H)})
    model["words"] = nn.Embedding(7, H)
    with pytest.raises(ValueError, match=r"cannot tell which .*vocab_size="):
        CoupledAdamW(model)
    for vocab_size in (V, np.int64(V), [np.int32(V)]):
        optimizer = CoupledAdamW(model, vocab_size=vocab_size)
        assert optimizer.param_groups[-1]["param_names"] == ["embed.weight"]


@pytest.mark.parametrize("kind", [list, UserList, np.array, torch.tensor])
@pytest.mark.parametrize("door", ["optimizer", "embeddings", "group", "later"])
def test_betas_as_configurations_have_them(kind, door):
    """Whatever has two numbers, as OmegaConf's lists; a step and a checkpoint take them."""
    model, betas = gpt2(), kind([0.5, 0.75])
    group = {"params": [model.transformer.wte.weight], "coupled": True}
    if door == "optimizer":
        optimizer = CoupledAdamW(model, betas=betas)
    elif door == "embeddings":
        optimizer = CoupledAdamW(model, embeddings=LEAN | {"betas": betas})
    elif door == "group":
        optimizer = CoupledAdamW([{**group, "betas": betas}])
    else:
        optimizer = CoupledAdamW([nn.Parameter(torch.ones(2, 2))], coupled=True)
        optimizer.add_param_group({**group, "betas": betas})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[-1]["betas"] == (0.5, 0.75)
    for wrong in ({0.5, 0.75}, {0: 0.5, 1: 0.75}, [0.5], 0.5, "ab"):
        with pytest.raises(ValueError, match=r"Invalid betas: .*two numbers from 0 on and below 1"):
            CoupledAdamW(model, betas=wrong)


DOORS = {
    "CoupledAdam": CoupledAdam,
    "CoupledAdamW": CoupledAdamW,
    "MuonWithCoupledAdam": MuonWithCoupledAdam,
}


@pytest.mark.parametrize(
    "door", [n for n in DOORS if "Muon" not in n or hasattr(torch.optim, "Muon")]
)
def test_every_door_takes_the_same_words(door):
    """What param_groups takes, the optimizers take for a model, and refuse without one."""
    given = {
        "head_lr": 0.3,
        "embedding_weight_decay": 0.2,
        "tables": ["tok.weight", "head.weight"],
        "exclude": ["conv.*", "norm.bias"],
    }
    model = HandWritten(tied=False)
    groups = param_groups(model, "lean", **given)
    expected = {n: g["coupled"] for g in groups for n in g["param_names"]}
    optimizer = DOORS[door](model, embeddings="lean", **given)
    seen = options_of(optimizer, "coupled", "lr", "weight_decay")
    assert {name: coupled for name, (coupled, *_) in seen.items()} == expected
    assert seen["head.weight"] == (True, 0.3, 0.2)
    assert seen["pos.weight"][-1] == 0.2
    only = DOORS[door](model, vocab_size=V, couple="input")
    assert [g["param_names"] for g in only.param_groups if g["coupled"]] == [["tok.weight"]]
    with pytest.raises(TypeError, match="exclude: only with a model"):
        DOORS[door](model.named_parameters(), vocab_size=V, exclude=[])
    with pytest.raises(TypeError, match=rf"{door} has no option 'exlude': did you mean \['exclude"):
        DOORS[door](model, exlude=[])
    passed_on = {*GroupOptions.__annotations__, "embeddings", "vocab_size", "steps"}
    assert passed_on == GROUP_OPTIONS


@pytest.mark.parametrize("optimizer_class", [CoupledAdamW, CoupledAdam])
def test_a_group_without_names_that_is_added_later(optimizer_class):
    """Nobody has asked for the names that the other groups have."""
    model = gpt2()
    optimizer = optimizer_class(model)
    extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer.add_param_group({"params": extra[0]})
    optimizer.add_param_group({"params": (p for p in extra[1:]), "lr": 0.5})
    assert [g["params"] for g in optimizer.param_groups[-2:]] == [extra[:1], extra[1:]]
    optimizer.param_groups[0]["lr"] = 7.0  # as a schedule does
    embeddings = [nn.Parameter(torch.ones(V, H))]  # that have been frozen so far
    optimizer.add_param_group({"params": embeddings, "coupled": True, **LEAN})
    assert optimizer.param_groups[-1]["lr"] == 2e-3  # the optimizer's, times the factor
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": extra})
