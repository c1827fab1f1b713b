"""Optimizers for the core, a decoder that trains them, and what a core must do: saved, on ranks."""

import copy
import pickle
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

import decoders
from coupled_adam import LEAN, CoupledAdamW
from optim.cases import through_disk


class OneByte(torch.optim.Optimizer):
    """Sign descent on a momentum of one byte an element, as 8-bit optimizers keep and load it."""

    def __init__(self, params, lr, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.levels = 100.0  # which torch's way to pickle an optimizer loses

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sign"] = torch.full_like(p, 100, dtype=torch.uint8)
                    state["scale"] = torch.zeros((), dtype=torch.float64)
                state["scale"].add_(1e-12)
                momentum = 0.9 * (state["sign"] / self.levels - 1) + 0.1 * p.grad.sign()
                state["sign"].copy_((momentum + 1) * self.levels)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * momentum.sign())

    def state_dict(self):
        saved = super().state_dict()
        return {**saved, "state": {k: {"packed": dict(s)} for k, s in saved["state"].items()}}

    def load_state_dict(self, saved):
        super().load_state_dict({**saved, "state": {}})
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, params, strict=True):
            if key in saved["state"]:
                self.state[p] = copy.deepcopy(saved["state"][key]["packed"])


def bitsandbytes(groups):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW8bit(groups, lr=1e-3, weight_decay=0.1)


def torchao(groups):
    optim = pytest.importorskip("torchao.optim")
    return optim.AdamW8bit(groups, lr=1e-3, weight_decay=0.1)


def loss_of(model, step):
    """On tokens enough for gradients of full rank: Muon makes noise in other directions large."""
    v = getattr(model, "module", model).embed.num_embeddings  # DDP has it within
    ids = torch.randint(0, v, (8, 5), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def train(model, optimizers, steps, schedulers=(), clip=None):
    """Steps of one optimizer, or of several that share the model's parameters."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in (*optimizers, *schedulers):
            optimizer.step()


def beside(model, core, **options):
    """LEAN for the table and another optimizer for all else."""
    embeddings = LEAN | {"lr_factor": 4}
    optimizer = CoupledAdamW(model, lr=1e-3, embeddings=embeddings, core=core, **options)
    optimizer.train()
    return optimizer


def assert_same_state(optimizer, other):
    """The groups and the states of two optimizers, or of their state dicts, bit for bit."""
    a, b = (x if isinstance(x, dict) else x.state_dict() for x in (optimizer, other))
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)


def go_on(through, model, optimizer, build):
    """The two as they come out of a state dict on disk, a pickle or a copy."""
    if through != "state_dict":
        pickled = through == "pickle"
        both = model, optimizer
        return pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
    resumed = build(model)
    resumed.load_state_dict(through_disk(optimizer.state_dict()))
    return model, resumed


def on_ranks(models, shard, build, fresh=None, **tolerance):
    """As in one process on the whole batch, also after a distributed checkpoint."""
    whole, model = models
    wrapped = shard(model)
    optimizers = [build(m) for m in models]
    for m, optimizer in zip((whole, wrapped), optimizers):
        train(m, optimizer, range(3))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = {"optimizer": get_optimizer_state_dict(model, optimizers[1])}
    dcp.save(state, checkpoint_id=folder[0])
    resumed = (fresh or build)(model)
    resumed.init_state()
    state = {"optimizer": get_optimizer_state_dict(model, resumed)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(model, resumed, state["optimizer"])
    for m, optimizer in ((whole, optimizers[0]), (wrapped, resumed)):
        train(m, optimizer, range(3, 6))
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, decoders.full(q), msg=name, **tolerance)
