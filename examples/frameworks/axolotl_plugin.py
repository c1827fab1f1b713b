"""Coupled Adam in Axolotl: ``plugins: [axolotl_plugin.CoupledAdamPlugin]`` in the YAML file.

The learning rate, betas, epsilon and weight decay are those of the YAML file.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import Trainer

from coupled_adam.transformers import CoupledAdamWFactory


class CoupledAdamPlugin(BasePlugin):
    """Gives the trainer an optimizer factory, whatever ``optimizer:`` says."""

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Called by Axolotl when the trainer exists and its optimizer does not."""
        trainer.optimizer_cls_and_kwargs = (CoupledAdamWFactory, {})  # it passes its arguments on
