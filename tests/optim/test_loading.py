"""Loading: hooks, checkpoints that are damaged, have overflowed, or lack options; warnings."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from cores import assert_same_state
from coupled_adam import LEAN, CoupledAdamW, param_groups, to_adam_state_dict
from optim.cases import CASES, optimizer_of, take_steps

V, H = 20, 7


def matrix(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(V, H, generator=generator).to(dtype))


def own_groups(optimizer, checkpoint):
    """The checkpoint's state with the optimizer's groups, as the page of switching says."""
    return {"state": checkpoint["state"], "param_groups": optimizer.state_dict()["param_groups"]}


RULES = {name: CASES[name] for name in ("coupled", "coupled, amsgrad", "LEAN", "LEAN, momentum")}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def test_an_optimizer_where_its_state_dict_is_meant():
    with pytest.raises(ValueError, match=r"as of optimizer.state_dict\(\)"):
        to_adam_state_dict(CoupledAdamW([nn.Parameter(torch.ones(2, 2))], coupled=True))


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hook_that_finds_states_by_name(rule, dtype):
    """Each matrix has its own moments, in their own dtype, as if the order had been the same."""
    params = {"embed": matrix(0, dtype), "head": matrix(1, dtype)}

    def make(order):
        groups = [{"params": [(n, params[n]) for n in order], "coupled": True}]
        return CoupledAdamW(groups, **rule)

    def by_name(optimizer, saved):
        ids = {n: i for g in saved["param_groups"] for n, i in zip(g["param_names"], g["params"])}
        names = [n for g in optimizer.param_groups for n in g["param_names"]]
        group = {**saved["param_groups"][0], "params": [0, 1], "param_names": names}
        state = {i: saved["state"][ids[n]] for i, n in enumerate(names)}
        return {"state": state, "param_groups": [group]}

    old, new = make(["embed", "head"]), make(["head", "embed"])
    params["head"].grad = matrix(2, dtype).detach() * 100
    params["embed"].grad = matrix(3, dtype).detach()
    for _ in range(2):
        old.step()
    new.register_load_state_dict_pre_hook(by_name)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for p in params.values():
        assert new.state[p].keys() == old.state[p].keys()
        for name, value in old.state[p].items():
            assert new.state[p][name].dtype == value.dtype
            assert torch.equal(new.state[p][name], value)


def test_what_hooks_see_and_change():
    """Before: the checkpoint as it was saved. After: what is used; and their edits stay."""
    p, calls = matrix(dtype=torch.bfloat16), []
    adamw = torch.optim.AdamW([p])
    take_steps(adamw, range(2))
    optimizer = CoupledAdamW([p], coupled=True)

    def before(_, saved):
        calls.append(saved["state"][0]["exp_avg_sq"].shape)
        saved["state"] = {0: {**saved["state"][0], "exp_avg_sq": torch.ones(V, H)}}

    def after(optimizer):
        nu = optimizer.state[p]["exp_avg_sq"]
        calls.append((nu.shape, nu.dtype, nu[0].item()))
        optimizer.state[p]["exp_avg_sq"] = nu * 4

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    for _ in range(2):
        optimizer.load_state_dict(adamw.state_dict())
    assert calls == [(V, H), ((H,), torch.float32, 1.0)] * 2
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], torch.full((H,), 4.0))


def decoder():
    return nn.ModuleDict({"embed": nn.Embedding(V, H), "hidden": nn.Linear(H, H)})


CONVERSIONS = {
    "LEAN to Coupled": ("LEAN, momentum", "coupled"),
    "AdamW to LEAN": (None, "LEAN, momentum"),
    "AdamW to Coupled": (None, "coupled"),
    "LEAN to AdamW": ("LEAN, momentum", None),
    "Coupled to LEAN": ("coupled", "LEAN, momentum"),
    "Coupled to AdamW": ("coupled", None),
}


def optimizer_for(p, rule):
    if rule is None:
        return torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    return optimizer_of([p], **{**CASES[rule], "second_moment_scale": 1.0})


@pytest.mark.parametrize(("old", "new"), CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("of", ["element", "row"])
def test_what_has_overflowed_stays_alone(old, new, of):
    """One inf in a gradient: all other rows, or columns, of the matrix move afterwards."""
    p = matrix()
    before = optimizer_for(p, old)
    take_steps(before, [0])
    p.grad = matrix(1).detach()
    if of == "element":
        p.grad[3, 2] = math.inf
    else:
        p.grad[3] = math.inf
    if old == "coupled" and of == "row":
        pytest.skip("Coupled Adam itself stops all columns")
    before.step()
    with torch.no_grad():
        p.nan_to_num_(0.0)
    after = optimizer_for(p, new)
    saved = before.state_dict()
    if old is not None and new is None:
        saved = to_adam_state_dict(saved)
    after.load_state_dict(own_groups(after, saved))
    take_steps(after, [2])
    start = p.detach().clone()
    take_steps(after, [3, 4])
    others = torch.ones(V, H, dtype=torch.bool)
    others[:, 2], others[3] = old != "coupled", False
    assert p.isfinite()[others].all()
    assert (p != start)[others].all()


@pytest.mark.parametrize("rule", ["coupled", "LEAN, momentum"])
def test_means_leave_out_what_has_overflowed(rule):
    """nu is the mean of the finite second moments, by the formula in float64."""
    p = matrix()
    adamw = optimizer_for(p, None)
    take_steps(adamw, range(2))
    adamw.state[p]["exp_avg_sq"][3, 2] = math.inf
    v = adamw.state[p]["exp_avg_sq"].double()
    optimizer = optimizer_for(p, rule)
    optimizer.load_state_dict(own_groups(optimizer, adamw.state_dict()))
    expected = torch.where(v.isinf(), torch.nan, v).nanmean(0)
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"].double(), expected)


def longer(x, dim):
    return torch.cat([x, x.narrow(dim, 0, 1)], dim) if x.dim() > dim else torch.cat([x[None]] * 2)


DAMAGES = {  # what a flipped bit, another version or a mistake may make of an entry
    "missing": lambda x: None,
    "words": lambda x: "seven",
    "a list": lambda x: x.tolist() if x.dim() else [1.0],
    "below 0": lambda x: torch.full_like(x, -5.0),
    "no number": lambda x: torch.full_like(x, math.nan),
    "integers": lambda x: x.to(torch.int64),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x[None].to_sparse(),
    "a scalar": lambda x: x.sum() if x.dim() else x[None, None],
    "another vocabulary": lambda x: longer(x, 0),
    "another width": lambda x: longer(x, -1 % max(x.dim(), 1)),
    "transposed": lambda x: x.T.contiguous() if x.dim() == 2 else longer(x, 0),
}


def is_damage(damage, name, x):
    """Not what may be so, or what a conversion makes anew or leaves out."""
    if name == "step":
        return damage not in ("integers", "sparse", "a scalar")  # which are one number still
    if damage == "missing":
        return name == "exp_avg_sq"
    if damage == "below 0":
        return "sq" in name
    return damage != "no number" or x.dim() < 2


@pytest.mark.parametrize(
    "rule", [{"coupled": False}, *({"coupled": True} | CASES[name] for name in RULES)], ids=str
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("ignore:no param group is coupled")
def test_a_damaged_checkpoint(damage, rule):
    """It is refused whole: not even the undamaged half of it is loaded, and training goes on."""
    first, p = matrix(1), matrix()
    groups = [{"params": [("first", first)]}, {"params": [("wte", p)], **rule}]
    optimizer = CoupledAdamW(groups)
    take_steps(optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    for name in [n for n, x in before["state"][1].items() if is_damage(damage, n, x)]:
        saved = copy.deepcopy(before)
        saved["state"][0] = {key: x + 1 for key, x in saved["state"][0].items()}
        saved["param_groups"][0]["lr"] = 7.0
        saved["state"][1][name] = DAMAGES[damage](saved["state"][1][name])
        if damage == "missing":
            del saved["state"][1][name]
        with pytest.raises(ValueError, match=rf"cannot load the state of 'wte' \[20, 7\].*{name}"):
            optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), before)
    take_steps(optimizer, [2])
    assert p.isfinite().all()


@pytest.mark.parametrize("wrong", [{"lr": "0.1"}, {"betas": (0.9, 1.0)}, {"row_exponent": 3}])
def test_a_damaged_group(wrong):
    optimizer = CoupledAdamW([matrix()], coupled=True)
    take_steps(optimizer, [0])
    saved, before = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    saved["param_groups"][0] |= wrong
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), before)


def test_what_a_checkpoint_does_not_have_keeps_its_value():
    """Among it the factor of the embeddings' rate, by which loops multiply."""
    m = decoder()
    groups = param_groups(m, {"lr": 2e-3, "betas": (0.0, 0.99)})
    adamw = torch.optim.AdamW([dict(group) for group in groups], lr=1e-3)
    take_steps(adamw, [0])
    saved = adamw.state_dict()
    for group in saved["param_groups"]:
        group.pop("coupled"), group.pop("vocab_dim", None)
    optimizer = CoupledAdamW(m, lr=1e-3, embeddings="lean")
    optimizer.param_groups[-1]["mine"] = "here"
    kept = {**LEAN, "initial_lr_factor": 2.0, "coupled": True, "vocab_dim": 0, "mine": "here"}
    del kept["lr_factor"]
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[-1]
    assert {name: group[name] for name in kept} == kept
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * group.get("initial_lr_factor", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer, [1])


def test_one_warning_for_one_cause():
    """LEAN's checkpoint in Coupled Adam has other betas and two other options; in two groups."""
    tables = [matrix(), nn.Parameter(matrix(1).detach().T.contiguous())]
    groups = [{"params": [p], "coupled": True, "vocab_dim": dim} for dim, p in enumerate(tables)]
    lean = CoupledAdamW([dict(group, **LEAN) for group in groups])
    take_steps(lean, [0])
    coupled = CoupledAdamW([dict(group) for group in groups])
    with pytest.warns(UserWarning, match="row_exponent=0.75, zero_sum=True, betas=") as caught:
        coupled.load_state_dict(lean.state_dict())
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(coupled, [1])


def warn_of_rows():
    p = matrix()
    optimizer = CoupledAdamW([p], coupled=True)
    p.grad = torch.zeros(V, H)
    p.grad[0] = 1.0
    optimizer.step()


def warn_of_a_factor():
    optimizer = CoupledAdamW(decoder(), embeddings="lean")
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()


def warn_of_momentum():
    optimizer = CoupledAdamW(decoder(), embeddings="lean")
    group = optimizer.param_groups[-1]
    group["betas"] = (0.9, 0.99)
    group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step(lambda: None)


@pytest.mark.parametrize(
    "cause",
    [warn_of_rows, warn_of_a_factor, warn_of_momentum, lambda: CoupledAdamW([matrix()])],
)
def test_warnings_point_at_the_users_line(cause):
    """Also where the call goes through torch's wrappers."""
    with pytest.warns(UserWarning, match="have a gradient|coupled") as caught:
        cause()
    assert [w.filename for w in caught] == [__file__]


def test_other_groups():
    """The error names the page, whose recipe transfers AdamW's state, and the run goes on."""
    m = decoder()
    old = torch.optim.AdamW(m.parameters(), lr=0.1)
    take_steps(old, range(2))
    optimizer = CoupledAdamW(m, lr=0.2, embeddings="lean")
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, .*docs/switching\.md"):
        optimizer.load_state_dict(old.state_dict())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: old.state[p] for i, p in enumerate(params)}
    optimizer.load_state_dict(own_groups(optimizer, {"state": state}))
    table = m["embed"].weight
    torch.testing.assert_close(
        optimizer.state[table]["row_exp_avg_sq"], old.state[table]["exp_avg_sq"].mean(1)
    )
    hidden = m["hidden"].weight
    assert torch.equal(optimizer.state[hidden]["exp_avg"], old.state[hidden]["exp_avg"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.4]
    take_steps(optimizer, [2])


@pytest.mark.parametrize("structure", [None, {}, {"state": {}}], ids=str)
def test_no_state_dict(structure):
    p = matrix()
    optimizer = CoupledAdamW([p], coupled=True)
    take_steps(optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="this is no state dict"):
        optimizer.load_state_dict(structure)
    assert_same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize("source", ["coupled", "adamw"])
def test_rows_without_gradients_after_a_conversion(source):
    """Padding, of which the first moment tells that it never had one, does not move."""
    p = matrix()
    is_adamw = source == "adamw"
    old = torch.optim.AdamW([p]) if is_adamw else CoupledAdamW([p], coupled=True)

    def step(optimizer, number):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(p)
        p.grad[:3] = 0
        optimizer.step()

    for number in range(5):
        step(old, number)
    lean = CoupledAdamW([p], coupled=True, weight_decay=0.0, **{**LEAN, "betas": (0.5, 0.99)})
    saved = old.state_dict()
    saved["param_groups"] = lean.state_dict()["param_groups"]
    lean.load_state_dict(saved)
    before = p.detach().clone()
    for number in range(5, 20):
        step(lean, number)
    assert torch.equal(p[:3], before[:3])
    assert (p[3:] != before[3:]).all()
