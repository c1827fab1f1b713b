"""Whole training steps, forward, backward, clipping and update: Coupled Adam against AdamW."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.bench.timing import Quartiles, now, sample_in_turn
from coupled_adam.errors import UsageError
from coupled_adam.lab.models import build_model, count_parameters
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import next_token_loss


@dataclasses.dataclass(frozen=True)
class TrainingSpeed:
    """Training steps of two models of one recipe, taken in turn.

    Attributes:
        parameters: the number of parameters of each model.
        tokens: the number of tokens in a step.
        samples: seconds of a step with Coupled Adam, and of one with AdamW right before or after.
    """

    recipe: str
    parameters: int
    tokens: int
    samples: list[tuple[float, float]]

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Medians: Coupled Adam, AdamW."""
        ours, theirs = (statistics.median(times) for times in zip(*self.samples))
        return self.tokens / ours, self.tokens / theirs

    @property
    def ratio(self) -> Quartiles:
        """Coupled Adam's tokens per second relative to AdamW's, within pairs."""
        return Quartiles.of(theirs / ours for ours, theirs in self.samples)

    @property
    def summary(self) -> str:
        """One sentence for the terminal."""
        ours, theirs = self.tokens_per_second
        ratio = self.ratio
        return (
            f"{self.recipe}: {self.parameters / 1e6:.1f}M parameters, {self.tokens:,} tokens a "
            f"step: {ours:,.0f} tokens/s with CoupledAdamW, {theirs:,.0f} with AdamW fused; ratio "
            f"in pairs {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) {ratio.remark}"
        ).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        summary = {
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "noisy": self.ratio.noisy,
        }
        return {**dataclasses.asdict(self), **summary}


def training_speed(recipe: Recipe, *, device: str = "cpu", steps: int = 20) -> TrainingSpeed:
    """Train two models on random tokens with fused optimizers, a step of each in turn.

    AdamW's gradients are clipped by ``clip_grad_norm_``, Coupled Adam's in its own step. The
    precision is float32, or bfloat16 autocast where the recipe says so; the recipe's batch is one
    micro-batch.

    Args:
        recipe: its model, batch and optimizer's options are used, and none of its data.
        device: of the models.
        steps: how many are timed with each optimizer, after two that are not; at least 2.

    Raises:
        UsageError: fewer steps.
    """
    if steps < 2:
        raise UsageError(f"--steps {steps}: quartiles need 2 steps at least")
    ours = _training_step(recipe, device, coupled=True)
    theirs = _training_step(recipe, device, coupled=False)
    with torch.device("meta"):
        parameters = count_parameters(build_model(recipe))
    for step in (ours, theirs, ours, theirs):
        step()
    rounds = sample_in_turn([ours, theirs], least=steps, most=steps)
    tokens = recipe.training.batch_size * recipe.training.sequence_length
    return TrainingSpeed(recipe.name, parameters, tokens, [(a, b) for a, b in rounds])


def _training_step(recipe: Recipe, device: str, *, coupled: bool) -> Callable[[], float]:
    """Takes a training step of a new model with each call, and returns its seconds."""
    training = recipe.training
    model = build_model(recipe).train()
    nn.Module.to(model, device)
    groups = param_groups(model, weight_decay=training.weight_decay)
    options: dict[str, Any] = {"lr": training.lr, "betas": training.betas, "fused": True}
    optimizer: Optimizer
    if coupled:
        optimizer = CoupledAdamW(groups, max_grad_norm=training.max_grad_norm, **options)
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
        vocabulary = model.config.vocab_size
        batch = torch.randint(vocabulary, shape, generator=generator, device=device)
        start = now(device)
        optimizer.zero_grad()
        with autocast:
            loss = next_token_loss(model, batch)
        loss.backward()
        if not coupled:
            nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        return now(device) - start

    return step
