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
from records import DEVICE, LAYOUTS, record, take_step
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim import kernels, reference, rounding, update

HAS_GPU = DEVICE == "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",  # of the interpreter, on overflow
    "ignore:Synchronization debug mode",
)
on_device = pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="needs a GPU")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

TENSORS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row")
RULES = (
    {"zero_sum": True},
    {"row_exponent": 0.5},
    {"row_exponent": 0.5, "zero_sum": True},
    {"row_exponent": 0.5, "zero_sum": True, "beta1": 0.0},
    {"row_exponent": 1.0, "beta1": 0.0},
)


def tensors_of(matrix):
    values = {name: getattr(matrix, name) for name in TENSORS}
    return {name: x for name, x in values.items() if x is not None}


def with_tensors(matrix, change, names=(*TENSORS, "grad")):
    """The matrix with other tensors in place of those of these names."""
    return replace(
        matrix, **{x: change(getattr(matrix, x)) for x in names if getattr(matrix, x) is not None}
    )


def in_float64(matrix):
    """The same for the reference, on the CPU."""
    theirs = with_tensors(matrix, lambda x: x.to("cpu", torch.float64, copy=True))
    return replace(
        theirs,
        kernel=reference,
        step=matrix.step.cpu().clone(),
        lr=float(matrix.lr),
    )


def compare_step(matrix, factor=None, found_inf=None):
    """Take a step by the kernel, and compare with the reference from the same place."""
    theirs = in_float64(matrix)
    take_step(matrix, factor, found_inf)
    take_step(theirs, factor if factor is None else factor.cpu().double(), found_inf)
    assert matrix.step == theirs.step
    for name, ours in tensors_of(matrix).items():
        right = getattr(theirs, name)
        eps = torch.finfo(ours.dtype).eps
        tolerance = eps if ours.dtype != torch.float32 else 20 * eps
        torch.testing.assert_close(
            ours.cpu().double(),
            right,
            rtol=tolerance,
            atol=tolerance * right.abs().mean().item(),  # where two numbers nearly cancel
            msg=lambda message, name=name: f"{name}: {message}",
        )


@pytest.fixture
def on_gpu(monkeypatch):
    """In the interpreter, too, no number is read on the host."""
    monkeypatch.setattr(update, "number", lambda value, traced: value.reshape(()))


@on_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels(dtype, layout):
    """In any memory layout, that of an [H, V] matrix among them."""
    matrix = record(37, 11, dtype, layout, vocab_dim=int(layout == "transposed"), amsgrad=True)
    for _ in range(3):
        compare_step(matrix)


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 300), (300, 1), (9, 770), (1025, 3), (130, 257)], ids=str
)
def test_kernels_shapes(shape, layout):
    compare_step(record(*shape, torch.float32, layout))
    if shape[0] > 1:  # the only row would be one that never occurs
        compare_step(record(*shape, torch.float32, layout, row_exponent=0.5, zero_sum=True))


@on_device
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"second_moment_scale": 0.25, "amsgrad": True},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta1": 0.0},
        {"beta2": 0.999999},
        {"row_exponent": 1.0, "zero_sum": True, "layout": "transposed"},
        {"row_exponent": 0.5, "zero_sum": True, "beta1": 0.0, "layout": "transposed"},
        {"maximize": True, "row_exponent": 0.5, "zero_sum": True},
        {"maximize": True, "row_exponent": 0.5, "zero_sum": True, "beta1": 0.0},
        *RULES,
    ],
    ids=str,
)
def test_kernels_options(options):
    for t in (1.0, 1000.0):
        compare_step(record(65, 130, torch.float32, t=t, **options))


@on_device
@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize(
    ("factor", "layout"), [(1.0, "rows"), (0.0, "rows"), *((0.3, layout) for layout in LAYOUTS)]
)
def test_kernels_clipped(factor, options, layout, on_gpu):
    """By a factor on the device, which is 1 where nothing is clipped, in any memory layout."""
    for dtype in (torch.float32, torch.bfloat16):
        matrix = record(40, 19, dtype, layout, **options)
        compare_step(matrix, torch.tensor(factor, device=DEVICE))


@on_device
def test_kernels_of_wide_rows():
    """Of rows that do not fit into the registers of a program, each block of columns is summed."""
    compare_step(record(3, 8200, torch.float32, row_exponent=0.5, zero_sum=True))


@on_device
@pytest.mark.parametrize("options", [{}, *RULES], ids=str)
@pytest.mark.parametrize("factor", [0.3, -1.0, 0.0])
def test_kernels_read_numbers_on_the_device(factor, options, monkeypatch):
    """The factor, the learning rate and the step, as numbers and as tensors: the same bits."""
    results = []
    for where in ("argument", "device"):
        matrix, found_inf = record(40, 19, torch.float32, amsgrad=True, t=7.0, **options), None
        scale = factor
        if where == "device":
            scale = torch.tensor(factor, device=DEVICE)
            found_inf = torch.zeros((), device=DEVICE)
            matrix = replace(
                matrix, lr=torch.tensor(1e-2, device=DEVICE), step=matrix.step.to(DEVICE)
            )
        monkeypatch.setattr(update, "number", lambda value, traced, scale=scale: scale)
        take_step(matrix, torch.tensor(factor, device=DEVICE), found_inf)
        results.append(tensors_of(matrix))
    first, second = results
    for name in first:
        if name == "param":
            torch.testing.assert_close(first[name], second[name], rtol=2e-7, atol=1e-9)
        else:
            assert torch.equal(first[name], second[name]), name


@on_device
@pytest.mark.parametrize("options", [{}, *RULES], ids=str)
def test_kernels_clipped_to_nothing(options, on_gpu):
    """Squares that overflow, of a gradient of which nothing is left, leave no trace."""
    matrix = record(40, 19, torch.float32, **options)
    before = {name: x.clone() for name, x in tensors_of(matrix).items()}
    matrix.grad[3, 2] = 1e20
    take_step(matrix, torch.tensor(0.0, device=DEVICE))
    assert matrix.param.isfinite().all()
    for name in ("exp_avg_sq", "exp_avg_sq_row"):
        if name in before:
            torch.testing.assert_close(getattr(matrix, name), 0.95 * before[name])


@on_device
@pytest.mark.parametrize("beta1", [2**-10, 0.5, 0.9])
@pytest.mark.parametrize("options", [{}, {"row_exponent": 0.5, "zero_sum": True}], ids=str)
def test_kernels_forget_nothing_small(beta1, options):
    """Of a small gradient after a large one the first moment has all digits."""
    matrix = record(40, 20, torch.float32, beta1=beta1, **options)
    matrix.exp_avg.mul_(1e6)
    old, g = matrix.exp_avg.double(), matrix.grad.double()
    take_step(matrix)
    expected = beta1 * old + (1 - beta1) * g
    torch.testing.assert_close(matrix.exp_avg.double(), expected, rtol=3e-7, atol=0)


@on_device
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("options", [{"amsgrad": True}, *RULES], ids=str)
@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_kernels_skip(found_inf, options, rounding):
    """Unless it is 0, nothing changes."""
    matrix = record(40, 19, torch.bfloat16, stochastic_rounding=rounding, **options)
    before = {name: x.clone() for name, x in tensors_of(matrix).items()}
    take_step(matrix, found_inf=torch.tensor(found_inf, device=DEVICE))
    assert all(torch.equal(x, before[name]) for name, x in tensors_of(matrix).items())
    assert matrix.step == 0
    matrix.group["stochastic_rounding"] = False
    compare_step(matrix, found_inf=torch.zeros((), device=DEVICE))


@on_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, *RULES], ids=str)
def test_kernels_not_finite(bad, options):
    """What is not finite spoils what it spoils in the reference, no more and no less."""
    matrix = record(40, 19, torch.float32, amsgrad=True, **options)
    matrix.grad[3, 2] = bad
    theirs = in_float64(matrix)
    take_step(matrix)
    take_step(theirs)
    for name, ours in tensors_of(matrix).items():
        right = getattr(theirs, name)
        assert torch.equal(ours.cpu().isnan(), right.isnan()), name
        assert torch.equal(ours.cpu().isinf(), right.isinf()), name


@on_device
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("t", [1, 5, 2**20])
@pytest.mark.parametrize("where", ["argument", "device"])
@pytest.mark.parametrize("index", [0, 1, 5])  # of which the last has a salt with the highest bit
def test_kernels_round_stochastically(index, t, where, layout, monkeypatch):
    """To the bit as rounding.py; step sizes that are exact in any order of the sums."""
    monkeypatch.setattr(rounding, "global_offset", lambda _: (5, 2))
    options = {"beta1": 0.0, "beta2": 0.0, "lr": 1e-3, "stochastic_rounding": True}
    matrix = record(40, 90, torch.bfloat16, layout, t=float(t), **options)
    matrix.position = index
    noise = rounding.noise_of(matrix.group, matrix.parameter, float(t), index)
    matrix.grad.fill_(2.0**-7)
    decayed = matrix.param.float() * matrix.decay
    take_step(matrix, found_inf=torch.zeros((), device=DEVICE) if where == "device" else None)
    rate = torch.tensor(1e-3) / torch.tensor(2.0**-7 + 1e-8)
    values = decayed - rate.to(DEVICE) * matrix.grad.float()
    expected = torch.empty_like(matrix.param)
    rounding.round_(expected, values, noise)
    assert torch.equal(matrix.param, expected)
    assert not torch.equal(expected, values.bfloat16())


@on_device
@pytest.mark.parametrize("options", [{}, *RULES], ids=str)
def test_kernels_give_the_same_bits_again(options):
    results = []
    for _ in range(3):
        matrix = record(200, 40, torch.float32, **options)
        take_step(matrix)
        results.append(tensors_of(matrix))
    for again in results[1:]:
        assert all(torch.equal(x, again[name]) for name, x in results[0].items())


@on_device
@pytest.mark.parametrize("options", [{}, {"row_exponent": 0.5, "zero_sum": True}], ids=str)
def test_kernels_beyond_2_to_the_31(options):
    """Rows that are further apart than 32 bits can say; between them there need be no memory."""
    memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=DEVICE)
    places = iter((0, 32, 64))

    def far(x):
        return memory.as_strided((2, 20), (2**31, 1), next(places)).copy_(x)

    compare_step(
        with_tensors(record(2, 20, torch.bfloat16, **options), far, ("param", "grad", "exp_avg"))
    )


@on_device
@pytest.mark.parametrize("options", [{}, *RULES], ids=str)
def test_kernels_tell_autograd(options):
    matrix = record(40, 19, torch.float32, amsgrad=True, **options)
    before = {name: x._version for name, x in tensors_of(matrix).items()}
    take_step(matrix)
    assert all(x._version > before[name] for name, x in tensors_of(matrix).items())


@on_device
def test_kernels_take_parts_without_rows_or_columns(monkeypatch):
    """A rank that has none of the rows still updates nu from the sums of others."""
    matrix = record(4, 5, torch.float32)
    matrix = with_tensors(matrix, lambda x: x[:0], ("param", "grad", "exp_avg"))
    before = matrix.exp_avg_sq.clone()
    (sums,) = update.measure([matrix], True)
    assert sums.squares.sum(0).tolist() == [0.0] * 5
    sums.squares = torch.ones(5, device=DEVICE)
    update.update([matrix], [sums], None, None)
    torch.testing.assert_close(matrix.exp_avg_sq, 0.95 * before + 0.05 / 4)
    matrix = with_tensors(matrix, lambda x: x[:, :0], ("param", "grad", "exp_avg"))
    take_step(replace(matrix, exp_avg_sq=matrix.exp_avg_sq[:0]))
    matrix = record(4, 5, torch.float32, row_exponent=0.5, zero_sum=True)
    matrix = with_tensors(matrix, lambda x: x[:0], ("param", "grad", "exp_avg", "exp_avg_sq_row"))
    (sums,) = update.measure([matrix], True)
    matrix.kernel.weigh_rows(matrix, sums, update.advance(matrix, sums, None, None))
    assert sums.updates.sum(0).tolist() == [0.0] * 5
    assert sums.rows.sum(0).tolist() == [0.0] * 2


@on_device
@pytest.mark.parametrize("rule", [{}, *RULES], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=str)
def test_kernels_on_a_part_of_a_matrix(options, rule, tmp_path, monkeypatch):
    """The sums of a DTensor are added up before ranks exchange them."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from coupled_adam.optim.kernels import triton as kernel

    betas = (rule.get("beta1", 0.9), 0.95)
    options = {**options, **{name: x for name, x in rule.items() if name != "beta1"}}
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        plain = torch.randn(40, 19, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        results = []
        for placement in (None, Shard(0), Shard(1)):
            whole = placement is None
            values = plain.clone() if whole else distribute_tensor(plain, mesh, [placement])
            p = nn.Parameter(values)
            p.grad = p.detach() * 0.5
            optimizer = CoupledAdamW(
                [p], coupled=True, betas=betas, fused=False if whole else None, **options
            )
            with monkeypatch.context() as patch:
                if not whole:
                    patch.setattr(kernels, "choose", lambda _: kernel)
                optimizer.step()
            results.append(p.detach() if whole else p.detach().full_tensor())
        for again in results[1:]:
            torch.testing.assert_close(again, results[0], rtol=1e-6, atol=1e-7)
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
