"""Random configurations of matrices that lie on several ranks: real processes, beside the oracle.

All ranks draw the same numbers; the same file is the program of each rank.
"""

import functools
import sys

import pytest
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from optim.test_random_configurations import Configuration, check
from optim.test_sharded import TWO_BY_REST, mesh_of
from processes import run_cases, run_on_ranks

mesh = functools.cache(mesh_of)  # each has process groups of its own

PLACEMENTS = (
    (None, [Shard(0)]),
    (None, [Shard(1)]),
    (TWO_BY_REST, [Shard(0), Shard(1)]),
    (TWO_BY_REST, [Shard(1), Shard(0)]),
    (TWO_BY_REST, [Shard(0), Shard(0)]),
    (TWO_BY_REST, [Replicate(), Shard(0)]),
    (TWO_BY_REST, [Replicate(), Shard(1)]),
)


class Sharded(Configuration):
    """A configuration whose matrices are all split in one way."""

    def __init__(self, seed):
        self.seed = seed
        shape, self.placements = PLACEMENTS[seed % len(PLACEMENTS)]
        self.mesh = mesh(shape)
        super().__init__(seed)

    def placed(self, values, layout):
        """Every rank has the whole, and takes its part."""
        return distribute_tensor(values, self.mesh, self.placements, src_data_rank=None)


def cases(first, last):
    return {f"seed {n}": lambda n=n: check(Sharded(n)) for n in range(int(first), int(last))}


@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [
        (2, 0, 10),
        pytest.param(2, 10, 35, marks=pytest.mark.slow),
        pytest.param(4, 35, 50, marks=pytest.mark.slow),
    ],
)
def test_random_shards(ranks, first, last):
    """Fifty of them. Where rows or columns are few, some ranks have nothing of a matrix."""
    run_on_ranks(ranks, __file__, cases(first, last), str(first), str(last))


if __name__ == "__main__":
    run_cases(cases(*sys.argv[1:]))
