"""8-bit AdamW beside LEAN on two ranks: DDP, FSDP2 and distributed checkpoints.

The same file is the program of each rank, which must not import transformers' trainer.
"""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import decoders
from cores import beside, bitsandbytes, on_ranks, torchao
from processes import run_cases, run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def check(core, shard):
    models = [decoders.decoder(True, 40, 64).float() for _ in range(2)]
    on_ranks(models, shard, lambda m: beside(m, core), rtol=1e-2, atol=1e-3)


CASES = {
    f"{core.__name__}, {shard.__name__}": functools.partial(check, core, shard)
    for core, shard in (
        (bitsandbytes, DistributedDataParallel),
        (torchao, DistributedDataParallel),
        (torchao, fully_shard),
    )
}


def test_two_ranks(frameworks_in_processes):
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    run_on_ranks(2, __file__, CASES)


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")  # without torchao's compilation of its step
    run_cases(CASES)
