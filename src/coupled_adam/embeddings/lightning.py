"""A callback for Lightning that logs the measures of the embeddings during training."""

from typing import Any

import lightning.pytorch as pl
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings.monitor import Find, Monitor


class EmbeddingMeasures(pl.Callback):
    """Log measures of the embeddings to all of a trainer's loggers, by default six.

    These are ``embeddings/isotropy``, ``mean_norm``, ``mean_norm_ratio``, ``effective_rank``,
    ``norm_frequency_correlation`` (with counts) and ``largest_logit``.

    A warning is given when ``mean_norm_ratio`` exceeds 0.9 or ``largest_logit`` 100, and again only
    after the value has been below.

    Args:
        every: the number of optimizer steps between two measurements. The first measurement takes
            place before the first step.
        counts: unigram counts [V], for the correlation of norms with frequency.
        embeddings: a function that maps the model to a dict of its matrices [V, H], with the key
            ``"output"`` and optionally ``"input"``; by default, to those that
            :func:`coupled_adam.embedding_parameters` finds. Sharded matrices (FSDP2, tensor
            parallelism) are gathered.
        all_measures: log all measures that the laboratory logs.

    Raises:
        ValueError: if ``every`` is below 1, or no token embeddings are found and ``embeddings`` is
            not given.
    """

    def __init__(
        self,
        every: int = 1000,
        counts: Tensor | NDArray[Any] | None = None,
        embeddings: Find | None = None,
        all_measures: bool = False,
    ) -> None:
        self.monitor = Monitor(every, counts, embeddings, all_measures)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Watch the logits of a step that will be measured."""
        self.monitor.watch(pl_module, trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Measure if a measurement is due."""
        step = trainer.global_step
        if self.monitor.is_due(step):
            # Every process gathers the matrices, and one has the measures.
            measures = self.monitor.measure(pl_module, trainer.is_global_zero)
            for logger in trainer.loggers if measures else ():
                logger.log_metrics(measures, step)

    on_train_start = on_train_batch_end  # step 0 is always due
