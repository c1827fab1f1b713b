"""Steps of a model on a GPU: counted, scaled, captured and compiled there, and very large.

``test_cuda.py`` has the update of a matrix in every dtype and layout, ``test_torch.py`` the scaler
on a CPU.
"""

import copy

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from optim.cases import CASES, optimizer_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's, of compilers and of graphs
]

LEAN = CASES["LEAN"]
STEPS = {
    "default": {},
    "fused": {"fused": True},
    "not fused": {"fused": False},
    "capturable": {"capturable": True},
    "capturable, fused": {"capturable": True, "fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "penalty": {"cls": CoupledAdam, "weight_decay": 0.1},
    "LEAN": LEAN,
    "LEAN, fused": {**LEAN, "fused": True},
    "LEAN, not fused": {**LEAN, "fused": False},
    "LEAN, capturable": {**LEAN, "capturable": True},
    "LEAN, momentum": {**LEAN, "betas": (0.9, 0.95)},
}


def each(*names):
    """Run a test with these options of an optimizer."""
    return pytest.mark.parametrize("options", [STEPS[name] for name in names], ids=names)


class Model:
    """A model with two coupled matrices, and its optimizer."""

    def __init__(self, dtype=torch.float32, device="cuda", cls=CoupledAdamW, lr=1e-2, **options):
        torch.manual_seed(0)
        layers = nn.Embedding(4000, 96), nn.Linear(96, 96), nn.Linear(96, 4000)
        self.layers = nn.Sequential(*layers).to(dtype).to(device)
        coupled = [layers[0].weight, layers[2].weight]
        others = [*layers[1].parameters(), layers[2].bias]
        groups = [{"params": others}, {"params": coupled, "coupled": True}]
        self.optimizer = cls(groups, lr=lr, **options)

    def set_gradients(self, step, scale=1.0):
        """The same on every device; in the same tensors, as a graph must find them there."""
        generator = torch.Generator().manual_seed(step)
        for p in self.layers.parameters():
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
            p.grad.copy_(scale * torch.randn(p.shape, generator=generator))

    def step(self, number):
        self.set_gradients(number)
        self.optimizer.step()

    def assert_close(self, other, **tolerances):
        for p, q in zip(self.layers.parameters(), other.layers.parameters(), strict=True):
            torch.testing.assert_close(p.cpu().to(q.dtype), q.cpu(), **tolerances)


@each(*STEPS)
def test_steps_are_a_cpus(options):
    """In float64 there; and none of them waits for the device."""
    rules = {name: x for name, x in options.items() if name not in ("fused", "capturable")}
    ours, theirs = Model(**options), Model(torch.float64, "cpu", **rules)
    for step in range(5):
        for model in (ours, theirs):
            model.set_gradients(step, 1e-2 if step % 2 else 1.0)
        theirs.optimizer.step()
        if step > 1:  # the first two compile, and make the state
            torch.cuda.set_sync_debug_mode("error")
        try:
            ours.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ours.assert_close(theirs, rtol=2e-5, atol=2e-6)


@each("default", "fused", "LEAN", "LEAN, fused")
def test_grad_scaler(options):
    """The scale is taken from gradients, and an overflow changes nothing."""
    ours, theirs = Model(**options), Model(**options)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)
    ids = torch.arange(64, device="cuda")

    def loss(model):
        model.optimizer.zero_grad()
        return 50 * nn.functional.cross_entropy(model.layers(ids), ids)

    for _ in range(4):
        loss(theirs).backward()
        theirs.optimizer.step()
        scaler.scale(loss(ours)).backward()
        scaler.step(ours.optimizer)
        scaler.update()
    ours.assert_close(theirs, rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(ours.layers.state_dict())
    scaler.scale(loss(ours)).backward()
    ours.layers[0].weight.grad[3, 2] = torch.inf
    scaler.step(ours.optimizer)
    torch.testing.assert_close(ours.layers.state_dict(), before, rtol=0, atol=0)


def test_triton_runs():
    model = Model()
    model.set_gradients(0)
    coupled, _ = model.optimizer._collect()
    assert {update.kernel.__name__ for update in coupled} == {"coupled_adam.optim.kernels.triton"}


@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "rounded"])
@each("capturable", "capturable, fused", "LEAN, capturable")
def test_captured(options, is_rounded):
    """Ten replays are ten steps, to the bit; stochastic rounding is that of each step."""
    dtype = torch.bfloat16 if is_rounded else torch.float32
    captured, eager = (
        Model(dtype, lr=torch.tensor(1e-2).cuda(), stochastic_rounding=is_rounded, **options)
        for _ in range(2)
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up, as torch asks for
        for step in range(3):
            captured.step(step)
            eager.step(step)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.optimizer.step()
    for step in range(10):
        for model in (captured, eager):
            model.set_gradients(step)
            for group in model.optimizer.param_groups:
                group["lr"].fill_(1e-2 / (step + 1))
        graph.replay()
        eager.optimizer.step()
    captured.assert_close(eager, rtol=0, atol=0)
    assert captured.optimizer.state[captured.layers[0].weight]["step"] == 13


@pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
def test_not_captured_before_the_first_step(name):
    """A capture that would have to make the state, or compile, is refused and changes nothing."""
    captured, eager = (Model(**CASES[name], capturable=True) for _ in range(2))
    captured.set_gradients(0)
    with (
        pytest.raises(RuntimeError, match="take a step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        captured.optimizer.step()
    captured.step(0)
    eager.step(0)
    captured.assert_close(eager, rtol=0, atol=0)


@each("default", "LEAN")
def test_compiled(options):
    options = {**options, "lr": torch.tensor(1e-2).cuda(), "capturable": True}
    ours, theirs = Model(**options), Model(**options)
    step_compiled = torch.compile(ours.optimizer.step)
    for step in range(3):
        ours.set_gradients(step)
        step_compiled()
        theirs.step(step)
    ours.assert_close(theirs, rtol=2e-5, atol=2e-6)


def test_more_than_2_to_the_31_elements():
    """The last rows, which lie beyond; nu, which is of all rows."""
    rows, columns = 2**31 // 4096 + 64, 4096
    if torch.cuda.mem_get_info()[0] < 4 * 2 * rows * columns:
        pytest.skip("needs 18 GB of free memory on the GPU")
    p = nn.Parameter(torch.full((rows, columns), 0.5, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.randn(64, columns, device="cuda").bfloat16().repeat(rows // 64, 1)
    small = nn.Parameter(p.detach()[-64:].clone())
    small.grad = p.grad[-64:].clone()
    optimizer, control = optimizer_of([p]), optimizer_of([small], fused=False)
    optimizer.step()
    control.step()  # the rows repeat: the means are the same
    ours, theirs = optimizer.state[p], control.state[small]
    torch.testing.assert_close(ours["exp_avg"][-64:], theirs["exp_avg"], rtol=2**-7, atol=0)
    torch.testing.assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-4, atol=0)
    torch.testing.assert_close(p.detach()[-64:], small.detach(), rtol=2**-7, atol=0)
    torch.testing.assert_close(p.detach()[:64], small.detach(), rtol=2**-7, atol=0)
