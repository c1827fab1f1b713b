"""Pieces of flattened matrices, cut anywhere: against the whole matrix, in one process.

Each rank is a thread with an optimizer of its own, and the all-reduce is between threads.
"""

import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from coupled_adam import CoupledAdam, FlatShard, to_adam_state_dict
from coupled_adam.optim import sharded
from optim.cases import LEAN_SOON, through_disk

STEPS = 4
SOON = (0.8, 0.5)  # with so short a memory updates sum to zero from the second step on
OPTIONS = (
    {},
    {"fused": False, "maximize": True},
    {"amsgrad": True, "second_moment_scale": 0.5},
    {"decoupled_weight_decay": False, "weight_decay": 0.1},
    {"zero_sum": True, "betas": SOON},
    {"row_exponent": 0.75},
    {"row_exponent": 0.5, "zero_sum": True, "betas": SOON, "fused": False},
    {"row_exponent": 0.5, "zero_sum": True, "betas": SOON},
    LEAN_SOON,
    {"betas": (0.0, 0.99)},
    {
        "decoupled_weight_decay": False,
        "weight_decay": 0.1,
        "zero_sum": True,
        "betas": SOON,
        "maximize": True,
    },
)


class Ranks:
    """Threads that stand for the ranks of a process group, and that wait for each other."""

    def __init__(self, number):
        self.number = number
        self.barrier = threading.Barrier(number, timeout=60)
        self.vectors = [None] * number
        self.rank = threading.local()

    def run(self, function):
        """Call a function on each rank with its number; returns what they return."""

        def on(rank):
            self.rank.number = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(on, range(self.number)))

    def add_up(self, vector):
        """All ranks must send as many numbers of the same dtype."""
        self.vectors[self.rank.number] = vector
        self.barrier.wait()
        assert len({(v.dtype, v.shape) for v in self.vectors}) == 1
        total = sum(self.vectors[1:], self.vectors[0])
        self.barrier.wait()
        return total


@pytest.fixture(autouse=True)
def threads_for_ranks(monkeypatch):
    monkeypatch.setattr(sharded, "ranks_of", lambda group: (group,))
    monkeypatch.setattr(sharded, "all_reduced", lambda vector, ranks: ranks[0].add_up(vector))


def matrices(shapes, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    found[0][0] = 0  # a token that never occurs, if these are gradients
    return [matrix.to(dtype) for matrix in found]


def cut(values, cuts, gap=0):
    """The pieces of each rank of matrices that lie one after the other, with gaps, in a buffer."""
    buffer = torch.cat([torch.cat([x.flatten(), x.new_zeros(gap)]) for x in values])
    return [part.clone() for part in buffer.tensor_split(cuts)]


def shards(shapes, cuts, group, gap=0):
    """For each rank where the pieces of all matrices lie in its part of the buffer."""
    total = sum(rows * columns + gap for rows, columns in shapes)
    edges = [0, *cuts, total]
    for low, high in itertools.pairwise(edges):
        begin, found = 0, []
        for shape in shapes:
            end = begin + shape[0] * shape[1]
            first, last = min(max(begin, low), end), max(min(end, high), begin)
            last = max(first, last)
            found.append(FlatShard(shape, first - begin, group, max(first - low, 0), last - first))
            begin = end + gap
        yield [
            shard if shard.numel else FlatShard(shard.shape, shard.offset, group, 0, 0)
            for shard in found
        ]


def optimizer_of(ps, options, **more):
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    adam = {"decoupled_weight_decay": True, **options}
    return CoupledAdam([{"params": ps, **more}], coupled=True, **adam)


class Whole:
    """The same matrices in one piece."""

    def __init__(self, shapes, options):
        self.shapes = shapes
        self.ps = [nn.Parameter(x) for x in matrices(shapes, 0)]
        self.optimizer = optimizer_of(self.ps, options)

    def step(self, number):
        for p, grad in zip(self.ps, matrices(self.shapes, number + 1)):
            p.grad = grad
        self.optimizer.step()


class Cut:
    """Pieces of them on several ranks."""

    def __init__(self, shapes, cuts, options, gap=0):
        self.shapes, self.cuts, self.gap = shapes, cuts, gap
        self.ranks = Ranks(len(cuts) + 1)
        pieces = cut(matrices(shapes, 0), cuts, gap)
        self.ps = [nn.Parameter(piece) for piece in pieces]
        told = shards(shapes, cuts, self.ranks, gap)
        self.optimizers = [
            optimizer_of([p], options, flat_shards=[of_rank]) for p, of_rank in zip(self.ps, told)
        ]

    def step(self, number):
        for p, grad in zip(self.ps, cut(matrices(self.shapes, number + 1), self.cuts, self.gap)):
            p.grad = grad  # also where a rank has no element
        self.ranks.run(lambda rank: self.optimizers[rank].step())

    def joined(self, parts):
        """The matrices again, from the parts of each rank."""
        sizes = [rows * columns + self.gap for rows, columns in self.shapes]
        buffers = torch.cat(parts).split(sizes)
        return [
            buffer[: rows * columns].view(rows, columns)
            for buffer, (rows, columns) in zip(buffers, self.shapes)
        ]

    def exp_avgs(self):
        return self.joined([o.state[p]["exp_avg"] for o, p in zip(self.optimizers, self.ps)])


def assert_same(whole, cut_up, steps):
    """Parameters, first moments and each rank's second moments to 1e-12."""
    options = {"rtol": 1e-12, "atol": 1e-12}
    for number in steps:
        whole.step(number)
        cut_up.step(number)
    for p, q in zip(whole.ps, cut_up.joined([p.detach() for p in cut_up.ps])):
        torch.testing.assert_close(q, p.detach(), **options)
    states = [whole.optimizer.state[p] for p in whole.ps]
    if "exp_avg" in states[0]:
        for state, exp_avg in zip(states, cut_up.exp_avgs()):
            torch.testing.assert_close(exp_avg, state["exp_avg"], **options)
    for name in set(states[0]) - {"exp_avg", "step"}:
        expected = torch.cat([state[name] for state in states])
        for optimizer, p in zip(cut_up.optimizers, cut_up.ps):
            torch.testing.assert_close(optimizer.state[p][name], expected, **options)


@st.composite
def cuts_of(draw):
    """Matrices, where they are cut, the options, and which dimension counts tokens."""
    size = st.integers(1, 9)
    shapes = draw(st.lists(st.tuples(size, size), min_size=1, max_size=3))
    gap = draw(st.sampled_from([0, 0, 3]))
    total = sum(rows * columns + gap for rows, columns in shapes)
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    options = draw(st.sampled_from(OPTIONS))
    return shapes, cuts, {**options, "vocab_dim": draw(st.sampled_from([0, 0, 1]))}, gap


@given(cuts_of())
@settings(max_examples=settings.default.max_examples // 3)
@example(([(7, 6)], [3, 4, 4], OPTIONS[5], 0))  # several ranks in one row, one of them empty
@example(([(4, 5)], [20, 20], OPTIONS[6], 0))  # all on the first rank
@example(([(4, 5), (3, 2)], [7, 21], OPTIONS[7], 3))
def test_any_cut_is_the_whole_matrix(case):
    shapes, cuts, options, gap = case
    whole, cut_up = Whole(shapes, options), Cut(shapes, cuts, options, gap)
    assert_same(whole, cut_up, range(STEPS))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_checkpoint_of_pieces(options):
    """On as many ranks, one of them without an element, and to the same bits."""
    shapes, cuts = [(7, 6), (4, 3)], [10, 11, 11, 48]
    whole, again = (Cut(shapes, cuts, options) for _ in range(2))
    for number in range(3):
        whole.step(number)
    for rank, (old, new) in enumerate(zip(whole.optimizers, again.optimizers)):
        new.load_state_dict(through_disk(old.state_dict()))
        again.ps[rank].data.copy_(whole.ps[rank])
    for number in range(3, 5):
        whole.step(number)
        again.step(number)
    for p, q in zip(whole.ps, again.ps):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:param group 0 was constructed")
def test_checkpoints_that_are_refused():
    """Adam's moments of pieces, and those of other options; and Adam cannot take ours."""
    pieces = Cut([(7, 6)], [20], {"betas": (0.9, 0.99)})
    pieces.step(0)
    optimizer = pieces.optimizers[0]
    of_adam, of_coupled_adam = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    of_adam["state"][0]["exp_avg_sq"] = torch.ones(20)
    with pytest.raises(ValueError, match=r"exp_avg_sq has the shape \[20\], but must have \[6\]"):
        optimizer.load_state_dict(of_adam)
    of_coupled_adam["param_groups"][0]["row_exponent"] = 0.5
    with pytest.raises(ValueError, match="it has no row_exp_avg_sq"):
        optimizer.load_state_dict(of_coupled_adam)
    with pytest.raises(ValueError, match="pieces of flattened matrices"):
        to_adam_state_dict(optimizer.state_dict())
