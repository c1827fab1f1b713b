"""A run: an arm of a recipe with a seed, and what its folder holds of it."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from coupled_adam.embeddings import load_embeddings
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import Recipe, recipe_from
from coupled_adam.runs import CONFIG, COUNTS, EVALUATION, METRICS, MODEL, SECOND_MOMENTS, by_step


@dataclasses.dataclass(frozen=True)
class Run:
    """An arm of a recipe with a seed, trained or not, and its folder.

    The files in the folder are read only when they are needed.
    """

    recipe: Recipe
    arm: str
    seed: int
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.yaml``: the same whatever the run is compared with."""
        recipe = self.recipe.only(self.arm, self.seed)
        return {"arm": self.arm, "seed": self.seed, "recipe": recipe.to_dict()}

    @property
    def label(self) -> str:
        """The arm in tables and pictures: its optimizer and options, after a name of its own."""
        label = self.setup.label
        return label if self.family == self.setup.optimizer else f"{self.arm}: {label}"

    @property
    def family(self) -> str:
        """What numbered arms have in common: their optimizer, or a name of their own."""
        named_after = self.setup.optimizer, self.setup.label.partition(",")[0].lower()
        own = re.sub(r"-\d+$", "", self.arm)
        return self.setup.optimizer if self.arm.lower().startswith(named_after) else own

    @property
    def setup(self) -> Arm:
        """The arm itself: its optimizer with all options."""
        return self.recipe.arms[self.arm]

    @functools.cached_property
    def evaluation(self) -> dict[str, Any]:
        """The content of ``evaluation.json``; empty before the first evaluation."""
        path = self.folder / EVALUATION
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @functools.cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The log: the metrics at a step in each entry; empty before the training."""
        path = self.folder / METRICS
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # The last line is cut off if the process was killed while it wrote it.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    @property
    def problem(self) -> str:
        """Why a report cannot use the run; empty if it is finished and evaluated."""
        last = self.metrics[-1] if self.metrics else {}
        if not all(math.isfinite(last.get(name, 0.0)) for name in ("train_loss", "grad_norm")):
            return f"diverged at step {last['step']}"
        # The parts of an evaluation are written one after the other; these two come first.
        if {"test_loss", "parameters"} <= self.evaluation.keys():
            return ""
        return "not evaluated yet" if self.evaluation else "not finished"

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """The numbers of training tokens, and the metric at each of them, where it is finite."""
        lines = [line for line in self.metrics if math.isfinite(line.get(metric, math.nan))]
        tokens = [line["step"] * self.recipe.tokens_per_step for line in lines]
        return tokens, [line[metric] for line in lines]

    @property
    def tokens_per_second(self) -> float:
        """The mean speed of training, without evaluations and checkpoints; NaN if not logged."""
        speeds = [speed for speed in self.curve("tokens_per_second")[1] if speed > 0]
        return len(speeds) / math.fsum(1 / speed for speed in speeds) if speeds else math.nan

    @property
    def has_model(self) -> bool:
        """Whether model and counts still exist; some users delete them to save space."""
        files = (f"{MODEL}/model.safetensors", COUNTS)
        return all((self.folder / file).exists() for file in files)

    def embeddings(self) -> NDArray[np.float64]:
        """The output embeddings [V, H] of the run's model."""
        # The input embeddings of an untied model come first.
        matrix = load_embeddings(self.folder / MODEL / "model.safetensors")[-1].matrix
        embeddings: NDArray[np.float64] = matrix.double().numpy()
        return embeddings

    def probabilities(self) -> NDArray[np.float64]:
        """The unigram probabilities [V] of the training text."""
        counts = np.load(self.folder / COUNTS)
        probabilities: NDArray[np.float64] = counts / counts.sum()
        return probabilities

    def second_moments(self) -> dict[int, NDArray[np.float64]]:
        """AdamW's second moments [V], averaged over H, by the number of training tokens."""
        saved = by_step(self.folder / SECOND_MOMENTS, ".npy")
        per_step = self.recipe.tokens_per_step
        return {step * per_step: np.load(path).astype(float) for step, path in saved.items()}


def read_run(folder: Path) -> Run | None:
    """The run of a folder with a ``config.yaml``; None if that file is another program's."""
    path = folder / CONFIG
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not {"arm", "seed", "recipe"} <= config.keys():
        return None
    return Run(recipe_from(config["recipe"], str(path)), config["arm"], config["seed"], folder)
