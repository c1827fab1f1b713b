"""DeepSpeed's ZeRO 1 and 2 on three gloo processes, against one process.

The same file is the program of each rank.
"""

import importlib.util
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coupled_adam import CoupledAdamW, param_groups
from decoders import decoder, loss_of
from processes import run_cases, run_on_ranks

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    import coupled_adam.deepspeed

    # It would be compiled; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS = 8
BETWEEN = {"row_exponent": 0.5, "zero_sum": True, "betas": (0.8, 0.5)}
NO_MOMENTUM = {**BETWEEN, "betas": (0.0, 0.99)}


def single(steps, tied=False, clip=None, **options):
    model = decoder(tied).float()
    optimizer = CoupledAdamW(param_groups(model), lr=1e-2, **options)
    for step in steps:
        loss_of(model, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def engine_of(stage, tied=False, clip=0.0, zero=(), model=None, optimizer=None, **options):
    model = decoder(tied).float() if model is None else model
    if optimizer is None:
        optimizer = CoupledAdamW(param_groups(model), lr=1e-2, **options)
    config = {
        "train_batch_size": 12,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **dict(zero)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, steps):
    for step in steps:
        engine.backward(loss_of(engine, step, dist.get_rank(), dist.get_world_size()))
        engine.step()


def assert_same_model(expected, engine):
    """All is float32, and only the order of sums differs."""
    for p, q in zip(expected.parameters(), engine.module.parameters()):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-5)


def against_one_process(stage, **options):
    engine = engine_of(stage, **options)
    coupled_adam.deepspeed.couple(engine)
    group = engine.optimizer.optimizer.param_groups[-1]
    assert group["coupled"]
    assert len(group["params"]) == 1  # of which the matrices are pieces
    train(engine, range(STEPS))
    model, optimizer = single(range(STEPS), **options)
    assert_same_model(model, engine)
    state = engine.optimizer.optimizer.state[group["params"][0]]
    expected = [optimizer.state[p]["exp_avg_sq"] for p in optimizer.param_groups[-1]["params"]]
    torch.testing.assert_close(state["exp_avg_sq"], torch.cat(expected), rtol=1e-4, atol=0)


def checkpoint(stage, **options):
    """Saved and loaded by DeepSpeed, on as many processes."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    first = engine_of(stage, **options)
    coupled_adam.deepspeed.couple(first)
    train(first, range(STEPS // 2))
    first.save_checkpoint(folder[0])
    resumed = engine_of(stage, **options)
    coupled_adam.deepspeed.couple(resumed)
    resumed.load_checkpoint(folder[0])
    train(resumed, range(STEPS // 2, STEPS))
    assert_same_model(single(range(STEPS), **options)[0], resumed)
    dist.barrier()


def refused():
    """Before anything changes: what cannot be coupled, or what would not do what it says."""
    engine = engine_of(1)
    with pytest.raises(ValueError, match=r"has flattened a matrix into it.*couple\(engine\)"):
        train(engine, range(1))
    couple = coupled_adam.deepspeed.couple
    with pytest.raises(ValueError, match="ZeRO stage 3: use stage 1 or 2"):
        couple(engine_of(3))
    for zero in ({"elastic_checkpoint": True}, {"offload_optimizer": {"device": "cpu"}}):
        with pytest.raises(ValueError, match=r"elastic_checkpoint are not .* in other buffers"):
            couple(engine_of(1, zero=zero))
    model = decoder().float()
    with pytest.raises(TypeError, match=r"optimizer is a AdamW: pass a CoupledAdamW"):
        couple(engine_of(1, model=model, optimizer=torch.optim.AdamW(model.parameters())))
    engine = engine_of(1)
    engine.optimizer.single_partition_of_fp32_groups[-1].data += 1
    with pytest.raises(ValueError, match="does not hold the parameter of shape"):
        couple(engine)


def not_partitioned():
    """Under ZeRO 0 matrices are whole, and there is nothing to do."""
    engine = engine_of(0)
    coupled_adam.deepspeed.couple(engine)
    train(engine, range(STEPS))
    assert_same_model(single(range(STEPS))[0], engine)


CASES = {
    "stage 1": lambda: against_one_process(1),
    "stage 2": lambda: against_one_process(2),
    "stage 1, tied, between": lambda: against_one_process(1, tied=True, **BETWEEN),
    "stage 2, clipped by DeepSpeed": lambda: against_one_process(2, clip=0.05),
    "checkpoint of stage 1": lambda: checkpoint(1),
    "checkpoint of stage 2, between": lambda: checkpoint(2, **BETWEEN),
    "checkpoint of stage 2, no momentum": lambda: checkpoint(2, **NO_MOMENTUM),
    "not partitioned": not_partitioned,
    "refused": refused,
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="not installed")
def test_deepspeed(frameworks_in_processes):
    """ZeRO 1 and 2: training, clipping, saving and loading."""
    run_on_ranks(3, __file__, CASES)


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    run_cases(CASES)
