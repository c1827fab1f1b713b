"""What must be right on a GPU, as functions that need torch, Triton and numpy, and no pytest.

``benchmarks/gpu.py`` calls them before it measures anything, and ``test_cuda.py`` under pytest. On
a CPU, those of ``CHECKS`` run as well.
"""

import copy
import functools

import torch
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from optim.cases import CASES, check_steps, gradient, matrix, optimizer_of

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
    "LEAN, capturable": {**LEAN, "capturable": True},
    "LEAN, momentum": {**LEAN, "betas": (0.9, 0.95)},
}
"""Options of steps of a whole model."""


def model(dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(4000, 96), nn.Linear(96, 96), nn.Linear(96, 4000))
    return network.to(dtype).to(device)


def set_gradients(network, step, scale=1.0):
    """The same on every device; of the same tensors, as a graph must find them where they were."""
    generator = torch.Generator().manual_seed(step)
    for p in network.parameters():
        grad = torch.randn(p.shape, generator=generator) * scale
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grad)


def optimizer_of_model(network, cls=CoupledAdamW, lr=1e-2, **options):
    coupled = [network[0].weight, network[2].weight]
    others = [p for p in network.parameters() if all(p is not q for q in coupled)]
    return cls([{"params": others}, {"params": coupled, "coupled": True}], lr=lr, **options)


def assert_close(ours, theirs, **tolerances):
    """All parameters of two models, wherever they are."""
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.cpu().to(q.dtype), q.cpu(), **tolerances)


def as_the_oracle(device, options):
    """Against float64, in what is not compiled alike; test_cuda.py has every dtype and layout."""
    for dtype, layout in (
        (torch.float32, "rows"),
        (torch.float32, "transposed"),
        (torch.bfloat16, "columns of more"),
    ):
        check_steps((13, 7), dtype, layout, device=device, **options)


def triton_runs(device):
    optimizer = optimizer_of_model(network := model(device=device))
    set_gradients(network, 0)
    coupled, _ = optimizer._collect()
    assert {update.kernel.__name__ for update in coupled} == {"coupled_adam.optim.kernels.triton"}


def steps_as_on_a_cpu(device, options):
    """And none of them waits for the device."""
    ours, theirs = model(device=device), model(torch.float64)
    rules = {name: x for name, x in options.items() if name not in ("fused", "capturable")}
    optimizer, control = optimizer_of_model(ours, **options), optimizer_of_model(theirs, **rules)
    for step in range(5):
        for network in (ours, theirs):
            set_gradients(network, step, 1e-2 if step % 2 else 1.0)
        control.step()
        if device == "cuda" and step > 1:  # the first two compile, and make the state
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def grad_scaler(device, options):
    """The scale is taken from gradients, and an overflow changes nothing."""
    ours, theirs = model(device=device), model(device=device)
    optimizer, control = (optimizer_of_model(x, **options) for x in (ours, theirs))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    ids = torch.arange(64, device=device)
    for _ in range(4):
        for network, one in ((ours, optimizer), (theirs, control)):
            one.zero_grad()
            loss = 50 * nn.functional.cross_entropy(network(ids), ids)
            (scaler.scale(loss) if one is optimizer else loss).backward()
        control.step()
        scaler.step(optimizer)
        scaler.update()
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(ours.state_dict())
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(ours(ids), ids)).backward()
    ours[0].weight.grad[3, 2] = torch.inf
    scaler.step(optimizer)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)


def captured(device, options, is_rounded):
    """Ten replays are ten steps, to the bit; stochastic rounding is that of each step."""
    dtype = torch.bfloat16 if is_rounded else torch.float32
    network = model(dtype, device)
    eager = copy.deepcopy(network)
    options = {**options, "stochastic_rounding": is_rounded, "lr": torch.tensor(1e-2).to(device)}
    optimizers = [optimizer_of_model(x, **options) for x in (network, eager)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up, as torch asks for
        for step in range(3):
            for each, optimizer in zip((network, eager), optimizers):
                set_gradients(each, step)
                optimizer.step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizers[0].step()
    for step in range(10):
        for each, optimizer in zip((network, eager), optimizers):
            set_gradients(each, step)
            for group in optimizer.param_groups:
                group["lr"].fill_(1e-2 / (step + 1))
        graph.replay()
        optimizers[1].step()
    assert_close(network, eager, rtol=0, atol=0)
    assert optimizers[0].state[network[0].weight]["step"] == 13


def not_captured_before_the_first_step(device, options):
    """A capture that would have to make the state, or compile, is refused and changes nothing."""
    network, eager = model(device=device), model(device=device)
    optimizers = [optimizer_of_model(x, **options, capturable=True) for x in (network, eager)]
    for each in (network, eager):
        set_gradients(each, 0)
    problem = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizers[0].step()
    except RuntimeError as error:
        problem = str(error)
    assert "take a step before the capture" in problem
    for optimizer in optimizers:
        optimizer.step()
    assert_close(network, eager, rtol=0, atol=0)


def compiled(device, options):
    ours, theirs = model(device=device), model(device=device)
    options = {**options, "lr": torch.tensor(1e-2).to(device), "capturable": True}
    optimizer, control = (optimizer_of_model(x, **options) for x in (ours, theirs))
    step_compiled = torch.compile(optimizer.step)
    for step in range(3):
        for network, take_step in ((ours, step_compiled), (theirs, control.step)):
            set_gradients(network, step)
            take_step()
    assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def more_than_2_to_the_31_elements(device):
    """The last rows, which lie beyond; nu, which is of all rows."""
    rows, columns = 2**31 // 4096 + 64, 4096
    if torch.cuda.mem_get_info()[0] < 4 * 2 * rows * columns:
        print("not tried: a matrix of 2^31 elements needs 18 GB of free memory")
        return
    p = nn.Parameter(torch.full((rows, columns), 0.5, device=device, dtype=torch.bfloat16))
    p.grad = torch.randn(64, columns, device=device).bfloat16().repeat(rows // 64, 1)
    last = p.detach()[-64:].clone()
    optimizer = CoupledAdamW([p], lr=1e-2, coupled=True, weight_decay=0.0)
    optimizer.step()
    small = nn.Parameter(last)
    small.grad = p.grad[-64:].clone()
    control = CoupledAdamW([small], lr=1e-2, coupled=True, weight_decay=0.0, fused=False)
    control.step()  # the rows repeat: the means are the same
    for name in ("exp_avg", "exp_avg_sq"):
        ours, theirs = optimizer.state[p][name], control.state[small][name]
        ours = ours[-64:] if name == "exp_avg" else ours
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if name == "exp_avg" else 1e-4, atol=0)
    torch.testing.assert_close(p.detach()[-64:], small.detach(), rtol=2**-7, atol=0)
    torch.testing.assert_close(p.detach()[:64], small.detach(), rtol=2**-7, atol=0)


def rows_far_apart(device, options):
    """Further than 32 bits can say, with no memory between them: as the same rows side by side."""
    memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=device)
    results = []
    for is_far in (False, True):
        places = iter((0, 32, 64))

        def laid(x, is_far=is_far, places=places):
            x = x.to(device)
            return memory.as_strided((2, 20), (2**31, 1), next(places)).copy_(x) if is_far else x

        p = nn.Parameter(laid(matrix((2, 20), 0, torch.bfloat16)))
        optimizer = optimizer_of([p], **options)
        optimizer.init_state()
        if "exp_avg" in optimizer.state[p]:
            optimizer.state[p]["exp_avg"] = laid(optimizer.state[p]["exp_avg"])
        p.grad = laid(gradient((2, 20), 1, torch.bfloat16))
        optimizer.step()
        results.append({**optimizer.state[p], "param": p.detach()})
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def _named(what, check, cases):
    return {f"{what}: {name}": functools.partial(check, **x) for name, x in cases.items()}


def _options(names, table):
    return {name: {"options": table[name]} for name in names}


KINDS = _options(("coupled", "LEAN", "LEAN, momentum"), CASES)
SCALED = _options(("default", "fused", "LEAN", "LEAN, fused"), STEPS)
CAPTURABLE = [name for name, options in STEPS.items() if options.get("capturable")]
EAGER = [name for name in STEPS if name not in CAPTURABLE]
CHECKS = {
    **_named("as the oracle", as_the_oracle, _options(CASES, CASES)),
    **_named("steps of a model", steps_as_on_a_cpu, _options(EAGER, STEPS)),
    **_named("GradScaler", grad_scaler, SCALED),
}
"""What can be checked on any device; each function takes its name."""

CHECKS_ON_A_GPU = {
    "Triton runs": triton_runs,
    **CHECKS,
    **_named("steps of a model", steps_as_on_a_cpu, _options(CAPTURABLE, STEPS)),
    **_named(
        "captured in a graph",
        captured,
        {
            name + ", rounded" * is_rounded: {"options": STEPS[name], "is_rounded": is_rounded}
            for name in CAPTURABLE
            for is_rounded in (False, True)
        },
    ),
    **_named("not captured before the first step", not_captured_before_the_first_step, KINDS),
    **_named("compiled step", compiled, _options(("default", "LEAN"), STEPS)),
    **_named("rows far apart", rows_far_apart, KINDS),
    "2^31 elements": more_than_2_to_the_31_elements,
}
