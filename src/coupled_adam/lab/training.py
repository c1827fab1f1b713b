"""One run: a recipe, an arm and a seed, trained into a run folder.

A run folder holds ``config.yaml`` (what was run), ``environment.json`` (on what), ``metrics.jsonl``
(a line for each log), ``checkpoints/`` (the last one), and ``model/`` (in Hugging Face format, when
training is finished).
"""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_only
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, GPT2LMHeadModel, get_cosine_with_min_lr_schedule_with_warmup

from coupled_adam.embeddings import analyze
from coupled_adam.lab import UsageError
from coupled_adam.lab.arms import ARMS
from coupled_adam.lab.corpus import Corpus
from coupled_adam.lab.environment import environment
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe, Training


def train(
    recipe: Recipe, arm: str, seed: int, corpus: Corpus, folder: Path, accelerator: str = "auto"
) -> None:
    """Train one model into ``folder``; a folder with a checkpoint of the same run is continued.

    On one CPU the result of a continued run is that of an uninterrupted one, bit for bit.

    Args:
        accelerator: as in ``lightning.pytorch.Trainer``.

    Raises:
        UsageError: the folder holds another run.
        KeyboardInterrupt: the user pressed Ctrl-C; the last checkpoint is kept.
    """
    _claim(folder, {"arm": arm, "seed": seed, "recipe": recipe.to_dict()})
    if (folder / "model").exists():
        return
    checkpoints = folder / "checkpoints"
    last = max(checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    step = 0 if last is None else _checkpoint_step(last)

    pl.seed_everything(seed, verbose=False)
    training = recipe.training
    model = build_model(recipe.model, training.sequence_length)
    batches = Batches(corpus.tokens("train"), training, seed)
    with warnings.catch_warnings():
        # Batches come from a memory map: there is nothing for worker processes to do.
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        # Lightning 2.6 uses a name that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            max_steps=training.steps,
            gradient_clip_val=training.max_grad_norm,
            val_check_interval=min(training.evaluate_every, training.steps),
            log_every_n_steps=10,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            logger=MetricsFile(folder / "metrics.jsonl", step),
            callbacks=[
                # Saved after each evaluation: a continued run has none to make up for.
                ModelCheckpoint(checkpoints, "step-{step}", auto_insert_metric_name=False),
                ProgressBar(f"{arm}, seed {seed}"),
            ],
            plugins=[CheckpointIO()],
        )
        try:
            trainer.fit(
                LanguageModel(model, arm, training),
                batches,
                held_out_batches(corpus.tokens("valid"), training),
                ckpt_path=last,
                weights_only=True,
            )
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None

    temporary = folder / "model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(corpus.tokenizer_folder).save_pretrained(temporary)
    temporary.rename(folder / "model")


class LanguageModel(pl.LightningModule):
    """A causal language model with the optimizer of an arm; warmup, then cosine."""

    def __init__(self, model: GPT2LMHeadModel, arm: str, training: Training) -> None:
        super().__init__()
        self.model = model
        self.arm = arm
        self.training_options = training

    def training_step(self, batch: Tensor) -> Tensor:
        """Cross-entropy of the next token, in nats per token."""
        loss = next_token_loss(self.model, batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """The same on held-out text."""
        loss = next_token_loss(self.model, batch[0])
        self.log("valid_loss", loss, prog_bar=True, batch_size=batch[0].numel())

    def on_validation_epoch_end(self) -> None:
        """Where the embeddings are now."""
        self.log_dict(self.measures())

    def on_train_start(self) -> None:
        """Where the embeddings start from."""
        if self.global_step == 0:
            self.loggers[0].log_metrics(self.measures(), step=-1)

    def measures(self) -> dict[str, float]:
        """The measures of the output embeddings."""
        report = analyze(self.model.lm_head.weight).to_dict()
        names = ("isotropy", "mean_norm", "mean_norm_ratio", "condition")
        return {name: report[name] for name in names}

    def configure_optimizers(self) -> Any:
        """The arm's optimizer, with the schedule stepped at every step."""
        options = self.training_options
        optimizer = ARMS[self.arm].optimizer(self.model, options)
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, options.warmup_steps, options.steps, min_lr_rate=options.final_lr
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Batches:
    """The batches of a run, [batch_size, sequence_length + 1] token ids: the same for every arm.

    The blocks come in a new order in each epoch, from the seed. The state is the number of batches
    handed out, so that a continued run goes on where it was.
    """

    def __init__(self, tokens: NDArray[Any], training: Training, seed: int) -> None:
        self.tokens = tokens
        self.training = training
        self.seed = seed
        self.position = 0

    def __len__(self) -> int:
        return self.training.steps

    def __iter__(self) -> Iterator[Tensor]:
        size, length = self.training.batch_size, self.training.sequence_length
        blocks = (len(self.tokens) - 1) // length
        per_epoch = blocks // size
        while self.position < len(self):
            epoch, batch = divmod(self.position, per_epoch)
            order = np.random.default_rng((self.seed, epoch)).permutation(blocks)
            starts = order[batch * size : (batch + 1) * size] * length
            ids = np.stack([self.tokens[start : start + length + 1] for start in starts])
            self.position += 1  # before the batch is used: the state is saved after its step
            yield torch.from_numpy(ids.astype(np.int64))

    def state_dict(self) -> dict[str, int]:
        """For Lightning's checkpoints."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From Lightning's checkpoints."""
        self.position = state["position"]


def held_out_batches(tokens: NDArray[Any], training: Training) -> DataLoader[Any]:
    """All whole blocks of a held-out split, in order, in batches [batch, sequence_length + 1]."""
    length = training.sequence_length
    starts = range(0, len(tokens) - length, length)
    ids = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    return DataLoader(TensorDataset(torch.from_numpy(ids)), training.batch_size)


def next_token_loss(model: GPT2LMHeadModel, blocks: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each token of [batch, length + 1] but the first."""
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), blocks[:, 1:].flatten())


class MetricsFile(Logger):
    """Lightning's logs as JSON lines. ``step`` counts finished steps: 0 is before the first.

    Lines after ``last_step``, which a killed run wrote after its last checkpoint, are dropped.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        super().__init__()
        self.path = path
        if path.exists():
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
        """Append a line; Lightning numbers a step from 0."""
        assert step is not None
        values = {name: value for name, value in metrics.items() if name != "epoch"}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step + 1, **values}) + "\n")

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They are in config.yaml."""


class CheckpointIO(TorchCheckpointIO):
    """Checkpoints that are whole or absent; Lightning's own are moved from another file system."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write beside the target, then rename."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


class ProgressBar(TQDMProgressBar):
    """One bar for the run, with its name instead of an epoch."""

    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10 if sys.stderr.isatty() else 100)
        self.title = title

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Name the bar."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(self.title)

    def init_validation_tqdm(self) -> Any:
        """No bar of its own for an evaluation of a second."""
        return Tqdm(disable=True)

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without Lightning's version of the run."""
        return {k: v for k, v in super().get_metrics(*args, **kwargs).items() if k != "v_num"}


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is whole or absent."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _claim(folder: Path, config: dict[str, Any]) -> None:
    """Make the run folder, or see that it is this run's."""
    path = folder / "config.yaml"
    if path.exists():
        if yaml.safe_load(path.read_text()) != config:
            raise UsageError(
                f"{folder} holds another run, see its config.yaml: choose another --out"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "environment.json", json.dumps(environment(), indent=2))
    write_atomically(path, yaml.safe_dump(config, sort_keys=False))


def _checkpoint_step(path: Path) -> int:
    step: int = torch.load(path, weights_only=True, mmap=True)["global_step"]
    return step
