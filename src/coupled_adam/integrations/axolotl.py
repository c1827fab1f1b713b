"""Coupled Adam in Axolotl.

In the YAML file::

    plugins: [coupled_adam.integrations.axolotl.CoupledAdamPlugin]
    optim_args: {embeddings: lean}

The learning rate, betas, epsilon and weight decay are those of the YAML file. In pretraining,
``steps: auto`` beside ``embeddings`` chooses LEAN's rate.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import Trainer

from coupled_adam.transformers import use_coupled_adam


class CoupledAdamPlugin(BasePlugin):
    """Gives the trainer our optimizer factory, whatever ``optimizer:`` says."""

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Called by Axolotl when the trainer exists and its optimizer does not.

        Raises:
            ValueError: for an option of Axolotl that its own optimizers alone would follow.
        """
        for name in ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio"):
            value = getattr(trainer.args, name, None)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} has no effect with CoupledAdamPlugin: leave it out; the "
                    "embeddings have a rate of their own in optim_args: {embeddings: {lr: ...}}"
                )
        use_coupled_adam(trainer)
