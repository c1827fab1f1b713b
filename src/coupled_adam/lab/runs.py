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

from coupled_adam.lab import UsageError
from coupled_adam.lab.arms import AdamW
from coupled_adam.lab.recipe import Recipe, parse_recipe

_OUTPUT_EMBEDDINGS = ("lm_head.weight", "transformer.wte.weight", "model.embed_tokens.weight")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run folder.

    ``experiment`` names what it may be compared with: the runs whose recipes differ at most in
    name, arms and seeds.
    """

    folder: Path
    arm: str
    seed: int
    recipe: Recipe
    metrics: list[dict[str, float]]
    evaluation: dict[str, Any]
    experiment: str = ""

    @property
    def label(self) -> str:
        """The arm's name in tables and pictures."""
        return self.recipe.arm(self.arm).label

    @property
    def setup(self) -> str:
        """The arm's optimizer and options: equal for the same arm under another name."""
        return repr(self.recipe.arm(self.arm))

    @property
    def is_baseline(self) -> bool:
        """Whether it is plain AdamW, which the other arms are compared with."""
        return isinstance(self.recipe.arm(self.arm), AdamW)

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

    @property
    def has_model(self) -> bool:
        """Whether its model and counts are still there: some delete them, to save space."""
        files = ("model/model.safetensors", "unigram_counts.npy")
        return all((self.folder / file).exists() for file in files)

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


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The finished runs below some folders, in the order of a table; and why others are left out.

    Raises:
        UsageError: a file of a run cannot be understood.
    """
    runs, left_out = [], {}
    configs = {path.resolve(): path for folder in folders for path in folder.rglob("config.yaml")}
    for _, path in sorted(configs.items()):
        folder = path.parent
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(config, dict) or not {"arm", "seed", "recipe"} <= config.keys():
                continue
            evaluation = _json(folder / "evaluation.json")
            # Its parts are written one after the other; these two come first.
            if not all({"test_loss", "parameters"} <= part.keys() for part in evaluation):
                left_out[folder] = "not evaluated yet"
            elif not evaluation:
                left_out[folder] = "not finished"
            else:
                metrics = _json(folder / "metrics.jsonl")
                recipe = parse_recipe(yaml.safe_dump(config["recipe"]), str(path))
                run = Run(folder, config["arm"], config["seed"], recipe, metrics, *evaluation)
                runs.append(run)
        except (ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{folder} is damaged ({reason}): move it away") from None
    runs = sorted(_name_experiments(runs), key=_place)
    kept: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        first = kept.setdefault((run.experiment, run.setup, run.seed), run)
        if first is not run:  # counted twice, it would feign a smaller p
            left_out[run.folder] = f"the same arm and seed as {first.folder}"
    return list(kept.values()), left_out


def _json(path: Path) -> list[Any]:
    """What a file holds: its lines for JSON lines; nothing where there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(part) for part in (text.splitlines() if path.suffix == ".jsonl" else [text])]


def _name_experiments(runs: Sequence[Run]) -> list[Run]:
    """With ``experiment``: the recipe's name, and what sets it apart from others of that name."""
    settings: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    keys = []
    for run in runs:
        recipe = run.recipe.to_dict()
        flat = {
            f"{section}.{key}": value
            for section in ("model", "data", "training")
            for key, value in recipe[section].items()
        }
        key = json.dumps(flat, sort_keys=True)
        keys.append(key)
        settings[key] = flat
        # 124M-20B-scaled and 124M-20B are one experiment, by the shorter name.
        names[key] = min(names.get(key, recipe["name"]), recipe["name"], key=lambda n: (len(n), n))
    full = {}
    for key, name in names.items():
        others = [settings[other] for other in names if names[other] == name]
        apart = [
            f"{setting}={value}"
            for setting, value in settings[key].items()
            if any(other[setting] != value for other in others)
        ]
        full[key] = ", ".join([name, *apart])
    return [dataclasses.replace(run, experiment=full[key]) for run, key in zip(runs, keys)]


def _place(run: Run) -> tuple[Any, ...]:
    """By size and experiment; AdamW first, then Coupled Adam; the plain arm before its sweep."""
    options = run.recipe.arms[run.arm]
    kind = {"adamw": 0, "coupled_adam": 1}.get(options["optimizer"], 2)
    scale = options.get("second_moment_scale", 1)
    swept = -np.log2(scale) if scale != 1 else -np.inf, float(options.get("lr_factor", 0))
    size = run.parameters, run.recipe.tokens, run.experiment
    return *size, kind, *swept, run.setup, run.seed


def short(number: float) -> str:
    """123456789 -> 123M, three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
