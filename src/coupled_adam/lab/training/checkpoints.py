"""The checkpoints of a run: each is complete or absent, and the last two are kept.

``step-N`` is a file, or a folder if the model is sharded. It has that name once it is complete;
until then it is called ``unfinished``, as is what a killed process has left. ``checksums.json`` has
the SHA-256 of each file, since neither torch nor the disk notices a flipped bit.
"""

import json
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from coupled_adam.errors import PreemptedError, TrainingError, UsageError, one_line
from coupled_adam.files import checksum, remove, write_atomically
from coupled_adam.inputs import read_own
from coupled_adam.lab.training.distributed import (
    any_rank,
    on_every_rank,
    on_rank_zero,
    rank,
    world_size,
)
from coupled_adam.runs import CHECKPOINTS, by_step, step_name

CHECKSUMS = "checksums.json"
_KEPT = 2  # so that a run can continue from the one before if the last one is damaged
ADVICE = "remove it to continue from the one before it, or from the beginning"


class Checkpoints(pl.Callback):
    """Saves a checkpoint after each evaluation, and when the process is asked to stop (SIGTERM)."""

    def __init__(self, run: Path, evaluate_every: int) -> None:
        self.folder = run / CHECKPOINTS
        self.evaluate_every = evaluate_every
        self.has_begun = False  # whether the checkpoint, if any, has been loaded
        self._begins_at = 0  # its step
        self._asked_to_stop = False

    def last(self) -> tuple[int, Path | None]:
        """The step and the path of the newest checkpoint that is whole; -1 and None without any.

        Those that are newer and damaged are removed: the run makes them again. Every rank calls it.
        Raises UsageError if all of them are damaged.
        """
        expected = on_rank_zero(self._expected)
        damaged: list[Path] = []
        for step, path in reversed(on_rank_zero(lambda: by_step(self.folder)).items()):
            # The newest first. Without its checksums nobody knows whether one is whole.
            if path.name in expected and expected[path.name] == _checksums(path):
                if damaged and rank() == 0:
                    names = ", ".join(map(str, damaged))
                    warnings.warn(
                        f"damaged, and removed: {names}; continuing from {path}", stacklevel=2
                    )
                    for checkpoint in damaged:
                        remove(checkpoint)
                self._begins_at = step
                return step, path
            damaged.append(path)
        if damaged:
            raise UsageError(f"{damaged[0]} is damaged, and there is no other: {ADVICE}")
        return -1, None

    def _expected(self) -> dict[str, Any]:
        path = self.folder / CHECKSUMS
        return read_own(path, lambda text: dict(json.loads(text))) if path.exists() else {}

    @contextmanager
    def deferring_sigterm(self) -> Iterator[None]:
        """Record SIGTERM for an orderly stop; after a signal, the handler stays installed."""
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            yield
        finally:
            if not self._asked_to_stop:
                signal.signal(signal.SIGTERM, before)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Check that Lightning is where the run stopped, and replace its signal handler."""
        # A checkpoint that was renamed, or copied from another run, would continue elsewhere.
        if trainer.global_step != self._begins_at:
            raise ValueError(f"it is of step {trainer.global_step}")
        self.has_begun = True
        # Lightning's own handler communicates with the other ranks.
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: Any) -> None:
        # Nothing else: a signal may come in the middle of a collective, or of a file.
        self._asked_to_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop after this step if asked to, unless it is followed by an evaluation anyway."""
        due = trainer.global_step % self.evaluate_every == 0
        if not due and trainer.global_step < trainer.max_steps and self.any_asked_to_stop():
            self.on_validation_end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save after the evaluation, so that a resumed run does not have to repeat it."""
        self._save(trainer)
        if trainer.global_step < trainer.max_steps and self.any_asked_to_stop():
            raise PreemptedError(f"stopped by SIGTERM after step {trainer.global_step}")

    def any_asked_to_stop(self) -> bool:
        """Whether any process was asked to stop; all must stop at the same step, or would hang."""
        return any_rank(self._asked_to_stop)

    def _save(self, trainer: pl.Trainer) -> None:
        path = self.folder / step_name(trainer.global_step)
        unfinished = self.folder / "unfinished"

        def begin() -> None:
            self.folder.mkdir(exist_ok=True)
            remove(unfinished)

        def finish() -> None:
            # Checksums come first: a checkpoint that has its name has its checksums.
            kept = {n: c for n, c in self._expected().items() if (self.folder / n).exists()}
            content = json.dumps({**kept, path.name: checksums}, indent=1)
            write_atomically(self.folder / CHECKSUMS, content)
            unfinished.rename(path)
            for checkpoint in [*by_step(self.folder).values()][:-_KEPT]:
                remove(checkpoint)

        on_rank_zero(begin)
        try:
            trainer.save_checkpoint(unfinished, weights_only=False)  # the optimizer's state, too
        except BaseException as error:  # a full disk, or Ctrl-C
            if rank() == 0:
                remove(unfinished)
            raise _cause(error, path) from None
        checksums = _checksums(unfinished)
        on_rank_zero(finish)


class CheckpointIO(TorchCheckpointIO):
    """Writes checkpoints directly; Lightning goes through memory and a temporary folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        with open(path, "wb") as file:
            torch.save(checkpoint, file)


def _cause(error: BaseException, path: Path) -> BaseException:
    """The full disk, or Ctrl-C, because of which a checkpoint could not be written."""
    # A sharded one is written by all ranks; torch raises the errors of all on each of them.
    if isinstance(error, CheckpointException):
        number, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        reason = getattr(_cause(failure, path), "strerror", None) or failure
        return TrainingError(
            f"process {number}: {one_line(reason)}: {path}; what was finished is kept, continue "
            "with --resume"
        )
    # torch raises another error when it closes the archive that it could not write.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
        cause = cause.__context__
    if isinstance(cause, OSError):
        cause.filename = str(path)  # the unfinished one is gone
    return cause or error


def _checksums(checkpoint: Path) -> dict[str, str]:
    """The checksum of each of its files, by name; the ranks share the work, and each gets all."""
    is_folder = checkpoint.is_dir()
    files = on_rank_zero(lambda: sorted(checkpoint.iterdir()) if is_folder else [checkpoint])
    own = files[rank() :: world_size()]
    # A single file has no name, as it is called `unfinished` when it is written; a pipe or a folder
    # in the place of one has no checksum, so that the checkpoint is damaged.
    by_rank = on_every_rank(
        lambda: {p.name if is_folder else "": checksum(p) if p.is_file() else "" for p in own}
    )
    return {name: value for sums in by_rank for name, value in sums.items()}
