"""The Triton kernels against the reference in float64, and whole steps on a GPU.

The first part also runs without a GPU, on CPU tensors in Triton's interpreter, if the environment
had TRITON_INTERPRET=1 from the start: test_triton.py does that. The rest is for GPUs alone.
"""

import copy
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from records import DEVICE, LAYOUTS, apply_all, record
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim import kernels, reference
from coupled_adam.optim.rounding import Noise, round_

HAS_GPU = DEVICE == "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, on overflow
on_device = pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="needs a GPU")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

TENSORS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row")


def in_float64(update):
    """The same, on the CPU."""
    names = [name for name in (*TENSORS, "grad") if getattr(update, name) is not None]
    return replace(
        update,
        **{name: getattr(update, name).to("cpu", torch.float64, copy=True) for name in names},
    )


def take_step(update, t=1.0):
    """Take it by the kernel, and compare with the reference from the same place."""
    update = replace(update, t=t)
    theirs = in_float64(update)
    for name in ("t", "factor", "skip", "lr"):
        value = getattr(theirs, name)
        if isinstance(value, torch.Tensor):
            setattr(theirs, name, value.to("cpu", torch.float64, copy=True))
    for one, its_kernel in ((update, update.kernel), (theirs, reference)):
        its_kernel.measure(one, its_kernel is update.kernel)
        apply_all(one, its_kernel)
    for name in TENSORS:
        mine, right = getattr(update, name), getattr(theirs, name)
        if right is None:
            continue
        eps = torch.finfo(mine.dtype).eps
        tolerance = eps if mine.dtype != torch.float32 else 20 * eps
        torch.testing.assert_close(
            mine.cpu().double(),
            right,
            rtol=tolerance,
            atol=tolerance * right.abs().mean().item(),  # where two numbers nearly cancel
            msg=lambda message, name=name: f"{name}: {message}",
        )
    return update


@on_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels(dtype, layout):
    """In any memory layout, that of an [H, V] matrix among them."""
    update = record(37, 11, dtype, layout, vocab_dim=int(layout == "transposed"), amsgrad=True)
    for t in (1.0, 2.0, 3.0):
        update = take_step(update, t)


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 300), (300, 1), (9, 770), (1025, 3), (130, 257)], ids=str
)
def test_kernels_shapes(shape, layout):
    take_step(record(*shape, torch.float32, layout))


@on_device
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"second_moment_scale": 0.25, "amsgrad": True},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta2": 0.999999},
        {"zero_sum": True},
        {"row_exponent": 0.5},
        {"row_exponent": 1.0, "zero_sum": True, "layout": "transposed"},
    ],
    ids=str,
)
def test_kernels_options(options):
    for t in (1.0, 1000.0):
        take_step(record(65, 130, torch.float32, **options), t)


@on_device
@pytest.mark.parametrize("factor", [0.3, -1.0, 0.0])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_kernels_read_numbers_on_the_device(factor, amsgrad):
    """The factor, the learning rate and the step, as numbers and as tensors: the same bits."""
    results = []
    for where in ("argument", "device"):
        update = record(40, 19, torch.float32, amsgrad=amsgrad)
        t = 7.0
        update.factor = factor
        if where == "device":
            update.factor, t = torch.tensor(factor, device=DEVICE), torch.tensor(t, device=DEVICE)
            update.lr = torch.tensor(1e-2, device=DEVICE)
        results.append(take_step(update, t))
    first, second = results
    assert torch.equal(first.exp_avg, second.exp_avg)
    assert torch.equal(first.exp_avg_sq, second.exp_avg_sq)
    torch.testing.assert_close(first.param, second.param, rtol=2e-7, atol=1e-9)


@on_device
def test_kernels_clipped_to_nothing():
    """Squares that overflow, of a gradient of which nothing is left, leave no trace."""
    for factor in (0.0, torch.tensor(0.0, device=DEVICE)):
        update = record(40, 19, torch.float32)
        before = update.exp_avg_sq.clone()
        update.grad[3, 2] = 1e20
        update.factor = factor
        update.kernel.measure(update, False)
        update.kernel.apply(update)
        assert update.param.isfinite().all()
        torch.testing.assert_close(update.exp_avg_sq, 0.95 * before)


@on_device
@pytest.mark.parametrize("noise", [None, Noise(1.0)])
def test_kernels_skip(noise):
    """Unless it is 0, nothing changes."""
    for options in ({"amsgrad": True}, {"row_exponent": 0.5, "zero_sum": True}):
        update = record(40, 19, torch.bfloat16, **options)
        update.noise = noise
        names = [name for name in TENSORS if getattr(update, name) is not None]
        before = [getattr(update, name).clone() for name in names]
        for skip in (1.0, 2.0):
            again = replace(update, skip=torch.tensor(skip, device=DEVICE))
            again.t = torch.tensor(0.0, device=DEVICE)
            again.kernel.measure(again, False)
            apply_all(again, again.kernel)
            assert all(torch.equal(getattr(again, x), y) for x, y in zip(names, before))
        take_step(replace(update, skip=torch.tensor(0.0, device=DEVICE), noise=None))


@on_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_kernels_not_finite(bad):
    """What is not finite spoils what it spoils in the reference, no more and no less."""
    update = record(40, 19, torch.float32, amsgrad=True)
    update.grad[3, 2] = bad
    theirs = in_float64(update)
    for kernel, one in ((update.kernel, update), (reference, theirs)):
        kernel.measure(one, False)
        kernel.apply(one)
    for name in TENSORS:
        mine, right = getattr(update, name).cpu(), getattr(theirs, name)
        assert torch.equal(mine.isnan(), right.isnan()), name
        assert torch.equal(mine.isinf(), right.isinf()), name


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("t", [1, 5, 2**20, "tensor"])
def test_kernels_round_stochastically(t, layout):
    """To the bit as rounding.py; step sizes that are exact in any order of the sums."""
    step = torch.tensor(5.0, device=DEVICE) if t == "tensor" else float(t)
    update = record(40, 90, torch.bfloat16, layout, beta1=0.0, beta2=0.0, lr=1e-3)
    update.grad.copy_(torch.full_like(update.grad, 2.0**-7))
    update.noise, update.t = Noise(step, 5, 2), step
    decayed = update.param.float() * update.decay
    update.kernel.measure(update, False)
    update.kernel.apply(update)
    rate = torch.tensor(1e-3) / torch.tensor(2.0**-7 + 1e-8)
    values = decayed - rate.to(DEVICE) * update.exp_avg.float()
    expected = torch.empty_like(update.param)
    round_(expected, values, update.noise)
    assert torch.equal(update.param, expected)
    assert not torch.equal(expected, values.bfloat16())


@on_device
def test_kernels_give_the_same_bits_again():
    results = []
    for _ in range(3):
        update = record(200, 40, torch.float32)
        update.kernel.measure(update, False)
        update.kernel.apply(update)
        results.append([update.param, update.exp_avg, update.exp_avg_sq])
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


@on_device
def test_kernels_beyond_2_to_the_31():
    """Rows that are further apart than 32 bits can say; between them there need be no memory."""
    update = record(2, 20, torch.bfloat16)
    memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=DEVICE)
    for i, name in enumerate(("param", "grad", "exp_avg")):
        far = memory.as_strided((2, 20), (2**31, 1), 32 * i)
        setattr(update, name, far.copy_(getattr(update, name)))
    take_step(update)


@on_device
def test_kernels_tell_autograd():
    update = record(40, 19, torch.float32, amsgrad=True)
    before = [getattr(update, name)._version for name in TENSORS]
    update.kernel.measure(update, False)
    update.kernel.apply(update)
    assert all(getattr(update, x)._version > y for x, y in zip(TENSORS, before))


@on_device
def test_kernels_take_parts_without_rows_or_columns():
    """A rank that has none of the rows still updates nu from the sums of others."""
    update = record(4, 5, torch.float32)
    empty = {name: getattr(update, name)[:0] for name in ("param", "grad", "exp_avg")}
    update = replace(update, **empty)
    update.kernel.measure(update, False)
    assert update.sums.sum(0).tolist() == [0.0] * 5
    update.sums = torch.ones(5, device=DEVICE)
    before = update.exp_avg_sq.clone()
    update.kernel.apply(update)
    torch.testing.assert_close(update.exp_avg_sq, 0.95 * before + 0.05 / 4)
    for name in ("param", "grad", "exp_avg"):
        setattr(update, name, getattr(update, name)[:, :0])
    update.exp_avg_sq = update.exp_avg_sq[:0]
    update.kernel.measure(update, False)
    update.kernel.apply(update)


@on_device
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=str)
def test_kernels_on_a_part_of_a_matrix(options, tmp_path, monkeypatch):
    """The sums of a DTensor are added up before ranks exchange them."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from coupled_adam.optim.kernels import triton as kernel

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        plain = torch.randn(40, 19, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        results = []
        for whole in (True, False):
            values = plain.clone() if whole else distribute_tensor(plain, mesh, [Shard(0)])
            p = nn.Parameter(values)
            p.grad = p.detach() * 0.5
            optimizer = CoupledAdamW([p], coupled=True, fused=False if whole else None, **options)
            with monkeypatch.context() as patch:
                if not whole:
                    patch.setattr(kernels, "choose", lambda _: kernel)
                optimizer.step()
            results.append(p.detach() if whole else p.detach().full_tensor())
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    finally:
        dist.destroy_process_group()


# Whole steps, for GPUs alone.


def model(dtype=torch.float32):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(4000, 96), nn.Linear(96, 96), nn.Linear(96, 4000))
    return network.to(dtype)


def groups(network):
    coupled = [network[0].weight, network[2].weight]
    return [
        {"params": coupled, "coupled": True},
        {"params": [p for p in network.parameters() if all(p is not q for q in coupled)]},
    ]


def set_gradients(network, step, scale=1.0):
    """The same on every device; of the same tensors, as a graph must find them where they were."""
    generator = torch.Generator().manual_seed(step)
    for p in network.parameters():
        grad = torch.randn(p.shape, generator=generator) * scale
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grad)


STEPS = (
    {},
    {"fused": True},
    {"fused": False},
    {"capturable": True},
    {"capturable": True, "fused": True},
    {"amsgrad": True},
    {"maximize": True},
    {"max_grad_norm": 1.0},
    {"max_grad_norm": 1.0, "fused": True},
    {"capturable": True, "max_grad_norm": 1.0},
    {"cls": CoupledAdam, "weight_decay": 0.1},
    {"cls": CoupledAdam, "weight_decay": 0.1, "max_grad_norm": 1.0},
)


def optimizer_of(network, cls=CoupledAdamW, lr=1e-2, **options):
    return cls(groups(network), lr=lr, **options)


@needs_gpu
def test_triton_is_what_runs():
    network = model().cuda()
    optimizer = optimizer_of(network)
    set_gradients(network, 0)
    coupled, _ = optimizer._collect()
    assert [update.kernel.__name__ for update in coupled] == [
        "coupled_adam.optim.kernels.triton"
    ] * 2


@needs_gpu
@pytest.mark.parametrize("options", STEPS, ids=str)
def test_steps_as_on_a_cpu(options):
    """And none of them waits for the device."""
    ours, theirs = model().cuda(), model().double()
    rules = {name: x for name, x in options.items() if name not in ("fused", "capturable")}
    optimizer, control = optimizer_of(ours, **options), optimizer_of(theirs, **rules)
    for step in range(5):
        for network in (ours, theirs):
            set_gradients(network, step, 1e-2 if step % 2 else 1.0)
        control.step()
        if step < 2:  # compiles, and makes the state
            optimizer.step()
            continue
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.cpu().double(), q, rtol=2e-5, atol=2e-6)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_in_half_precision(dtype):
    ours, theirs = model(dtype).cuda(), model(dtype)
    optimizer, control = optimizer_of(ours, eps=1e-5), optimizer_of(theirs, eps=1e-5, fused=False)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        control.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=2**-5, atol=2**-7)
    assert optimizer.state[ours[0].weight]["exp_avg_sq"].dtype == torch.float32


@needs_gpu
@pytest.mark.parametrize("options", [x for x in STEPS if x.get("capturable")], ids=str)
@pytest.mark.parametrize("rounding", [False, True])
def test_captured_in_a_graph(options, rounding):
    """Ten replays are ten steps, to the bit; stochastic rounding is that of each step."""
    dtype = torch.bfloat16 if rounding else torch.float32
    captured = model(dtype).cuda()
    eager = copy.deepcopy(captured)
    options = {**options, "stochastic_rounding": rounding, "lr": torch.tensor(1e-2).cuda()}
    optimizers = [optimizer_of(network, **options) for network in (captured, eager)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm up, as torch asks for
        for step in range(3):
            for network, optimizer in zip((captured, eager), optimizers):
                set_gradients(network, step)
                optimizer.step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizers[0].step()
    for step in range(10):
        set_gradients(captured, step)
        set_gradients(eager, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"].fill_(1e-2 / (step + 1))
        graph.replay()
        optimizers[1].step()
    for p, q in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizers[0].state[captured[0].weight]["step"] == 13


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler, which differ from release to release
def test_compiled_step():
    ours, theirs = model().cuda(), model().cuda()
    optimizer, control = (
        optimizer_of(network, lr=torch.tensor(1e-2).cuda(), capturable=True)
        for network in (ours, theirs)
    )
    step_compiled = torch.compile(optimizer.step)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        step_compiled()
        control.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fused": True, "max_grad_norm": 1.0}])
def test_grad_scaler(options):
    """The scale is taken from gradients, and an overflow changes nothing."""
    ours, theirs = model().cuda(), model().cuda()
    optimizer, control = optimizer_of(ours, **options), optimizer_of(theirs)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)
    ids = torch.arange(64, device="cuda")
    for _ in range(4):
        for network, one in ((ours, optimizer), (theirs, control)):
            one.zero_grad()
            loss = 50 * nn.functional.cross_entropy(network(ids), ids)
            (scaler.scale(loss) if one is optimizer else loss).backward()
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(theirs.parameters(), options["max_grad_norm"])
        control.step()
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(ours.state_dict())
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(ours(ids), ids)).backward()
    ours[0].weight.grad[3, 2] = torch.inf
    scaler.step(optimizer)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)


@needs_gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_fully_sharded_on_one_rank(options, tmp_path):
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        ours, theirs = model().cuda(), model().cuda()
        fully_shard(ours)
        optimizer, control = optimizer_of(ours, **options), optimizer_of(theirs, **options)
        ids = torch.arange(64, device="cuda")
        for _ in range(3):
            for network, one in ((ours, optimizer), (theirs, control)):
                one.zero_grad()
                nn.functional.cross_entropy(network(ids), ids).backward()
                one.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)
    finally:
        dist.destroy_process_group()


@needs_gpu
def test_a_matrix_of_more_than_2_to_the_31_elements():
    """The last rows, which lie beyond; nu, which is of all rows."""
    rows, columns = 2**31 // 4096 + 64, 4096
    if torch.cuda.mem_get_info()[0] < 4 * 2 * rows * columns:
        pytest.skip("needs 18 GB of free memory")
    p = nn.Parameter(torch.full((rows, columns), 0.5, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.randn(64, columns, device="cuda").bfloat16().repeat(rows // 64, 1)
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


@needs_gpu
def test_where_triton_does_not_work(monkeypatch):
    """torch's operations: the same numbers, and nothing of the matrix's size beside it."""
    results = []
    for works in (True, False):
        if not works:
            monkeypatch.setattr(kernels, "_triton_works", lambda *_: False)
        network = model().cuda()
        optimizer = optimizer_of(network)
        for step in range(3):
            set_gradients(network, step)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            if step:
                extra = torch.cuda.max_memory_allocated() - before
                assert extra < network[0].weight.nbytes / 4
        results.append(network)
    for p, q in zip(*(network.parameters() for network in results), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
