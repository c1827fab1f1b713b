"""The checkpoints of a run: written atomically, and verified before use; the last two are kept.

``step-N`` is a file, or a folder if the model is sharded. ``step-N.json`` next to it contains the
SHA-256 digests of its files and of the run's ``config.yaml``. Both are flushed to the disk before
the checkpoint gets its final name ``step-N``.
"""

import functools
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from coupled_adam.embeddings.weights import check_distributed
from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically
from coupled_adam.lab.training.distributed import (
    all_gather,
    any_rank,
    on_rank_zero,
    rank,
    world_size,
)
from coupled_adam.lab.training.errors import PreemptedError

_KEPT = 2  # so that a run can continue from the one before if the last one is damaged
_CHUNK = 2**22


class Checkpoints(pl.Callback):
    """Saves a checkpoint after each evaluation, and when the process is asked to stop (SIGTERM)."""

    def __init__(self, run: Path, evaluate_every: int) -> None:
        self.config = run / "config.yaml"
        self.folder = run / "checkpoints"
        self.evaluate_every = evaluate_every
        self._asked_to_stop = False

    def last(self, skip_damaged: bool) -> Path | None:
        """The newest checkpoint, or None if there is none. Every rank must call this.

        Args:
            skip_damaged: whether to remove damaged checkpoints and return the newest intact one.

        Raises:
            UsageError: if the newest checkpoint is damaged or belongs to another run.
        """
        while True:
            newest, before = on_rank_zero(self._newest)
            reason = None if newest is None else self._damage(newest)
            if newest is None or reason is None:
                return newest
            if before is None:
                way = f"remove {self.folder} to start from the beginning"
            else:
                way = f"--skip-damaged removes it, and continues from {before.name}"
            if before is None or not skip_damaged:
                raise UsageError(f"{newest} {reason}: {way}")
            on_rank_zero(functools.partial(self._remove, newest))

    @staticmethod
    def step(path: Path) -> int:
        """The number of steps made before the checkpoint."""
        return int(path.name.removeprefix("step-"))

    @contextmanager
    def deferring_sigterm(self) -> Iterator[None]:
        """Record SIGTERM for an orderly stop; after a signal, the handler stays installed."""
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            yield
        finally:
            if not self._asked_to_stop:
                signal.signal(signal.SIGTERM, before)

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Replace Lightning's signal handler, which communicates with other processes."""
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._asked_to_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop after this step if asked to, unless it is followed by an evaluation anyway."""
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
        path = self.folder / f"step-{trainer.global_step}"
        temporary = path.with_name(f"{path.name}.tmp")
        trainer.save_checkpoint(temporary)
        digests = _digests(temporary, sync=True)

        def finish() -> None:
            content = {"config": self._config(), "files": digests}
            write_atomically(_manifest(path), json.dumps(content, indent=2))
            temporary.rename(path)
            for other in sorted(self._all(), key=self.step)[:-_KEPT]:
                self._remove(other)

        on_rank_zero(finish)

    def _all(self) -> list[Path]:
        names = self.folder.glob("step-*")  # among them .tmp, .json, and what others put there
        return [path for path in names if path.name.removeprefix("step-").isdecimal()]

    def _newest(self) -> tuple[Path | None, Path | None]:
        """The last two checkpoints, newest first; also removes leftovers of killed processes."""
        for path in self.folder.glob("*.tmp"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.folder.glob("*.json"):
            if not path.with_suffix("").exists():
                path.unlink()
        before, newest = [None, None, *sorted(self._all(), key=self.step)][-2:]
        return newest, before

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, as the end of a sentence; None if it is intact."""
        found = _digests(path)
        try:
            content = json.loads(_manifest(path).read_text(encoding="utf-8"))
            config, files = content["config"], dict(content["files"])
        except OSError:
            return f"is not of this run (there is no {_manifest(path).name})"
        except (ValueError, KeyError, TypeError):
            return f"cannot be checked ({_manifest(path).name} is damaged)"
        if config != self._config():
            return "is not of this run (it was made with another config.yaml)"
        damaged = sorted(name for name in {**files, **found} if files.get(name) != found.get(name))
        if damaged:
            return f"is damaged ({', '.join(damaged)})"
        try:
            if path.is_dir():  # checksums that come with it do not show who wrote it
                check_distributed(path)
        except ValueError as error:
            return f"cannot be used ({error})"
        return None

    def _config(self) -> str:
        return hashlib.sha256(self.config.read_bytes()).hexdigest()

    @staticmethod
    def _remove(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        _manifest(path).unlink(missing_ok=True)


class CheckpointIO(TorchCheckpointIO):
    """Writes checkpoints directly; Lightning goes through memory and a temporary folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; leave nothing behind if that fails."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            Path(path).unlink(missing_ok=True)
            # On a full disk torch raises a second error while it closes its archive.
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _manifest(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _digests(path: Path, sync: bool = False) -> dict[str, str]:
    """The SHA-256 digests of a checkpoint's files, by name; every rank reads a share of the files.

    Args:
        sync: whether to flush each file to the disk first.
    """
    names = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    found = {}
    for name in names[rank() :: world_size()] if path.is_dir() else [""][rank() :]:
        digest = hashlib.sha256()
        with (path / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            while block := file.read(_CHUNK):
                digest.update(block)
        found[name or path.name.removesuffix(".tmp")] = digest.hexdigest()
    return {name: digest for part in all_gather(found) for name, digest in part.items()}
