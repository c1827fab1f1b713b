"""Coupled Adam in ms-swift.

With a file ``plugin.py`` that imports this module, write
``--external_plugins plugin.py --optimizer coupled_adamw --optim_args embeddings=lean``.
"""

from swift.optimizers import OptimizerCallback, optimizers_map
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.transformers import CoupledAdamWFactory


class CoupledAdamWCallback(OptimizerCallback):
    """Builds the optimizer from the trainer's model and arguments."""

    def create_optimizer(self, model: nn.Module | None = None) -> CoupledAdamW:
        """What ms-swift calls in place of the trainer's own method."""
        # args have optim_args, from which the factory takes embeddings=lean.
        return CoupledAdamWFactory()(self.trainer.model if model is None else model, self.args)


optimizers_map["coupled_adamw"] = CoupledAdamWCallback
