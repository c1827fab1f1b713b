"""Why momentum hurts embeddings: how rules would move the same rows with the same gradients.

One model is trained as in question ``betas``. Beside it, each rule of :data:`RULES` is given the
same gradients of the embedding matrix, so that all of them differ in nothing but the rule: what
one of them does cannot change what the next one sees. In a few windows of :data:`WINDOW` steps
their updates are held against the gradient of all validation blocks at the start of the window.

    python -m study.movement --text english/train.txt.xz
"""

import argparse
import dataclasses
import itertools
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
from .run import HERE, machine, parse_seeds, read_results, recipe_of, write_results
from .tables import TRAINED_BY

RULES: dict[str, dict[str, Any]] = {
    "AdamW, 0.9, 0.95": {"betas": (0.9, 0.95)},
    "AdamW, 0.9, 0.999": {"betas": (0.9, 0.999)},
    "AdamW, 0, 0.95": {"betas": (0.0, 0.95)},
    "AdamW, 0, 0.999": {"betas": (0.0, 0.999)},
    "Coupled Adam, 0.9, 0.95": {"betas": (0.9, 0.95), "coupled": True},
    "a = 0.75, 0.9, 0.99": {
        "betas": (0.9, 0.99),
        "coupled": True,
        "row_exponent": 0.75,
        "zero_sum": True,
    },
    "a = 0.75, 0, 0.99": {
        "betas": (0.0, 0.99),
        "coupled": True,
        "row_exponent": 0.75,
        "zero_sum": True,
    },
}
"""The options of each rule: of CoupledAdamW with ``coupled``, of torch's AdamW without."""

WINDOW = 50
RECENT = 10
"""After that many steps nearly nothing (0.35) of a gradient is left in a momentum of 0.9."""


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


@dataclasses.dataclass
class Window:
    """What the rules would have done in some steps.

    Attributes:
        start: the number of the first step.
        downhill: the validation loss's gradient before it, negated, [V, H].
        total: for each rule the sum of its updates, [V, H].
        path: for each rule the sum of the norms of its updates of each row, [V].
        squares: for each rule the sum over steps of the squared norms of its updates, [3, V]: of
            rows whose token is in the batch, was in one of the last RECENT, or was in neither.
    """

    start: int
    downhill: Tensor
    total: dict[str, Tensor]
    path: dict[str, Tensor]
    squares: dict[str, Tensor]

    @classmethod
    def beginning(cls, start: int, downhill: Tensor) -> "Window":
        """A window in which nothing has been added up."""
        rows = len(downhill)
        return cls(
            start,
            downhill,
            {name: torch.zeros_like(downhill) for name in RULES},
            {name: torch.zeros(rows) for name in RULES},
            {name: torch.zeros(3, rows) for name in RULES},
        )

    def add(self, rules: Mapping[str, Rule], steps_since: Tensor) -> None:
        """Add the last update of each rule; ``steps_since`` each token was in a batch, [V]."""
        age = (steps_since > 0).long() + (steps_since > RECENT).long()
        rows = torch.arange(len(age))
        for name, rule in rules.items():
            norm = rule.update.norm(dim=1)
            self.total[name] += rule.update
            self.path[name] += norm
            self.squares[name][age, rows] += norm.square()

    def result(self, bands: Tensor) -> dict[str, Any]:
        """By rule, a list over the :func:`frequency_bands` of the tokens for each measure.

        ``cosine`` is that of the sum of the updates and downhill, over all rows of a band;
        ``directness`` the norm of the sum divided by the path, the mean over rows; ``share`` the
        band's share of all squared movement; ``in_batch``, ``recent`` and ``older`` how much of
        the band's squared movement happens that long after a token was seen.
        """

        def by_band(values: Tensor) -> Tensor:
            return bands.bincount(values.double())

        steepest = by_band(self.downhill.square().sum(1)).sqrt()
        measured = {}
        for name, total in self.total.items():
            along = by_band((total * self.downhill).sum(1))
            squares = torch.stack([by_band(moved) for moved in self.squares[name]])
            directness = total.norm(dim=1) / self.path[name].clamp(min=1e-30)
            in_batch, recent, older = (squares / squares.sum(0)).tolist()
            cosine = along / (by_band(total.square().sum(1)).sqrt() * steepest)
            measured[name] = {
                "cosine": cosine.tolist(),
                "directness": (by_band(directness) / bands.bincount()).tolist(),
                "share": (squares.sum(0) / squares.sum()).tolist(),
                "in_batch": in_batch,
                "recent": recent,
                "older": older,
            }
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
    last_seen = torch.full((len(matrix),), -RECENT - 1)
    window, results = None, []
    for step, batch in enumerate(Batches(corpus.tokens("train"), recipe, seed)):
        if step in starts:
            held_out = held_out_batches(
                corpus.tokens("valid"), training.batch_size, training.sequence_length
            )
            window = Window.beginning(step, -gradient(model, matrix, held_out))
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        assert matrix.grad is not None
        last_seen[batch.flatten()] = step
        for rule in rules.values():
            rule.step(matrix.grad)
        if window is not None:
            window.add(rules, step - last_seen)
            if step + 1 == window.start + WINDOW:
                results.append(window.result(bands))
                window = None
        optimizer.step()
        schedule.step()
    return results


def main() -> None:
    """Measure both trainings with each seed, and write ``results/movement.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="the study's training text")
    parser.add_argument("--seeds", type=parse_seeds, default=[1, 2, 3], metavar="1,2,...")
    parser.add_argument("--windows", type=int, default=6, help="evenly spaced over the training")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "movement.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = read_results(options.out)
    for seed, name in itertools.product(options.seeds, TRAINED_BY.values()):
        seeds = content.setdefault(name, {"seeds": {}})["seeds"]
        if str(seed) in seeds:
            continue
        recipe = recipe_of(QUESTIONS["betas"][name], options.text)
        starts = np.linspace(recipe.steps // 6, recipe.steps - WINDOW, options.windows).astype(int)
        corpus = prepare_corpus(recipe, default_cache())
        windows = measure(recipe, corpus, seed, frozenset(starts.tolist()))
        seeds[str(seed)] = {"windows": windows, "environment": machine()}
        write_results(options.out, content)
        print(f"{name}, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
