"""torch's own records of its optimizers, with ours in the place of Adam and AdamW.

``torch.testing._internal.common_optimizers.optim_db`` says of each optimizer with which options,
schedulers and wrong arguments it is to be tested. Run by test_optim_db.py in a process of its own:
importing the records freezes flags of ``torch.backends`` and loads another hypothesis profile.
"""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from oracle import CoupledAdamOracle
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coupled_adam import CoupledAdam, CoupledAdamW

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

pytestmark = pytest.mark.filterwarnings("ignore:no param group is coupled")

OURS = {"Adam": CoupledAdam, "AdamW": CoupledAdamW}
INFOS = [info for info in optim_db if info.name in OURS]
OWN_OPTIONS = (
    *("coupled", "second_moment_scale", "row_exponent", "zero_sum"),
    *("vocab_dim", "stochastic_rounding"),
)
V, H, STEPS = 13, 5, 5
IMPLEMENTATIONS = {
    "default": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "differentiable": {"differentiable": True},
}


def inputs_of(info, dtype=torch.float32):
    """Every input for any device; without ``capturable``, which is not for CPUs."""
    inputs = {}
    for device in ("cpu", "mps", "cuda"):
        for one in info.optim_inputs_func(device, dtype):
            kwargs = {k: v for k, v in one.kwargs.items() if k != "capturable"}
            inputs.setdefault(str(kwargs), kwargs)
    return inputs


def allowed(kwargs, implementation):
    tensors = isinstance(kwargs.get("lr"), torch.Tensor)
    return not (tensors and implementation == "foreach")  # torch refuses it: see test_errors


EVERY = [
    pytest.param(info, kwargs, implementation, id=f"{info.name}-{name}-{implementation}")
    for info in INFOS
    for name, kwargs in inputs_of(info).items()
    for implementation in IMPLEMENTATIONS
    if allowed(kwargs, implementation)
]
every = pytest.mark.parametrize(("info", "kwargs", "implementation"), EVERY)
INPUTS = [
    pytest.param(info, kwargs, id=f"{info.name}-{name}")
    for info in INFOS
    for name, kwargs in inputs_of(info).items()
]
every_input = pytest.mark.parametrize(("info", "kwargs"), INPUTS)
each = pytest.mark.parametrize("info", INFOS, ids=[info.name for info in INFOS])
both = pytest.mark.parametrize("coupled", [False, True], ids=["uncoupled", "coupled"])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def parameters(shapes, dtype=torch.float32, requires_grad=True):
    drawn = [draw(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    return [p.requires_grad_(requires_grad) for p in drawn]


def set_gradients(params, step, skip=()):
    for index, p in enumerate(params):
        p.grad = None if index in skip else draw(p.shape, p.dtype, 100 * step + index + 50)


def take_steps(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def options_of(kwargs, implementation="default", dtype=torch.float32):
    options = copy.deepcopy({**kwargs, **IMPLEMENTATIONS[implementation]})
    if dtype == torch.float16:
        options.setdefault("eps", 0.1)
    return options


def same(actual, expected):
    """Equal in all bits: numbers, tensors, and what contains them."""
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[k], expected[k]) for k in actual
        )
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual == expected


def without_ours(state_dict):
    groups = [
        {name: value for name, value in group.items() if name not in OWN_OPTIONS}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def assert_same_as_torch(optimizer, params, control, others):
    assert same(params, others)
    assert same(without_ours(optimizer.state_dict()), control.state_dict())


# Without coupling: torch's own numbers.

SHAPES = [(V, H), (H,), (), (2, 3, 4), (0, 3), (1, 1)]


@pytest.mark.parametrize(
    ("info", "kwargs", "implementation", "dtype"),
    [
        pytest.param(*one.values, dtype, id=f"{one.id}-{dtype}")
        for one in EVERY
        for dtype in [*DTYPES, torch.complex64, torch.complex128]
        if not (dtype.is_complex and one.values[2] == "fused")  # see test_complex_fused
    ],
)
def test_uncoupled_is_torch(info, kwargs, implementation, dtype):
    options = options_of(kwargs, implementation, dtype)
    differentiable = implementation == "differentiable"
    params, others = (parameters(SHAPES, dtype, not differentiable) for _ in range(2))
    optimizer = OURS[info.name](params, **copy.deepcopy(options))
    control = info.optim_cls(others, **options)
    for step in range(STEPS):
        skip = () if step == 0 else (step,)
        set_gradients(params, step, skip)
        set_gradients(others, step, skip)
        optimizer.step()
        control.step()
        assert_same_as_torch(optimizer, params, control, others)


@each
def test_complex_fused(info):
    messages = []
    for cls in (info.optim_cls, OURS[info.name]):
        params = parameters([(V, H)], torch.complex64)
        with pytest.raises(RuntimeError) as raised:
            take_steps(cls(params, fused=True), params, [0])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


CONTAINERS = {
    "list": lambda params: params,
    "generator": iter,
    "named": lambda params: [(f"p{i}", p) for i, p in enumerate(params)],
    "groups": lambda params: [
        {"params": params[:2], "lr": 0.02, "weight_decay": 0.3},
        {"params": params[2:], "betas": (0.5, 0.6), "amsgrad": True, "maximize": True},
    ],
    "named groups": lambda params: [
        {"params": [("first", params[0])]},
        {"params": [("second", params[1]), ("third", params[2])], "eps": 0.1},
    ],
    "tensors as groups": lambda params: [{"params": p} for p in params],
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("implementation", ["default", "for-loop", "foreach", "fused"])
@each
def test_uncoupled_containers(info, container, implementation):
    params, others = (parameters(SHAPES[:3]) for _ in range(2))
    options = IMPLEMENTATIONS[implementation]
    optimizer = OURS[info.name](container(params), **options)
    control = info.optim_cls(container(others), **options)
    take_steps(optimizer, params, range(STEPS))
    take_steps(control, others, range(STEPS))
    assert_same_as_torch(optimizer, params, control, others)


@pytest.mark.parametrize("implementation", ["default", "for-loop", "foreach", "fused"])
@each
def test_uncoupled_dtypes_mixed(info, implementation):
    params, others = (
        [p for seed, dtype in enumerate(DTYPES) for p in parameters([(3, 4), (2,)], dtype)]
        for _ in range(2)
    )
    options = {"eps": 0.1, **IMPLEMENTATIONS[implementation]}
    optimizer, control = OURS[info.name](params, **options), info.optim_cls(others, **options)
    take_steps(optimizer, params, range(STEPS))
    take_steps(control, others, range(STEPS))
    assert_same_as_torch(optimizer, params, control, others)


# With coupling: the oracle.


def oracle_of(info, kwargs, p, vocab_dim, scale):
    matrix = p.detach().double().numpy()
    beta1, beta2 = (float(beta) for beta in kwargs.get("betas", (0.9, 0.999)))
    names = ("eps", "amsgrad", "maximize")
    return CoupledAdamOracle(
        matrix.T if vocab_dim else matrix,
        lr=float(kwargs.get("lr", 1e-3)),
        beta1=beta1,
        beta2=beta2,
        weight_decay=kwargs.get("weight_decay", 0.01 if info.name == "AdamW" else 0.0),
        decoupled_weight_decay=info.name == "AdamW",
        second_moment_scale=scale,
        **{name: kwargs[name] for name in names if name in kwargs},
    )


@every
@dtypes
@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_coupled_is_the_oracle(info, kwargs, implementation, dtype, vocab_dim, scale):
    options = options_of(kwargs, implementation, dtype)
    (p,) = parameters([(V, H)], dtype, implementation != "differentiable")
    oracle = oracle_of(info, options, p, vocab_dim, scale)
    optimizer = OURS[info.name](
        [p], **options, coupled=True, vocab_dim=vocab_dim, second_moment_scale=scale
    )
    for step in range(STEPS):
        set_gradients([p], step)
        gradient = p.grad.double().numpy()
        optimizer.step()
        oracle.step(gradient.T if vocab_dim else gradient)
    given = (kwargs.get("lr"), *kwargs.get("betas", ()))
    tensors = any(isinstance(value, torch.Tensor) for value in given)  # of float32
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if tensors else 0.0)
    tolerance = 1e-12 if rounding < 1e-15 else 4 * rounding * STEPS
    actual = p.detach().double().numpy()
    actual = actual.T if vocab_dim else actual
    np.testing.assert_allclose(actual, oracle.embeddings, rtol=tolerance, atol=tolerance)
    assert optimizer.state[p]["exp_avg_sq"].shape == ((V,) if vocab_dim else (H,))


@each
@both
@pytest.mark.parametrize("implementation", ["default", "for-loop", "foreach", "fused"])
def test_options_of_groups(info, coupled, implementation):
    """The bias keeps its own rate and no decay, whatever the weights have."""
    weight, bias, other = parameters([(V, H), (V,), (V, H)])
    groups = [
        {"params": [weight], "coupled": coupled, "weight_decay": 0.1},
        {"params": [bias], "lr": 0.0},
        {"params": [other], "coupled": coupled, "lr": 0.0, "weight_decay": 0.0},
    ]
    before = [p.detach().clone() for p in (weight, bias, other)]
    optimizer = OURS[info.name](groups, lr=0.01, **IMPLEMENTATIONS[implementation])
    take_steps(optimizer, [weight, bias, other], range(STEPS))
    assert not torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])
    assert torch.equal(other, before[2])


# With and without: what every optimizer of torch does.


@every
@both
def test_state_dict_goes_on(info, kwargs, implementation, coupled):
    """Saved and loaded into a new optimizer after three steps: the same bits after six."""
    options = {**options_of(kwargs, implementation), "coupled": coupled}
    requires_grad = implementation != "differentiable"
    params = parameters([(V, H), (H, V)], requires_grad=requires_grad)
    optimizer = OURS[info.name](params, **copy.deepcopy(options))
    take_steps(optimizer, params, range(3))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    state_dict = torch.load(buffer, weights_only=True)
    others = [p.detach().clone().requires_grad_(requires_grad) for p in params]
    saved = copy.deepcopy(state_dict)
    resumed = OURS[info.name](others, coupled=coupled)
    resumed.load_state_dict(state_dict)
    assert same(state_dict, saved)  # what was given is as it was
    assert same(resumed.state_dict(), optimizer.state_dict())
    resumed.defaults["differentiable"] = optimizer.defaults["differentiable"]
    for one, its in ((optimizer, params), (resumed, others)):
        take_steps(one, its, range(3, 6))
    assert same(others, params)
    assert same(resumed.state_dict(), optimizer.state_dict())


@every_input
@both
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_go_on(info, kwargs, coupled, copied):
    params = [nn.Parameter(p.detach()) for p in parameters([(V, H), (H, V)])]
    optimizer = OURS[info.name](params, **options_of(kwargs), coupled=coupled)
    take_steps(optimizer, params, range(3))
    others, other = copied((params, optimizer))
    assert repr(other) == repr(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public <= set(vars(other))
    for one, its in ((optimizer, params), (other, others)):
        take_steps(one, its, range(3, 6))
    assert same(list(others), list(params))
    assert same(other.state_dict(), optimizer.state_dict())


@every_input
@both
def test_older_state_dicts(info, kwargs, coupled):
    """Groups of a checkpoint that know nothing of later flags, ours included; steps as numbers."""
    params = parameters([(V, H)])
    optimizer = OURS[info.name](params, **options_of(kwargs), coupled=coupled)
    take_steps(optimizer, params, range(3))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        for name in (*info.not_og_supported_flags, *OWN_OPTIONS):
            if name != "maximize" or not group["maximize"]:
                del group[name]
    for state in state_dict["state"].values():
        state["step"] = state["step"].item()
    others = [p.detach().clone().requires_grad_() for p in params]
    resumed = OURS[info.name](others, coupled=coupled)
    resumed.load_state_dict(state_dict)
    for one, its in ((optimizer, params), (resumed, others)):
        take_steps(one, its, range(3, 6))
    assert same(others, params)
    assert isinstance(resumed.state[others[0]]["step"], torch.Tensor)


@each
@both
@pytest.mark.parametrize("named", [(True, False), (False, True), (True, True)], ids=str)
def test_named_state_dicts(info, coupled, named):
    params, others = (parameters([(V, H), (H, V)]) for _ in range(2))

    def optimizer_of(tensors, names):
        given = [(f"p{i}", p) for i, p in enumerate(tensors)] if names else tensors
        return OURS[info.name](given, lr=0.01, coupled=coupled)

    optimizer, resumed = optimizer_of(params, named[0]), optimizer_of(others, named[1])
    take_steps(optimizer, params, range(3))
    with torch.no_grad():
        for p, q in zip(params, others):
            q.copy_(p)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares its tensors
    assert ("param_names" in resumed.param_groups[0]) == any(named)
    for one, its in ((optimizer, params), (resumed, others)):
        take_steps(one, its, range(3, 6))
    assert same(others, params)


@every
@both
def test_without_gradients_nothing_happens(info, kwargs, implementation, coupled):
    params = parameters([(V, H)], requires_grad=implementation != "differentiable")
    before = [p.detach().clone() for p in params]
    optimizer = OURS[info.name](params, **options_of(kwargs, implementation), coupled=coupled)
    optimizer.step()
    assert same([p.detach() for p in params], before)
    assert not optimizer.state


@every
@both
def test_gradients_of_zero(info, kwargs, implementation, coupled):
    """Nothing but weight decay moves."""
    params = parameters([(V, H)], requires_grad=implementation != "differentiable")
    before = [p.detach().clone() for p in params]
    options = {**options_of(kwargs, implementation), "weight_decay": 0.0}
    optimizer = OURS[info.name](params, **options, coupled=coupled)
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert same([p.detach() for p in params], before)
    assert next(iter(optimizer.state.values()))["step"] == 3


@every_input
@both
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("implementation", ["default", "for-loop", "fused"])
def test_learning_rate_as_a_tensor(info, kwargs, coupled, shape, implementation):
    results = []
    for tensor in (False, True):
        (p,) = parameters([(V, H)])
        options = options_of(kwargs, implementation)
        lr = float(options.pop("lr", 1e-3))
        lr = torch.full(shape, lr) if tensor else float(torch.tensor(lr))
        optimizer = OURS[info.name]([p], lr, **options, coupled=coupled)
        take_steps(optimizer, [p], range(STEPS))
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


SCHEDULERS = [
    pytest.param(info, schedulers, id=f"{info.name}-{number}")
    for info in INFOS
    for number, schedulers in enumerate(info.scheduler_inputs)
]


@pytest.mark.parametrize(("info", "schedulers"), SCHEDULERS)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@both
def test_schedulers(info, schedulers, lr, coupled):
    """torch's own optimizer and the oracle take the same rates; they reach the group in time."""
    (p,), (q,) = (parameters([(V, H)], torch.float64) for _ in range(2))
    optimizer = OURS[info.name]([p], copy.deepcopy(lr), coupled=coupled)
    control = info.optim_cls([q], copy.deepcopy(lr))
    oracle = oracle_of(info, {}, p, 0, 1.0)
    ours, theirs = ([make(one) for make in schedulers] for one in (optimizer, control))
    rates = []
    for step in range(15):
        set_gradients([p], step)
        set_gradients([q], step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        oracle.lr = rates[-1]
        oracle.step(p.grad.numpy())
        optimizer.step()
        control.step()
        for scheduler in (*ours, *theirs):
            # A loss that does not fall, so that ReduceLROnPlateau has something to do.
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        assert same(optimizer.param_groups[0]["lr"], control.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    if coupled:
        np.testing.assert_allclose(p.detach().numpy(), oracle.embeddings, rtol=1e-9, atol=1e-9)
    else:
        assert torch.equal(p, q)


@each
@both
def test_step_hooks(info, coupled):
    """Global ones around the optimizer's own, each once, with what torch gives them."""
    calls = []
    (p,) = parameters([(V, H)])
    optimizer = OURS[info.name]([p], coupled=coupled)

    def recorder(name):
        def hook(of, args, kwargs):
            assert of is optimizer
            calls.append((name, args, kwargs))

        return hook

    handles = [
        register_optimizer_step_pre_hook(recorder("global pre")),
        register_optimizer_step_post_hook(recorder("global post")),
        optimizer.register_step_pre_hook(recorder("pre")),
        optimizer.register_step_post_hook(recorder("post")),
    ]
    try:
        set_gradients([p], 0)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, *_ in calls] == ["global pre", "pre", "post", "global post"]
    optimizer.step()
    assert len(calls) == 4


@each
@both
def test_step_hook_changes_the_closure(info, coupled):
    """A hook that runs before the step may give other arguments to it."""
    (p,) = parameters([(V, H)])
    set_gradients([p], 0)
    optimizer = OURS[info.name]([p], coupled=coupled)
    optimizer.register_step_pre_hook(lambda *_: ((optimizer, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


@each
@both
def test_state_dict_hooks(info, coupled):
    (p,) = parameters([(V, H)])
    optimizer = OURS[info.name]([p], coupled=coupled)
    take_steps(optimizer, [p], [0])
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 7})
    saved = optimizer.state_dict()
    assert saved["extra"] == 7

    def halve(_, loaded):
        calls.append("halve")
        groups = [{**group, "lr": group["lr"] / 2} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    def add(_, loaded):
        calls.append("add")
        groups = [{**group, "lr": group["lr"] + 1.0} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_pre_hook(add, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append(one.state[p]["step"]))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("first"), prepend=True)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == (lr + 1.0) / 2
    assert calls == ["saving", "add", "halve", "first", 1]


@each
@both
def test_groups_added_later(info, coupled):
    first, second = parameters([(V, H), (V, H)])
    optimizer = OURS[info.name]([first], coupled=coupled)
    take_steps(optimizer, [first], range(3))
    optimizer.add_param_group({"params": [second], "lr": 0.1, "coupled": coupled})
    take_steps(optimizer, [first, second], range(2))
    assert [optimizer.state[p]["step"].item() for p in (first, second)] == [5, 2]
    assert optimizer.param_groups[1]["betas"] == optimizer.param_groups[0]["betas"]


@each
def test_sparse_gradients(info):
    """Uncoupled as torch, word for word; coupled with the way out."""
    assert not info.supports_sparse
    messages = []
    for cls, options in (
        (info.optim_cls, {}),
        (OURS[info.name], {}),
        (OURS[info.name], {"coupled": True}),
    ):
        embedding = nn.Embedding(V, H, sparse=True)
        optimizer = cls(embedding.parameters(), **options)
        embedding(torch.tensor([1, 2])).sum().backward()
        before = embedding.weight.detach().clone()
        with pytest.raises(RuntimeError, match="sparse") as raised:
            optimizer.step()
        assert torch.equal(embedding.weight, before)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "sparse=False" in messages[2]


@each
@both
def test_capturable_is_not_for_cpus(info, coupled):
    assert info.has_capturable_arg
    (p,) = parameters([(V, H)])
    before = p.detach().clone()
    optimizer = OURS[info.name]([p], capturable=True, coupled=coupled)
    set_gradients([p], 0)
    with pytest.raises(RuntimeError if coupled else AssertionError, match="capturable"):
        optimizer.step()
    assert torch.equal(p, before)


ERRORS = [
    pytest.param(info, wrong, id=f"{info.name}-{wrong.optimizer_error_input.desc}")
    for info in INFOS
    for wrong in info.optim_error_inputs_func("cpu", torch.float32)
]


# What is checked before torch checks it is said as of every other option.
OUR_WORDS = {
    "Tensor lr must be 1-element": r"Invalid lr: tensor\(",
    "Invalid beta parameter at index 0: 1.0": r"Invalid betas: \(1.0, 0.0\)",
    "Invalid weight_decay value: -1": "Invalid weight_decay: -1",
}


@pytest.mark.parametrize(("info", "wrong"), ERRORS)
@both
def test_errors(info, wrong, coupled):
    """The type and the words that torch has recorded for its own."""
    assert wrong.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    given = wrong.optimizer_error_input
    params = given.params
    if params is None:
        params = [nn.Parameter(torch.randn(1, 1))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words = OUR_WORDS.get(wrong.error_regex, wrong.error_regex)
        with pytest.raises(wrong.error_type, match=words):
            OURS[info.name](params, **given.kwargs, coupled=coupled)
