"""One run of what the laboratory does not have: other losses, models, optimizers, interventions."""

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from coupled_adam.embeddings import analyze, mean_norm, single_tokens, word_similarity
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.evaluation.evaluate import Sets
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.run import (
    Batches,
    held_out_batches,
    output_embeddings,
    schedule,
    sequence_losses,
)
from coupled_adam.text.tokenizers import load_tokenizer

Optimizers = list[Optimizer]


def optimizer_of_arm(model: PreTrainedModel, recipe: Recipe, arm: str) -> Optimizers:
    """The laboratory's."""
    return [recipe.arm(arm).optimizer(model, recipe.training)]


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a run does otherwise than the laboratory; nothing, as it is here.

    losses: of each sequence, [batch]: what is reported, and trained on.
    penalty: added in training, a number from the logits and the model.
    after_step: an operation on the model after each step.
    half_way: an operation on the model, and the optimizers to continue with.
    at_the_end: an operation on the trained model, before it is tested.
    also: more measures of the trained model, on held-out blocks.
    """

    build: Callable[[Recipe], PreTrainedModel] = build_model
    optimizers: Callable[[PreTrainedModel, Recipe, str], Optimizers] = optimizer_of_arm
    losses: Callable[[PreTrainedModel, Tensor], Tensor] = sequence_losses
    penalty: Callable[[PreTrainedModel, Tensor], Tensor] | None = None
    after_step: Callable[[PreTrainedModel], None] | None = None
    half_way: Callable[[PreTrainedModel, Optimizers, Recipe], Optimizers] | None = None
    at_the_end: Callable[[PreTrainedModel], None] | None = None
    also: Callable[[PreTrainedModel, Tensor], dict[str, float]] | None = None


def train(
    recipe: Recipe, arm: str, variant: Variant, seed: int, corpus: Corpus, sets: Sets
) -> dict[str, Any]:
    """Train and test; same initialisation, batches and schedule as in the laboratory.

    Returns:
        As :func:`study.run.of_the_laboratory`; a run whose loss or gradient is not finite has
        ``diverged_at``, its step, instead of results.
    """
    torch.manual_seed(seed)
    began = time.perf_counter()
    model = variant.build(recipe)
    model.train()
    initial_mean_norm = mean_norm(output_embeddings(model))
    options = recipe.training
    optimizers = variant.optimizers(model, recipe, arm)
    factors = learning_rate_factors(recipe)
    counts = np.pad(
        corpus.unigram_counts(), (0, len(output_embeddings(model)) - recipe.model.vocab_size)
    )
    curve = []
    for step, blocks in enumerate(Batches(corpus.tokens("train"), recipe, seed), 1):
        factor = next(factors)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        model.zero_grad()
        loss = _trained_loss(model, blocks, variant)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            return {"diverged_at": step}
        for optimizer in optimizers:
            optimizer.step()
        if variant.after_step is not None:
            variant.after_step(model)
        if variant.half_way is not None and step == recipe.steps // 2:
            optimizers = variant.half_way(model, optimizers, recipe)
        if step % options.evaluate_every == 0 or step == recipe.steps:
            report = analyze(output_embeddings(model))
            curve.append(
                {
                    "step": step,
                    "valid_loss": held_out_loss(model, variant, recipe, corpus, "valid"),
                    "mean_norm": report.mean_norm,
                    "mean_norm_ratio": report.mean_norm_ratio,
                }
            )
    if variant.at_the_end is not None:
        variant.at_the_end(model)
    report = analyze(output_embeddings(model), counts)
    assert corpus.tokenizer_folder is not None
    token_ids = single_tokens(load_tokenizer(corpus.tokenizer_folder))
    similarity = word_similarity(
        output_embeddings(model)[: recipe.model.vocab_size], sets, token_ids
    )
    blocks = next(
        held_out_batches(corpus.tokens("valid"), 4 * options.batch_size, options.sequence_length)
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "initial_mean_norm": initial_mean_norm,
        "valid_loss": held_out_loss(model, variant, recipe, corpus, "valid"),
        "test_loss": held_out_loss(model, variant, recipe, corpus, "test"),
        **{name: value for name, value in report.to_dict().items() if name in MEASURES},
        "word_similarity": {
            name: {"r": found.r, "pairs": found.pairs} for name, found in similarity.sets.items()
        },
        **({} if variant.also is None else variant.also(model, blocks)),
        "curve": curve,
        "seconds": time.perf_counter() - began,
    }


MEASURES = (
    *("isotropy", "mean_norm", "mean_norm_ratio", "norm_frequency_correlation", "condition"),
)


def _trained_loss(model: PreTrainedModel, blocks: Tensor, variant: Variant) -> Tensor:
    if variant.penalty is None:
        return variant.losses(model, blocks).mean()
    kept: list[Tensor] = []
    hook = model.register_forward_hook(lambda *call: kept.append(call[-1].logits))
    try:
        loss = variant.losses(model, blocks).mean()
    finally:
        hook.remove()
    return loss + variant.penalty(model, kept[0])


def held_out_loss(
    model: PreTrainedModel, variant: Variant, recipe: Recipe, corpus: Corpus, split: str
) -> float:
    """As the laboratory's, on the first batches of a split."""
    options = recipe.training
    batches = options.evaluation_batches if split == "valid" else options.test_batches
    length, size = options.sequence_length, options.batch_size
    blocks = held_out_batches(corpus.tokens(split), size, length)
    model.train(False)
    with torch.inference_mode():
        losses = [variant.losses(model, part) for part in itertools.islice(blocks, batches)]
    model.train()
    return torch.cat(losses).double().mean().item()


def learning_rate_factors(recipe: Recipe) -> Iterator[float]:
    """What the recipe's schedule makes of a learning rate of 1, at each step."""
    clock = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = schedule(clock, recipe)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.* before .*optimizer.step")
        while True:
            yield scheduler.get_last_lr()[0]
            scheduler.step()
