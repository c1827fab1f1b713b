"""Each framework's own code builds the optimizer, which updates as one made of ``param_groups``.

``test_trainers.py`` has those whose trainers run on a CPU.
"""

import copy
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdamW, embedding_parameters, param_groups

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are the packages'

V, H = 64, 32
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


class Decoder(nn.Module):
    """With torchtitan's and OLMo-core's names of the matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(V, H)
        self.layers = nn.ModuleDict({"0": nn.Linear(H, H)})
        self.norm = nn.RMSNorm(H)
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, ids):
        return self.lm_head(self.norm(self.layers["0"](self.tok_embeddings(ids))))


def updates(model, optimizer, steps=3):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def assert_as_param_groups(model, optimizer, weight_decay, embeddings="coupled"):
    """After three steps; only the embeddings are coupled."""
    coupled = [p for g in optimizer.param_groups if g["coupled"] for p in g["params"]]
    matrices = embedding_parameters(model, vocab_size=V).values()
    assert {id(p) for p in coupled} == {id(p) for p in matrices}
    control = copy.deepcopy(model)
    groups = param_groups(control, embeddings, vocab_size=V, weight_decay=weight_decay)
    updates(model, optimizer)
    updates(control, CoupledAdamW(groups, **OPTIONS))
    for (name, p), q in zip(model.named_parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_torchtitan():
    """Its container, three steps and a checkpoint; its trainer needs a GPU."""
    pytest.importorskip("torchtitan.components.optimizer")
    from coupled_adam.integrations.torchtitan import default_coupled_adamw

    model = Decoder()
    config = default_coupled_adamw(lr=1e-2, embeddings="lean")
    config.implementation = "for-loop"
    container = config.build(model_parts=[model])
    (optimizer,) = container.optimizers
    # Its groups go by names alone: vectors have the weight decay of matrices.
    for group in optimizer.param_groups:
        if not group["coupled"]:
            assert group.pop("weight_decay") == 0.1
            group["weight_decay"] = 0.0
    assert_as_param_groups(model, optimizer, 0.0, "lean")
    saved = copy.deepcopy(container.state_dict())
    model.zero_grad()  # for then it creates the states to load into
    again = config.build(model_parts=[model])
    again.load_state_dict(saved)
    torch.testing.assert_close(
        again.optimizers[0].state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0
    )


class Nested(nn.Module):
    """The names of a model of transformers; its head is tied if there is none."""

    def __init__(self, head=True):
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(V, H), "layer": nn.Linear(H, H)})
        self.lm_head = nn.Linear(H, V, bias=False) if head else None


def test_torchtitan_finds_the_matrices():
    """Whatever their names are, tied or not, and on each stage of a pipeline."""
    pytest.importorskip("torchtitan.components.optimizer")
    from coupled_adam.integrations.torchtitan import default_coupled_adamw

    config = default_coupled_adamw(lr=1e-2, embeddings="lean")
    config.implementation = "for-loop"
    first, middle, last = Decoder(), Decoder(), Decoder()
    del first.lm_head, middle.lm_head, middle.tok_embeddings, last.tok_embeddings
    for parts, expected in (
        ([Nested()], ["model.embed_tokens.weight", "lm_head.weight"]),
        ([Nested(head=False)], ["model.embed_tokens.weight"]),
        ([first, middle, last], ["tok_embeddings.weight", "lm_head.weight"]),
    ):
        names = {p: name for part in parts for name, p in part.named_parameters()}
        groups = [g for o in config.build(model_parts=parts).optimizers for g in o.param_groups]
        coupled = [names[p] for g in groups if g["coupled"] for p in g["params"]]
        assert sorted(coupled) == sorted(expected)


def test_olmo_core_finds_the_matrices():
    """Tied models have no head of their own, and a stage may have neither."""
    pytest.importorskip("olmo_core.optim")
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import OptimConfig

    from coupled_adam.integrations.olmo_core import CoupledAdamWConfig, coupled_matrices

    def coupled(model):
        config = CoupledAdamWConfig(group_overrides=[coupled_matrices("lean")])
        names = {p: name for name, p in model.named_parameters()}
        groups = config.build(model).param_groups
        return [names[p] for g in groups if g.get("coupled") for p in g["params"]]

    def build():
        sizes = {"d_model": H, "vocab_size": V, "n_layers": 1, "n_heads": 2}
        return TransformerConfig.llama_like(**sizes).build()

    assert coupled(build()) == ["embeddings.weight", "lm_head.w_out.weight"]
    tied = build()
    tied.lm_head.w_out.weight = tied.embeddings.weight
    assert coupled(tied) == ["embeddings.weight"]
    last, middle = build(), build()
    last.embeddings = middle.embeddings = middle.lm_head = None
    assert coupled(last) == ["lm_head.w_out.weight"]
    assert coupled(middle) == []
    assert OptimConfig.get_registered_class("coupled_adamw") is CoupledAdamWConfig


def test_axolotl(tmp_path):
    """Its plugin manager gives the factory, and its mixin calls it; its trainer does not run.

    The mixin's package cannot be imported without numba, but its file can. ``optim_args`` comes as
    text.
    """
    base = pytest.importorskip("axolotl.integrations.base")
    from axolotl.integrations.base import PluginManager
    from transformers import Trainer, TrainingArguments

    path = Path(base.__file__).parents[1] / "core" / "trainers" / "mixins" / "optimizer.py"
    mixin = types.ModuleType("optimizer")
    exec(compile(path.read_text(), path, "exec"), mixin.__dict__)
    own_options = ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio")

    class AxolotlTrainer(mixin.OptimizerMixin, Trainer):
        pass

    def trainer_of(model, **options):
        arguments = TrainingArguments(str(tmp_path), **options)
        for name in own_options:
            setattr(arguments, name, None)
        return AxolotlTrainer(model, arguments)

    model = Decoder()
    options = {"learning_rate": 1e-2, "adam_beta2": 0.95, "weight_decay": 0.3, "use_cpu": True}
    options["optim_args"] = "embeddings=lean"
    trainer = trainer_of(model, **options)
    manager = PluginManager.get_instance()
    manager.register("coupled_adam.integrations.axolotl.CoupledAdamPlugin")
    manager.post_trainer_create(None, trainer)
    assert_as_param_groups(model, trainer.create_optimizer(), 0.3, "lean")
    pytest.importorskip("bitsandbytes")
    trainer = trainer_of(model, **options, optim="adamw_bnb_8bit")
    manager.post_trainer_create(None, trainer)
    optimizer = trainer.create_optimizer()
    updates(model, optimizer, 1)
    assert type(optimizer.core).__module__.startswith("bitsandbytes")
    assert {*optimizer.state[model.layers["0"].weight]} >= {"state1", "state2"}
    for name in own_options:  # which Axolotl's own optimizers follow
        trainer = trainer_of(model, **options)
        setattr(trainer.args, name, 2.0)
        with pytest.raises(ValueError, match=f"{name}=2.0 has no effect"):
            manager.post_trainer_create(None, trainer)


def test_nemo_automodel():
    """From a class path and options, as its recipes do, which need a GPU."""
    optim = pytest.importorskip("nemo_automodel.components.optim.optimizer")
    model = Decoder()
    options = {**OPTIONS, "weight_decay": 0.0, "vocab_size": V, "embeddings": "lean"}
    (optimizer,) = optim.build_optimizer(model, ("coupled_adam.CoupledAdamW", options))
    assert_as_param_groups(model, optimizer, 0.0, "lean")


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="not installed")
def test_verl(monkeypatch):
    """What its FSDP engine calls. The package cannot be imported without Ray, but its file can."""
    folder = Path(importlib.util.find_spec("verl").origin).parent
    for name in ("verl", "verl.workers", "verl.workers.config"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    config = FSDPOptimizerConfig(
        optimizer_impl="coupled_adam",
        optimizer="CoupledAdamW",
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        override_optimizer_config={"vocab_size": V, "embeddings": "lean"},
    )
    model = Decoder()
    assert_as_param_groups(model, build_optimizer(model.parameters(), config), 0.0, "lean")
