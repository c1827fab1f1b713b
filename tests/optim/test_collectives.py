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
from optim.cases import CASES

RANKS, V, H, MATRICES = 1024, 50_000, 16, 3


class Collectives(TorchDispatchMode):
    """How many numbers each all-reduce sends, in order."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "all_reduce":
            self.sent.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def counted(mesh, placement, steps=3, **options):
    """What is sent in each step."""
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
        events.append(seen.sent)
    return optimizer, events


def of_rank(values, mesh, placement, whole):
    stride = (whole[1], 1)
    return DTensor.from_local(values, mesh, [placement], shape=whole, stride=stride)


@pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum", "rows", "zero-sum"])
def test_two_all_reduces(name, mesh):
    """For which matrices there is a gradient, and the sums for the next step, of all at once."""
    _, steps = counted(mesh, Shard(0), **CASES[name])
    assert steps == 3 * [[MATRICES, MATRICES * (2 * H + 1)]]


def test_no_gradient_is_kept_until_the_next_step(mesh):
    """Gradients that are freed are free during the next backward."""
    optimizer, _ = counted(mesh, Shard(0), steps=1, **CASES["LEAN"])
    params = optimizer.param_groups[0]["params"]
    grads = [weakref.ref(p.grad._local_tensor) for p in params]
    assert all(grad() is not None for grad in grads)
    optimizer.zero_grad()
    gc.collect()
    assert [grad() for grad in grads] == [None] * MATRICES


def test_coupled_adam(mesh):
    """For which matrices there is a gradient, and the sums of squares, before any is updated."""
    assert counted(mesh, Shard(0))[1] == 3 * [[MATRICES, MATRICES * H]]


@pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum"])
def test_rows_that_are_cut(name, mesh):
    """The mean of log nu, then each row's two sums, and rho, of all matrices at once."""
    _, steps = counted(mesh, Shard(1), **CASES[name])
    assert steps == 3 * [[MATRICES, MATRICES * 2, MATRICES * (2 * 64 + 1)]]
