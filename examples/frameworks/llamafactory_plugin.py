"""Coupled Adam in LLaMA-Factory's v1 trainer: ``optim_config: {name: coupled_adamw, lr: 1e-5}``.

Import this file before the trainer is created.
"""

from typing import Any

from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.transformers import CoupledAdamWFactory


@OptimizerPlugin("coupled_adamw").register()
def coupled_adamw(model: nn.Module, config: dict[str, Any]) -> CoupledAdamW:
    """Build the optimizer from the options beside the name."""
    return CoupledAdamWFactory()(model, **{k: v for k, v in config.items() if k != "name"})
