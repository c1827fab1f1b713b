"""Each framework's own code builds the optimizer, which updates as one made of ``param_groups``."""

import copy

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


def test_litgpt():
    """As in its pretrain.py: a plain list of parameters."""
    litgpt = pytest.importorskip("litgpt")
    from litgpt.utils import instantiate_torch_optimizer

    sizes = {"padded_vocab_size": V, "n_layer": 1, "n_head": 2, "n_embd": H, "block_size": 8}
    model = litgpt.GPT(litgpt.Config(**sizes))
    options = {**OPTIONS, "weight_decay": 0.0, "vocab_size": V, "embeddings": "lean"}
    spelled = {"class_path": "coupled_adam.CoupledAdamW", "init_args": options}
    optimizer = instantiate_torch_optimizer(spelled, model.parameters(), fused=None)
    assert_as_param_groups(model, optimizer, 0.0, "lean")


def test_torchtitan():
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


def test_olmo_core():
    pytest.importorskip("olmo_core.optim")
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import OptimConfig

    from coupled_adam.integrations.olmo_core import CoupledAdamWConfig, coupled_matrices

    model = TransformerConfig.llama_like(d_model=H, vocab_size=V, n_layers=1, n_heads=2).build()
    config = CoupledAdamWConfig(lr=1e-2, weight_decay=0.0)
    config.group_overrides = [coupled_matrices("lean")]
    assert_as_param_groups(model, config.build(model), 0.0, "lean")
    assert OptimConfig.get_registered_class("coupled_adamw") is CoupledAdamWConfig


def test_axolotl(tmp_path):
    """Its plugin manager gives the trainer the factory, to be called as its trainer's mixin does.

    The mixin itself cannot be imported without numba. ``optim_args`` comes as text.
    """
    pytest.importorskip("axolotl.integrations.base")
    from axolotl.integrations.base import PluginManager
    from transformers import Trainer, TrainingArguments

    model = Decoder()
    options = {"learning_rate": 1e-2, "adam_beta2": 0.95, "weight_decay": 0.3, "use_cpu": True}
    options["optim_args"] = "embeddings=lean"
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options))
    manager = PluginManager.get_instance()
    manager.register("coupled_adam.integrations.axolotl.CoupledAdamPlugin")
    manager.post_trainer_create(None, trainer)
    factory, options = trainer.optimizer_cls_and_kwargs
    assert_as_param_groups(model, factory()(model, **options), 0.3, "lean")
