"""One run: a recipe, an arm and a seed, trained into a folder."""

import contextlib
import ctypes
import math
import os
import platform
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from coupled_adam.errors import PreemptedError, TrainingError, UsageError, lacks_resources, one_line
from coupled_adam.lab.data.batches import Batches, held_out_loader
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.models import require_causal
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.checkpoints import ADVICE, CheckpointIO, Checkpoints
from coupled_adam.lab.training.distributed import launcher, on_rank_zero, rank, world_size
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.folder import claim, record_resumption, save_model
from coupled_adam.lab.training.loggers import run_loggers, truncate_log
from coupled_adam.lab.training.module import LanguageModel
from coupled_adam.lab.training.run_log import RunLog
from coupled_adam.lab.training.variant import load_variant
from coupled_adam.runs import METRICS, MODEL


def try_out(recipe: Recipe, execution: Execution, shape: tuple[int, int]) -> float:
    """Make steps of the recipe's first arm with a batch of this shape, and save the configuration.

    transformers finds some errors in ``model.config`` only then. Raises UsageError if the model
    cannot be built, trained or saved.

    Returns:
        The seconds of a step in this process, of three tried.
    """
    variant = load_variant(recipe.variant)
    model = variant.build_model(recipe).to(execution.device)  # type: ignore[arg-type]
    optimizer = variant.build_optimizer(model, recipe, next(iter(recipe.arms.values())))
    batch = torch.zeros(shape, dtype=torch.long, device=execution.device)
    times = []
    try:
        for _ in range(3):
            start = time.perf_counter()
            optimizer.zero_grad()
            for blocks in batch.split(execution.micro_batch_size or len(batch)):
                loss = variant.sequence_losses(model, blocks).mean()
                loss.backward()
            optimizer.step()
            if not math.isfinite(loss.item()):
                raise ValueError(f"the loss is {loss.item()}")
            times.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
    except Exception as error:  # each architecture has checks of its own
        raise UsageError(
            f"model.architecture={recipe.model.architecture} cannot be trained with these values "
            f"of model, and config {recipe.model.config}: {one_line(error)}"
        ) from None
    return min(times)


def train(run: Run, corpus: Corpus, execution: Execution) -> None:
    """Train one model into the run's folder, or resume from the last checkpoint in it.

    On a single CPU, a resumed run gives bit-identical results to an uninterrupted one. A finished
    run is left as it is. Whatever ends a run, the last checkpoint is kept.

    Raises:
        UsageError: if the folder holds another run or a run on another text, or is in use; if its
            checkpoints are damaged; or if the processes cannot share the batch.
        TrainingError: if a loss or gradient is not finite, or another process failed.
        PreemptedError: after SIGTERM, once a checkpoint has been written.
    """
    batch_size = run.recipe.training.batch_size
    if batch_size % world_size():
        raise UsageError(
            f"training.batch_size={batch_size} cannot be divided among {world_size()} processes: "
            "start a number of processes that divides it"
        )
    # On a GPU the large blocks are torch's own, which it keeps by itself.
    if execution.device == "cpu":
        keep_freed_memory()
    with contextlib.ExitStack() as locks:
        on_rank_zero(lambda: claim(run, corpus, locks))
        if not on_rank_zero((run.folder / MODEL).exists):
            checkpoints = Checkpoints(run.folder, run.recipe.training.evaluate_every)
            locks.enter_context(checkpoints.deferring_sigterm())
            _train(run, corpus, execution, checkpoints)


def _train(run: Run, corpus: Corpus, execution: Execution, checkpoints: Checkpoints) -> None:
    """Train a run whose folder is claimed, and save its model."""
    recipe, variant = run.recipe, load_variant(run.recipe.variant)
    # 1. Where it begins: at a checkpoint, after which the log is cut, or at the start
    step, last = checkpoints.last()

    def begin() -> None:
        truncate_log(run.folder / METRICS, step)
        if last is not None:
            record_resumption(run, step)

    on_rank_zero(begin)
    # 2. Model and batches. The seed is set directly before the weights are drawn,
    # so that they depend on nothing else.
    pl.seed_everything(run.seed, verbose=False)
    model = variant.build_model(recipe)
    if recipe.variant is not None and variant.is_causal:
        require_causal(model, f"variant={recipe.variant}")
    if recipe.training.precision == "64-true":
        model.double()
    model.config.bos_token_id = model.config.eos_token_id = corpus.end_of_text
    share = {"rank": rank(), "world_size": world_size()}
    batches = Batches(corpus.tokens("train"), recipe, run.seed, **share)
    held_out = held_out_loader(corpus.tokens("valid"), recipe, **share)
    # 3. Training
    with warnings.catch_warnings():
        # A batch is a few kB of a file, so worker processes would have nothing to do.
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        # Lightning 2.6 uses a name that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        trainer = _trainer(
            recipe,
            execution,
            # The log comes first, so that a checkpoint never contains a step that was not logged.
            callbacks=[RunLog(run), checkpoints],
            logger=run_loggers(run.folder, execution, step),
        )
        module = LanguageModel(model, run, execution, variant)
        try:
            trainer.fit(module, batches, held_out, ckpt_path=last, weights_only=True)
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None
        except Exception as error:  # of Lightning, of torch, or of an optimizer
            # Before the first step, what is wrong is what has been loaded, if nothing is missing.
            is_other = isinstance(error, UsageError | TrainingError | OSError)
            if last is None or checkpoints.has_begun or is_other or lacks_resources(error):
                raise
            raise UsageError(
                f"{last} does not fit this run ({one_line(error, 200)}): {ADVICE}"
            ) from None
    # 4. The model; it makes the run a finished one
    if variant.at_the_end is not None:
        variant.at_the_end(model)
    # All ranks gather the weights of a sharded model, and the first saves them.
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_model_state_dict(model, options=gather)
    on_rank_zero(lambda: save_model(model, state_dict, corpus, run.folder / MODEL))
    # A signal that came in the last steps is for what would follow, such as the next run.
    if checkpoints.any_asked_to_stop():
        raise PreemptedError("stopped by SIGTERM at the end of a run")


def _trainer(recipe: Recipe, execution: Execution, **options: Any) -> pl.Trainer:
    """Lightning's trainer, of which only the loop and the strategies are used."""
    strategy: Any = "ddp" if world_size() > 1 else "auto"
    if execution.strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)
    kind, _, number = execution.device.partition(":")
    # As torchrun and SLURM say; each node runs the same number of processes.
    nodes = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1
    nodes = int(nodes) if world_size() > 1 else 1
    precision = recipe.training.precision
    return pl.Trainer(
        accelerator="gpu" if kind == "cuda" else kind,
        strategy=strategy,
        devices=[int(number)] if number else world_size() // nodes,
        num_nodes=nodes,
        # Token ids need no conversion, and Lightning shards no model in float64.
        precision="32-true" if precision == "64-true" else precision,
        max_steps=recipe.training.total_steps,
        val_check_interval=min(recipe.training.evaluate_every, recipe.training.total_steps),
        log_every_n_steps=1,  # RunLog logs by itself
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_checkpointing=False,
        enable_progress_bar=False,  # RunLog has its own
        use_distributed_sampler=False,
        plugins=[CheckpointIO(), *filter(None, [launcher()])],
        **options,
    )


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees, instead of returning it to the system.

    glibc returns each block of more than 32 MB as soon as it is freed. The logits are such blocks:
    getting them anew in every step, page by page, takes a third of a small model's time.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)  # except for what earlier runs have left
        # Blocks below the thresholds are kept; glibc takes 32-bit numbers.
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 2**31 - 1)
