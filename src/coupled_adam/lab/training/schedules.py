"""The learning rate over a run: cosine, constant or warmup-stable-decay, each with a warmup."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from coupled_adam.lab.recipe import Recipe


def lr_scheduler(optimizer: Optimizer, recipe: Recipe) -> Any:
    """The recipe's learning-rate schedule, to be stepped after each step of the optimizer."""
    training, warmup, steps = recipe.training, recipe.warmup_steps, recipe.training.total_steps
    if training.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if training.schedule == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_rate=training.final_lr
        )
    decay = round(training.decay * steps)

    # transformers has such a schedule, too, but its warmup starts at final_lr instead of zero.
    def warmup_stable_decay(step: int) -> float:
        rising = step / warmup if step < warmup else 1.0
        # From 0 before the last steps to 1 at the end; the warmup may overlap with them.
        decayed = max(0, step - (steps - decay)) / max(1, decay)
        return min(rising, 1.0 - (1.0 - training.final_lr) * decayed)

    return LambdaLR(optimizer, warmup_stable_decay)
