"""Why momentum hurts embeddings: how rules would move the same rows with the same gradients.

A model is trained as in question ``betas``. Beside it, each rule of :data:`RULES` is given the
same gradients of the embedding matrix, so that all of them differ in nothing but the rule: what
one of them does cannot change what the next one sees. In a few windows of :data:`WINDOW` steps
their updates are held against the gradient of all validation blocks at the start of the window.

    python -m study.movement --text english/train.txt.xz
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from transformers import PreTrainedModel

from coupled_adam import CoupledAdamW, embedding_parameters
from coupled_adam.lab.data.batches import Batches, held_out_batches
from coupled_adam.lab.data.corpus import Corpus, default_cache, prepare_corpus
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.schedules import lr_scheduler

from .documents import frequency_bands
from .head import losses
from .questions import QUESTIONS
from .run import HERE, add_result, has_result, machine, parse_seeds, recipe_of
from .tables import MOVED

RULES: dict[str, dict[str, Any]] = {
    "AdamW, 0.9, 0.95": {"betas": (0.9, 0.95)},
    "AdamW, 0.9, 0.999": {"betas": (0.9, 0.999)},
    "AdamW, 0, 0.95": {"betas": (0.0, 0.95)},
    "AdamW, 0, 0.999": {"betas": (0.0, 0.999)},
    "Coupled Adam, 0.9, 0.95": {"betas": (0.9, 0.95), "coupled": True},
}
"""The options of each rule: of CoupledAdamW with ``coupled``, of torch's AdamW without."""

WINDOW = 50


class Rule:
    """An optimizer of a matrix [V, H] that computes updates and never applies them.

    Attributes:
        update: the last update at a learning rate of one, [V, H].
    """

    def __init__(self, options: Mapping[str, Any], matrix: Tensor) -> None:
        self.update = torch.zeros_like(matrix)
        self._parameter = nn.Parameter(torch.zeros_like(matrix))
        optimizer_class = CoupledAdamW if "coupled" in options else torch.optim.AdamW
        self._optimizer = optimizer_class([self._parameter], lr=1.0, weight_decay=0.0, **options)

    def step(self, gradient: Tensor) -> None:
        """Compute the update for the next gradient."""
        self._parameter.data.zero_()
        self._parameter.grad = gradient
        self._optimizer.step()
        self.update = self._parameter.detach().clone()


class Window:
    """What the rules would have done in some steps.

    Attributes:
        start: the number of the first step.
        downhill: the validation loss's gradient before it, negated, [V, H].
        total: for each rule the sum of its updates, [V, H].
        squares: for each rule the sum over steps of the squared norms of its updates, [2, V]: of
            rows whose token is in the batch, and of the others.
    """

    def __init__(self, start: int, downhill: Tensor) -> None:
        self.start, self.downhill = start, downhill
        self.total = {name: torch.zeros_like(downhill) for name in RULES}
        self.squares = {name: torch.zeros(2, len(downhill)) for name in RULES}

    def add(self, rules: Mapping[str, Rule], batch: Tensor) -> None:
        """Add the last update of each rule, of a step whose batch has these tokens."""
        absent = torch.ones(len(self.downhill), dtype=torch.long)
        absent[batch.flatten()] = 0
        rows = torch.arange(len(absent))
        for name, rule in rules.items():
            self.total[name] += rule.update
            self.squares[name][absent, rows] += rule.update.square().sum(1)

    def result(self, bands: Tensor) -> dict[str, Any]:
        """By rule, a list over the :func:`frequency_bands` of the tokens for each measure.

        ``cosine`` is that of the sum of the updates and downhill, over all rows of a band;
        ``in_batch`` how much of the band's squared movement is that of tokens in the batch.
        """

        def by_band(values: Tensor) -> Tensor:
            return bands.bincount(values.double())

        steepest = by_band(self.downhill.square().sum(1)).sqrt()
        measured = {}
        for name, total in self.total.items():
            along = by_band((total * self.downhill).sum(1))
            squares = torch.stack([by_band(moved) for moved in self.squares[name]])
            cosine = along / (by_band(total.square().sum(1)).sqrt() * steepest)
            in_batch = squares[0] / squares.sum(0)
            measured[name] = {"cosine": cosine.tolist(), "in_batch": in_batch.tolist()}
        return {"start": self.start, "rules": measured}


def gradient(model: PreTrainedModel, matrix: Tensor, batches: Iterator[Tensor]) -> Tensor:
    """The mean gradient of a matrix over batches of blocks, [V, H]."""
    total, number = torch.zeros_like(matrix), 0
    for blocks in batches:
        (batch_gradient,) = torch.autograd.grad(losses(model, blocks).mean(), [matrix])
        total += batch_gradient
        number += 1
    return total / number


def measure(recipe: Recipe, corpus: Corpus, seed: int, starts: frozenset[int]) -> list[Any]:
    """Train a run of the study, and return the results of the windows that begin at ``starts``."""
    (arm,) = recipe.arms.values()
    training = recipe.training
    seed_everything(seed, verbose=False)
    model = build_model(recipe)
    (matrix,) = embedding_parameters(model).values()
    optimizer = arm.build_optimizer(model, training)
    schedule = lr_scheduler(optimizer, recipe)
    rules = {name: Rule(options, matrix.detach()) for name, options in RULES.items()}
    bands = torch.from_numpy(frequency_bands(corpus.unigram_counts()))
    window, results = None, []
    for step, batch in enumerate(Batches(corpus.tokens("train"), recipe, seed)):
        if step in starts:
            held_out = held_out_batches(
                corpus.tokens("valid"), training.batch_size, training.sequence_length
            )
            window = Window(step, -gradient(model, matrix, held_out))
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        assert matrix.grad is not None
        for rule in rules.values():
            rule.step(matrix.grad)
        if window is not None:
            window.add(rules, batch)
            if step + 1 == window.start + WINDOW:
                results.append(window.result(bands))
                window = None
        optimizer.step()
        schedule.step()
    return results


def main() -> None:
    """Measure the training with each seed, and write ``results/movement.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="the study's training text")
    parser.add_argument("--seeds", type=parse_seeds, default=[1, 2, 3], metavar="1,2,...")
    parser.add_argument("--windows", type=int, default=6, help="evenly spaced over the training")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "movement.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        if has_result(options.out, MOVED, seed):
            continue
        recipe = recipe_of(QUESTIONS["betas"][MOVED], options.text)
        steps = recipe.training.total_steps
        starts = np.linspace(steps // 6, steps - WINDOW, options.windows).astype(int)
        corpus = prepare_corpus(recipe, default_cache())
        windows = measure(recipe, corpus, seed, frozenset(starts.tolist()))
        add_result(options.out, MOVED, seed, {"windows": windows, "environment": machine()})
        print(f"seed {seed}", flush=True)


if __name__ == "__main__":
    main()
