"""A model under FSDP1, which flattens matrices and cuts them anywhere, against one process.

The same file is the program of each rank.
"""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import StateDictType as Kind

import decoders
from coupled_adam import CoupledAdamW, MuonWithCoupledAdam, param_groups, to_adam_state_dict
from decoders import train
from processes import run_cases, run_on_ranks

V, H, STEPS = 7, 5, 20
ROUNDING = 1e-12  # all is float64, and only the order of sums differs
CPU = torch.device("cpu")
BETWEEN = {"row_exponent": 0.5, "zero_sum": True}
NO_MOMENTUM = {**BETWEEN, "betas": (0.0, 0.99)}


def decoder(tied=False):
    return decoders.decoder(tied, V, H)


def wrapped(model, nested=True, **options):
    """In one flat parameter, or in one for each large module, except for tied embeddings."""
    options = {"device_id": CPU, "use_orig_params": True, **options}
    tied = model.head.weight is model.embed.weight
    for name in [] if not nested else ["block"] if tied else ["embed", "block", "head"]:
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
    return FullyShardedDataParallel(model, **options)


def coupled(model, **options):
    groups = param_groups(model)
    assert groups[0]["coupled"]
    assert all("embed" in name or "head" in name for name in groups[0]["param_names"])
    assert (
        "weight_decay" not in groups[1]
    )  # the matrices, though they are vectors now, have the default
    return CoupledAdamW(groups, lr=1e-2, **options)


def whole(state):
    """A state dict of FSDP with the names of the original model."""
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in state.items()}


def full(model):
    """Whole state dicts, not offloaded: from a CPU, torch would let all states share memory."""
    return FullyShardedDataParallel.state_dict_type(
        model, Kind.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(False)
    )


def assert_same_model(expected, actual, tolerance=ROUNDING):
    with full(actual):
        state = whole(actual.state_dict())
    for name, p in expected.named_parameters():
        torch.testing.assert_close(
            state[name], p.detach(), rtol=0, atol=tolerance, check_dtype=False
        )


def assert_same_state(expected, actual):
    """What FSDP gathers is Adam's state; the shared moments are whole on every rank."""
    names = {p: name for name, p in expected[0].named_parameters()}
    with full(actual[0]):
        gathered = whole(FullyShardedDataParallel.optim_state_dict(*actual)["state"])
    for p, state in expected[1].state.items():
        found = gathered[names[p]]
        if "exp_avg" not in state:  # Adam's has one, which is zero
            assert not found.pop("exp_avg").any()
        for key in {"exp_avg", "exp_avg_sq"} & state.keys():
            values = found[key]
            if values.dim() > state[key].dim():
                values = values.mean(0)
            torch.testing.assert_close(values, state[key], rtol=1e-10, atol=ROUNDING)


def against_one_process(tied=False, nested=True, group=None, **options):
    """FSDP1 over all ranks, each with its part of the batch."""
    fsdp = {name: options.pop(name) for name in ("sharding_strategy",) if name in options}
    single, split = decoder(tied), wrapped(decoder(tied), nested, process_group=group, **fsdp)
    expected = single, coupled(single, **options)
    actual = split, coupled(split, **options)
    norms = [train(*expected, range(STEPS))]
    norms.append(train(*actual, range(STEPS), dist.get_rank(), dist.get_world_size()))
    if "max_grad_norm" in options:
        assert min(norms[0]) > options["max_grad_norm"]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-10, atol=0)
    assert_same_model(single, split)
    assert_same_state(expected, actual)


def cuts():
    """The ranks hold what this file is about: pieces that begin and end within a row, and none."""
    groups = [param_groups(wrapped(decoder(), nested))[0] for nested in (True, False)]
    found = [
        (shard.offset, shard.offset + p.numel())
        for group in groups
        for p, shard in zip(group["params"], group["flat_shards"])
    ]
    assert "of 7 x 5" in str(param_groups(wrapped(decoder())))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    pieces = [piece for of_rank in gathered for piece in of_rank]
    assert any(begin % H and end > begin for begin, end in pieces)
    assert any(end % H for _, end in pieces)
    assert any(begin == end for begin, end in pieces)


def mixed_precision():
    """bfloat16 in forward and backward, float32 in the optimizer, also in its shared moments."""
    split = wrapped(
        decoder().float(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    single = decoder().float()
    optimizers = coupled(single), coupled(split)
    train(single, optimizers[0], range(STEPS))
    train(split, optimizers[1], range(STEPS), dist.get_rank(), dist.get_world_size())
    for p in optimizers[1].param_groups[0]["params"]:
        state = optimizers[1].state[p]
        assert p.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert state["exp_avg_sq"].shape == (H,)
    assert_same_model(single, split, 2e-2)  # steps of 1e-2 in other directions were 0.4 apart


def checkpoints():
    """Saved by all ranks; continued by all, by fewer, by one without FSDP, and by AdamW."""
    half, ranks = STEPS // 2, dist.get_world_size()
    for options in ({}, BETWEEN, NO_MOMENTUM):
        single = decoder(tied=True)
        expected = single, coupled(single, **options)
        train(*expected, range(half))
        saved = wrapped(decoder(tied=True))
        optimizer = coupled(saved, **options)
        train(saved, optimizer, range(half), dist.get_rank(), ranks)
        with full(saved):
            weights = whole(saved.state_dict())
            states = FullyShardedDataParallel.optim_state_dict(saved, optimizer)
        train(*expected, range(half, STEPS))

        for number in range(1, ranks + 1):
            group = dist.new_group(list(range(number)))
            if dist.get_rank() >= number:
                continue
            model = decoder(tied=True)
            model.load_state_dict(weights)
            model = wrapped(model, process_group=group)
            again = coupled(model, **options)
            state = copy.deepcopy(states)
            if number == 1:  # FSDP does not cut anything
                assert model.sharding_strategy == ShardingStrategy.NO_SHARD
            again.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, again, state)
            )
            train(model, again, range(half, STEPS), dist.get_rank(), number)
            assert_same_model(single, model, 1e-10)
        dist.barrier()

        model = decoder(tied=True)
        model.load_state_dict(weights)
        again = coupled(model, **options)
        ids = {
            name: i
            for i, name in enumerate(n for g in again.param_groups for n in g["param_names"])
        }
        state = {ids[name]: value for name, value in whole(states["state"]).items()}
        groups = again.state_dict()["param_groups"]
        again.load_state_dict({"state": state, "param_groups": groups})
        train(model, again, range(half, STEPS))
        torch.testing.assert_close(
            list(model.parameters()), list(single.parameters()), rtol=0, atol=1e-10
        )
        adamw = torch.optim.AdamW([p for g in again.param_groups for p in g["params"]])
        adamw.load_state_dict({"state": state, "param_groups": adamw.state_dict()["param_groups"]})
        train(model, adamw, range(1))


def from_whole_matrices():
    """A checkpoint with [H] moments has to be converted before FSDP cuts it; it is refused else."""
    single = decoder()
    old = coupled(single)
    train(single, old, range(2))
    names = [name for group in old.param_groups for name in group["param_names"]]

    def named(state_dict):
        state = {names[i]: value for i, value in state_dict["state"].items()}
        groups = [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    split = wrapped(copy.deepcopy(single))
    optimizer = coupled(split)
    own = optimizer.state_dict()["param_groups"]
    state = copy.deepcopy(named(to_adam_state_dict(old.state_dict())))
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(split, optimizer, state)
    optimizer.load_state_dict({**loaded, "param_groups": own})
    train(single, old, range(2, 4))
    train(split, optimizer, range(2, 4), dist.get_rank(), dist.get_world_size())
    assert_same_model(single, split)
    refused = FullyShardedDataParallel.optim_state_dict_to_load(
        split, optimizer, named(old.state_dict())
    )
    held = [p.numel() for p in optimizer.param_groups[0]["params"]]
    if held[0]:
        with pytest.raises(ValueError, match=r"convert it with .*to_adam_state_dict"):
            optimizer.load_state_dict({**refused, "param_groups": own})


def refused():
    """What cannot be told, or cannot work, is an error on every rank before anything changes."""
    flat = FullyShardedDataParallel(decoder(), device_id=CPU, use_orig_params=False)
    with pytest.raises(ValueError, match=r"flattened by a wrapper.*use_orig_params=True"):
        param_groups(flat)
    with pytest.raises(ValueError, match=r"flattened.*use_orig_params=True.*FSDP2"):
        CoupledAdamW(flat.parameters(), coupled=True)
    with pytest.raises(ValueError, match=r"Muon needs whole matrices"):
        MuonWithCoupledAdam(wrapped(decoder()))
    model = decoder()
    optimizer = CoupledAdamW(param_groups(model))
    split = wrapped(model, nested=False)
    split(torch.arange(V)).sum().backward()
    with pytest.raises(ValueError, match=r"'embed.weight' \[\d+\].*make the param groups of the"):
        optimizer.step()
    groups = param_groups(wrapped(decoder()))
    groups[-1].pop("flat_shards")
    optimizer = CoupledAdamW(groups, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 .* no flat_shards"):
        optimizer.step()
    with pytest.raises(ValueError, match="differentiable"):
        CoupledAdamW(param_groups(wrapped(decoder())), differentiable=True)


def no_gradient_on_some_ranks():
    """As if no rank had one, if none has; a piece of zeros, if others have one."""
    split = wrapped(decoder())
    optimizer = coupled(split)
    before = [p.detach().clone() for p in split.parameters()]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(split.parameters(), before))
    assert all(optimizer.state[p]["step"] == 0 for p in optimizer.param_groups[0]["params"])
    train(split, optimizer, range(1), dist.get_rank(), dist.get_world_size())
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.ones_like(p) if p.numel() and dist.get_rank() == 0 else None
    optimizer.step()
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, optimizer.state[p]["step"].item())
    assert steps[0] == 2


CASES = {
    "cuts": cuts,
    "untied": against_one_process,
    "tied, one flat parameter": lambda: against_one_process(tied=True, nested=False),
    "clipped": lambda: against_one_process(max_grad_norm=0.05),
    "no momentum, clipped": lambda: against_one_process(max_grad_norm=0.05, **NO_MOMENTUM),
    "between, clipped": lambda: against_one_process(max_grad_norm=0.05, **BETWEEN),
    "gradients only": lambda: against_one_process(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, tied=True
    ),
    "copies": lambda: against_one_process(sharding_strategy=ShardingStrategy.NO_SHARD),
    "mixed precision": mixed_precision,
    "checkpoints": checkpoints,
    "from whole matrices": from_whole_matrices,
    "no gradient on some ranks": no_gradient_on_some_ranks,
    "refused": refused,
}


def hybrid():
    """Two pairs of ranks with the same pieces."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    against_one_process(
        group=(pairs[rank // 2], across[rank % 2]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        max_grad_norm=0.05,
    )


QUICK = ("cuts", "between, clipped", "checkpoints")


def test_fsdp1_on_two_ranks():
    """Each rank with its part of the batch; see ``cuts``."""
    run_on_ranks(2, __file__, QUICK, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, CASES), (3, CASES), (4, ["hybrid"])])
def test_fsdp1(ranks, names):
    run_on_ranks(ranks, __file__, names, *names)


if __name__ == "__main__":
    all_cases = {**CASES, "hybrid": hybrid}
    run_cases({name: all_cases[name] for name in sys.argv[1:]})
