"""What happens to the state between two steps: ``optimizer.state`` is all that the next one needs.

Each layout is trained as if nothing had happened, and with its state touched after each step; both
have the same bits. The same file is the program of each rank.
"""

import copy
import functools
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from coupled_adam import CoupledAdamW, FlatShard, MuonWithCoupledAdam
from coupled_adam.optim.sharded import full_tensor
from optim.cases import LEAN_SOON, through_disk
from processes import run_cases, run_on_ranks

V, H, STEPS = 9, 6, 6
SPARSE = {"row_exponent": 0.75, "betas": (0.0, 0.99), "weight_decay": 0.0}
METHODS = {
    "Coupled Adam": {"betas": (0.9, 0.95)},
    "LEAN": LEAN_SOON,
    "LEAN with momentum": {"row_exponent": 0.5, "zero_sum": True, "betas": (0.8, 0.5)},
}


def values(seed):
    return torch.randn(V, H, generator=torch.Generator().manual_seed(seed))


def of_one_parameter(parameter, gradient, options):
    """An optimizer, and a function that sets the gradient of a step."""
    p = nn.Parameter(parameter(values(0)))

    def set_gradient(step):
        p.grad = gradient(values(step + 1))

    return CoupledAdamW([{"params": [p], "coupled": True, **options}], lr=1e-2), set_gradient


def whole(options):
    return of_one_parameter(torch.clone, torch.clone, options)


def sparse():
    return of_one_parameter(torch.clone, lambda x: (x * (x > 0.5)).to_sparse(1), SPARSE)


def sharded(placements, shape, options):
    mesh = init_device_mesh("cpu", shape)
    place = functools.partial(distribute_tensor, device_mesh=mesh, placements=placements)
    return of_one_parameter(place, place, options)


def flat(options):
    """A piece on each rank, which begins and ends in the middle of a row."""
    rank, size = dist.get_rank(), -(-V * H // dist.get_world_size())
    pieces = [FlatShard((V, H), rank * size)]

    def piece(x):
        return x.flatten()[rank * size : (rank + 1) * size].clone()

    return of_one_parameter(piece, piece, {**options, "flat_shards": [pieces]})


def muon():
    torch.manual_seed(0)
    model = nn.ModuleDict({"wte": nn.Embedding(V, H), "layer": nn.Linear(H, H)})
    optimizer = MuonWithCoupledAdam(model, lr=1e-2, embeddings="lean", steps=STEPS)

    def set_gradient(step):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + i))

    return optimizer, set_gradient


def replaced(optimizer, change):
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = change(value)


def assigned(optimizer):
    states = {p: dict(state) for p, state in optimizer.state.items()}
    optimizer.state = defaultdict(dict, states)


def taken_back(optimizer, set_gradient):
    """A step with a gradient that is not finite, and then all that it has changed in place."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [p.data for p in params]
    tensors += [x for state in optimizer.state.values() for x in state.values()]
    saved = [x.clone() for x in tensors]
    set_gradient(99)
    for p in params:
        p.grad = p.grad * torch.nan
    optimizer.step()
    for x, before in zip(tensors, saved):
        x.copy_(before)


TOUCHES = {
    "nothing": lambda optimizer, _: None,
    "copied": lambda optimizer, _: replaced(optimizer, torch.clone),
    "copied deeply": lambda optimizer, _: replaced(optimizer, copy.deepcopy),
    # As tensors go to the host and back, and to a file and back.
    "moved": lambda optimizer, _: replaced(optimizer, lambda x: x.double().to(x.dtype)),
    "saved and loaded": lambda optimizer, _: replaced(optimizer, through_disk),
    "assigned": lambda optimizer, _: assigned(optimizer),
    "taken back": taken_back,
}


def bits(tensor):
    return full_tensor(tensor.detach()).clone()


def trained(layout, touch):
    """The parameters and all of the state after each step."""
    optimizer, set_gradient = layout()
    history = []
    for step in range(STEPS):
        set_gradient(step)
        optimizer.step()
        for p, state in optimizer.state.items():
            history += [bits(p), *(bits(state[name]) for name in sorted(state))]
        touch(optimizer, set_gradient)
    return history


def same_as_untouched(layout):
    untouched = trained(layout, TOUCHES["nothing"])
    assert any(not torch.equal(untouched[0], x) for x in untouched if x.shape == untouched[0].shape)
    for name, touch in TOUCHES.items():
        touched = trained(layout, touch)
        assert len(touched) == len(untouched)
        assert all(torch.equal(x, y) for x, y in zip(touched, untouched)), name


ON_RANKS = {
    f"{layout}, {method}": functools.partial(same_as_untouched, functools.partial(build, options))
    for layout, build in {
        "rows": functools.partial(sharded, [Shard(0)], (4,)),
        "columns": functools.partial(sharded, [Shard(1)], (4,)),
        "rows and columns": functools.partial(sharded, [Shard(0), Shard(1)], (2, 2)),
        "pieces": flat,
    }.items()
    for method, options in METHODS.items()
}


def test_a_whole_matrix():
    for options in METHODS.values():
        same_as_untouched(functools.partial(whole, options))


def test_a_table_with_sparse_gradients():
    same_as_untouched(sparse)


def test_muon():
    same_as_untouched(muon)


def test_matrices_that_ranks_share():
    run_on_ranks(4, __file__, ON_RANKS)


if __name__ == "__main__":
    run_cases(ON_RANKS)
