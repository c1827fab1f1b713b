"""State and checkpoints: shapes, dtypes, AdamW in and out, and every refusal."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW, FlatShard, to_adam_state_dict
from coupled_adam.optim.options import OPTIONS
from coupled_adam.optim.state import entries
from optim.cases import CASES, LEAN, optimizer_of, take_steps, through_disk

V, H = 13, 5
TO_ADAM = {CoupledAdam: torch.optim.Adam, CoupledAdamW: torch.optim.AdamW}


def matrix(seed=0, shape=(V, H), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state_is_one_row(dtype, options):
    """V x H + H elements and the step: half of AdamW's two matrices."""
    p, head = matrix(dtype=dtype), matrix(shape=(H, V), dtype=dtype)
    groups = [{"params": [p]}, {"params": [head], "vocab_dim": 1}]
    optimizer = CoupledAdamW(groups, coupled=True, **options)
    take_steps(optimizer, [0])
    wide = torch.promote_types(dtype, torch.float32)
    for q in (p, head):
        state = dict(optimizer.state[q])
        assert state.pop("step").item() == 1
        exp_avg = state.pop("exp_avg")
        assert (exp_avg.shape, exp_avg.dtype) == (q.shape, dtype)
        names = {"exp_avg_sq", "max_exp_avg_sq"} if "amsgrad" in options else {"exp_avg_sq"}
        assert {name: (x.shape, x.dtype) for name, x in state.items()} == dict.fromkeys(
            names, ((H,), wide)
        )


RULES = {name: CASES[name] for name in ("coupled", "coupled, amsgrad", "LEAN", "LEAN, momentum")}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@every_rule
def test_init_state_is_not_a_step(rule):
    """The state before the first step, of what is trained; then the run is as without."""
    early, late, frozen = matrix(), matrix(), matrix().requires_grad_(False)
    other, control = matrix(1, (H,)), matrix(1, (H,))
    groups = [{"params": [early, frozen], "coupled": True, **rule}, {"params": [other]}]
    optimizer = CoupledAdamW(groups)
    optimizer.init_state()
    assert early.grad is None
    assert torch.equal(early, late)
    assert {p: state["step"].item() for p, state in optimizer.state.items()} == {early: 0, other: 0}
    reference = CoupledAdamW([{"params": [late], "coupled": True, **rule}, {"params": [control]}])
    for o in (optimizer, reference):
        take_steps(o, range(3))
    assert torch.equal(early, late)
    assert torch.equal(other, control)
    optimizer.init_state()  # nothing is reset by calling it again
    assert optimizer.state[early]["step"].item() == 3


@every_rule
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_is_exact(dtype, steps, rule):
    """Save to disk, load, continue: bit for bit, the float32 moments of bf16 matrices included.

    Entries of a user stay.
    """
    p, q = matrix(dtype=dtype), matrix(dtype=dtype)
    optimizer = CoupledAdamW([p], coupled=True, **{**rule, "second_moment_scale": 0.25})
    optimizer.init_state()
    optimizer.state[p]["mine"] = torch.ones(3, dtype=dtype)
    take_steps(optimizer, range(steps))
    with torch.no_grad():
        q.copy_(p)
    resumed = CoupledAdamW([q], coupled=True, **rule)
    resumed.load_state_dict(through_disk(optimizer.state_dict()))
    assert resumed.param_groups[0]["second_moment_scale"] == 0.25
    for name, value in optimizer.state[p].items():
        assert resumed.state[q][name].dtype == value.dtype, name
        assert torch.equal(resumed.state[q][name], value), name
    for o in (optimizer, resumed):
        take_steps(o, range(5, 10))
    assert torch.equal(p, q)


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adam_checkpoint_is_averaged(cls, vocab_dim, dtype):
    """A running Adam(W) is switched over between two steps; options that it lacks stay ours."""
    p, embedding = matrix(1, (H,), dtype), matrix(2, dtype=dtype)
    adam = TO_ADAM[cls]([{"params": [p]}, {"params": [embedding]}], lr=0.02, amsgrad=True)
    take_steps(adam, range(6))
    q, loaded = copy.deepcopy((p, embedding))
    ours = {"coupled": True, "second_moment_scale": 0.5, "vocab_dim": vocab_dim}
    switched = cls([{"params": [q]}, {"params": [loaded], **ours}])
    switched.load_state_dict(through_disk(adam.state_dict()))
    assert not switched.param_groups[0]["coupled"]
    group = switched.param_groups[1]
    assert {name: group[name] for name in (*ours, "lr")} == {**ours, "lr": 0.02}
    state, wide = switched.state[loaded], torch.promote_types(dtype, torch.float32)
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        average = adam.state[embedding][name].to(wide).mean(vocab_dim)
        assert state[name].dtype == wide
        torch.testing.assert_close(state[name], average)
    assert torch.equal(state["exp_avg"], adam.state[embedding]["exp_avg"])
    assert state["step"].item() == 6
    # The mean of the maxima is an upper bound of the maximum of the means.
    assert (state["max_exp_avg_sq"] >= state["exp_avg_sq"]).all()
    for o in (switched, adam):
        take_steps(o, range(6, 9))
    assert torch.equal(q, p)  # the uncoupled parameter goes on as under torch's own optimizer


def lean_of(v, vocab_dim):
    """LEAN's r and nu of Adam's v [V, H], by reference.py's formulas, in float64."""
    v = v.double().T if vocab_dim else v.double()
    r = v.mean(1)
    return r, v[r > 0].mean(0)


@pytest.mark.parametrize("options", LEAN.values(), ids=LEAN)
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_lean_from_and_to_adam(dtype, vocab_dim, options):
    """r and nu are what LEAN would average; r_i nu_j / mean(nu) goes back."""
    p = matrix(dtype=dtype)
    adam = torch.optim.AdamW([p], betas=(0.9, 0.95))
    take_steps(adam, range(6), vocab_dim)
    v = adam.state[p]["exp_avg_sq"].clone()
    options = {"betas": (0.9, 0.95), **options, "vocab_dim": vocab_dim}
    betas = options["betas"]
    optimizer = optimizer_of([p], **options)
    checkpoint = through_disk(adam.state_dict())
    checkpoint["param_groups"][0] |= {"betas": betas, "weight_decay": 0.0}
    optimizer.load_state_dict(checkpoint)
    state, wide = optimizer.state[p], torch.promote_types(dtype, torch.float32)
    assert state.keys() == {"step", *entries(optimizer.param_groups[0])}
    r, nu = lean_of(v, vocab_dim)
    torch.testing.assert_close(state["row_exp_avg_sq"], r.to(wide))
    torch.testing.assert_close(state["exp_avg_sq"], nu.to(wide))
    if "mean_update" in state:
        assert not state["mean_update"].count_nonzero()

    back = torch.optim.AdamW([p])
    back.load_state_dict(through_disk(to_adam_state_dict(optimizer.state_dict())))
    assert not OPTIONS.keys() & back.param_groups[0].keys()
    assert back.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    rank_one = nu.unsqueeze(vocab_dim) * r.unsqueeze(1 - vocab_dim) / nu.mean()
    torch.testing.assert_close(back.state[p]["exp_avg_sq"], rank_one.to(dtype))
    take_steps(back, [6])
    take_steps(optimizer, [7])


def test_lean_from_coupled_adam():
    """Nothing tells the rows apart: all have the mean of the columns."""
    torch.manual_seed(0)
    p, nu = matrix(), torch.rand(H)
    optimizer = optimizer_of([p], **CASES["LEAN"])
    groups = optimizer.state_dict()["param_groups"]
    del groups[0]["row_exponent"], groups[0]["zero_sum"]
    saved = {"step": torch.tensor(6.0), "exp_avg_sq": nu.clone()}
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    state, (r, expected) = optimizer.state[p], lean_of(nu.expand(V, H), 0)
    torch.testing.assert_close(state["row_exp_avg_sq"], r.float())
    torch.testing.assert_close(state["exp_avg_sq"], expected.float())
    assert not state["mean_update"].count_nonzero()
    take_steps(optimizer, [6])


def test_coupled_adam_from_lean():
    """The mean of all rows' v_ij = r_i nu_j / mean(nu)."""
    p = matrix()
    lean = optimizer_of([p], **CASES["LEAN, momentum"])
    take_steps(lean, range(4))
    checkpoint, state = lean.state_dict(), lean.state[p]
    checkpoint["param_groups"][0] |= {"row_exponent": 0.0, "zero_sum": False}
    coupled = optimizer_of([p])
    coupled.load_state_dict(through_disk(checkpoint))
    expected = state["row_exp_avg_sq"].mean() * state["exp_avg_sq"] / state["exp_avg_sq"].mean()
    assert coupled.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(coupled.state[p]["exp_avg_sq"], expected)
    take_steps(coupled, [4])


def test_momentum_begins_and_ends_between_steps():
    p = matrix()
    optimizer = CoupledAdamW([p], coupled=True, betas=(0.9, 0.9))
    take_steps(optimizer, range(2))
    for beta1 in (0.0, 0.9):
        optimizer.param_groups[0]["betas"] = (beta1, 0.9)
        take_steps(optimizer, [2])
        assert ("exp_avg" in optimizer.state[p]) == (beta1 != 0)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.1 * p.grad)  # begun at zero


PLAIN = {"coupled": True, "betas": (0.9, 0.99), "amsgrad": False, "row_exponent": 0.0}
PLAIN |= {"zero_sum": False}
OF_OTHER_OPTIONS = {
    "coupled": PLAIN,
    "uncoupled": PLAIN | {"coupled": False},
    "amsgrad": PLAIN | {"amsgrad": True},
    "rows": PLAIN | {"row_exponent": 0.5},
    "LEAN": PLAIN | CASES["LEAN"],
}
CHANGES = [(a, b) for a, b in itertools.permutations(OF_OTHER_OPTIONS, 2) if b != "uncoupled"]


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.filterwarnings("ignore:no param group is coupled", "ignore:.*built with beta1 = 0")
def test_options_that_need_another_state(old, new):
    """Refused in the step, before anything changes; a reload converts the state."""
    p = matrix()
    optimizer = CoupledAdamW([p], **OF_OTHER_OPTIONS[old])
    take_steps(optimizer, range(2))
    optimizer.param_groups[0] |= OF_OTHER_OPTIONS[new]
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"changed after the first step.*load_state_dict\(o"):
        take_steps(optimizer, [2])
    assert torch.equal(p, before)
    optimizer.load_state_dict(through_disk(optimizer.state_dict()))
    take_steps(optimizer, [2])
    assert not torch.equal(p, before)
    assert optimizer.state[p].keys() == {"step", *entries(optimizer.param_groups[0])}


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_export_to_adam(cls, vocab_dim, amsgrad):
    """torch loads the export and steps with it; loading it back gives what was exported."""
    p, bias = matrix(), matrix(1, (H,))
    groups = [{"params": [p], "coupled": True, "vocab_dim": vocab_dim}, {"params": [bias]}]
    optimizer = cls(groups, amsgrad=amsgrad)
    assert to_adam_state_dict(optimizer.state_dict())["state"] == {}
    take_steps(optimizer, range(4))
    saved = optimizer.state_dict()
    moment = saved["state"][0]["exp_avg_sq"].clone()
    exported = through_disk(to_adam_state_dict(saved))
    assert saved["state"][0]["exp_avg_sq"].shape == moment.shape  # the given dict is not changed
    assert "coupled" in saved["param_groups"][0]
    assert not {"coupled", "second_moment_scale", "vocab_dim"} & set(exported["param_groups"][0])

    q, other = copy.deepcopy((p, bias))
    adam = TO_ADAM[cls]([{"params": [q]}, {"params": [other]}], amsgrad=amsgrad)
    adam.load_state_dict(exported)
    assert torch.equal(adam.state[q]["exp_avg_sq"], moment.unsqueeze(vocab_dim).expand(V, H))
    take_steps(adam, [4])
    take_steps(optimizer, [4])
    assert torch.equal(bias, other)

    before = optimizer.state[p]["exp_avg_sq"].clone()
    optimizer.load_state_dict(to_adam_state_dict(optimizer.state_dict()))
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], before)


@pytest.mark.parametrize(
    ("name", "constructed", "saved"),
    [
        ("coupled", True, False),
        ("row_exponent", 0.5, 0.0),
        ("row_exponent", 0.0, 0.5),
        ("zero_sum", True, False),
        ("zero_sum", False, True),
        ("betas", (0.9, 0.95), (0.0, 0.95)),
    ],
)
@pytest.mark.filterwarnings("ignore:no param group is coupled")
def test_checkpoint_that_makes_it_another_optimizer_warns(name, constructed, saved):
    """It is then used, and the step after it works."""
    p = matrix()
    optimizer, other = (
        CoupledAdamW([p], **{"coupled": True, name: value}) for value in (constructed, saved)
    )
    for each in (optimizer, other):
        take_steps(each, [0])
    message = re.escape(f"with {name}={constructed}, but the checkpoint has {name}={saved}")
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0][name] == saved
    take_steps(optimizer, [1])


FLAT, VECTOR = FlatShard((V, H), 0), [matrix(shape=(V * H,))]
BAD_GROUPS = [
    ({"vocab_dim": 2}, "Invalid vocab_dim: 2"),
    ({"row_exponent": 0.5, "amsgrad": True}, "amsgrad=True is not defined with row_exponent"),
    ({"zero_sum": True, "amsgrad": True}, "amsgrad=True is not defined with row_exponent or zero"),
    ({"coupled": "yes"}, "Invalid coupled: 'yes'"),
    ({"params": [nn.Parameter(torch.zeros(3))]}, r"\[3\].*flattened"),
    ({"params": [nn.Parameter(torch.zeros(2, 3, 4))]}, r"parameter 0 \[2, 3, 4\].*\[V, H\]"),
    ({"params": [nn.Parameter(torch.zeros(0, 4))]}, r"\[0, 4\].*empty"),
    ({"params": [nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))]}, "complex64"),
    ({"params": [torch.zeros(2, 2, dtype=torch.float8_e4m3fn)]}, "float8_e4m3fn"),
    ({"flat_shards": [FLAT]}, "a piece must lie in a parameter with one dimension"),
    ({"params": VECTOR, "flat_shards": [FlatShard((V, H, 2), 0)]}, "in a matrix"),
    ({"params": VECTOR, "flat_shards": [FlatShard((V, H), 1)]}, "in a matrix"),
    ({"params": VECTOR, "flat_shards": [FlatShard((V, H), 0, None, 3, 63)]}, "in a matrix"),
]


@pytest.mark.parametrize(("group", "message"), BAD_GROUPS)
def test_bad_group(group, message):
    """Refused at construction and by add_param_group, which leaves the groups as they were."""
    group = {"params": [matrix()], "coupled": True, **group}
    with pytest.raises(ValueError, match=message):
        CoupledAdamW([dict(group)])
    optimizer = CoupledAdamW([matrix()], coupled=True)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1


def test_a_whole_matrix_that_is_flat():
    """Without a process group a piece may be all there is."""
    flat, whole = matrix(shape=(V * H,)), matrix()
    whole.data = flat.detach().view(V, H).clone()
    group = {"params": [flat], "coupled": True, "flat_shards": [FLAT]}
    optimizers = CoupledAdamW([group]), CoupledAdamW([whole], coupled=True)
    for seed in range(3):
        whole.grad = matrix(seed).detach()
        flat.grad = whole.grad.flatten()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(flat.view(V, H), whole)
    optimizers[0].load_state_dict(through_disk(optimizers[0].state_dict()))
    assert optimizers[0].param_groups[0]["flat_shards"] == [FLAT]


def test_rows_that_megatron_has_split_are_refused():
    """The average over this rank's rows would be another one; what has all rows is coupled."""
    table = nn.Parameter(torch.zeros(40, 16))
    table.tensor_model_parallel, table.partition_dim = True, 0
    with pytest.raises(ValueError, match=r"cannot couple .* \[40, 16\].*parallelize_module"):
        CoupledAdamW([table], coupled=True)
    table.partition_dim = 1  # all rows are here, of some columns
    CoupledAdamW([table], coupled=True)
