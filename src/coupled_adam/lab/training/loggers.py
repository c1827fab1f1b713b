"""Where a run is logged: ``metrics.jsonl``, and the loggers that a user has chosen."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from coupled_adam.files import write_atomically
from coupled_adam.lab.training.config import Execution
from coupled_adam.runs import METRICS, logged_lines

LOG_EVERY = 10
"""The number of steps between two lines about the training."""


def run_loggers(folder: Path, execution: Execution, step: int | None) -> list[Logger]:
    """The loggers of a run that resumes at ``step``, or starts."""
    loggers: list[Logger] = [MetricsFile(folder / METRICS)]
    if "tensorboard" in execution.log:
        purge_step = 0 if step is None else step + 1
        loggers.append(TensorBoardLogger(folder, "tensorboard", "", purge_step=purge_step))
    name = f"{folder.parent.name}/{folder.name}"
    if "wandb" in execution.log:
        loggers.append(WandbLogger(name, folder, project="coupled-adam", id=name.replace("/", "-")))
    if "mlflow" in execution.log:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        loggers.append(MLFlowLogger("coupled-adam", name, tracking_uri=uri))
    if "trackio" in execution.log:
        loggers.append(TrackioLogger(name))
    return loggers


class _RunLogger(Logger):
    """What Lightning wants to know of a logger besides how it logs."""

    name = ""
    version = ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: they are in config.yaml."""


class MetricsFile(_RunLogger):
    """A log of JSON lines, where ``step`` is the number of finished steps, 0 before the first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


class TrackioLogger(_RunLogger):
    """A run of trackio, which has wandb's functions; Lightning has no logger for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._run: Any = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log the numbers of a step; a run that is resumed goes on."""
        if self._run is None:
            import trackio  # where it is installed

            self._run = trackio.init(project="coupled-adam", name=self.name, resume="allow")
        self._run.log(metrics, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Wait until everything has been stored."""
        if self._run is not None:
            self._run.finish()


def cut_log(path: Path, last_step: int | None) -> None:
    """Drop the lines of a log after the checkpoint of a step, or all where a run begins.

    They are of steps that will be made, and logged, again.

    Raises:
        UsageError: a line is not JSON, or not of a log; the file is not changed.
    """
    if path.exists():
        end = -1 if last_step is None else last_step
        lines = [line for step, _, line in logged_lines(path) if step <= end]
        write_atomically(path, "".join(lines))
