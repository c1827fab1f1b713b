"""Finished run folders, read."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors import safe_open

from coupled_adam.lab.recipe import Recipe, parse_recipe

_OUTPUT_EMBEDDINGS = ("lm_head.weight", "transformer.wte.weight", "model.embed_tokens.weight")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run folder."""

    folder: Path
    arm: str
    seed: int
    recipe: Recipe
    metrics: list[dict[str, float]]
    evaluation: dict[str, Any]

    @property
    def label(self) -> str:
        """The arm's name in tables and pictures."""
        return self.recipe.arm(self.arm).label

    @property
    def parameters(self) -> int:
        """N."""
        number: int = self.evaluation["parameters"]
        return number

    def value(self, path: Sequence[str]) -> Any:
        """A result of the evaluation, mostly a number; None where it was not measured."""
        found: Any = self.evaluation
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Tokens seen, and the metric there."""
        points = [(line["step"], line[metric]) for line in self.metrics if metric in line]
        return [step * self.recipe.tokens_per_step for step, _ in points], [y for _, y in points]

    def embeddings(self) -> NDArray[np.float64]:
        """The output embeddings [V, H] of its model."""
        with safe_open(self.folder / "model" / "model.safetensors", framework="pt") as file:
            name = next(name for name in _OUTPUT_EMBEDDINGS if name in file.keys())  # noqa: SIM118
            matrix: torch.Tensor = file.get_tensor(name)
        return matrix.double().numpy()

    def probabilities(self) -> NDArray[np.float64]:
        """The unigram probabilities of the training tokens, [V]."""
        counts = np.load(self.folder / "unigram_counts.npy")
        probabilities: NDArray[np.float64] = counts / counts.sum()
        return probabilities

    def second_moments(self) -> dict[int, NDArray[np.float64]]:
        """Tokens seen, and AdamW's second moment of each row, averaged over H, [V]."""
        paths = (self.folder / "second_moments").glob("step-*.npy")
        steps = {int(path.stem.removeprefix("step-")): path for path in paths}
        return {step * self.recipe.tokens_per_step: np.load(steps[step]) for step in sorted(steps)}


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """The finished runs in some folders, by recipe, seed and arm; and the folders of unfinished."""
    runs, unfinished = [], []
    configs = {path for folder in folders for path in folder.rglob("config.yaml")}
    for path in sorted(configs):
        folder = path.parent
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not {"arm", "seed", "recipe"} <= config.keys():
            continue
        if not (folder / "evaluation.json").exists():
            unfinished.append(folder)
            continue
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        runs.append(
            Run(
                folder=folder,
                arm=config["arm"],
                seed=config["seed"],
                recipe=parse_recipe(yaml.safe_dump(config["recipe"]), str(path)),
                metrics=[json.loads(line) for line in lines],
                evaluation=json.loads((folder / "evaluation.json").read_text(encoding="utf-8")),
            )
        )
    kinds = {"adamw": 0, "coupled_adam": 1}

    def place(run: Run) -> tuple[Any, ...]:
        options = run.recipe.arms[run.arm]
        kind = kinds.get(options["optimizer"], 2)
        return run.parameters, run.recipe.tokens, run.recipe.name, kind, _sorting(run), run.seed

    return sorted(runs, key=place), unfinished


def _sorting(run: Run) -> tuple[float, str]:
    """The plain arm first, then sweeps by their number."""
    options = run.recipe.arms[run.arm]
    scale = options.get("second_moment_scale", 1)
    return -np.log2(scale) if scale != 1 else -np.inf, f"{options.get('lr_factor', 0):09.3f}"


def short(number: float) -> str:
    """123456789 -> 123M, three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
