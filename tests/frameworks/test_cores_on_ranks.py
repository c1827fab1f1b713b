"""8-bit AdamW beside LEAN on two ranks: DDP, FSDP2 and distributed checkpoints.

The same file is the program of each rank.
"""

import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import decoders
from coupled_adam import LEAN, CoupledAdamW
from processes import run_cases, run_on_ranks

V, H = 40, 64  # so that 8-bit optimizers make the hidden matrices' states smaller

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def bitsandbytes(groups):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW8bit(groups, lr=1e-3, weight_decay=0.1)


def torchao(groups):
    optim = pytest.importorskip("torchao.optim")
    return optim.AdamW8bit(groups, lr=1e-3, weight_decay=0.1)


def decoder():
    return decoders.decoder(True, V, H).float()


def train(model, optimizers, steps):
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = torch.randint(0, V, (8, 5), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()


def beside(model, core):
    optimizer = CoupledAdamW(model, lr=1e-3, embeddings=LEAN | {"lr_factor": 4}, core=core)
    optimizer.train()
    return optimizer


def on_ranks(core, shard):
    """As in one process on the whole batch, also after a distributed checkpoint."""
    whole, model = decoder(), decoder()
    wrapped = shard(model)
    optimizers = [beside(m, core) for m in (whole, model)]
    train(whole, [optimizers[0]], range(3))
    train(wrapped, [optimizers[1]], range(3))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = {"optimizer": get_optimizer_state_dict(model, optimizers[1])}
    dcp.save(state, checkpoint_id=folder[0])
    fresh = beside(model, core)
    fresh.init_state()
    state = {"optimizer": get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(model, fresh, state["optimizer"])
    train(whole, [optimizers[0]], range(3, 5))
    train(wrapped, [fresh], range(3, 5))
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, decoders.full(q), rtol=1e-2, atol=1e-3, msg=name)


CASES = {
    f"{core.__name__}, {shard.__name__}": functools.partial(on_ranks, core, shard)
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
    run_cases(CASES)
