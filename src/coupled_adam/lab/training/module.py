"""The training loop: what happens in one step, and in one evaluation."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from coupled_adam.errors import DivergedError
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.schedules import lr_scheduler
from coupled_adam.lab.training.variant import Variant
from coupled_adam.optim.sharded import full_tensor


class LanguageModel(pl.LightningModule):
    """A language model in training.

    Each batch is one step, which this module itself splits into micro-batches. So Lightning's
    counters and the checkpoints do not depend on the micro-batch size, which may change on resume.
    """

    def __init__(
        self, model: PreTrainedModel, run: Run, execution: Execution, variant: Variant
    ) -> None:
        super().__init__()
        self.model = model
        self.run = run
        self.execution = execution
        self.variant = variant
        self.train_loss = torch.zeros(())
        self.grad_norm = torch.zeros(())
        self.valid = torch.zeros(2)  # the sum of the losses of sequences, and their number

    def configure_model(self) -> None:
        """Compile and shard the model, once."""
        if self.execution.compile:
            self.model.compile()
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.model, self.trainer.strategy, self.run.recipe.training.precision)

    def configure_optimizers(self) -> Any:
        """The arm's optimizer, with the recipe's schedule stepped at every step."""
        recipe = self.run.recipe
        optimizer = self.variant.build_optimizer(self.model, recipe, self.run.arm)
        scheduler = {"scheduler": lr_scheduler(optimizer, recipe), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of this process's share of a batch, [sequences, length + 1].

        This makes the backward passes of all micro-batches except the last. Lightning makes the
        last one, in which the processes exchange their gradients.
        """
        *first, last = batch.split(self.execution.micro_batch_size or len(batch))
        # Here, as optimizer_zero_grad() below does nothing.
        self.trainer.optimizers[0].zero_grad()
        self.train_loss = torch.zeros((), device=batch.device)
        # Each counts by its share of the batch, since the last one may be smaller.
        for micro_batch in first:
            loss = self.loss(micro_batch) * (len(micro_batch) / len(batch))
            loss.backward()
            self.train_loss += loss.detach()
        loss = self.loss(last) * (len(last) / len(batch))
        self.train_loss += loss.detach()
        return loss

    def loss(self, blocks: Tensor) -> Tensor:
        """The mean loss of blocks, [batch, length + 1]."""
        return self.variant.sequence_losses(self.model, blocks).mean()

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing: Lightning would discard the gradients of the first micro-batches."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip the norm of all gradients; raise DivergedError if it is not finite."""
        # The norm is needed for the log as well, so it is not left to Lightning.
        parameters = [p for p in self.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, self.run.recipe.training.max_grad_norm, total)
        self.grad_norm = full_tensor(total)
        if torch.isfinite(self.grad_norm):
            return
        # The norm is the same on all ranks, so that all stop together; the losses differ.
        loss, norm, step = self.train_loss.item(), self.grad_norm.item(), self.global_step + 1
        for logger in self.trainer.loggers:  # so that a report can tell why the run ends here
            logger.log_metrics({"train_loss": loss, "grad_norm": norm}, step)
        problem = f"the norm of the gradient is {norm}"
        if not math.isfinite(loss):
            problem = f"the loss is {loss}"
        raise self.diverged(problem, step)

    def diverged(self, problem: str, step: int) -> DivergedError:
        """The error that ends a run whose numbers are no longer finite."""
        return DivergedError(
            f"{self.run.folder}: {problem} at step {step}; the last checkpoint is kept. A lower "
            "training.lr or a longer training.warmup may help",
            step,
        )

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """Perform the step, then call the variant's functions that follow it.

        Raises DivergedError if the rate is beyond what the parameters' type can represent.
        """
        variant, step = self.variant, self.global_step + 1  # counted when this returns
        try:
            super().optimizer_step(*arguments, **options)
        except RuntimeError as error:  # torch has no class of its own for it
            if "overflow" not in str(error):
                raise
            raise self.diverged(f"the update is too large ({error})", step) from None
        if variant.after_step is not None:
            variant.after_step(self.model)
        if variant.half_way is not None and step == self.run.recipe.training.total_steps // 2:
            variant.half_way(self.model, self.trainer.optimizers[0])

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation from zero."""
        # In float64, which MPS does not have: it is a sum over the whole split.
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        self.valid = torch.zeros(2, dtype=wide, device=self.device)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Add the losses of this process's share of a held-out batch."""
        blocks, counted = batch  # [batch, length + 1], and [batch] booleans
        losses = self.variant.sequence_losses(self.model, blocks)
        # Counted, so that the mean is over sequences, however they are shared among processes.
        self.valid += torch.stack([losses[counted].sum(), counted.sum()])


def shard(model: PreTrainedModel, strategy: ModelParallelStrategy, precision: str) -> None:
    """FSDP2: shard each block, then the rest with the embeddings, over all processes."""
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = strategy.device_mesh["data_parallel"]
    (blocks,) = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in (*blocks, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
