"""Coupled Adam in Axolotl.

In the YAML file::

    plugins: [coupled_adam.integrations.axolotl.CoupledAdamPlugin]
    optim_args: {embeddings: lean}

The learning rate, betas, epsilon and weight decay are those of the YAML file.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import Trainer

from coupled_adam.transformers import use_coupled_adam


class CoupledAdamPlugin(BasePlugin):
    """Gives the trainer our optimizer factory, whatever ``optimizer:`` says."""

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Called by Axolotl when the trainer exists and its optimizer does not."""
        use_coupled_adam(trainer)
