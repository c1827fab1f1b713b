"""Clipping of mixed gradients: as torch clips their dense twins, which have the same numbers.

The same file is the program of each rank of the test with several processes.
"""

import copy
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from coupled_adam import CoupledAdamW, clip_grad_norm_
from processes import run_cases, run_on_ranks

# Which takes no other orders than a full norm's, no largest of no rows, and rows of no table.
TORCHS_OWN = torch.__version__ >= "2.14"
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def with_grad(gradient):
    p = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    p.grad = gradient
    return p


def sparse(rows, columns, number, generator, dtype=torch.float32):
    indices = torch.randint(rows, (1, number), generator=generator)
    values = torch.randn(number, columns, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (rows, columns))


def dense(p):
    return p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()


@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_as_dense_twins(clip, dtype):
    """Torch's function does the same, wherever it is called."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(20):
        columns = draw.choice([1, 16, 40])
        params = [
            with_grad(sparse(30, columns, draw.choice([int(TORCHS_OWN), 1, 70]), generator, dtype)),
            with_grad(sparse(9, columns, 20, generator, dtype).coalesce()),
            with_grad(torch.randn(5, 7, generator=generator)),
            nn.Parameter(torch.zeros(2)),
        ]
        twins = [with_grad(dense(p)) for p in params if p.grad is not None]
        options = {
            "max_norm": draw.choice([0.1, 1.0, 1e6, float("inf")]),
            "norm_type": draw.choice([2.0, 2.0, 1.0, 3.0, float("inf")]),
            "foreach": draw.choice([None, False]),
        }
        expected = nn.utils.clip_grad_norm_(twins, **options)
        rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        norm = clip(params, **options)
        torch.testing.assert_close(norm, expected, rtol=rounding, atol=0)
        for p, twin in zip(params, twins):
            torch.testing.assert_close(dense(p), twin.grad, rtol=2 * rounding, atol=rounding)


def test_nothing_sparse_is_torchs_own():
    """To the bit, and one parameter may be given alone."""
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    p, twin = with_grad(gradient), with_grad(gradient.clone())
    assert torch.equal(clip_grad_norm_(p, 0.3), nn.utils.clip_grad_norm_(twin, 0.3))
    assert torch.equal(p.grad, twin.grad)


@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torch"])
def test_refused_before_anything_is_clipped(clip):
    generator = torch.Generator().manual_seed(0)
    infinite = with_grad(sparse(30, 4, 50, generator) * torch.inf)
    outside = with_grad(
        torch.sparse_coo_tensor(
            torch.tensor([[30]]), torch.ones(1, 4), (30, 4), check_invariants=False
        )
    )
    other = with_grad(torch.ones(3, 3))
    for bad, message in ((infinite, "non-finite"), (outside, "rows from 30 to 30, but its table")):
        if bad is outside and TORCHS_OWN and clip is not clip_grad_norm_:
            continue
        with pytest.raises(RuntimeError, match=message):
            clip([other, bad], 0.1, error_if_nonfinite=True)
        assert torch.equal(other.grad, torch.ones(3, 3))


@pytest.mark.skipif(TORCHS_OWN, reason="torch has one")
@pytest.mark.parametrize("order", [2, 0, -1, -torch.inf, torch.inf])
def test_the_norm_that_torch_is_given(order):
    """That of the dense tensor, also of one dimension, and of what is sparse in columns, too."""
    x = sparse(6, 3, 9, torch.Generator().manual_seed(0))
    for y in (x, x.to_dense().to_sparse()):
        for options in ({}, {"dim": 1}, {"dim": 0, "keepdim": True}, {"dtype": torch.float64}):
            expected = torch.linalg.vector_norm(y.to_dense(), order, **options)
            torch.testing.assert_close(torch.linalg.vector_norm(y, order, **options), expected)


@pytest.mark.parametrize("fused", [None, True])
def test_with_scaled_gradients(fused):
    """The loop of fp16 training; a step that overflows changes nothing."""
    torch.manual_seed(0)
    scaled, plain = (nn.EmbeddingBag(40, 8, mode="sum", sparse=True) for _ in range(2))
    plain.load_state_dict(scaled.state_dict())
    optimizers = [
        CoupledAdamW(m, lr=1e-2, embeddings="lean", steps=10, fused=fused) for m in (scaled, plain)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        ids = torch.randint(40, (6, 5))
        before = copy.deepcopy(scaled.state_dict())
        loss = scaled(ids).square().sum()
        scaler.scale(loss * (torch.inf if step == 3 else 1)).backward()
        scaler.unscale_(optimizers[0])
        clip_grad_norm_(scaled.parameters(), 0.1)
        scaler.step(optimizers[0])
        scaler.update()
        if step == 3:
            torch.testing.assert_close(scaled.state_dict(), before, rtol=0, atol=0)
        else:
            plain(ids).square().sum().backward()
            clip_grad_norm_(plain.parameters(), 0.1)
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    torch.testing.assert_close(scaled.weight, plain.weight)


# --- several processes ---


def mixed():
    """DTensors on two meshes, a sparse gradient, and a dense one, as one process has them."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(9, 8, generator=generator) for _ in range(3)]
    ranks = dist.get_world_size()
    meshes = [dist.init_device_mesh("cpu", shape) for shape in ((ranks,), (1, ranks))]
    placements = [[Shard(0)], [Shard(0), Shard(1)]]
    params = []
    for gradient, mesh, placed in zip(whole, meshes, placements):
        p = nn.Parameter(distribute_tensor(torch.zeros(9, 8), mesh, placed))
        p.grad = distribute_tensor(gradient, mesh, placed)
        params.append(p)
    params += [with_grad(whole[2].clone()), with_grad(sparse(30, 8, 70, generator))]
    twins = [*map(with_grad, [*whole, dense(params[-1])])]
    norm, expected = (clip_grad_norm_(tensors, 0.5) for tensors in (params, twins))
    torch.testing.assert_close(norm, expected)
    for p, twin in zip(params, twins):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else dense(p)
        torch.testing.assert_close(gradient, twin.grad)


CASES = {"mixed": mixed}


def test_several_meshes():
    run_on_ranks(2, __file__, CASES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(CASES)
