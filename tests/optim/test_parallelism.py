"""Models under the parallelisms of torch and of the frameworks, compared with one process.

The same file is the program of each rank.
"""

import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.optim.sharded import global_offset
from decoders import ROUNDING, Decoder, H, V, assert_same_training, decoder, full, train
from optim.cases import LEAN_SOON
from processes import run_cases, run_on_ranks

RANKS = 4
STEPS = 6


def assert_equal_on_all_ranks(tensor):
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in copies)


def assert_as_in_one_process(expected, actual):
    """Parameters and states of two models with their optimizers; placements; keys."""
    assert_same_training(expected, actual)
    for q in actual[0].parameters():
        state = actual[1].state[q]
        for tensor in (q, *(state[key] for key in state.keys() - {"step"})):
            assert_equal_on_all_ranks(full(tensor))
        if isinstance(q, DTensor) and q.dim() == 2:
            row, column = global_offset(q)
            part = q.to_local()
            rows, columns = part.shape
            assert torch.equal(part, full(q)[row : row + rows, column : column + columns])
        moment = state["exp_avg_sq"]
        if moment.dim() == 1 < q.dim() and isinstance(q, DTensor):
            for of_matrix, of_vector in zip(q.placements, moment.placements):
                by_columns = getattr(of_matrix, "dim", None) == 1
                assert of_vector.dim == 0 if by_columns else of_vector == Replicate()
    keys = [None] * dist.get_world_size()
    saved = get_optimizer_state_dict(*actual)
    dist.all_gather_object(
        keys,
        {
            name: {key: getattr(value, "shape", None) for key, value in state.items()}
            for name, state in saved["state"].items()
        },
    )
    assert set(keys[0]) == {name for name, _ in expected[0].named_parameters()}
    assert all(keys[0] == other for other in keys)


def against_one_process(shard, part=0, parts=1, tied=False, embeddings="coupled", **options):
    """A model that ``shard`` distributes, each rank with its part of the batch."""
    whole = decoder(tied)
    split = shard(decoder(tied))
    pairs = [
        (model, CoupledAdamW(model, embeddings=embeddings, lr=1e-2, **options))
        for model in (whole, split)
    ]
    train(*pairs[0], range(STEPS))
    train(*pairs[1], range(STEPS), part, parts)
    assert_as_in_one_process(*pairs)


def world():
    return init_device_mesh("cpu", (RANKS,))


def two():
    """torch's embedding needs rows on each rank; two such pairs do the same."""
    return two_by_two()["tensor"]


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def tensor_parallel(model, mesh, by=RowwiseParallel):
    """The vocabulary of the head is split; of the embedding the vocabulary, or the columns.

    The norm stays on every rank, a plain tensor.
    """
    tied = model.head.weight is model.embed.weight
    layouts = {"input_layouts" if by is RowwiseParallel else "output_layouts": Replicate()}
    plan = {
        "embed": by(**layouts),
        "block.0": ColwiseParallel(),
        "block.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    return model


def by_columns(p):
    return Shard(p.dim() - 1)


def fsdp2(model, **options):
    for module in (model.block, model):
        fully_shard(module, **options)
    return model


def both(by, columns=False, **options):
    """FSDP2 over the rows, or the columns, of what tensor parallelism has left."""
    mesh = two_by_two()
    more = {"shard_placement_fn": by_columns} if columns else {}
    against_one_process(
        lambda model: fsdp2(tensor_parallel(model, mesh["tensor"], by), mesh=mesh["data"], **more),
        mesh["data"].get_local_rank(),
        2,
        **options,
    )


def data_parallel(shard, **options):
    against_one_process(shard, dist.get_rank(), RANKS, **options)


def gradient_placed_otherwise():
    """Whatever backward leaves: copies on all ranks, the terms of a sum, other parts."""
    mesh = world()
    placements = ([Replicate()], [Partial()], [Shard(0)], [Shard(1)])
    for of_matrix in placements[::2] + placements[3:]:
        for of_gradient in placements:
            whole = nn.Parameter(decoder().embed.weight.detach())
            split = nn.Parameter(distribute_tensor(whole.detach(), mesh, of_matrix))
            optimizers = [CoupledAdamW([p], coupled=True) for p in (whole, split)]
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                whole.grad = torch.randn(V, H, dtype=torch.float64, generator=generator)
                split.grad = distribute_tensor(whole.grad, mesh, of_gradient)
                for optimizer in optimizers:
                    optimizer.step()
            torch.testing.assert_close(full(split), whole.detach(), rtol=0, atol=ROUNDING)
            moments = [optimizers[i].state[p]["exp_avg_sq"] for i, p in enumerate((whole, split))]
            torch.testing.assert_close(full(moments[1]), moments[0], rtol=1e-10, atol=0)


def refused_matrices():
    """A sum's terms, a vector, a gradient or state of another kind: before anything changes."""
    mesh = world()
    values = decoder().embed.weight.detach()
    terms = DTensor.from_local(values, mesh, [Partial()])
    with pytest.raises(ValueError, match=r"cannot couple .*Partial"):
        CoupledAdamW([nn.Parameter(terms)], coupled=True)
    vector = nn.Parameter(distribute_tensor(values.flatten(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"\[40\].*flattened"):
        CoupledAdamW([vector], coupled=True)

    rows, whole = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])), nn.Parameter(values)
    for p, grad in ((rows, values), (whole, rows.detach())):
        optimizer = CoupledAdamW([p], coupled=True)
        p.grad = grad
        with pytest.raises(RuntimeError, match="Make both DTensors, or both whole tensors"):
            optimizer.step()
        assert not optimizer.state

    optimizers = []
    for p in (rows, whole, nn.Parameter(distribute_tensor(values, mesh, [Shard(1)]))):
        optimizers.append(CoupledAdamW([p], coupled=True))
        p.grad = p.detach()
        optimizers[-1].step()
    for one, other in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=r"exp_avg is a .*full_state_dict=True"):
            optimizers[one].load_state_dict(optimizers[other].state_dict())
        optimizers[one].step()
    optimizers[0].load_state_dict(optimizers[2].state_dict())  # columns, for rows
    before = rows.to_local().clone()
    with pytest.raises(RuntimeError, match="its state is laid out differently"):
        optimizers[0].step()
    assert torch.equal(rows.to_local(), before)


def accelerate():
    """FSDP2: the optimizer is made before its parameters are; saved and loaded."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    # It shards for these only, although it could on a CPU.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)

    def prepare():
        model = decoder(tied=True)
        optimizer = CoupledAdamW(param_groups(model), lr=1e-2)
        return accelerator.prepare(model, optimizer)

    def train_on(pair, steps):
        train(*pair, steps, dist.get_rank(), RANKS, accelerator.backward)

    whole = decoder(tied=True)
    expected = whole, CoupledAdamW(param_groups(whole), lr=1e-2)
    train(*expected, range(STEPS))

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    first = prepare()
    assert first[0].embed.weight.placements == (Shard(0),)
    assert first[1].param_groups[-1]["params"] == [first[0].embed.weight]
    train_on(first, range(STEPS // 2))
    accelerator.save_state(folder[0])
    accelerator.free_memory()
    resumed = prepare()
    accelerator.load_state(folder[0])
    train_on(resumed, range(STEPS // 2, STEPS))
    assert_as_in_one_process(expected, (resumed[0], resumed[1].optimizer))


SHARDED = {
    "ddp": DistributedDataParallel,
    "fsdp2": fsdp2,
    "fsdp2 by columns": lambda model: fsdp2(model, shard_placement_fn=by_columns),
    "hsdp": lambda model: fsdp2(model, mesh=two_by_two()),
    "cpu offload": lambda model: fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}
TENSOR_PARALLEL = {
    "tensor": lambda model: tensor_parallel(model, two()),
    "tensor by columns": lambda model: tensor_parallel(model, two(), ColwiseParallel),
}
CASES = {}
for rule, embeddings in {"coupled": "coupled", "LEAN": LEAN_SOON}.items():
    for name, shard in SHARDED.items():
        tied = name == "hsdp"
        CASES[f"{name}, {rule}"] = partial(data_parallel, shard, tied=tied, embeddings=embeddings)
    for name, shard in TENSOR_PARALLEL.items():
        CASES[f"{name}, {rule}"] = partial(against_one_process, shard, embeddings=embeddings)
    CASES[f"both, {rule}"] = partial(both, RowwiseParallel, embeddings=embeddings)
CASES |= {
    "tensor, tied": partial(against_one_process, TENSOR_PARALLEL["tensor"], tied=True),
    "both, hidden by columns": partial(both, ColwiseParallel),
    "both by columns": partial(both, ColwiseParallel, columns=True),
    "both by columns, LEAN with momentum": partial(
        both, ColwiseParallel, columns=True, embeddings=LEAN_SOON | {"betas": (0.7, 0.5)}
    ),
    "gradient placed otherwise": gradient_placed_otherwise,
    "refused matrices": refused_matrices,
    "accelerate": accelerate,
}


def test_parallelism():
    """Of five rows the ranks have two, two, one and none; over tensor parallelism 2, 1, 1, 1."""
    run_on_ranks(RANKS, __file__, CASES)


def test_zero_partitions_are_refused():
    """DeepSpeed's ZeRO 1 and 2 give the optimizer one vector for each group, ZeRO 3 none at all."""
    model = Decoder()
    optimizer = CoupledAdamW(param_groups(model))
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().flatten() for p in group["params"]])
        partition = nn.Parameter(flat.chunk(2)[0].clone())
        partition.grad = torch.zeros_like(partition)
        group["params"] = [partition]
    with pytest.raises(ValueError, match=r"has flattened a matrix into it.*couple\(engine\)"):
        optimizer.step()

    for p in model.parameters():
        p.data = torch.empty(0)
    with pytest.raises(
        ValueError, match=r"'embed.weight' has the shape \[0\]: it was flattened.*fully_shard"
    ):
        param_groups(model)


if __name__ == "__main__":
    run_cases(CASES)
