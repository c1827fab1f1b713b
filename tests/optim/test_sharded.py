"""Matrices whose rows or columns lie on several ranks: real processes, compared with one process.

The same file is the program of each rank.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from coupled_adam import CoupledAdamW
from coupled_adam.optim.state import entries
from optim.cases import LEAN_SOON
from processes import run_cases, run_on_ranks

V, H, STEPS = 7, 6, 8


def mesh_of(shape):
    """All ranks, in a mesh of this shape, where -1 stands for what remains."""
    ranks = dist.get_world_size()
    shape = (ranks,) if shape is None else [ranks // 2 if n == -1 else n for n in shape]
    return init_device_mesh("cpu", tuple(shape))


def matrix(dtype=torch.float64):
    return torch.randn(V, H, dtype=dtype, generator=torch.Generator().manual_seed(0))


def gradient(step, dtype=torch.float64):
    values = torch.randn(V, H, dtype=dtype, generator=torch.Generator().manual_seed(step + 1))
    values[2] = 0  # a token that never occurs
    return values


BETWEEN = {"row_exponent": 0.5, "zero_sum": True, "betas": (0.8, 0.5)}


def step_of_one_matrix(placements, options, shape=None):
    """A matrix split over the ranks of a mesh of one or two dimensions against the same whole."""
    mesh = mesh_of(shape)
    whole = nn.Parameter(matrix())
    split = nn.Parameter(distribute_tensor(matrix(), mesh, placements))
    expected, actual = (CoupledAdamW([p], coupled=True, **options) for p in (whole, split))
    for step in range(STEPS):
        whole.grad = gradient(step)
        split.grad = distribute_tensor(gradient(step), mesh, placements)
        expected.step()
        actual.step()
        if step == STEPS // 2:  # rows that stand for other tokens from now on
            expected.forget_rows(whole, [0, 3, 5])
            actual.forget_rows(split, [0, 3, 5])
    vocab_dim = options.get("vocab_dim", 0)
    ours, theirs = actual.state_dict()["state"][0], expected.state_dict()["state"][0]
    assert ours.keys() == theirs.keys() == {"step", *entries(actual.param_groups[0])}
    # Only the order of the summation differs; what is read is complete.
    torch.testing.assert_close(split.full_tensor(), whole.detach(), rtol=1e-12, atol=1e-12)
    for name in ours.keys() - {"step"}:
        assert isinstance(ours[name], DTensor)
        actual_values = ours[name].full_tensor()
        torch.testing.assert_close(actual_values, theirs[name], rtol=1e-10, atol=1e-14, msg=name)
    moment, length = ours["exp_avg_sq"], matrix().shape[1 - vocab_dim]
    if Shard(1 - vocab_dim) not in placements:  # replicated: the same bits on every rank
        gathered = [torch.empty(length, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, moment.to_local())
        assert all(torch.equal(gathered[0], other) for other in gathered)
    # Saved and loaded, both continue to the same bits.
    copied = nn.Parameter(split.detach().clone())
    again = CoupledAdamW([copied], coupled=True, **options)
    again.load_state_dict(copy.deepcopy(actual.state_dict()))
    for step in range(STEPS, STEPS + 2):
        for p, optimizer in ((split, actual), (copied, again)):
            p.grad = distribute_tensor(gradient(step), mesh, placements)
            optimizer.step()
    assert torch.equal(copied.full_tensor(), split.full_tensor())


def stochastic_rounding(placements, shape=None):
    """The parts are rounded as the whole is, and copies to the same bits."""
    mesh = mesh_of(shape)
    start = torch.randn(37, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = nn.Parameter(start.clone())
    split = nn.Parameter(distribute_tensor(start, mesh, placements))
    options = {"coupled": True, "stochastic_rounding": True, "lr": 1e-3}
    optimizers = [CoupledAdamW([p], **options) for p in (whole, split)]
    for step in range(STEPS):
        grad = torch.randn(37, 30, generator=torch.Generator().manual_seed(step)).bfloat16()
        whole.grad, split.grad = grad, distribute_tensor(grad, mesh, placements)
        for optimizer in optimizers:
            optimizer.step()
    result = split.full_tensor()
    assert (result != whole).float().mean() < 0.01  # where the sums' order decides
    copies = [torch.empty_like(result) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, result.contiguous())
    assert all(torch.equal(result, other) for other in copies)


TWO_BY_REST = (2, -1)

CASES = {
    "rows": lambda: step_of_one_matrix([Shard(0)], {}),
    "rows, reference": lambda: step_of_one_matrix([Shard(0)], {"fused": False}),
    "rows, amsgrad": lambda: step_of_one_matrix([Shard(0)], {"amsgrad": True}),
    "rows, options": lambda: step_of_one_matrix(
        [Shard(0)], {"second_moment_scale": 0.5, "maximize": True, "lr": torch.tensor(1e-2)}
    ),
    **{
        f"{name}, {which}": functools.partial(step_of_one_matrix, placements, options, shape)
        for name, placements, shape in (
            ("rows", [Shard(0)], None),
            ("columns", [Shard(1)], None),
            ("rows and columns", [Shard(0), Shard(1)], TWO_BY_REST),
            ("columns, all on each rank", [Replicate(), Replicate(), Shard(1)], (*TWO_BY_REST, 1)),
        )
        for which, options in (
            ("zero-sum", {"zero_sum": True, "betas": (0.8, 0.5)}),
            ("row_exponent", {"row_exponent": 0.75}),
            ("both", BETWEEN),
            ("both, reference", {**BETWEEN, "fused": False, "maximize": True}),
            ("LEAN", LEAN_SOON),
            ("no momentum", {"betas": (0.0, 0.99)}),
        )
    },
    "rows of [H, V], both": lambda: step_of_one_matrix([Shard(1)], {"vocab_dim": 1, **BETWEEN}),
    "columns of [H, V], both": lambda: step_of_one_matrix([Shard(0)], {"vocab_dim": 1, **BETWEEN}),
    "rows of [H, V]": lambda: step_of_one_matrix([Shard(1)], {"vocab_dim": 1}),
    "columns": lambda: step_of_one_matrix([Shard(1)], {}),
    "columns, reference": lambda: step_of_one_matrix([Shard(1)], {"fused": False}),
    "copies of rows": lambda: step_of_one_matrix([Replicate(), Shard(0)], {}, TWO_BY_REST),
    "rows and columns": lambda: step_of_one_matrix([Shard(0), Shard(1)], {}, TWO_BY_REST),
    "rows of rows": lambda: step_of_one_matrix([Shard(0), Shard(0)], {}, TWO_BY_REST),
    "rows, rounded": lambda: stochastic_rounding([Shard(0)]),
    "columns, rounded": lambda: stochastic_rounding([Shard(1)]),
    "copies of columns, rounded": lambda: stochastic_rounding([Replicate(), Shard(1)], TWO_BY_REST),
}


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_sharded(ranks):
    """Heights 4 and 3 on two ranks; 2, 2, 2 and 1 on four; columns 2, 2, 2 and none on four.

    On eight ranks one has no row, and two have no column.
    """
    run_on_ranks(ranks, __file__, CASES)


if __name__ == "__main__":
    run_cases(CASES)
