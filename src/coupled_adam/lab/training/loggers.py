"""Where a run is logged: ``metrics.jsonl``, and the loggers that a user has chosen."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from coupled_adam.files import write_atomically
from coupled_adam.lab.run import read_log
from coupled_adam.lab.training.execution import Execution
from coupled_adam.runs import METRICS

LOG_EVERY = 10
"""The number of steps between two lines about the training."""


def run_loggers(folder: Path, execution: Execution, last: int) -> list[Logger]:
    """The loggers of a run that resumes after the step ``last``, or starts, after step -1."""
    loggers: list[Logger] = [MetricsFile(folder / METRICS)]
    # From purge_step on, TensorBoard hides what was logged of steps that are made again.
    if "tensorboard" in execution.logger:
        loggers.append(TensorBoardLogger(folder, "tensorboard", "", purge_step=last + 1))
    name = f"{folder.parent.name}/{folder.name}"
    # The same id lets a resumed run go on in the same run of wandb.
    if "wandb" in execution.logger:
        loggers.append(WandbLogger(name, folder, project="coupled-adam", id=name.replace("/", "-")))
    return loggers


class MetricsFile(Logger):
    """A log of JSON lines, where ``step`` is the number of finished steps, 0 before the first."""

    name = ""
    version = ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a line."""
        # Closed after each line, so that none is lost in a buffer if the process is killed.
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: they are in config.yaml."""


def truncate_log(path: Path, last: int) -> None:
    """Drop the lines of a log after a step; those steps will be made, and logged, again."""
    if path.exists():
        kept = (entry for entry in read_log(path) if entry["step"] <= last)
        write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in kept))
