"""What LEAN sends on many ranks: counted in torch's fake process group, as rank 0 of 1,024."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import CoupledAdamW
from coupled_adam.optim import state, update
from optim.cases import CASES

RANKS, V, H, MATRICES = 1024, 50_000, 16, 3


class Collectives(TorchDispatchMode):
    """The all-reduces and the waits for them, in order, with how many numbers were sent."""

    def __init__(self):
        super().__init__()
        self.events = EVENTS
        self.events.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("all_reduce", "wait_tensor"):  # what is waited for at once
            self.events.append((name.removesuffix("_tensor"), args[0].numel()))
        return func(*args, **(kwargs or {}))


class Work:
    """An all-reduce in the background that tells when it is waited for."""

    def __init__(self, work, size):
        self.work, self.size = work, size

    def wait(self):
        EVENTS.append(("wait", self.size))
        return self.work.wait()


EVENTS = []


@pytest.fixture(autouse=True)
def in_the_background(monkeypatch):
    """Record ``dist.all_reduce``, whose waits no dispatch mode sees."""
    all_reduce = dist.all_reduce

    def recorded(tensor, **options):
        EVENTS.append(("all_reduce", tensor.numel()))
        return Work(all_reduce(tensor, **options), tensor.numel())

    monkeypatch.setattr(dist, "all_reduce", recorded)


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def counted(mesh, placement, steps=3, **options):
    """The collectives of each step."""
    shape = (-(-V // RANKS), H) if placement == Shard(0) else (64, H // RANKS or 1)
    whole = (V, H) if placement == Shard(0) else (64, RANKS)
    params = []
    for _ in range(MATRICES):
        values = torch.randn(shape)
        params.append(nn.Parameter(of_rank(values, mesh, placement, whole)))
    optimizer = CoupledAdamW([{"params": params, "coupled": True, **options}])
    events = []
    for _ in range(steps):
        for p in params:
            p.grad = of_rank(torch.randn(shape), mesh, placement, whole)
        with Collectives() as seen:
            optimizer.step()
        events.append([*seen.events])
    return optimizer, events


def of_rank(values, mesh, placement, whole):
    stride = (whole[1], 1)
    return DTensor.from_local(values, mesh, [placement], shape=whole, stride=stride)


@pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum", "rows", "zero-sum"])
def test_one_all_reduce_which_no_step_waits_for(name, mesh):
    """Of 2 H + 2 numbers for each matrix, of all matrices at once; the next step needs the sums."""
    optimizer, (first, *others) = counted(mesh, Shard(0), **CASES[name])
    sums = MATRICES * (2 * H + 2)
    assert first == [("all_reduce", sums)]
    for events in others:
        assert events == [("wait", sums), ("all_reduce", sums)]
    with Collectives() as seen:
        optimizer.state_dict()
        optimizer.state_dict()
    assert seen.events == [("wait", sums)]


def test_no_gradient_is_kept_until_the_next_step(mesh):
    """Only what the sums are for: gradients that are freed are free during the next backward."""
    optimizer, _ = counted(mesh, Shard(0), steps=1, **CASES["LEAN"])
    params = optimizer.param_groups[0]["params"]
    grads = [weakref.ref(p.grad._local_tensor) for p in params]
    assert all(grad() is not None for grad in grads)
    optimizer.zero_grad()
    gc.collect()
    assert [grad() for grad in grads] == [None] * MATRICES


def test_a_captured_step_is_whole(mesh, monkeypatch):
    """Nothing is under way when it ends; and one that begins so is refused, with the way out."""
    sums = MATRICES * (2 * H + 2)
    monkeypatch.setattr(state, "_get_capturable_supported_devices", lambda: ["cpu"])
    _, steps = counted(mesh, Shard(0), capturable=True, **CASES["LEAN"])
    assert steps == 3 * [[("all_reduce", sums), ("wait", sums)]]
    optimizer, _ = counted(mesh, Shard(0), steps=1, **CASES["LEAN"])
    p = optimizer.param_groups[0]["params"][0]
    before = p.to_local().clone()
    with monkeypatch.context() as patch:
        patch.setattr(update, "_is_capturing", lambda x: True)
        with pytest.raises(RuntimeError, match=r"call state_dict\(\) before the capture"):
            optimizer.step()
    assert torch.equal(p.to_local(), before)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(update, "_is_capturing", lambda x: True)
        optimizer.step()


def test_coupled_adam_waits_for_one(mesh):
    """Of H + 1 numbers for each matrix, before any is updated."""
    sums = MATRICES * (H + 1)
    for events in counted(mesh, Shard(0))[1]:
        assert events == [("all_reduce", sums), ("wait", sums)]


def test_rows_that_are_cut(mesh):
    """The mean of log nu, then each row's sum of squares and rho, of all matrices at once."""
    _, steps = counted(mesh, Shard(1), **CASES["LEAN"])
    exchanges = MATRICES * (2 + 1), MATRICES * (64 + 1 + 1)
    expected = [(verb, sums) for sums in exchanges for verb in ("all_reduce", "wait")]
    assert steps == 3 * [expected]
