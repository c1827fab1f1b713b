"""Whether a bfloat16 embedding matrix needs more than rounding to nearest, with Coupled Adam.

    python benchmarks/bf16_embeddings.py benchmarks/results/bf16_embeddings.json

The ``tiny`` recipe at a tenth of its learning rate and at its own, three seeds. All is float32 but
the embedding matrix, which after each step is rounded to bfloat16: to nearest, stochastically, or
with what was lost kept for the next step (Kahan, in bfloat16, too). The first moment is float32, or
bfloat16. Writes the validation loss at the end. Half an hour on two cores;
the committed results are of the first seed, at a tenth of the rate.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.embeddings import analyze
from coupled_adam.lab.corpus import default_cache, prepare_corpus
from coupled_adam.lab.environment import environment
from coupled_adam.lab.files import write_atomically
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training import Batches, next_token_loss, schedule, sequence_losses

ROUNDINGS = ("float32", "nearest", "nearest, bf16 moment", "stochastic", "Kahan")
FACTORS = (0.1, 1.0)
SEEDS = (1, 2, 3)


class Rounded:
    """A float32 matrix that holds bfloat16 values after each step."""

    def __init__(self, parameter: nn.Parameter, how: str, seed: int) -> None:
        self.parameter = parameter
        self.how = how
        self.lost = torch.zeros_like(parameter, dtype=torch.bfloat16)
        self.generator = torch.Generator().manual_seed(seed)
        self.round()

    def before_step(self) -> None:
        if self.how == "Kahan":
            self.parameter.add_(self.lost.float())

    def round(self) -> None:
        p = self.parameter.data
        if self.how == "float32":
            return
        if self.how == "stochastic":
            rounded = stochastically(p, self.generator)
        else:
            rounded = p.bfloat16().float()
        if self.how == "Kahan":
            self.lost = (p - rounded).bfloat16()
        p.copy_(rounded)


def stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Up or down, with the probability of its distance: 16 random bits below those of bfloat16."""
    noise = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32)


def train(how: str, factor: float, seed: int) -> dict[str, float]:
    recipe = load_recipe("tiny")
    recipe = override(recipe, {"training.lr": recipe.training.lr * factor})
    corpus = prepare_corpus(recipe, default_cache())
    torch.manual_seed(seed)
    model = build_model(recipe)
    options = recipe.training
    optimizer = CoupledAdamW(
        param_groups(model, weight_decay=options.weight_decay),
        options.lr,
        options.betas,
        options.eps,
        max_grad_norm=options.max_grad_norm,
    )
    scheduler = schedule(optimizer, recipe)
    matrix = model.get_output_embeddings().weight
    with torch.no_grad():
        rounded = Rounded(matrix, how.split(",")[0], seed)
    for batch in Batches(corpus.tokens("train"), recipe, seed):
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        with torch.no_grad():
            rounded.before_step()
            optimizer.step()
            if "bf16 moment" in how:
                moment = optimizer.state[matrix]["exp_avg"]
                moment.copy_(moment.bfloat16())
            rounded.round()
        scheduler.step()
    held_out = corpus.tokens("valid")
    length = options.sequence_length
    starts = np.arange(0, len(held_out) - length - 1, length)
    blocks = torch.from_numpy(
        np.stack([held_out[s : s + length + 1] for s in starts]).astype(np.int64)
    )
    with torch.no_grad():
        losses = torch.cat([sequence_losses(model.eval(), part) for part in blocks.split(32)])
    report = analyze(matrix.detach())
    return {
        "valid_loss": losses.double().mean().item(),
        "isotropy": report.isotropy,
        "mean_norm_ratio": report.mean_norm_ratio,
    }


def main(target: Path) -> None:
    content = {
        "environment": environment(),
        "recipe": load_recipe("tiny").to_dict(),
        "results": [],
    }
    for factor in FACTORS:
        for seed in SEEDS:
            for how in ROUNDINGS:
                found = train(how, factor, seed)
                content["results"].append(
                    {"rounding": how, "lr_factor": factor, "seed": seed, **found}
                )
                write_atomically(target, json.dumps(content, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
