"""What a run logs while it trains, and its bar."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from tqdm import tqdm

from coupled_adam.embeddings import analyze
from coupled_adam.embeddings.measures import logged
from coupled_adam.errors import printable
from coupled_adam.lab.models import output_embeddings
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.distributed import rank
from coupled_adam.lab.training.folder import save_array
from coupled_adam.lab.training.loggers import LOG_EVERY
from coupled_adam.lab.training.module import LanguageModel
from coupled_adam.optim.lean import Rate
from coupled_adam.optim.sharded import full_tensor
from coupled_adam.runs import SECOND_MOMENTS, step_name


class RunLog(pl.Callback):
    """Logs the training every ten steps, and the held-out loss and embeddings at each evaluation.

    On rank 0 a bar shows the steps, the time left and the loss; in a file twice a minute.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._last = (0, 0.0)  # the step and the time of the last log
        self._evaluated_since: float | None = None

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:  # type: ignore[override]
        """Log the measures of the initial embeddings."""
        self._bar = tqdm(
            desc=printable(self.run.folder.name),
            initial=trainer.global_step,
            total=trainer.max_steps,
            disable=rank() > 0,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 30,
            smoothing=0,  # the average speed: evaluations count, too
        )
        for group in trainer.optimizers[0].param_groups:
            if "lr_factor_from" in group and rank() == 0:
                name, rate = printable(self.run.folder.name), Rate.in_group(group)
                tqdm.write(f"{name}: the embeddings' learning rate is {rate}", file=sys.stderr)
        self._last = (trainer.global_step, time.perf_counter())
        if trainer.global_step == 0:
            self._log(trainer, self._measures(trainer, module))

    def on_train_batch_start(self, *_: Any) -> None:
        """Exclude the time of an evaluation and its checkpoint from the tokens per second."""
        if self._evaluated_since is not None:
            step, since = self._last
            self._last = (step, since + time.perf_counter() - self._evaluated_since)
            self._evaluated_since = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, *_: Any) -> None:  # type: ignore[override]
        """Log loss, learning rate, gradient norm and speed, every ten steps."""
        step = trainer.global_step
        if step % LOG_EVERY == 0:
            # Every rank has the loss of its own share of the batch.
            loss = trainer.strategy.reduce(module.train_loss, reduce_op="mean")
            last, since = self._last
            self._last = (step, time.perf_counter())
            tokens = (step - last) * self.run.recipe.training.tokens_per_step
            metrics = {
                "train_loss": float(loss),
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "grad_norm": float(module.grad_norm),
                "tokens_per_second": tokens / (self._last[1] - since),
            }
            self._log(trainer, metrics)
            self._bar.set_postfix_str(f"loss {metrics['train_loss']:.3f}", refresh=False)
        self._bar.update()

    def on_train_end(self, *_: Any) -> None:
        """End the bar's line."""
        self._bar.close()

    def on_exception(self, *_: Any) -> None:
        """End the bar's line before the error is printed, if there is one yet."""
        if hasattr(self, "_bar"):
            self._bar.close()

    def on_validation_start(self, *_: Any) -> None:
        """Note when the evaluation begins, which does not count as training."""
        self._evaluated_since = time.perf_counter()

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:  # type: ignore[override]
        """Log the held-out loss, the embeddings and their state; save AdamW's second moments."""
        model = module.model
        # A set, as tied embeddings are one matrix.
        matrices: set[Any] = {output_embeddings(model), model.get_input_embeddings().weight}
        states = [trainer.optimizers[0].state.get(matrix, {}).values() for matrix in matrices]
        tensors = [v for state in states for v in state if isinstance(v, torch.Tensor)]
        # Of sharded tensors this is the size on all processes together. Scalars count the steps.
        sizes = [v.numel() * v.element_size() for v in tensors if v.ndim]
        measures = {"embedding_state_bytes": sum(sizes), **self._measures(trainer, module)}
        total, sequences = trainer.strategy.reduce(module.valid, reduce_op="sum").tolist()
        self._log(trainer, {"valid_loss": total / sequences, **measures})
        self._save_second_moment(trainer, module)

    def _measures(self, trainer: pl.Trainer, module: LanguageModel) -> dict[str, float]:
        """The measures of the output embeddings, on rank 0; DivergedError if they are not finite.

        As in the evaluation, rows that a variant has behind those of the vocabulary are left out.
        """
        matrix = full_tensor(output_embeddings(module.model).detach())
        if not torch.isfinite(matrix).all():
            raise module.diverged("the output embeddings are not finite", trainer.global_step)
        if rank() > 0:
            return {}
        return logged(analyze(matrix[: self.run.recipe.model.vocab_size]))

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        with _ctrl_c_waits():
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.global_step)

    def _save_second_moment(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        """Save AdamW's bias-corrected second moment, averaged over H: a number for each token."""
        embedding, optimizer = output_embeddings(module.model), trainer.optimizers[0]  # [V, H]
        moment = optimizer.state.get(embedding, {}).get("exp_avg_sq")
        # SGD has none, and that of Coupled Adam is a vector: AdamW's alone is a matrix.
        if moment is None or moment.shape != embedding.shape:
            return
        # All ranks gather a sharded one, and the first writes it.
        moment = full_tensor(moment)
        if rank() > 0:
            return
        groups = optimizer.param_groups
        (betas,) = (g["betas"] for g in groups if any(p is embedding for p in g["params"]))
        correction = 1 - betas[1] ** trainer.global_step
        values = moment.double().mean(1).cpu().numpy() / correction
        path = self.run.folder / SECOND_MOMENTS / f"{step_name(trainer.global_step)}.npy"
        path.parent.mkdir(exist_ok=True)
        save_array(path, values)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Defer a keyboard interrupt to the end of the block.

    TensorBoard and wandb write in threads. If this thread were interrupted while it holds a lock
    that it shares with them, the lock would never be released, and the run would hang at its end.
    """
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if signals:
            signal.raise_signal(signal.SIGINT)
