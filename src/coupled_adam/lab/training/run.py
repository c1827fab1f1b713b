"""One run: a recipe, an arm and a seed, trained into a run folder.

A run folder holds ``config.yaml`` (what was run), ``environment.json`` (on what), ``metrics.jsonl``
(a line for each log), ``unigram_counts.npy`` (of the training tokens), ``second_moments/`` (of
AdamW, at each evaluation), ``checkpoints/`` (the last two), and ``model/`` (in Hugging Face format,
when training is finished).
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import platform
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import PreTrainedModel
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from coupled_adam.embeddings import analyze
from coupled_adam.embeddings.monitor import full_tensor
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.files import sole_writer, write_atomically
from coupled_adam.lab import PreemptedError, TrainingError
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe, read_yaml
from coupled_adam.lab.training.callbacks import MetricsFile, ProgressBar
from coupled_adam.lab.training.checkpoints import CheckpointIO, Checkpoints
from coupled_adam.lab.training.distributed import launcher, nodes, on_rank_zero, rank, world_size
from coupled_adam.lab.training.environment import changes, environment
from coupled_adam.text.token_files import Tokens
from coupled_adam.text.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Machine:
    """How a run is done here. It changes results by rounding only, and may change on resume.

    device: ``"cpu"``, ``"cuda"`` or ``"mps"``.
    strategy: how several processes share the work: ``"ddp"``, or ``"fsdp2"``, which shards model
        and optimizer.
    micro_batch_size: sequences at a time in each process; gradients are accumulated over them. None
        is a process's whole share of the batch.
    compile: the model goes through ``torch.compile``.
    log: beside ``metrics.jsonl``.
    skip_damaged: remove checkpoints that are damaged, and continue from the newest that is whole.
    """

    device: str = "cpu"
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    micro_batch_size: int | None = None
    compile: bool = False
    log: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    skip_damaged: bool = False


def train(
    recipe: Recipe, arm: str, seed: int, corpus: Corpus, folder: Path, machine: Machine
) -> None:
    """Train one model into ``folder``; a folder with a checkpoint of the same run is continued.

    On one CPU the result of a continued run is that of an uninterrupted one, bit for bit.

    Raises:
        UsageError: the folder holds another run, or one of another text, or is in use by another
            process; its last checkpoint is damaged; the processes cannot share the batch.
        TrainingError: a loss or gradient is not finite; the last checkpoint is kept.
        PreemptedError: SIGTERM came, and a checkpoint was written.
        KeyboardInterrupt: the user pressed Ctrl-C; the last checkpoint is kept.
        OSError: the disk is full, or the folder cannot be written; the last checkpoint is kept.
    """
    training = recipe.training
    if training.batch_size % world_size():
        raise UsageError(
            f"training.batch_size={training.batch_size} cannot be shared by {world_size()} "
            "processes: start a number that divides it"
        )
    if machine.device == "cpu":
        keep_freed_memory()
    with contextlib.ExitStack() as held:
        on_rank_zero(lambda: _claim(folder, recipe, arm, seed, corpus, held))
        if not on_rank_zero((folder / "model").exists):
            checkpoints = Checkpoints(folder, training.evaluate_every)
            held.enter_context(checkpoints.taking_sigterm())
            _train(recipe, arm, seed, corpus, folder, machine, checkpoints)


def _train(
    recipe: Recipe,
    arm: str,
    seed: int,
    corpus: Corpus,
    folder: Path,
    machine: Machine,
    checkpoints: Checkpoints,
) -> None:
    training = recipe.training
    last = checkpoints.last(machine.skip_damaged)
    if last is not None:
        on_rank_zero(lambda: _record_resumption(folder, checkpoints.step(last)))

    pl.seed_everything(seed, verbose=False)
    model = build_model(recipe)
    if training.precision == "64-true":
        model.double()
    model.config.bos_token_id = model.config.eos_token_id = corpus.end_of_text
    module = LanguageModel(model, recipe, arm, machine, folder)
    batches = Batches(corpus.tokens("train"), recipe, seed)
    with warnings.catch_warnings():
        # Batches come from a memory map: there is nothing for worker processes to do.
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        # Lightning 2.6 uses a name that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        trainer = pl.Trainer(
            accelerator="gpu" if machine.device == "cuda" else machine.device,
            strategy=_strategy(machine),
            devices=world_size() // nodes(),
            num_nodes=nodes(),
            # Token ids need no conversion, and Lightning shards no model in float64.
            precision="32-true" if training.precision == "64-true" else training.precision,
            max_steps=recipe.steps,
            val_check_interval=min(training.evaluate_every, recipe.steps),
            log_every_n_steps=1,  # the module logs by itself, see on_train_batch_end
            num_sanity_val_steps=0,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            logger=_loggers(machine, folder, -1 if last is None else checkpoints.step(last)),
            callbacks=[checkpoints, ProgressBar(f"{arm}, seed {seed}")],
            plugins=[CheckpointIO(), *filter(None, [launcher()])],
        )
        try:
            trainer.fit(
                module,
                batches,
                held_out_share(corpus.tokens("valid"), recipe),
                ckpt_path=last,
                weights_only=True,
            )
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None

    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    on_rank_zero(lambda: _save_model(model, whole, corpus, folder / "model"))
    if checkpoints.any_told_to_stop():
        raise PreemptedError("stopped by SIGTERM at the end of a run")


class LanguageModel(pl.LightningModule):
    """A causal language model with the optimizer and schedule of its arm and recipe."""

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, arm: str, machine: Machine, folder: Path
    ) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.arm = arm
        self.machine = machine
        self.folder = folder
        self.shown: dict[str, float] = {}
        self._train_loss = torch.zeros(())
        self._grad_norm = torch.zeros(())
        self._valid = torch.zeros(2)
        self._clock = (0, 0.0)  # step and time of the last log
        self._evaluated_since = 0.0

    def configure_model(self) -> None:
        """Compile and shard the model, once."""
        if self.machine.compile:
            self.model.compile()
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.model, self.trainer.strategy, self.recipe.training.precision)

    def training_step(self, batch: Tensor) -> Tensor:
        """One process's share of a batch, [sequences, length + 1], by micro-batches.

        All backward passes but the last are made here; processes exchange gradients in the last.
        """
        size = self.machine.micro_batch_size or len(batch)
        *first, last = batch.split(size)
        self.trainer.optimizers[0].zero_grad()
        self._train_loss = torch.zeros((), device=batch.device)
        for part in first:
            loss = next_token_loss(self.model, part) * (len(part) / len(batch))
            loss.backward()
            self._train_loss += loss.detach()
        loss = next_token_loss(self.model, last) * (len(last) / len(batch))
        self._train_loss += loss.detach()
        return loss

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Done before the first micro-batch: Lightning would do it after all but the last."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip the norm of all gradients; refuse a step with one that is not finite."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, self.recipe.training.max_grad_norm, norm)
        self._grad_norm = full_tensor(norm)
        if torch.isfinite(self._grad_norm):
            return
        # Found in what all ranks have: if one stopped for its own loss, the others would wait.
        loss = self._train_loss.item()
        what = f"the norm of the gradient is {self._grad_norm.item()}"
        if not math.isfinite(loss):
            what = f"the loss is {loss}"
        raise TrainingError(
            f"{self.folder}: {what} at step {self.global_step + 1}; the last checkpoint is kept. "
            "A lower training.lr or a longer training.warmup may help"
        )

    def on_train_start(self) -> None:
        """Where the embeddings start from."""
        self._clock = (self.global_step, time.perf_counter())
        if self.global_step == 0:
            self._log(self.measures(), 0)

    def on_train_batch_end(self, *_: Any) -> None:
        """Log every ten steps."""
        step = self.global_step
        if step % 10:
            return
        loss = self.trainer.strategy.reduce(self._train_loss, reduce_op="mean")
        now = time.perf_counter()
        tokens = (step - self._clock[0]) * self.recipe.tokens_per_step
        metrics = {
            "train_loss": float(loss),
            "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            "grad_norm": float(self._grad_norm),
            "tokens_per_second": tokens / (now - self._clock[1]),
        }
        self._clock = (step, now)
        self._log(metrics, step)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Sum the losses of this process's share of the held-out text."""
        blocks, counted = batch
        losses = sequence_losses(self.model, blocks)
        self._valid += torch.stack([losses[counted].sum(), counted.sum()])

    def on_validation_epoch_start(self) -> None:
        """Start from zero."""
        self._evaluated_since = time.perf_counter()
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        self._valid = torch.zeros(2, dtype=wide, device=self.device)

    def on_validation_epoch_end(self) -> None:
        """Log the loss, and where the embeddings are now; keep AdamW's second moments."""
        total, sequences = self.trainer.strategy.reduce(self._valid, reduce_op="sum").tolist()
        self._log({"valid_loss": total / sequences, **self.measures()}, self.global_step)
        self._save_second_moment()

    def on_validation_end(self) -> None:
        """Evaluation and checkpoint do not count in tokens per second."""
        step, since = self._clock
        self._clock = (step, since + time.perf_counter() - self._evaluated_since)

    def measures(self) -> dict[str, float]:
        """The measures of the output embeddings."""
        matrix = full_tensor(output_embeddings(self.model))
        if rank() > 0:
            return {}
        report = analyze(matrix)
        names = ("isotropy", "mean_norm", "mean_norm_ratio", "condition")
        return {name: getattr(report, name) for name in names}

    def configure_optimizers(self) -> Any:
        """The arm's optimizer, with the schedule stepped at every step."""
        recipe = self.recipe
        optimizer = recipe.arm(self.arm).optimizer(self.model, recipe.training)
        scheduler = schedule(optimizer, recipe)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.shown.update(metrics)
        with _ctrl_c_waits():
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step)

    def _save_second_moment(self) -> None:
        """The mean over H of AdamW's second moment, bias-corrected: one number for each token."""
        embedding = output_embeddings(self.model)
        optimizer = self.trainer.optimizers[0]
        moment = optimizer.state.get(embedding, {}).get("exp_avg_sq")
        if moment is None or moment.shape != embedding.shape:
            return
        moment = full_tensor(moment)
        if rank() > 0:
            return
        correction = 1 - self.recipe.training.betas[1] ** self.global_step
        values = moment.double().mean(1).cpu().numpy() / correction
        path = self.folder / "second_moments" / f"step-{self.global_step}.npy"
        path.parent.mkdir(exist_ok=True)
        _save_array(path, values)


class Batches:
    """The batches of a run: this process's share of each, [sequences, length + 1] token ids.

    The blocks come in a new order in each epoch, from the seed: the same for every arm, whatever
    the number of processes and the micro-batch. The state is the number of batches handed out, so
    that a continued run goes on where it was.
    """

    def __init__(self, tokens: Tokens | NDArray[Any], recipe: Recipe, seed: int) -> None:
        self.tokens = tokens
        self.length = recipe.training.sequence_length
        self.batch_size = recipe.training.batch_size
        self.steps = recipe.steps
        self.seed = seed
        self.position = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        blocks = (len(self.tokens) - 1) // self.length
        per_epoch = blocks // self.batch_size
        share = self.batch_size // world_size()
        shuffled = -1
        order: NDArray[Any] = np.empty(0)
        while self.position < len(self):
            epoch, batch = divmod(self.position, per_epoch)
            if epoch != shuffled:
                order = np.random.default_rng((self.seed, epoch)).permutation(blocks)
                shuffled = epoch
            first = batch * self.batch_size + rank() * share
            starts = order[first : first + share] * self.length
            ids = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
            self.position += 1  # before the batch is used: the state is saved after its step
            yield torch.from_numpy(ids.astype(np.int64))

    def state_dict(self) -> dict[str, int]:
        """For Lightning's checkpoints."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From Lightning's checkpoints."""
        self.position = state["position"]


def held_out_share(tokens: Tokens | NDArray[Any], recipe: Recipe) -> DataLoader[Any]:
    """This process's share of a held-out split: blocks [batch, length + 1], and which count.

    All processes get as many batches, which sharded models need: some get a block more that does
    not count.
    """
    training = recipe.training
    length, batch = training.sequence_length, training.batch_size // world_size()
    blocks = (len(tokens) - 1) // length
    if training.evaluation_batches is not None:
        blocks = min(blocks, training.evaluation_batches * training.batch_size)
    mine = np.arange(rank(), math.ceil(blocks / world_size()) * world_size(), world_size())
    starts = np.minimum(mine, blocks - 1) * length
    ids = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    dataset = TensorDataset(torch.from_numpy(ids), torch.from_numpy(mine < blocks))
    return DataLoader(dataset, batch)


def held_out_batches(
    tokens: Tokens | NDArray[Any], batch_size: int, sequence_length: int
) -> Iterator[Tensor]:
    """All whole blocks of a held-out split, in order, in batches [batch, sequence_length + 1]."""
    starts = range(0, len(tokens) - sequence_length, sequence_length)
    for first in range(0, len(starts), batch_size):
        part = starts[first : first + batch_size]
        ids = np.stack([tokens[start : start + sequence_length + 1] for start in part])
        yield torch.from_numpy(ids.astype(np.int64))


def next_token_loss(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each token of [batch, length + 1] but the first."""
    return sequence_losses(model, blocks).mean()


def sequence_losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    """The same for each sequence, [batch]."""
    return losses_of_logits(model(input_ids=blocks[:, :-1], use_cache=False).logits, blocks)


def losses_of_logits(logits: Tensor, blocks: Tensor) -> Tensor:
    """The same, from the logits [batch, length, V]."""
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, blocks[:, 1:].flatten(), reduction="none")
    return losses.view(len(blocks), -1).mean(1)


def schedule(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    """The recipe's learning-rate schedule, to be stepped after each step of the optimizer."""
    training, warmup, steps = recipe.training, recipe.warmup_steps, recipe.steps
    if training.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if training.schedule == "wsd":
        # That of transformers warms up from final_lr, not from zero as the others.
        decay = round(training.decay * steps)

        def factor(step: int) -> float:
            rising = step / warmup if step < warmup else 1.0
            gone = max(0, step - (steps - decay)) / max(1, decay)
            return min(rising, 1.0 - (1.0 - training.final_lr) * gone)

        return LambdaLR(optimizer, factor)
    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, steps, min_lr_rate=training.final_lr
    )


def shard(model: PreTrainedModel, strategy: ModelParallelStrategy, precision: str) -> None:
    """FSDP2: each block, then the rest with the embeddings, over all processes."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = strategy.device_mesh["data_parallel"]
    (blocks,) = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def output_embeddings(model: PreTrainedModel) -> Tensor:
    """The matrix [V, H] that gives the logits; the optimizer's own, also between its uses."""
    if isinstance(model, FSDPModule):
        model.reshard()
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    return weight


def keep_freed_memory() -> None:
    """Let this process use its memory again instead of giving it back to the system.

    glibc gives each block of more than 32 MB back as soon as it is freed. The logits are such
    blocks: to get them anew in every step, page by page, is a third of a small model's time.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)  # except for what the runs before have left
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 2**31 - 1)


def _strategy(machine: Machine) -> Any:
    if machine.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)
    return "ddp" if world_size() > 1 else "auto"


def _loggers(machine: Machine, folder: Path, step: int) -> list[Logger]:
    loggers: list[Logger] = [MetricsFile(folder / "metrics.jsonl", step)]
    if "tensorboard" in machine.log:
        loggers.append(TensorBoardLogger(folder, "tensorboard", "", purge_step=step + 1))
    if "wandb" in machine.log:
        name = f"{folder.parent.name}/{folder.name}"
        loggers.append(WandbLogger(name, folder, project="coupled-adam", id=name.replace("/", "-")))
    return loggers


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """An interrupt takes effect at the end of the block.

    TensorBoard and wandb write in threads. Interrupted within a lock that it shares with them, this
    thread would never give it back, and the end of the run would wait for it forever.
    """
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _claim(
    folder: Path,
    recipe: Recipe,
    arm: str,
    seed: int,
    corpus: Corpus,
    held: contextlib.ExitStack,
) -> None:
    """Make the run folder, or see that it is this run's; hold it as its only writer."""
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(sole_writer(folder))
    path = folder / "config.yaml"
    config = {"arm": arm, "seed": seed, "recipe": recipe.only(arm, seed).to_dict()}
    if path.exists():
        if read_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path)) != config:
            raise UsageError(
                f"{folder} holds another run, see its config.yaml: choose another --out"
            )
        _check_text(folder, corpus)
        return
    facts = {**environment(), "corpus": corpus.facts, "processes": world_size()}
    write_atomically(folder / "environment.json", json.dumps(facts, indent=2))
    _save_array(folder / "unigram_counts.npy", corpus.unigram_counts())
    write_atomically(path, yaml.safe_dump(config, sort_keys=False))


def _check_text(folder: Path, corpus: Corpus) -> None:
    """Raise UsageError unless the run was begun with this text, and these tokens of it."""
    began = _recorded(folder).get("corpus", {})
    try:
        counts = read_array(folder / "unigram_counts.npy")
    except ValueError as error:
        raise UsageError(f"{error}: remove {folder} to begin the run again") from None
    now = corpus.facts["fingerprint"], corpus.facts["tokens"]
    if (began.get("fingerprint"), began.get("tokens")) != now or not np.array_equal(
        counts, corpus.unigram_counts()
    ):
        raise UsageError(
            f"{folder} was begun with another text than {corpus.facts['source']} holds now: put "
            "the old text there to continue, or choose another --out"
        )


def _record_resumption(folder: Path, step: int) -> None:
    """Note in ``environment.json`` where the run goes on; warn of what may change its numbers."""
    recorded = _recorded(folder)
    before = [recorded, *recorded.get("resumed", [])][-1]
    now = {**environment(), "processes": world_size(), "step": step}
    recorded["resumed"] = [*recorded.get("resumed", []), now]
    write_atomically(folder / "environment.json", json.dumps(recorded, indent=2))
    different = changes(before, now)
    if different:
        warnings.warn(
            f"{folder} goes on at step {step} in another environment, which may change its "
            f"numbers: {', '.join(different)}",
            stacklevel=2,
        )


def _recorded(folder: Path) -> dict[str, Any]:
    path = folder / "environment.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError):
        raise UsageError(f"{path} is damaged: remove {folder} to begin the run again") from None
    return content


def _save_model(
    model: PreTrainedModel, weights: dict[str, Any], corpus: Corpus, folder: Path
) -> None:
    temporary = folder.with_name("model.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
    # Gathered from shards, a tied matrix comes twice: its second name is not a parameter's.
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    own = {name: value for name, value in weights.items() if name in names}
    model.save_pretrained(temporary, state_dict=own)
    if corpus.tokenizer_folder is not None:
        load_tokenizer(corpus.tokenizer_folder).save_pretrained(temporary)
    temporary.rename(folder)


def _save_array(path: Path, values: NDArray[Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, values)
    temporary.replace(path)
