"""torch's own records of its optimizers, with ours in the place of Adam and AdamW.

``torch.testing._internal.common_optimizers.optim_db`` says of each optimizer with which options,
schedulers and wrong arguments it is to be tested. Run by test_optim_db.py in a process of its own:
importing the records freezes flags of ``torch.backends`` and loads another hypothesis profile.
"""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coupled_adam import CoupledAdam, CoupledAdamW
from optim.cases import through_disk

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
        if not (dtype.is_complex and one.values[2] == "fused")  # which torch refuses
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
@each
def test_uncoupled_containers(info, container):
    """Of parameters of several dtypes."""
    params, others = (
        [p for dtype in DTYPES[:3] for p in parameters([(3, 4)], dtype)] for _ in range(2)
    )
    optimizer, control = (
        cls(container(ps), eps=0.1)
        for cls, ps in ((OURS[info.name], params), (info.optim_cls, others))
    )
    take_steps(optimizer, params, range(STEPS))
    take_steps(control, others, range(STEPS))
    assert_same_as_torch(optimizer, params, control, others)


SCHEDULERS = [
    pytest.param(info, schedulers, id=f"{info.name}-{number}")
    for info in INFOS
    for number, schedulers in enumerate(info.scheduler_inputs)
]


@pytest.mark.parametrize(("info", "schedulers"), SCHEDULERS)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_schedulers(info, schedulers, lr):
    """torch's own optimizer takes the same rates, which a coupled group has as well."""
    (p, table), (q,) = parameters([(V, H)] * 2), parameters([(V, H)])
    rates = [copy.deepcopy(lr) for _ in range(3)]  # schedulers change tensors in place
    groups = [{"params": [p]}, {"params": [table], "coupled": True, "lr": rates[1]}]
    optimizers = OURS[info.name](groups, rates[0]), info.optim_cls([q], rates[2])
    taken = [make(one) for one in optimizers for make in schedulers]
    taken_rates = set()
    for step in range(15):
        set_gradients([p, table], step)
        set_gradients([q], step)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in taken:
            # A loss that does not fall, so that ReduceLROnPlateau has something to do.
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        ours, coupled, theirs = (g["lr"] for o in optimizers for g in o.param_groups)
        assert same([ours, coupled], [theirs, theirs])
        taken_rates.add(float(ours))
    assert len(taken_rates) > 1
    assert torch.equal(p, q)


# With and without coupling: what every optimizer of torch does.


def saved(info, optimizer, params, older=False, named=False, **options):
    """A new optimizer of copies, which has loaded what the other has saved."""
    state_dict = through_disk(optimizer.state_dict())
    if older:  # of later flags, ours included, nothing is known; steps are numbers
        for group in state_dict["param_groups"]:
            for name in (*info.not_og_supported_flags, *OWN_OPTIONS):
                if name != "maximize" or not group["maximize"]:
                    del group[name]
        for state in state_dict["state"].values():
            state["step"] = state["step"].item()
    given = copy.deepcopy(state_dict)
    others = [p.detach().clone().requires_grad_(p.requires_grad) for p in params]
    resumed = OURS[info.name](
        [(f"p{i}", p) for i, p in enumerate(others)] if named else others, **options
    )
    resumed.load_state_dict(state_dict)
    assert same(state_dict, given)  # what was given is as it was
    resumed.defaults["differentiable"] = optimizer.defaults["differentiable"]
    return others, resumed


def copied(copier):
    def both(info, optimizer, params, coupled):
        others, other = copier((params, optimizer))
        assert repr(other) == repr(optimizer)
        public = {name for name in vars(optimizer) if not name.startswith("_")}
        assert public <= set(vars(other))
        return others, other

    return both


WAYS = {
    "saved": saved,
    "older": functools.partial(saved, older=True),
    "named": functools.partial(saved, named=True),
    "copy": copied(copy.deepcopy),
    "pickle": copied(lambda both: pickle.loads(pickle.dumps(both))),
}


@every_input
@both
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_goes_on(info, kwargs, coupled, way):
    """From three steps to six, with the same bits."""
    params = [nn.Parameter(p.detach()) for p in parameters([(V, H), (H, V)])]
    optimizer = OURS[info.name](params, **options_of(kwargs), coupled=coupled)
    take_steps(optimizer, params, range(3))
    others, other = way(info, optimizer, params, coupled=coupled)
    for one, its in ((optimizer, params), (other, others)):
        take_steps(one, its, range(3, 6))
    assert same(list(others), list(params))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


@every
@both
def test_without_a_gradient_nothing_moves(info, kwargs, implementation, coupled):
    """Nor is there a state; with one of zero the step counts."""
    params = parameters([(V, H)], requires_grad=implementation != "differentiable")
    before = [p.detach().clone() for p in params]
    options = {**options_of(kwargs, implementation), "weight_decay": 0.0}
    optimizer = OURS[info.name](params, **options, coupled=coupled)
    optimizer.step()
    assert not optimizer.state
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert same([p.detach() for p in params], before)
    assert optimizer.state[params[0]]["step"] == 1


@each
@both
def test_hooks(info, coupled):
    """In torch's order, each once; they may change what they are given."""
    calls = []
    (p,) = parameters([(V, H)])
    set_gradients([p], 0)
    optimizer = OURS[info.name]([p], coupled=coupled)

    def recorder(name, result=None):
        def hook(of, *_):
            assert of is optimizer
            calls.append(name)
            return result

        return hook

    handles = [
        register_optimizer_step_pre_hook(recorder("global pre")),
        register_optimizer_step_post_hook(recorder("global post")),
        optimizer.register_step_pre_hook(recorder("pre", ((optimizer, lambda: 7.0), {}))),
        optimizer.register_step_post_hook(recorder("post")),
    ]
    try:
        assert optimizer.step() == 7.0  # of the closure that a hook has given
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()

    def changing(name, rate):
        def hook(_, loaded):
            calls.append(name)
            groups = [{**group, "lr": rate(group["lr"])} for group in loaded["param_groups"]]
            return {**loaded, "param_groups": groups}

        return hook

    optimizer.register_state_dict_pre_hook(recorder("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 7})
    optimizer.register_load_state_dict_pre_hook(changing("halve", lambda lr: lr / 2))
    optimizer.register_load_state_dict_pre_hook(changing("add", lambda lr: lr + 1), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append(one.state[p]["step"]))
    optimizer.register_load_state_dict_post_hook(recorder("first"), prepend=True)
    state_dict, lr = optimizer.state_dict(), optimizer.param_groups[0]["lr"]
    assert state_dict["extra"] == 7
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == (lr + 1.0) / 2
    expected = ["global pre", "pre", "post", "global post", "saving", "add", "halve", "first", 2]
    assert calls == expected


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
