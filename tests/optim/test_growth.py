"""A vocabulary that grows or shrinks in the middle of a training."""

import copy

import pytest
import torch
from torch import nn

import token_models
from coupled_adam import LEAN, CoupledAdamW, MuonWithCoupledAdam, param_groups
from optim.cases import LEAN_SOON

V, H = 32, 8


def gpt2(**options):
    torch.manual_seed(0)
    return token_models.gpt2(0, vocab_size=V, n_embd=H, **options)


def take_steps(model, optimizer, steps, tokens=V):
    for step in steps:
        ids = torch.randint(tokens, (4, 6), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIONS = {
    "coupled": {},
    "LEAN": {"embeddings": "lean"},
    "LEAN, momentum": {"embeddings": LEAN | {"betas": (0.8, 0.99)}},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_new_tokens_of_transformers(options, tied):
    """All old rows and other parameters go on as they would have; new ones begin."""
    model = gpt2(tie_word_embeddings=tied)
    optimizer = CoupledAdamW(model, lr=1e-2, **options)
    take_steps(model, optimizer, range(3))
    table = model.get_input_embeddings().weight
    before = copy.deepcopy(optimizer.state[table])
    others = {n: p for n, p in model.named_parameters() if "wte" not in n and "lm_head" not in n}
    kept = {n: copy.deepcopy(optimizer.state[p]) for n, p in others.items()}
    model.resize_token_embeddings(V + 4, mean_resizing=False)
    optimizer.follow(model)
    grown = model.get_input_embeddings().weight
    assert len(grown) == V + 4  # of another parameter, or of the same one, as transformers likes
    state = optimizer.state[grown]
    assert (table in optimizer.state) == (grown is table)
    for name, value in before.items():
        if name == "exp_avg_sq" and options == {}:
            torch.testing.assert_close(state[name], value * V / (V + 4))
        elif name in ("exp_avg", "row_exp_avg_sq"):
            assert torch.equal(state[name][:V], value)
            assert not state[name][V:].any()
        else:
            assert torch.equal(state[name], value), name
    for name, p in others.items():
        for entry, value in kept[name].items():
            assert torch.equal(optimizer.state[p][entry], value)
    new_rows = grown.detach()[V:].clone()
    take_steps(model, optimizer, range(3, 6), V + 4)
    assert (grown[V:] != new_rows).any()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.resize_token_embeddings(V - 2)
    optimizer.follow(model)
    take_steps(model, optimizer, range(6, 8), V - 2)
    assert all(p.isfinite().all() for p in model.parameters())


def test_rows_that_are_not_new_do_not_notice():
    """With LEAN a token's row moves as without the new ones, as long as those have no gradient."""
    tables = [nn.Embedding(V, H) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [CoupledAdamW(table, lr=1e-2, embeddings="lean") for table in tables]
    for step in range(6):
        if step == 3:
            weight = tables[1].weight.detach()
            tables[1].weight = nn.Parameter(torch.cat([weight, torch.ones(4, H)]))
            optimizers[1].follow(tables[1])
        for table, optimizer in zip(tables, optimizers):
            generator = torch.Generator().manual_seed(step)
            grad = torch.randn(V, H, generator=generator)
            missing = len(table.weight) - V
            table.weight.grad = torch.cat([grad, torch.zeros(missing, H)])
            optimizer.step()
    torch.testing.assert_close(tables[1].weight[:V], tables[0].weight)
    assert torch.equal(tables[1].weight[V:], torch.ones(4, H))


def test_rows_added_in_place():
    table = nn.Embedding(V, H)
    for embeddings in ("coupled", "lean"):
        optimizer = CoupledAdamW(table, lr=1e-2, embeddings=embeddings)
        table.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.weight.data = torch.cat([table.weight.data, torch.ones(4, H)])
        table.weight.square().sum().backward()
        with pytest.raises(RuntimeError, match=r"optimizer.follow\(model\) takes over"):
            optimizer.step()
        optimizer.follow(table)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Model has")  # tied weights, which PEFT unties
@pytest.mark.slow  # with the packages of tests/frameworks
@pytest.mark.filterwarnings("ignore")  # warnings are PEFT's
def test_with_adapters():
    """PEFT's model has other names, of which the optimizer was built; they stay."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        gpt2(),
        peft.LoraConfig(
            target_modules=["c_attn"], modules_to_save=["wte", "lm_head"], fan_in_fan_out=True
        ),
    )
    optimizer = CoupledAdamW(model, lr=1e-2, embeddings="lean")
    take_steps(model, optimizer, range(2))
    name = next(n for g in optimizer.param_groups if g["coupled"] for n in g["param_names"])
    holder = model.get_submodule(name.rpartition(".")[0])
    holder.weight = nn.Parameter(torch.cat([holder.weight.detach(), torch.zeros(4, H)]))
    with pytest.raises(ValueError, match="no parameter of the model") as caught:
        optimizer.follow(gpt2())
    assert name in str(caught.value) or "base_model" in str(caught.value)
    optimizer.follow(model)
    (state,) = (optimizer.state[p] for p in [dict(model.named_parameters())[name]])
    assert len(state["row_exp_avg_sq"]) == V + 4


def test_beside_muon_and_with_a_bias():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"wte": nn.Embedding(V, H), "hidden": nn.Linear(H, H), "head": nn.Linear(H, V)}
    )
    optimizer = MuonWithCoupledAdam(model, lr=1e-2)
    for size in (V, V + 3):
        if size > V:
            for part in ("wte", "head"):
                weight = model[part].weight.detach()
                model[part].weight = nn.Parameter(torch.cat([weight, torch.ones(3, H)]))
            bias = model["head"].bias.detach()
            model["head"].bias = nn.Parameter(torch.cat([bias, torch.zeros(3)]))
            optimizer.follow(model)
        model["head"](model["hidden"](model["wte"](torch.arange(size)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model["head"].bias]["exp_avg"].shape == (V + 3,)


def test_states_of_a_core_are_its_own():
    """Of whatever shape, as a projected moment, they stay; their parameters cannot be followed."""
    model = nn.ModuleDict({"wte": nn.Embedding(V, H), "layer": nn.Linear(H, H)})
    optimizer = CoupledAdamW(
        model, embeddings="lean", core=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    moment = optimizer.state[model["layer"].weight]["exp_avg"] = torch.ones(2, H)
    model["wte"].weight = nn.Parameter(torch.ones(V + 1, H))
    optimizer.follow(model)
    assert optimizer.state[model["layer"].weight]["exp_avg"] is moment
    table = optimizer.param_groups[-1]["params"]
    assert table == [model["wte"].weight]
    model["wte"].weight = nn.Parameter(torch.ones(V + 2, H))
    model["layer"].weight = nn.Parameter(torch.ones(H + 1, H))
    with pytest.raises(ValueError, match=r"cannot follow 'layer.weight' .*core= updates it"):
        optimizer.follow(model)
    assert optimizer.param_groups[-1]["params"] == table


def wider(model):
    model.wte.weight = nn.Parameter(torch.ones(V, H + 1))


def renamed(model):
    model.other = model.wte
    del model.wte


def another_dtype(model):
    model.wte.weight = nn.Parameter(torch.ones(V + 1, H, dtype=torch.float64))


CHANGES = {
    wider: r"cannot follow 'wte.weight' \[32, 8\]: it has another shape now, \[32, 9\]",
    renamed: "'wte.weight' is no parameter of the model any more",
    another_dtype: "it is torch.float64 on cpu now, and was torch.float32",
}


@pytest.mark.parametrize(("change", "message"), CHANGES.items())
def test_what_cannot_be_followed(change, message):
    """And nothing has changed then."""
    model = nn.Module()
    model.first, model.wte = nn.Linear(H, H), nn.Embedding(V, H)
    optimizer = CoupledAdamW(model)
    optimizer.init_state()
    before = [[*group["params"]] for group in optimizer.param_groups]
    change(model)
    model.first.weight = nn.Parameter(torch.ones(H + 1, H))
    with pytest.raises(ValueError, match=message):
        optimizer.follow(model)
    assert [[*group["params"]] for group in optimizer.param_groups] == before
    assert all(p in optimizer.state for params in before for p in params)


def test_groups_without_names():
    table = nn.Embedding(V, H)
    optimizer = CoupledAdamW([{"params": [table.weight], "coupled": True}])
    with pytest.raises(ValueError, match="the param groups have no names"):
        optimizer.follow(table)
    assert param_groups(table)


# --- rows that stand for something else ---

FORGOTTEN, BETAS = [1, 4, 5], (0.5, 0.99)
TABLES = {
    "AdamW": {"coupled": False, "betas": BETAS, "amsgrad": True},
    "coupled": {"coupled": True, "betas": BETAS, "amsgrad": True},
    "LEAN": {"coupled": True, **LEAN_SOON},
    "LEAN, momentum": {"coupled": True, "row_exponent": 0.75, "betas": BETAS},
    "[H, V]": {"coupled": True, "row_exponent": 0.75, "betas": BETAS, "vocab_dim": 1},
    "sparse": {
        "coupled": True,
        "row_exponent": 0.75,
        "betas": (0.0, 0.99),
        "weight_decay": 0.0,
        "sparse": True,
    },
}


def row_gradient(options, step, without=()):
    gradient = torch.randn(V, H, generator=torch.Generator().manual_seed(step))
    gradient[::3] = 0
    gradient[[*without]] = 0
    if options.get("vocab_dim"):
        return gradient.T.contiguous()
    return gradient.to_sparse(1) if options.get("sparse") else gradient


@pytest.mark.parametrize("rows", [FORGOTTEN, torch.tensor([5, 1, 4, 5], dtype=torch.int32)])
@pytest.mark.parametrize("options", TABLES.values(), ids=TABLES.keys())
def test_forgotten_rows_never_had_a_gradient(options, rows):
    """But for averages over all rows, of which those of the past are not undone."""
    shape = (H, V) if options.get("vocab_dim") else (V, H)
    tables = [nn.Parameter(torch.ones(shape)) for _ in range(2)]
    forgetful, never = (CoupledAdamW([{"params": [p], **options}], lr=1e-2) for p in tables)
    for step in range(4):
        tables[0].grad = row_gradient(options, step)
        tables[1].grad = row_gradient(options, step, FORGOTTEN)
        forgetful.step(), never.step()
    forgetful.forget_rows(tables[0], rows)
    tables[0].data.copy_(tables[1].data)
    states = [optimizer.state[p] for optimizer, p in zip((forgetful, never), tables)]
    for name in ("exp_avg_sq", "max_exp_avg_sq", "mean_update"):  # [H]
        if options["coupled"] and name in states[0]:
            states[1][name].copy_(states[0][name])
    kept = [{k: x for k, x in state.items() if k != "row_step"} for state in states]
    torch.testing.assert_close(*kept, rtol=0, atol=0)
    for step in range(4, 8):
        for p, optimizer in zip(tables, (forgetful, never)):
            p.grad = row_gradient(options, step)
            optimizer.step()
        torch.testing.assert_close(*tables, rtol=0, atol=0)
    if "row_count" in states[0]:
        assert states[0]["row_count"] == (states[0]["row_exp_avg_sq"] > 0).sum()


def test_rows_that_cannot_be_forgotten():
    model = nn.ModuleDict({"wte": nn.Embedding(V, H), "layer": nn.Linear(H, H)})
    optimizer = CoupledAdamW(
        model, embeddings="lean", core=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    for rows in ([0], []):  # there is no state yet, or nothing to forget
        optimizer.forget_rows(model["wte"].weight, rows)
    for rows, message in (
        ([3, V], rf"rows=\[{V}\] must be integers from 0 to {V - 1}, of rows of 'wte.weight'"),
        ([-1], r"rows=\[-1\] must be"),
        (torch.ones(V, dtype=torch.bool), "rows=torch.bool must be"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.forget_rows(model["wte"].weight, rows)
    with pytest.raises(ValueError, match="none of the optimizer's"):
        optimizer.forget_rows(torch.ones(V, H), [0])
    with pytest.raises(ValueError, match=r"'layer.weight' .*neither by core="):
        optimizer.forget_rows(model["layer"].weight, [0])
