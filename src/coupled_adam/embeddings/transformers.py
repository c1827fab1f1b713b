"""A callback for Hugging Face's ``Trainer`` that logs the measures of the embeddings."""

from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coupled_adam.embeddings.monitor import Find, Monitor


class EmbeddingMeasures(TrainerCallback):
    """Log ``embeddings/isotropy``, ``embeddings/mean_norm``, ... wherever the trainer logs.

    Add it after the trainer has been created:
    ``trainer.add_callback(EmbeddingMeasures(trainer))``. All other arguments, and the errors, are
    those of :class:`coupled_adam.embeddings.lightning.EmbeddingMeasures`.
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int = 1000,
        counts: Tensor | NDArray[Any] | None = None,
        embeddings: Find | None = None,
        all_measures: bool = False,
    ) -> None:
        self.trainer = trainer
        self.monitor = Monitor(every, counts, embeddings, all_measures)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch the logits of a step that will be measured."""
        self.monitor.watch(kwargs["model"], state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure if a measurement is due."""
        if self.monitor.is_due(state.global_step):
            measures = self.monitor.measure(kwargs["model"], state.is_world_process_zero)
            if measures:
                is_due = control.should_log
                self.trainer.log(measures)
                control.should_log = is_due  # log withdraws it, but the trainer is yet to log

    on_train_begin = on_step_end  # step 0 is always due
