"""A callback for Lightning that logs the measures of the embeddings during training."""

from typing import Any

import lightning.pytorch as pl
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings.monitor import Find, Monitor


class EmbeddingMeasures(pl.Callback):
    """Log ``embeddings/isotropy``, ``embeddings/mean_norm``, ... to all of a trainer's loggers.

    Args:
        every: optimizer steps between two measurements; there is one before the first step.
        counts: unigram counts [V], for the correlation of norms with frequency.
        embeddings: a function from the LightningModule to its matrices [V, H]: ``"output"`` and
            perhaps ``"input"``. By default, those of the transformers model inside it.
            Sharded matrices (FSDP2, tensor parallel) are gathered.

    Raises:
        ValueError: ``every`` is below 1; there is no transformers model inside.
    """

    def __init__(
        self,
        every: int = 1000,
        counts: Tensor | NDArray[Any] | None = None,
        embeddings: Find | None = None,
    ) -> None:
        self.monitor = Monitor(every, counts, embeddings)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the initial embeddings."""
        self._log(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Measure, if it is due."""
        self._log(trainer, pl_module)

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        if self.monitor.is_due(step):
            measures = self.monitor.measure(module, trainer.is_global_zero)
            if measures:
                for logger in trainer.loggers:
                    logger.log_metrics(measures, step)
