"""A callback for Hugging Face's ``Trainer`` that logs the measures of the embeddings."""

from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coupled_adam.embeddings.monitor import Find, Monitor


class EmbeddingMeasures(TrainerCallback):
    """Log ``embeddings/isotropy``, ``embeddings/mean_norm``, ... wherever the trainer logs.

    Added to a trainer once that is made: ``trainer.add_callback(EmbeddingMeasures(trainer))``.

    Args:
        trainer: whose :meth:`log` is called.
        every: optimizer steps between two measurements; there is one before the first step.
        counts: unigram counts [V], for the correlation of norms with frequency.
        embeddings: a function from the model to its matrices [V, H]: ``"output"`` and perhaps
            ``"input"``. By default, those that the transformers model names.

    Raises:
        ValueError: ``every`` is below 1; the model is not of transformers.
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int = 1000,
        counts: Tensor | NDArray[Any] | None = None,
        embeddings: Find | None = None,
    ) -> None:
        self.trainer = trainer
        self.monitor = Monitor(every, counts, embeddings)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the initial embeddings."""
        self._log(state, kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure, if it is due."""
        self._log(state, kwargs["model"])

    def _log(self, state: TrainerState, model: Any) -> None:
        if self.monitor.is_due(state.global_step):
            measures = self.monitor.measure(model, state.is_world_process_zero)
            if measures:
                self.trainer.log(measures)
