"""The Triton kernels against the oracle, and whole steps on a GPU.

The first part also runs without a GPU, on CPU tensors in Triton's interpreter, if the environment
had TRITON_INTERPRET=1 from the start: test_triton.py does that. The rest is for GPUs alone.
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim import coupled_adam, kernels, update
from optim.cases import CASES, check_steps, gradient, matrix, optimizer_of, use
from optim.every_kernel import EveryKernel, assert_same_bits, lean_and_coupled, stored

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",  # of the interpreter, on overflow
    "ignore:Synchronization debug mode",
)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


@pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="needs a GPU")
class TestTriton(EveryKernel):
    device = DEVICE
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if INTERPRETED:
        shapes = ((1, 1), (1, 300), (300, 1), (9, 770), (33, 130))

    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        from coupled_adam.optim.kernels import triton as kernel

        use(monkeypatch, kernel)
        return kernel

    def test_wide_rows(self):
        check_steps((3, 8192), torch.float32, steps=2, device=DEVICE, **CASES["LEAN"])

    @lean_and_coupled
    def test_numbers_that_are_on_the_device(self, options, monkeypatch):
        """The rate, the factor and the count of steps, as numbers and as tensors: the same bits."""
        results = []
        for on_device in (False, True):
            if on_device:
                for module in (update, coupled_adam):
                    monkeypatch.setattr(module, "as_python_number", in_a_tensor)
            p = self.parameter((13, 7))
            optimizer = optimizer_of([p], fused=True, **options)
            if on_device:
                optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, device=DEVICE)
            for step in range(3):
                self.scale(optimizer, 0.25)
                p.grad = self.gradient((13, 7), step)
                optimizer.step()
            results.append(stored(optimizer, p))
        assert_same_bits(*results)

    @pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
    def test_beyond_2_to_the_31(self, name):
        """Rows that are further apart than 32 bits can say; between them there need be no memory.

        The steps are those of the same rows side by side.
        """
        memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=DEVICE)
        results = []
        for is_far in (False, True):
            places = iter((0, 32, 64))

            def laid(x, is_far=is_far, places=places):
                return (
                    memory.as_strided((2, 20), (2**31, 1), next(places)).copy_(x) if is_far else x
                )

            p = nn.Parameter(laid(matrix((2, 20), 0, torch.bfloat16).to(DEVICE)))
            optimizer = optimizer_of([p], **CASES[name])
            optimizer.init_state()
            if "exp_avg" in optimizer.state[p]:
                optimizer.state[p]["exp_avg"] = laid(optimizer.state[p]["exp_avg"])
            p.grad = laid(gradient((2, 20), 1, torch.bfloat16).to(DEVICE))
            optimizer.step()
            results.append(stored(optimizer, p))
        assert_same_bits(*results)

    @pytest.mark.parametrize("name", ["coupled", "coupled, amsgrad", "LEAN", "LEAN, momentum"])
    def test_parts_of_a_matrix(self, name, tmp_path, monkeypatch):
        """The sums of a DTensor are added up before ranks exchange them."""
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("nccl" if HAS_GPU else "gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(DEVICE, (1,))
            results = []
            for placement in (None, Shard(0), Shard(1)):
                values = self.parameter((40, 19)).detach()
                if placement is not None:
                    values = distribute_tensor(values, mesh, [placement])
                p = nn.Parameter(values)
                optimizer = optimizer_of([p], **CASES[name])
                for step in range(3):
                    p.grad = self.gradient((40, 19), step)
                    if placement is not None:
                        p.grad = distribute_tensor(p.grad, mesh, [placement])
                    optimizer.step()
                results.append(p.detach() if placement is None else p.detach().full_tensor())
            for again in results[1:]:
                torch.testing.assert_close(again, results[0], rtol=1e-6, atol=1e-7)
        finally:
            dist.destroy_process_group()


def in_a_tensor(value, no_host_reads):
    """A number that is on a GPU; of the betas only Python numbers go to Triton."""
    return value.reshape(()) if isinstance(value, torch.Tensor) else value


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


LEAN = CASES["LEAN"]
STEPS = (
    {},
    {"fused": True},
    {"fused": False},
    {"capturable": True},
    {"capturable": True, "fused": True},
    {"amsgrad": True},
    {"maximize": True},
    {"cls": CoupledAdam, "weight_decay": 0.1},
    LEAN,
    {**LEAN, "fused": True},
    {**LEAN, "capturable": True},
    {**LEAN, "betas": (0.9, 0.95)},
)


def optimizer_of_model(network, cls=CoupledAdamW, lr=1e-2, **options):
    return cls(groups(network), lr=lr, **options)


@needs_gpu
def test_triton_is_what_runs():
    network = model().cuda()
    optimizer = optimizer_of_model(network)
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
    optimizer, control = optimizer_of_model(ours, **options), optimizer_of_model(theirs, **rules)
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
    optimizer, control = (
        optimizer_of_model(ours, eps=1e-5),
        optimizer_of_model(theirs, eps=1e-5, fused=False),
    )
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
    optimizers = [optimizer_of_model(network, **options) for network in (captured, eager)]
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
        optimizer_of_model(network, lr=torch.tensor(1e-2).cuda(), capturable=True)
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
@pytest.mark.parametrize("options", [{}, {"fused": True}, LEAN, {**LEAN, "fused": True}])
def test_grad_scaler(options):
    """The scale is taken from gradients, and an overflow changes nothing."""
    ours, theirs = model().cuda(), model().cuda()
    optimizer, control = (optimizer_of_model(x, **options) for x in (ours, theirs))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)
    ids = torch.arange(64, device="cuda")
    for _ in range(4):
        for network, one in ((ours, optimizer), (theirs, control)):
            one.zero_grad()
            loss = 50 * nn.functional.cross_entropy(network(ids), ids)
            (scaler.scale(loss) if one is optimizer else loss).backward()
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
@pytest.mark.parametrize("options", [{}, LEAN], ids=["coupled", "LEAN"])
def test_fully_sharded_on_one_rank(options, tmp_path):
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        ours, theirs = model().cuda(), model().cuda()
        fully_shard(ours)
        optimizer, control = (
            optimizer_of_model(ours, **options),
            optimizer_of_model(theirs, **options),
        )
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
        optimizer = optimizer_of_model(network)
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
