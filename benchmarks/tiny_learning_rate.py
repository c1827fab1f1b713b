"""Find the best learning rate of the ``tiny`` recipe: both arms, four rates, three seeds.

    python benchmarks/tiny_learning_rate.py benchmarks/results/tiny_learning_rate.json

The script writes the final validation loss of each run and the environment. It takes half an hour
on two cores.
"""

import json
import sys
import tempfile
from pathlib import Path

from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.environment import environment
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train

RATES = (3e-3, 6e-3, 1e-2, 2e-2)
SEEDS = (1, 2, 3)


def main(target: Path) -> None:
    recipe = load_recipe("tiny")
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare_corpus(recipe, default_cache())
        for lr in RATES:
            at_rate = override(recipe, {"training.lr": lr})
            for seed in SEEDS:
                for arm in recipe.arms:
                    run = Run(at_rate, arm, seed, folder / f"{arm}-{lr}-{seed}")
                    train(run, corpus, Execution())
                    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
                    losses = [json.loads(line).get("valid_loss") for line in lines]
                    (*_, last) = filter(None, losses)
                    results.append({"lr": lr, "seed": seed, "arm": arm, "valid_loss": last})
    content = {"environment": environment(), "recipe": recipe.to_dict(), "results": results}
    write_atomically(target, json.dumps(content, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
