"""What a run says of itself: the log, the progress bar."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically
from coupled_adam.lab.training.distributed import rank


class MetricsFile(Logger):
    """The log as JSON lines. ``step`` counts finished steps: 0 is before the first.

    Lines after ``last_step``, which a killed run wrote after its last checkpoint, are dropped.

    Raises:
        UsageError: a file that is there holds something else.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        super().__init__()
        self.path = path
        if rank() == 0 and path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            try:
                kept = [line for line in whole if json.loads(line)["step"] <= last_step]
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path} is damaged: remove the lines that are no JSON") from None
            write_atomically(path, "".join(kept))

    @property
    def name(self) -> str:
        """Of the run, which is its folder."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """Empty: a run has one version."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They are in config.yaml."""


class ProgressBar(TQDMProgressBar):
    """One bar for the run: steps, time left, losses, tokens per second."""

    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10 if sys.stderr.isatty() else 100)
        self.title = title

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Name the bar."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(self.title)

    def init_validation_tqdm(self) -> Any:
        """No bar of its own for an evaluation."""
        return Tqdm(disable=True)

    def get_metrics(self, _: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        """What the run has logged last."""
        names = {"train_loss": "loss", "valid_loss": "valid", "tokens_per_second": "tok/s"}
        shown: dict[str, float] = module.shown  # type: ignore[assignment]
        return {label: f"{shown[name]:.4g}" for name, label in names.items() if name in shown}
