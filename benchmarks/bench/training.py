"""Timing of whole training steps (forward, backward, clipping, update) with both optimizers."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from bench.timing import Quartiles, now, sample_in_turn
from torch import nn
from torch.optim import Optimizer

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.models import build_model, parameters
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import sequence_losses


@dataclasses.dataclass(frozen=True)
class TrainingSpeed:
    """Times of training steps of a recipe's model, alternately with Coupled Adam and with AdamW.

    Attributes:
        parameters: the number of parameters of each model.
        tokens: the number of tokens in a step.
        samples: pairs of seconds: of a step with Coupled Adam, and of the adjacent step with AdamW.
    """

    recipe: str
    parameters: int
    tokens: int
    samples: list[tuple[float, float]]

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """The medians for Coupled Adam and for AdamW."""
        coupled, adamw = (statistics.median(times) for times in zip(*self.samples))
        return self.tokens / coupled, self.tokens / adamw

    @property
    def ratio(self) -> Quartiles:
        """Coupled Adam's tokens per second relative to AdamW's, computed within each pair."""
        return Quartiles.of(adamw / coupled for coupled, adamw in self.samples)

    @property
    def summary(self) -> str:
        """One sentence for the terminal."""
        coupled, adamw = self.tokens_per_second
        ratio = self.ratio
        return (
            f"{self.recipe}: {self.parameters / 1e6:.1f}M parameters, {self.tokens:,} tokens a "
            f"step: {coupled:,.0f} tokens/s with CoupledAdamW, {adamw:,.0f} with AdamW fused; "
            f"ratio in pairs {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) {ratio.remark}"
        ).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """All fields and a summary, for JSON."""
        summary = {
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "noisy": self.ratio.noisy,
        }
        return {**dataclasses.asdict(self), **summary}


def training_speed(recipe: Recipe, *, device: str = "cpu", steps: int = 20) -> TrainingSpeed:
    """Train two models on random tokens with fused optimizers, with alternating steps.

    The gradients are clipped by ``clip_grad_norm_``.
    The precision is float32, or bfloat16 autocast if the recipe sets that. The recipe's batch is
    not split into micro-batches.

    Args:
        recipe: its model, batch size and optimizer options are used, but not its data.
        device: the device of the models.
        steps: the number of timed steps of each optimizer, 2 at least.
    """
    coupled_step = _training_step(recipe, device, coupled=True)
    adamw_step = _training_step(recipe, device, coupled=False)
    # Two warmup steps of each: the first makes the state, and both fill the allocator's caches.
    for step in (coupled_step, adamw_step, coupled_step, adamw_step):
        step()
    rounds = sample_in_turn([coupled_step, adamw_step], least=steps, most=steps)
    samples = [(a, b) for a, b in rounds]
    return TrainingSpeed(recipe.name, parameters(recipe), recipe.tokens_per_step, samples)


def _training_step(recipe: Recipe, device: str, *, coupled: bool) -> Callable[[], float]:
    """Create a model and a function that makes one training step and returns its seconds."""
    training = recipe.training
    model = build_model(recipe).train()
    nn.Module.to(model, device)
    groups = param_groups(model, weight_decay=training.weight_decay)
    options: dict[str, Any] = {"lr": training.lr, "betas": training.betas, "fused": True}
    optimizer: Optimizer
    if coupled:
        optimizer = CoupledAdamW(groups, **options)
    else:
        for group in groups:
            del group["coupled"]
        optimizer = torch.optim.AdamW(groups, **options)
    generator = torch.Generator(device).manual_seed(0)
    shape = (training.batch_size, training.sequence_length + 1)
    autocast = torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=training.precision == "bf16-mixed"
    )

    def step() -> float:
        # Random tokens take as long as any others; drawing them is not part of the time.
        vocabulary = model.config.vocab_size
        batch = torch.randint(vocabulary, shape, generator=generator, device=device)
        start = now(device)
        optimizer.zero_grad()
        with autocast:
            loss = sequence_losses(model, batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        return now(device) - start

    return step
