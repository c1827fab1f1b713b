"""torch.distributed.checkpoint: saved by some ranks in one layout, continued by others in another.

The same file is the program of each rank. Fewer ranks than four are a mesh of some of them.
"""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import decoders
from coupled_adam import CoupledAdamW, param_groups, to_adam_state_dict
from decoders import V, assert_same_training, full, train
from optim.cases import LEAN_SOON
from processes import run_cases, run_on_ranks

RANKS = 4  # of V = 5 rows the last has none
H = 4
HALF, END = 3, 6  # steps


def decoder(seed=0):
    return decoders.decoder(h=H, seed=seed)


def coupled(model):
    return CoupledAdamW(param_groups(model), lr=1e-2, amsgrad=True)


def lean(model):
    return CoupledAdamW(model, embeddings=LEAN_SOON, lr=1e-2)


def adamw(model):
    """With other groups than Coupled Adam's, in another order, and another learning rate."""
    head, *others = reversed(list(model.parameters()))
    groups = [{"params": others}, {"params": [head], "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=2e-2, amsgrad=True)


class Layout:
    """Where the parts of a model lie: FSDP2 over some ranks, with tensor parallelism, or DDP."""

    def __init__(self, ranks, tensor_parallel=1, plan=("embed", "head")):
        self.plan = plan
        shape = (ranks // tensor_parallel, tensor_parallel)
        names = ("data", "tensor")
        self.mesh = DeviceMesh("cpu", torch.arange(ranks).view(shape), mesh_dim_names=names)
        self.group = dist.new_group(list(range(ranks)))
        self.here = dist.get_rank() < ranks

    def place(self, model):
        if self.mesh.size(1) > 1:  # the embedding by columns, the head by rows
            plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in self.plan}
            parallelize_module(model, self.mesh["tensor"], plan)
        for module in (model.block, model):
            fully_shard(module, mesh=self.mesh["data"])
        return model


class Replicated(Layout):
    def place(self, model):
        return DistributedDataParallel(model, process_group=self.group)


def save(pair, folder, group=None, options=None):
    model, optimizer = get_state_dict(*pair, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=group)


def load(pair, folder, group=None, options=None):
    model, optimizer = get_state_dict(*pair, options=options)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(*pair, **loaded, options=options)


def switch(pair, folder, group=None):
    """As in docs/switching.md: from a checkpoint of AdamW, whatever its groups."""
    model, optimizer = pair
    like_adamw = torch.optim.AdamW(model.parameters(), amsgrad=True)
    weights, template = get_state_dict(model, like_adamw)
    state = {"model": weights, "optimizer": {"state": template["state"]}}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(model, state["model"])
    own = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, {**own, "state": state["optimizer"]["state"]})


def uninterrupted(make=coupled):
    model = decoder()
    optimizer = make(model)
    train(model, optimizer, range(END))
    return model, optimizer


def switched():
    """The same in memory, averaged by hand."""
    model = decoder()
    old = adamw(model)
    train(model, old, range(HALF))
    optimizer = coupled(model)
    coupled_params = optimizer.param_groups[-1]["params"]
    assert len(coupled_params) == 2
    for p, state in old.state.items():
        optimizer.state[p] = copy.deepcopy(state)
        if any(p is q for q in coupled_params):
            for name in ("exp_avg_sq", "max_exp_avg_sq"):
                optimizer.state[p][name] = state[name].mean(0)
    train(model, optimizer, range(HALF, END))
    return model, optimizer


def fresh(layout=None, make=coupled, seed=1):
    """A model of other values, to be loaded into, and its optimizer."""
    model = decoder(seed) if layout is None else layout.place(decoder(seed))
    return model, make(model)


def on_other_ranks(layouts, folder, make=coupled):
    """Each layout into the next, and the last into the first."""
    expected = uninterrupted(make)
    for name, layout in layouts.items():
        if layout.here:
            pair = fresh(layout, make, seed=0)
            train(*pair, range(HALF))
            save(pair, folder / name, layout.group)
    dist.barrier()
    for name, layout in zip(layouts, [*layouts.values()][1:] + [*layouts.values()][:1]):
        if layout.here:
            pair = fresh(layout, make)
            load(pair, folder / name, layout.group)
            train(*pair, range(HALF, END))
            assert_same_training(expected, pair)


def lean_on_other_ranks(layouts, folder):
    on_other_ranks(layouts, folder / "lean", lean)


def lean_from_adamw(layouts, folder):
    """LEAN's moments of AdamW's, on ranks as in one process."""
    states = []
    for layout in (None, layouts["3"]):
        if layout is None or layout.here:
            old = fresh(layout, adamw, seed=0)
            train(*old, range(HALF))
            optimizer = lean(old[0])
            state = {i: copy.deepcopy(old[1].state[p]) for i, p in enumerate(params_of(optimizer))}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            train(old[0], optimizer, range(HALF, END))
            states.append((old[0], optimizer))
    if len(states) == 2:
        assert_same_training(*states)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def from_adamw(layouts, folder):
    """Second moments [V, H] of any layout into [H] of any other."""
    expected = switched()
    for name in ("ddp", "3"):
        layout = layouts[name]
        if layout.here:
            pair = fresh(layout, adamw, seed=0)
            train(*pair, range(HALF))
            save(pair, folder / f"adamw-{name}", layout.group)
    dist.barrier()
    for name in ("ddp", "3"):
        for layout in layouts.values():
            if layout.here:
                pair = fresh(layout)
                switch(pair, folder / f"adamw-{name}", layout.group)
                assert [group["lr"] for group in pair[1].param_groups] == [1e-2] * 3
                train(*pair, range(HALF, END))
                assert_same_training(expected, pair)

    model, optimizer = fresh(layouts["4"])
    state = get_optimizer_state_dict(model, adamw(model))
    with pytest.raises(ValueError, match="group 0 of the checkpoint has no betas"):
        set_optimizer_state_dict(model, optimizer, state)
    state = {"optimizer": {"state": get_optimizer_state_dict(model, optimizer)["state"]}}
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load(state, checkpoint_id=folder / "adamw-3")


def to_adamw(layouts, folder):
    """Back: each row has the shared moment, in parts as its parameter's."""
    for name in ("ddp", "4", "2 x 2"):
        model, optimizer = fresh(layouts[name])
        load((model, optimizer), folder / "2")
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        back = torch.optim.AdamW(groups)
        back.load_state_dict(to_adam_state_dict(optimizer.state_dict()))
        for p in optimizer.param_groups[-1]["params"]:
            moment = back.state[p]["exp_avg_sq"]
            assert torch.equal(full(moment), full(optimizer.state[p]["exp_avg_sq"]).expand(V, H))
            if isinstance(p, DTensor):
                assert moment.placements == p.placements
                assert moment.to_local().shape == p.to_local().shape
        train(model, back, range(1))


def whole_state_dicts(layouts, folder):
    """What trainers write as one file: full on each rank, or broadcast; AdamW's, too."""
    expected = fresh()
    load(expected, folder / "2")
    old = fresh(make=adamw)
    load(old, folder / "adamw-3")
    # Not with a head of five rows: torch does not distribute uneven strided parts of a whole.
    for layout in (layouts["4"], Layout(RANKS, 2, ["embed"])):
        for options in (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ):
            pair = fresh(layout)
            set_model_state_dict(pair[0], expected[0].state_dict(), options=options)
            state = copy.deepcopy(get_optimizer_state_dict(*expected))
            set_optimizer_state_dict(*pair, state, options=options)
            assert_same_training(expected, pair, 0)
            again = get_optimizer_state_dict(*pair, options=StateDictOptions(full_state_dict=True))
            original = get_optimizer_state_dict(*expected)["state"]
            torch.testing.assert_close(again["state"], original, rtol=0, atol=0)

        pair = fresh(layout)
        options = StateDictOptions(full_state_dict=True)
        own = get_optimizer_state_dict(*pair, options=options)
        state = {**own, "state": copy.deepcopy(get_optimizer_state_dict(*old)["state"])}
        set_optimizer_state_dict(*pair, state, options=options)
        for p, q in zip(old[0].parameters(), pair[0].parameters()):
            for key in ("exp_avg_sq", "max_exp_avg_sq"):
                ours, theirs = old[1].state[p][key], full(pair[1].state[q][key])
                if q in set(pair[1].param_groups[-1]["params"]):
                    ours = ours.mean(0)
                torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=0)
        train(*pair, range(1))


def flattened_state_dicts(layouts, folder):
    """With a key for each state and option of each parameter, as torchtitan saves."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if layouts["2"].here:
        pair = fresh(layouts["2"], seed=0)
        train(*pair, range(HALF))
        save(pair, folder / "flat", layouts["2"].group, options)
    dist.barrier()
    if layouts["3"].here:
        pair = fresh(layouts["3"])
        load(pair, folder / "flat", layouts["3"].group, options)
        train(*pair, range(HALF, END))
        assert_same_training(uninterrupted(), pair)


def bfloat16(layouts, folder):
    """The float32 moments of bfloat16 matrices are not rounded on the way."""
    models = [layouts[name].place(decoder().bfloat16()) for name in ("4", "2 x 2")]
    saved, loaded = ((model, coupled(model)) for model in models)
    train(*saved, range(HALF))
    save(saved, folder / "bf16")
    load(loaded, folder / "bf16")
    moment = full(loaded[1].state[models[1].embed.weight]["exp_avg_sq"])
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())
    assert_same_training(saved, loaded, 0)


def named(*cases):
    return {case.__name__: case for case in cases}


CASES = {
    "coupled": named(
        on_other_ranks,
        from_adamw,
        to_adamw,
        whole_state_dicts,
        flattened_state_dicts,
        bfloat16,
    ),
    "lean": named(lean_on_other_ranks, lean_from_adamw),
}


@pytest.mark.parametrize(
    ("kind", "folder", "make"),
    [("coupled", "", coupled), pytest.param("lean", "lean", lean, marks=pytest.mark.slow)],
)
def test_checkpoints(kind, folder, make, tmp_path):
    """Between 1, 2, 3, 4 and 2 x 2 ranks and DDP; then into this process, which is no rank."""
    run_on_ranks(RANKS, __file__, CASES[kind], tmp_path, kind)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        for name in ("1", "2", "3", "4", "2 x 2", "ddp"):
            pair = fresh(make=make)
            load(pair, tmp_path / folder / name)
            train(*pair, range(HALF, END))
            assert_same_training(uninterrupted(make), pair)
        for name in ("ddp", "3") if kind == "coupled" else ():
            pair = fresh()
            switch(pair, tmp_path / f"adamw-{name}")
            train(*pair, range(HALF, END))
            assert_same_training(switched(), pair)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    layouts = {str(ranks): Layout(ranks) for ranks in range(1, RANKS + 1)}
    layouts |= {"2 x 2": Layout(RANKS, 2), "ddp": Replicated(RANKS)}
    run_cases(CASES[sys.argv[2]], layouts, Path(sys.argv[1]))
