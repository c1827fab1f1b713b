"""Timing of whole training steps (forward, backward, clipping, update) with both optimizers."""

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


def training_speed(recipe: Recipe, *, device: str = "cpu", steps: int = 20) -> dict[str, Any]:
    """Train two models on random tokens with fused optimizers, with alternating steps.

    The gradients are clipped by ``clip_grad_norm_``.
    The precision is float32, or bfloat16 autocast if the recipe sets that. The recipe's batch is
    not split into micro-batches.

    Args:
        recipe: its model, batch size and optimizer options are used, but not its data.
        device: the device of the models.
        steps: the number of timed steps of each optimizer, 2 at least.

    Returns:
        For JSON, what was timed; ``samples`` are pairs of seconds, of a step with Coupled Adam and
        of the adjacent one with AdamW, and ``ratio`` is of tokens per second within each pair.
    """
    coupled_step = _training_step(recipe, device, coupled=True)
    adamw_step = _training_step(recipe, device, coupled=False)
    # Two warmup steps of each: the first makes the state, and both fill the allocator's caches.
    for step in (coupled_step, adamw_step, coupled_step, adamw_step):
        step()
    rounds = sample_in_turn([coupled_step, adamw_step], least=steps, most=steps)
    samples = [(a, b) for a, b in rounds]
    ratio = Quartiles.of(adamw / coupled for coupled, adamw in samples)
    tokens = recipe.training.tokens_per_step
    return {
        "recipe": recipe.name,
        "parameters": parameters(recipe),
        "tokens": tokens,
        "samples": samples,
        "tokens_per_second": [tokens / statistics.median(times) for times in zip(*samples)],
        "ratio": ratio,
        "noisy": ratio.noisy,
    }


def summary(speed: dict[str, Any]) -> str:
    """One sentence for the terminal."""
    ratio, (coupled, adamw) = speed["ratio"], speed["tokens_per_second"]
    return (
        f"{speed['recipe']}: {speed['parameters'] / 1e6:.1f}M parameters, {speed['tokens']:,} "
        f"tokens a step: {coupled:,.0f} tokens/s with CoupledAdamW, {adamw:,.0f} with AdamW fused; "
        f"ratio in pairs {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) {ratio.remark}"
    ).rstrip()


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
