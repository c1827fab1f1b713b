"""Where a run is logged: ``metrics.jsonl``, and the loggers that a user has chosen."""

import collections
import json
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.config import Execution, TrainingRun
from coupled_adam.runs import METRICS, logged_lines

LOG_EVERY = 10
"""The number of steps between two lines about the training."""


def run_loggers(folder: Path, execution: Execution, step: int | None) -> list[Logger]:
    """The loggers of a run that resumes at ``step``, or starts."""
    last_step = -1 if step is None else step
    loggers: list[Logger] = [MetricsFile(folder / METRICS)]
    if "tensorboard" in execution.log:
        loggers.append(TensorBoardLogger(folder, "tensorboard", "", purge_step=last_step + 1))
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

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._name

    @property
    def version(self) -> str:
        """Empty: a run has one version."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: they are in config.yaml."""


class MetricsFile(_RunLogger):
    """A log of JSON lines, where ``step`` is the number of finished steps, 0 before the first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent.name)
        self.path = path

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


class TrackioLogger(_RunLogger):
    """A run of trackio, which has wandb's functions; Lightning has no logger for it."""

    _run: Any = None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log the numbers of a step; a run that is resumed goes on."""
        if self._run is None:
            import trackio  # where it is installed

            self._run = trackio.init(project="coupled-adam", name=self._name, resume="allow")
        self._run.log(metrics, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Wait until everything has been stored."""
        if self._run is not None:
            self._run.finish()


def cut_log(run: TrainingRun, last_step: int | None, skip_damaged: bool) -> None:
    """Drop the lines of ``metrics.jsonl`` after the checkpoint from which a run continues.

    Args:
        last_step: the step of that checkpoint; None if the run begins, which drops all lines.
        skip_damaged: whether to go on, with a warning, if lines before the checkpoint are missing
            or come twice. Of the latter the first is kept.

    Raises:
        UsageError: if lines before the checkpoint are missing, come twice or are not JSON.
    """
    path = run.folder / METRICS
    # Lines after the checkpoint are of steps that will be made, and logged, again.
    end = -1 if last_step is None else last_step
    logged_before = [line for line in logged_lines(path) if line[0] <= end]
    first_lines = {(step, name): line for step, name, line in reversed(logged_before)}
    expected = _expected(run.recipe, end)
    missing = [place for place in expected if place not in first_lines]
    counts = collections.Counter(line[:2] for line in logged_before)
    twice = [place for place in expected if counts[place] > 1]
    if missing or twice:
        problem, places = ("missing", missing) if missing else ("there twice", twice)
        message = (
            f"{path} is damaged: of the lines before the checkpoint {len(places)} are {problem}, "
            f"first {places[0][1]} of step {places[0][0]}"
        )
        if not skip_damaged:
            raise UsageError(
                f"{message}. Restore the file, or continue as it is with --skip-damaged"
            )
        warnings.warn(message, stacklevel=2)
    if path.exists():
        lines = [first_lines[place] for place in expected if place in first_lines]
        write_atomically(path, "".join(lines))


def _expected(recipe: Recipe, last_step: int) -> list[tuple[int, str]]:
    """The step and the first metric of each line that a run logs up to a step, in order."""
    interval = min(recipe.training.evaluate_every, recipe.steps)
    lines = [] if last_step < 0 else [(0, "isotropy")]
    for step in range(1, last_step + 1):
        lines += [(step, "train_loss")] * (step % LOG_EVERY == 0)
        lines += [(step, "valid_loss")] * (step % interval == 0)
    return lines
