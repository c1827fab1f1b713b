"""Whole training steps, forward, backward, clipping and update: AdamW against Coupled Adam."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.lab.models import build_model, count_parameters
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import next_token_loss


@dataclasses.dataclass(frozen=True)
class TrainingSpeed:
    """Training steps of two models of one recipe, taken in turn.

    Attributes:
        parameters: of each model.
        tokens: in a step.
        samples: seconds of a step with Coupled Adam, and of one with AdamW right beside it.
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
    def ratio(self) -> tuple[float, float, float]:
        """Of Coupled Adam's tokens per second to AdamW's: lower quartile, median, upper."""
        low, middle, high = statistics.quantiles((b / a for a, b in self.samples), n=4)
        return low, middle, high

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        summary = {"tokens_per_second": self.tokens_per_second, "ratio": self.ratio}
        return {**dataclasses.asdict(self), **summary}


def training_speed(recipe: Recipe, *, device: str = "cpu", steps: int = 20) -> TrainingSpeed:
    """Train two models on random tokens with fused optimizers, a step of each in turn.

    AdamW's gradients are clipped by ``clip_grad_norm_``, Coupled Adam's by itself. The precision is
    float32, or bfloat16 autocast as the recipe says; all of the recipe's batch is one micro-batch.
    """
    training = recipe.training
    models = [build_model(recipe).train() for _ in range(2)]
    for model in models:
        nn.Module.to(model, device)
    options: dict[str, Any] = {"lr": training.lr, "betas": training.betas, "fused": True}
    groups = [param_groups(model, weight_decay=training.weight_decay) for model in models]
    for group in groups[1]:
        del group["coupled"]
    ours = CoupledAdamW(groups[0], max_grad_norm=training.max_grad_norm, **options)
    theirs = torch.optim.AdamW(groups[1], **options)
    generator = torch.Generator(device).manual_seed(0)
    shape = (training.batch_size, training.sequence_length + 1)

    def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
        vocabulary = model.config.vocab_size
        batch = torch.randint(vocabulary, shape, generator=generator, device=device)
        start = _now(device)
        optimizer.zero_grad()
        half = training.precision == "bf16-mixed"
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=half):
            loss = next_token_loss(model, batch)
        loss.backward()
        if optimizer is theirs:
            nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        return _now(device) - start

    pairs: list[Callable[[], float]] = [
        lambda: step(models[0], ours),
        lambda: step(models[1], theirs),
    ]
    for one in pairs * 2:
        one()
    samples = []
    for number in range(steps):
        times = {i: pairs[i]() for i in ((0, 1) if number % 2 else (1, 0))}
        samples.append((times[0], times[1]))
    tokens = training.batch_size * training.sequence_length
    return TrainingSpeed(recipe.name, count_parameters(models[0]), tokens, samples)


def _now(device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
