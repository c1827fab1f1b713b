"""What happens around a training: checkpoints, the log, the progress bar."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_only

from coupled_adam.lab import PreemptedError
from coupled_adam.lab.distributed import any_rank, rank
from coupled_adam.lab.files import write_atomically


class Checkpoints(pl.Callback):
    """A checkpoint after each evaluation, and one when the process is told to stop (SIGTERM).

    ``step-N`` is a file, or a folder where the model is sharded. Each is written under a temporary
    name, renamed when it is whole, and only then is the one before removed.
    """

    def __init__(self, folder: Path, evaluate_every: int) -> None:
        self.folder = folder
        self.evaluate_every = evaluate_every
        self._told_to_stop = False

    def last(self) -> Path | None:
        """The newest whole checkpoint; remains of unfinished ones are removed."""
        for path in self.folder.glob("*.tmp"):
            _remove(path)
        return max(self.folder.glob("step-*"), key=self.step, default=None)

    @staticmethod
    def step(path: Path) -> int:
        """How many steps the checkpoint has behind it."""
        return int(path.name.removeprefix("step-"))

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Take SIGTERM: Lightning's own handler would talk to other processes from within it."""
        self._told_to_stop = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._told_to_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop here if told to, unless an evaluation comes first, with its checkpoint."""
        due = trainer.global_step % self.evaluate_every == 0
        if not due and trainer.global_step < trainer.max_steps and self.any_told_to_stop():
            self._save(trainer)
            raise self._preempted(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Save; a continued run then has no evaluation to make up for."""
        self._save(trainer)
        if trainer.global_step < trainer.max_steps and self.any_told_to_stop():
            raise self._preempted(trainer)

    def any_told_to_stop(self) -> bool:
        """Whether any process was: they stop at the same step, or wait for each other forever."""
        return any_rank(self._told_to_stop)

    def _preempted(self, trainer: pl.Trainer) -> PreemptedError:
        return PreemptedError(f"stopped by SIGTERM after step {trainer.global_step}")

    def _save(self, trainer: pl.Trainer) -> None:
        path = self.folder / f"step-{trainer.global_step}"
        temporary = path.with_name(f"{path.name}.tmp")
        trainer.save_checkpoint(temporary)
        if trainer.is_global_zero:
            temporary.rename(path)
            for other in self.folder.glob("step-*"):
                if other != path:
                    _remove(other)
        trainer.strategy.barrier()


class CheckpointIO(TorchCheckpointIO):
    """Written straight to its place; Lightning's goes through memory and the temporary folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write, and wait until it is on the disk; leave nothing behind where that fails."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            Path(path).unlink(missing_ok=True)
            # Where the disk is full, torch fails once more while it closes its archive.
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class MetricsFile(Logger):
    """The log as JSON lines. ``step`` counts finished steps: 0 is before the first.

    Lines after ``last_step``, which a killed run wrote after its last checkpoint, are dropped.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        super().__init__()
        self.path = path
        if rank() == 0 and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            whole = (line for line in lines if line.endswith("\n"))
            kept = (line for line in whole if json.loads(line)["step"] <= last_step)
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


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
