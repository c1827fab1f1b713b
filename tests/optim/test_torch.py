"""What stands where torch.optim.Adam(W) stood must behave like it."""

import copy
import inspect
import pickle
import shutil

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from coupled_adam import LEAN, CoupledAdam, CoupledAdamW, param_groups
from coupled_adam.optim.matrix import OPTIONS
from decoders import assert_same_parameters

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
    """The same arguments, order and defaults, then ours."""
    mine = inspect.signature(ours).parameters
    torchs = inspect.signature(theirs).parameters
    assert list(mine)[: len(torchs)] == list(torchs)
    for name, parameter in torchs.items():
        assert mine[name].default == parameter.default, name
        assert mine[name].kind == parameter.kind, name
    added = {name: p.default for name, p in mine.items() if name not in torchs}
    if ours is CoupledAdam:
        assert added == {**OPTIONS, "embeddings": None, "vocab_size": None}
    with pytest.raises(TypeError, match="unexpected keyword argument 'couple'"):
        ours([nn.Parameter(torch.zeros(2, 2))], couple=True)


@pairs
def test_isinstance(ours, theirs):
    assert issubclass(ours, theirs)
    assert issubclass(CoupledAdamW, CoupledAdam)


BAD_ARGUMENTS = [
    {"lr": -1.0},
    {"lr": torch.tensor([1.0, 2.0])},
    {"lr": torch.tensor(1e-3), "foreach": True},
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, -0.1)},
    {"betas": (0.9, torch.tensor(0.9))},
    {"fused": True, "foreach": True},
    {"fused": True, "differentiable": True},
]


@uncoupled
@pairs
@pytest.mark.parametrize("options", BAD_ARGUMENTS, ids=str)
def test_errors(ours, theirs, options):
    """The same bad argument raises the same error."""
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        theirs([nn.Parameter(torch.zeros(2, 2))], **options)
    with pytest.raises(type(expected.value)) as raised:
        ours([nn.Parameter(torch.zeros(2, 2))], **options)
    assert str(raised.value) == str(expected.value)


@uncoupled
@pairs
@pytest.mark.parametrize("params", [[], torch.zeros(2), [1.0], [{"params": {torch.zeros(1)}}]])
def test_bad_params(ours, theirs, params):
    with pytest.raises((TypeError, ValueError)) as expected:
        theirs(params)
    with pytest.raises(type(expected.value), match=str(expected.value)[:20]):
        ours(params)


@pairs
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"amsgrad": True},
        {"maximize": True},
        {"lr": torch.tensor(1e-3)},
        {"weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-5},
    ],
    ids=str,
)
def test_uncoupled_groups_are_bit_equal(ours, theirs, options):
    """Beside a coupled group, and without one, torch's own numbers for everything else."""
    model, control = tiny_model(), tiny_model()
    for m in (model, control):
        m.head.weight = nn.Parameter(torch.zeros(17, 6))  # untied and frozen: same gradients
        m.embed.weight.requires_grad_(False)
        m.head.weight.requires_grad_(False)
    extra = nn.Parameter(torch.ones(4, 3))
    extra.grad = torch.randn(4, 3)
    optimizer = ours(
        [
            {"params": [p for p in model.parameters() if p.requires_grad]},
            {"params": [extra], "coupled": True},
        ],
        **options,
    )
    reference = theirs([p for p in control.parameters() if p.requires_grad], **options)
    for step in range(10):
        for m, o in ((model, optimizer), (control, reference)):
            for p in m.parameters():
                if p.requires_grad:
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            o.step()
    assert_same_parameters(model, control)
    for p, q in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"]):
        for name, value in reference.state[q].items():
            assert torch.equal(optimizer.state[p][name], value), name


@pairs
def test_warns_without_coupled_group(ours, theirs):
    with pytest.warns(UserWarning, match="Pass the model instead") as record:
        ours([nn.Parameter(torch.zeros(2, 2))])
    assert record[0].filename == __file__


def test_named_parameters():
    model = TinyLM()
    optimizer = CoupledAdamW(
        [
            {"params": [("embed.weight", model.embed.weight)], "coupled": True},
            {"params": list(model.hidden.named_parameters())},
        ]
    )
    assert optimizer.param_groups[0]["param_names"] == ["embed.weight"]
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == ["weight", "bias"]


def test_constructor_option_is_the_groups_default():
    p, q = (nn.Parameter(torch.zeros(3, 2)) for _ in range(2))
    optimizer = CoupledAdamW(
        [{"params": [p]}, {"params": [q], "coupled": False}], coupled=True, second_moment_scale=0.5
    )
    assert [g["coupled"] for g in optimizer.param_groups] == [True, False]
    assert optimizer.defaults["coupled"] is True
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 2))]})
    assert optimizer.param_groups[-1]["coupled"] is True
    assert optimizer.param_groups[-1]["second_moment_scale"] == 0.5
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert "vocab_dim: 0" in repr(optimizer)


def test_closure():
    model = TinyLM()
    optimizer = CoupledAdamW(param_groups(model))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    before = loss_of(model, 0).item()
    assert optimizer.step(closure).item() == before
    assert loss_of(model, 0).item() < before


def test_a_rate_below_zero_in_a_step():
    """A decay written by hand may end just below zero: as in torch, the run goes on."""
    model, control = tiny_model(), tiny_model()
    optimizer = CoupledAdamW(param_groups(model), lr=1e-2)
    reference = CoupledAdamW(param_groups(control), lr=1e-2)
    for m, o, lr in ((model, optimizer, -1e-19), (control, reference, 0.0)):
        for group in o.param_groups:
            group["lr"] = lr
        train(m, o, 2)
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_step_hooks_run_once():
    model, calls = TinyLM(), []
    torch.optim.AdamW(model.parameters())  # patches the parent's step, too
    optimizer = CoupledAdamW(param_groups(model))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    loss_of(model, 0).backward()
    optimizer.step()
    assert calls == ["pre", "post"]


def test_lr_scheduler():
    """A schedule set through torch's scheduler is the schedule that the coupled group follows."""
    model, control = tiny_model(), tiny_model()
    optimizer = CoupledAdamW(param_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    by_hand = CoupledAdamW(param_groups(control), lr=1e-2)
    for step in range(5):
        train(model, optimizer, 1, step)
        train(control, by_hand, 1, step)
        scheduler.step()
        for group, lr in zip(by_hand.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
    assert_same_parameters(model, control)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_gradient_accumulation_and_clipping():
    model, control = tiny_model(), tiny_model()
    optimizer, other = CoupledAdamW(param_groups(model)), CoupledAdamW(param_groups(control))
    for seed in range(3):
        (loss_of(model, seed) / 3).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    sum(loss_of(control, seed) / 3 for seed in range(3)).backward()
    torch.nn.utils.clip_grad_norm_(control.parameters(), 0.01)
    other.step()
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_parameter_without_gradient_is_skipped():
    p, q = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = CoupledAdamW([p, q], coupled=True)
    p.grad = torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(q.detach(), torch.ones(3, 2))
    assert q not in optimizer.state


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


@pytest.mark.parametrize("rule", [{}, LEAN], ids=["coupled", "LEAN"])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_alike(copier, rule):
    model = tiny_model()
    optimizer = CoupledAdamW(param_groups(model, rule), second_moment_scale=0.5)
    train(model, optimizer, 3)
    twin, twin_optimizer = copier((model, optimizer))
    train(model, optimizer, 3, start=3)
    train(twin, twin_optimizer, 3, start=3)
    assert_same_parameters(model, twin)
    new = nn.Parameter(torch.zeros(2, 2))
    twin_optimizer.add_param_group({"params": [new], "param_names": ["new"]})
    assert twin_optimizer.param_groups[-1]["second_moment_scale"] == 0.5


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


def test_parameters_are_trained():
    """On a corpus with one answer, the loss falls as far as with AdamW."""
    losses = {}
    for cls in (CoupledAdamW, torch.optim.AdamW):
        model = tiny_model()
        groups = param_groups(model)
        if cls is torch.optim.AdamW:
            for group in groups:
                del group["coupled"]
        optimizer = cls(groups, lr=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            optimizer.step()
        losses[cls] = loss.item()
    assert losses[CoupledAdamW] < 1.1 * losses[torch.optim.AdamW]
