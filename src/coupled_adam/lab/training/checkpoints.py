"""The checkpoints of a run: written atomically, and verified before use; the last two are kept.

``step-N`` is a file, or a folder if the model is sharded. ``step-N.json`` next to it contains the
SHA-256 digests of its files and of the run's ``config.yaml``. Both are flushed to the disk before
the checkpoint gets its final name ``step-N``, and so is the log up to that step. A checkpoint is
removed only if its digests show that it is this run's, file by file.
"""

import contextlib
import functools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from coupled_adam import files
from coupled_adam.embeddings.weights import open_distributed
from coupled_adam.errors import PreemptedError, TrainingError, UsageError, on_all_ranks, one_line
from coupled_adam.lab.training.distributed import (
    all_gather,
    any_rank,
    on_rank_zero,
    rank,
    world_size,
)
from coupled_adam.lab.training.schemas import Manifest, read_json
from coupled_adam.runs import CHECKPOINTS, CONFIG, METRICS, by_step, step_name, step_of

_KEPT = 2  # so that a run can continue from the one before if the last one is damaged


class Checkpoints(pl.Callback):
    """Saves a checkpoint after each evaluation, and when the process is asked to stop (SIGTERM)."""

    def __init__(self, run: Path, evaluate_every: int) -> None:
        self.config = run / CONFIG
        self.metrics = run / METRICS
        self.folder = run / CHECKPOINTS
        self.evaluate_every = evaluate_every
        self.io = CheckpointIO()
        self._asked_to_stop = False
        self._resumed: Path | None = None

    def last(self, skip_damaged: bool) -> Path | None:
        """The newest checkpoint, or None if there is none. Every rank must call this.

        With ``skip_damaged`` damaged ones are renamed to ``step-N.damaged``, and the newest intact
        one is returned.

        Raises:
            UsageError: if the newest checkpoint is damaged or belongs to another run.
        """
        while True:
            newest, before = on_rank_zero(self._newest)
            reason = None if newest is None else self._damage(newest)
            if newest is None or reason is None:
                self._resumed = newest
                return newest
            if before is None or not skip_damaged:
                advice = f"remove {self.folder} to start from the beginning"
                if before is not None:
                    advice = f"--skip-damaged sets it aside, and continues from {before.name}"
                raise on_all_ranks(UsageError(f"{newest} {reason}: {advice}"))
            on_rank_zero(functools.partial(_set_aside, newest))

    @contextmanager
    def deferring_sigterm(self) -> Iterator[None]:
        """Record SIGTERM for an orderly stop; after a signal, the handler stays installed."""
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            yield
        finally:
            if not self._asked_to_stop:
                signal.signal(signal.SIGTERM, before)

    @contextmanager
    def explaining_content(self) -> Iterator[None]:
        """Until the first step is made, blame an error on the content of the checkpoint.

        Its digests show that it is as it was written, but not that this program wrote it.

        Raises:
            UsageError: if it cannot be continued from.
        """
        try:
            yield
        # These say themselves what is wrong, and that is not the checkpoint.
        except (UsageError, TrainingError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except (Exception, CheckpointException) as error:
            if self._resumed is None:
                raise
            raise on_all_ranks(
                UsageError(
                    f"{self._resumed} cannot be used ({type(error).__name__}: {one_line(error)}): "
                    "remove it to continue from the one before it, or from the beginning"
                )
            ) from error

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Check what was restored; replace Lightning's signal handler, which communicates."""
        signal.signal(signal.SIGTERM, self._stop)
        if self._resumed is None:
            return
        # These errors are raised within explaining_content, which names the checkpoint.
        if trainer.global_step != step_of(self._resumed):
            raise ValueError(f"it is of step {trainer.global_step}")
        optimizer = trainer.optimizers[0]
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if not state or not 1 <= state.get("step", 1) <= trainer.global_step:
                    raise ValueError("a parameter has no optimizer state, or one of another step")

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._asked_to_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop after this step if asked to, unless it is followed by an evaluation anyway."""
        self._resumed = None
        due = trainer.global_step % self.evaluate_every == 0
        if not due and trainer.global_step < trainer.max_steps and self.any_asked_to_stop():
            self._save(trainer)
            raise self._preempted(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Save after the evaluation, so that a resumed run does not have to repeat it."""
        self._save(trainer)
        if trainer.global_step < trainer.max_steps and self.any_asked_to_stop():
            raise self._preempted(trainer)

    def any_asked_to_stop(self) -> bool:
        """Whether any process was asked to stop; all must stop at the same step, or would hang."""
        return any_rank(self._asked_to_stop)

    def _preempted(self, trainer: pl.Trainer) -> PreemptedError:
        return PreemptedError(f"stopped by SIGTERM after step {trainer.global_step}")

    def _save(self, trainer: pl.Trainer) -> None:
        path = self.folder / step_name(trainer.global_step)

        def begin() -> Path:
            files.make_folder(self.folder)
            return files.temporary_path(path)

        # All ranks write under this name, and all of them know it if that fails.
        temporary = on_rank_zero(begin)
        try:
            try:
                trainer.save_checkpoint(temporary)
            except RuntimeError as error:
                raise _cause(error) from None
            on_rank_zero(self.io.check)
            digests = _digests(temporary, path.name, flush=True)
            on_rank_zero(lambda: self._commit(temporary, path, digests))
        except BaseException as error:
            # Whatever ended it, a full disk or Ctrl-C, earlier checkpoints stay as they are.
            if rank() == 0:
                files.remove(temporary)
            if isinstance(error, OSError):
                error.filename = str(path)  # the temporary one is gone
            if isinstance(error, CheckpointException):  # torch raises it on every rank
                raise _of_any_rank(error, path) from None
            raise

    def _commit(self, temporary: Path, path: Path, digests: dict[str, str]) -> None:
        """Give a checkpoint its name once it is on the disk, and remove the oldest one."""
        # In this order a crash leaves a whole checkpoint, with its digests and its part of the
        # log, or none of this name.
        if temporary.is_dir():
            files.sync_folder(temporary)
        files.sync(self.metrics)
        files.sync_folder(self.metrics.parent)
        content: Manifest = {"config": files.file_digest(self.config), "files": digests}
        files.write_atomically(_manifest(path), json.dumps(content, indent=2))
        temporary.rename(path)
        files.sync_folder(self.folder)
        saved = [*filter(self._own_files, by_step(self.folder).values())]
        for checkpoint in saved[:-_KEPT]:
            self._remove(checkpoint)

    def _newest(self) -> tuple[Path | None, Path | None]:
        """The last two checkpoints, newest first; also removes digests without a checkpoint."""
        # Digests are written first, and removed last: a crash may leave them alone.
        for manifest in by_step(self.folder, ".json").values():
            path = manifest.with_suffix("")
            if not os.path.lexists(path) and self._own_files(path):
                manifest.unlink()
        before, newest = [None, None, *by_step(self.folder).values()][-2:]
        return newest, before

    def _own_files(self, path: Path) -> dict[str, str]:
        """The digests of a checkpoint's files by name; none if it is not known to be this run's."""
        try:
            manifest = read_json(_manifest(path), Manifest)
        except (OSError, ValueError):
            return {}
        return manifest["files"] if manifest["config"] == files.file_digest(self.config) else {}

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, as the end of a sentence; None if it is intact."""
        digests = _digests(path, path.name)
        try:
            manifest = read_json(_manifest(path), Manifest)
        except OSError:
            return f"is not of this run (there is no {_manifest(path).name})"
        except ValueError:
            return f"cannot be checked ({_manifest(path).name} is damaged)"
        if manifest["config"] != files.file_digest(self.config):
            return "is not of this run (it was made with another config.yaml)"
        damaged = sorted({name for name, _ in manifest["files"].items() ^ digests.items()})
        if damaged:
            return f"is damaged ({', '.join(damaged)})"
        try:
            if path.is_dir():  # checksums that come with it do not show who wrote it
                open_distributed(path)
        except ValueError as error:
            return f"cannot be used ({error})"
        return None

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint of this run, but nothing that others have put into its folder."""
        own_files = self._own_files(path)
        # In reverse, what is in a folder comes before the folder.
        for entry in (*sorted(path.rglob("*"), reverse=True), path):
            if entry.is_dir():
                with contextlib.suppress(OSError):  # it is not empty
                    entry.rmdir()
            elif entry == path or entry.relative_to(path).as_posix() in own_files:
                entry.unlink()
        if not path.exists():
            _manifest(path).unlink(missing_ok=True)


class CheckpointIO(TorchCheckpointIO):
    """Writes checkpoints directly; Lightning goes through memory and a temporary folder."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; if that fails, :meth:`check` raises, when no rank waits for this."""
        self._failure = None
        try:
            with open(path, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            self._failure = _cause(error)

    def check(self) -> None:
        """Raise the error with which writing ended."""
        if self._failure is not None:
            raise self._failure


def _cause(error: BaseException) -> BaseException:
    """The full disk, or Ctrl-C, behind an error that torch raises when it closes its archive."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
        cause = cause.__context__
    return cause or error


def _of_any_rank(error: CheckpointException, path: Path) -> TrainingError:
    """What went wrong on the first rank that failed, for all ranks to raise."""
    number, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    cause = _cause(failure)
    reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else cause
    return on_all_ranks(
        TrainingError(
            f"process {number}: {one_line(reason)}: {path}; what was finished is kept, continue "
            "with --resume"
        )
    )


def _manifest(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _set_aside(path: Path) -> None:
    """Give a checkpoint that cannot be used a name that is not taken for a checkpoint's."""
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    with contextlib.suppress(FileNotFoundError):
        _manifest(path).rename(_manifest(aside))


def _digests(path: Path, name: str, flush: bool = False) -> dict[str, str]:
    """The SHA-256 digests of a checkpoint's files, of which every rank reads a share.

    Args:
        name: the key of its digest if the checkpoint is a file; otherwise names are relative to it.
        flush: whether to flush each file to the disk first.
    """
    names = {path: name}
    if path.is_dir():
        inner = sorted(file for file in path.rglob("*") if file.is_file())
        names = {file: str(file.relative_to(path)) for file in inner}
    digests = {}
    for file in [*names][rank() :: world_size()]:
        if flush:
            files.sync(file)
        digests[names[file]] = files.file_digest(file)
    return {name: digest for share in all_gather(digests) for name, digest in share.items()}
