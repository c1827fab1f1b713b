"""Coupled Adam in LLaMA-Factory's v1 trainer.

Import this module before the trainer is created, and write
``optim_config: {name: coupled_adamw, lr: 1e-5, embeddings: lean}``.
"""

from typing import Any

from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin
from torch import nn

from coupled_adam import CoupledAdamW


@OptimizerPlugin("coupled_adamw").register()
def coupled_adamw(model: nn.Module, config: dict[str, Any]) -> CoupledAdamW:
    """Build the optimizer from the options beside the name."""
    return CoupledAdamW(model, **{key: config[key] for key in config if key != "name"})
