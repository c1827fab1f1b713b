"""Ranks with different sets of gradients, of matrices whose rows or columns they share.

A rank without a gradient takes part with zeros, as if its part of the gradient were zeros; the same
file is the program of each rank.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from coupled_adam import CoupledAdam, CoupledAdamW, FlatShard
from optim.cases import LEAN_SOON
from optim.test_sharded import gradient, matrix, mesh_of
from processes import run_cases, run_on_ranks

STEPS = 6


def has_gradient(step, number, rank):
    """Of one matrix there is one on some ranks in each step; of the other on none in some."""
    if number == 0:
        return step == 0 or rank == step % 2 or rank > 1
    return step in (1, 2, 5)


def against_zeros(placements, options, shape=None):
    """As in one process whose gradient is zero where a rank has none."""
    mesh = mesh_of(shape)
    rank = mesh.get_local_rank(0)
    whole = [nn.Parameter(matrix() + i) for i in range(2)]
    split = [nn.Parameter(distribute_tensor(matrix() + i, mesh, placements)) for i in range(2)]
    options = {"cls": CoupledAdamW, "lr": 1e-2, **options}
    cls = options.pop("cls")
    expected, actual = (cls(ps, coupled=True, **options) for ps in (whole, split))
    for step in range(STEPS):
        for number, (p, q) in enumerate(zip(whole, split)):
            full = distribute_tensor(gradient(step), mesh, placements)
            has_one = has_gradient(step, number, rank)
            q.grad = full if has_one else None
            local = full.to_local() if has_one else torch.zeros_like(full.to_local())
            zeros = DTensor.from_local(
                local, mesh, placements, shape=full.shape, stride=full.stride()
            )
            anywhere = number == 0 or has_one
            p.grad = zeros.full_tensor() if anywhere else None
        expected.step()
        actual.step()
    for p, q in zip(whole, split):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=1e-10, atol=1e-12)
    theirs, ours = (optimizer.state_dict()["state"] for optimizer in (expected, actual))
    for number, state in theirs.items():
        for name, x in state.items():
            y = ours[number][name]
            y = y.full_tensor() if isinstance(y, DTensor) else y
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12, msg=f"{number} {name}")


def flat_against_zeros(options):
    """The same of flattened matrices, of which each rank has a piece that begins within a row."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = [nn.Parameter(matrix() + i) for i in range(2)]
    flat = [x.detach().flatten().tensor_split(ranks) for x in whole]
    pieces = [nn.Parameter(parts[rank].clone()) for parts in flat]
    offset = sum(len(part) for part in flat[0][:rank])
    shards = [FlatShard(tuple(whole[0].shape), offset)] * 2
    options = {"cls": CoupledAdamW, "lr": 1e-2, **options}
    cls = options.pop("cls")
    expected = cls(whole, coupled=True, **options)
    actual = cls([{"params": pieces, "flat_shards": shards}], coupled=True, **options)
    for step in range(STEPS):
        for number, (p, q) in enumerate(zip(whole, pieces)):
            parts = [x.clone() for x in gradient(step).flatten().tensor_split(ranks)]
            have_one = [has_gradient(step, number, other) for other in range(ranks)]
            q.grad = parts[rank] if have_one[rank] else None
            zeros = [x if has else torch.zeros_like(x) for x, has in zip(parts, have_one)]
            p.grad = torch.cat(zeros).view_as(p) if any(have_one) else None
        expected.step()
        actual.step()
    for p, q in zip(whole, pieces):
        ours = p.detach().flatten().tensor_split(ranks)[rank]
        torch.testing.assert_close(q.detach(), ours, rtol=1e-10, atol=1e-12)
    theirs, ours = (optimizer.state_dict()["state"] for optimizer in (expected, actual))
    assert [state["step"] for state in ours.values()] == [s["step"] for s in theirs.values()]
    for number, state in theirs.items():
        torch.testing.assert_close(ours[number]["exp_avg_sq"], state["exp_avg_sq"])


OPTIONS = {
    "coupled": {},
    "coupled, reference": {"fused": False, "amsgrad": True},
    "coupled, penalty": {"cls": CoupledAdam, "weight_decay": 0.1},
    "LEAN": LEAN_SOON,
    "LEAN, momentum": {**LEAN_SOON, "betas": (0.7, 0.5)},
}
CASES = {
    f"{where}, {name}": functools.partial(against_zeros, [Shard(dim)], options)
    for where, dim in (("rows", 0), ("columns", 1))
    for name, options in OPTIONS.items()
}
CASES |= {
    f"rows and columns, {name}": functools.partial(
        against_zeros, [Shard(0), Shard(1)], OPTIONS[name], (2, -1)
    )
    for name in ("coupled", "LEAN, momentum")
}
CASES |= {
    f"flat, {name}": functools.partial(flat_against_zeros, OPTIONS[name])
    for name in ("coupled", "coupled, penalty", "LEAN", "LEAN, momentum")
}


def test_ranks_without_gradients():
    run_on_ranks(4, __file__, CASES)


if __name__ == "__main__":
    run_cases(CASES)
