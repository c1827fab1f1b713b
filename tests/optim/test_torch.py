"""What stands where torch.optim.Adam(W) stood must behave like it, beyond optim_db_cases.py."""

import copy
import inspect
import shutil

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from coupled_adam import LEAN, CoupledAdam, CoupledAdamW, param_groups
from coupled_adam.optim.options import OPTIONS

PAIRS = [(CoupledAdam, torch.optim.Adam), (CoupledAdamW, torch.optim.AdamW)]
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["Adam", "AdamW"])
uncoupled = pytest.mark.filterwarnings("ignore:no param group is coupled")


class TinyLM(nn.Module):
    """Tied embeddings and a hidden layer: one coupled matrix beside a matrix, norms and biases."""

    def __init__(self, vocab=17, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embed(tokens)).tanh()))


def loss_of(model, seed, vocab=17):
    tokens = torch.randint(vocab, (8, 5), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return TinyLM()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@pairs
def test_signature(ours, theirs):
    """The same arguments, order and defaults, then ours by name, as frameworks look them up."""
    assert issubclass(ours, theirs)
    assert issubclass(ours, CoupledAdam)
    mine = inspect.signature(ours).parameters
    torchs = inspect.signature(theirs).parameters
    assert list(mine)[: len(torchs)] == list(torchs)
    for name, parameter in torchs.items():
        assert mine[name].default == parameter.default, name
        assert mine[name].kind == parameter.kind, name
    by_name = (name for name, p in mine.items() if p.kind != p.VAR_KEYWORD)
    added = {name: mine[name].default for name in by_name if name not in torchs}
    # A model, or embeddings=, may say all these, and they are None where they are not given.
    names = {*OPTIONS, "vocab_size", "steps", "core"}
    assert added == {**dict.fromkeys(names), "embeddings": "coupled"}
    with pytest.raises(TypeError, match="couple: only with a model"):
        ours([nn.Parameter(torch.zeros(2, 2))], couple=True)


def test_constructor_option_is_the_groups_default():
    p, q = (nn.Parameter(torch.zeros(3, 2)) for _ in range(2))
    groups = iter([{"params": [p]}, {"params": [q], "coupled": False}])  # torch takes it, too
    optimizer = CoupledAdamW(groups, coupled=True, second_moment_scale=0.5)
    assert [g["coupled"] for g in optimizer.param_groups] == [True, False]
    assert optimizer.defaults["coupled"] is True
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 2))]})
    assert optimizer.param_groups[-1]["coupled"] is True
    assert optimizer.param_groups[-1]["second_moment_scale"] == 0.5
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert repr(optimizer).splitlines()[1:] == [
        "  1 parameter: the defaults",
        "  1 parameter: coupled=False",
        "  1 parameter: the defaults",
        ")",
    ]


@pytest.mark.parametrize("rule", [{}, LEAN], ids=["coupled", "LEAN"])
@pytest.mark.parametrize(("fused", "unscaled"), [(False, False), (True, False), (True, True)])
def test_grad_scaler(fused, unscaled, rule):
    """An fp16 overflow is skipped, with nothing changed; other steps are those without a scaler.

    Also where the gradients have been unscaled before, to be clipped.
    """
    model, control = tiny_model(), tiny_model()
    optimizer = CoupledAdamW(param_groups(model, rule), lr=1e-2, fused=fused)
    reference = CoupledAdamW(param_groups(control, rule), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 3:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
            model.embed.weight.grad[2, 1] = float("inf")
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            after = (model.state_dict(), optimizer.state_dict()["state"])
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        else:
            scaler.step(optimizer)
            train(control, reference, 1, step)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    if fused:  # as torch's fused kernels, the step leaves the gradients unscaled
        control.zero_grad()
        optimizer.zero_grad()
        model.load_state_dict(control.state_dict())
        scaler.scale(loss_of(model, 9)).backward()
        loss_of(control, 9).backward()
        scaler.step(optimizer)
        torch.testing.assert_close(model.embed.weight.grad, control.embed.weight.grad)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("coupled", [{}, LEAN], ids=["coupled", "LEAN"])
@pytest.mark.filterwarnings("ignore")
def test_a_step_sets_no_attribute(coupled, compiled):
    """Dynamo refuses that in several versions of torch, and the step could not be compiled."""

    class Sealed(CoupledAdamW):
        is_sealed = False

        def __setattr__(self, name, value):
            if self.is_sealed:
                raise AttributeError(f"a step sets {name}")
            super().__setattr__(name, value)

    model = tiny_model()
    optimizer = Sealed(param_groups(model, coupled), lr=1e-2)
    # A group that comes without options is completed, and warnings are given once.
    optimizer.param_groups[0].pop("second_moment_scale")
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    Sealed.is_sealed = True
    before = model.embed.weight.detach().clone()
    for seed in range(3):
        loss_of(model, seed).backward()
        step()
    assert not torch.equal(model.embed.weight, before)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "coupled", [{}, {"amsgrad": True}, LEAN], ids=["coupled", "amsgrad", "LEAN"]
)
@pytest.mark.filterwarnings("ignore")
def test_compiled_step(coupled):
    """A compiled step computes what the plain one does, and is compiled once, not at every step."""
    model, control = tiny_model(), tiny_model()
    options = {"lr": 1e-2, "amsgrad": "amsgrad" in coupled, "second_moment_scale": 0.5}
    rules = {} if "amsgrad" in coupled else coupled
    optimizer = CoupledAdamW(param_groups(model, rules), **options)
    reference = CoupledAdamW(param_groups(control, rules), **options)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(optimizer.step, backend=counter)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        compiled()
        train(control, reference, 1, step)
        if step == 3:
            frames = counter.frame_count
    assert counter.frame_count == frames > 0
    assert optimizer.state[model.embed.weight]["step"].item() == 12
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
