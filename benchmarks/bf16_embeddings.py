"""The loss with a bfloat16 embedding matrix, with and without stochastic rounding.

    python benchmarks/bf16_embeddings.py benchmarks/results/bf16_embeddings.json

The ``tiny`` recipe is trained with Coupled Adam and three seeds at a tenth of its learning rate,
where updates are small. The optimizer's embedding matrix, its gradient and its first moment are in
float32, or in bfloat16 with rounding to nearest or stochastic rounding. Everything else is in
float32, so that only the update differs. The script writes the final validation loss of each run,
and takes ten minutes on two cores.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.embeddings import analyze
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.batches import Batches, held_out_batches
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training.environment import environment
from coupled_adam.lab.training.loss import sequence_losses
from coupled_adam.lab.training.schedules import lr_scheduler

ROUNDINGS = ("float32", "nearest", "stochastic")
LR_FACTOR = 0.1
SEEDS = (1, 2, 3)


def train(how: str, seed: int) -> dict[str, float]:
    recipe = load_recipe("tiny")
    recipe = override(recipe, {"training.lr": recipe.training.lr * LR_FACTOR})
    corpus = prepare_corpus(recipe, default_cache())
    torch.manual_seed(seed)
    model = build_model(recipe)
    options = recipe.training
    matrix = model.get_output_embeddings().weight
    groups = param_groups(model, weight_decay=options.weight_decay)
    stored = matrix if how == "float32" else nn.Parameter(matrix.detach().bfloat16())
    for group in groups:
        group["params"] = [stored if p is matrix else p for p in group["params"]]
    optimizer = CoupledAdamW(
        groups,
        options.lr,
        options.betas,
        options.eps,
        stochastic_rounding=how == "stochastic",
    )
    assert any(p is stored for p in optimizer.param_groups[-1]["params"])
    scheduler = lr_scheduler(optimizer, recipe)
    for batch in Batches(corpus.tokens("train"), recipe, seed):
        matrix.data.copy_(stored.detach())
        model.zero_grad()
        sequence_losses(model, batch).mean().backward()
        stored.grad = matrix.grad.to(stored.dtype)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, options.max_grad_norm)
        optimizer.step()
        scheduler.step()
    matrix.data.copy_(stored.detach())
    held_out = held_out_batches(corpus.tokens("valid"), 32, options.sequence_length)
    with torch.no_grad():
        losses = torch.cat([sequence_losses(model.eval(), blocks) for blocks in held_out])
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
    for seed in SEEDS:
        for how in ROUNDINGS:
            setting = {"rounding": how, "lr_factor": LR_FACTOR, "seed": seed}
            content["results"].append({**setting, **train(how, seed)})
            write_atomically(target, json.dumps(content, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
