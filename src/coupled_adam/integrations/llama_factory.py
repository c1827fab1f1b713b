"""Coupled Adam in LLaMA-Factory's v1 trainer.

Write ``optim_config: {name: coupled_adamw, lr: 1.0e-5, embeddings: lean}`` in the YAML file, and
start LLaMA-Factory's launcher through this module, on any number of devices::

    torchrun --nproc-per-node 8 -m coupled_adam.integrations.llama_factory sft config.yaml

Its own command, ``llamafactory-cli``, starts processes that have not imported this module.
"""

from typing import Any

from llamafactory.v1.launcher import main
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin
from torch import nn

from coupled_adam import CoupledAdamW


@OptimizerPlugin("coupled_adamw").register()
def coupled_adamw(model: nn.Module, config: dict[str, Any]) -> CoupledAdamW:
    """Build the optimizer from the options beside the name."""
    return CoupledAdamW(model, **{key: config[key] for key in config if key != "name"})


# torchrun runs this module in each process, in which the name is then registered.
if __name__ == "__main__":
    main()
