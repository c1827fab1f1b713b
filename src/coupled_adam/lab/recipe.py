"""What to run: a recipe, typed and validated, from a YAML file."""

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from coupled_adam.lab import UsageError
from coupled_adam.lab.arms import ARMS

_FOLDER = resources.files("coupled_adam.lab") / "recipes"


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPT-2 with tied embeddings, without dropout; H = n_embd."""

    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int


@dataclasses.dataclass(frozen=True)
class Data:
    """The text; null for the documentation inside Python. ``held_out`` is a share of it, twice."""

    held_out: float
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """One run: AdamW's hyperparameters, warmup and cosine; lengths in tokens, times in steps."""

    steps: int
    batch_size: int
    sequence_length: int
    lr: float
    warmup_steps: int
    final_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    evaluate_every: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A comparison: one model, one text, one way of training, and the arms that differ."""

    name: str
    model: Model
    data: Data
    training: Training
    arms: list[str]

    def __post_init__(self) -> None:
        """Raise UsageError for values that are out of range or do not fit together."""
        model, training = self.model, self.training
        for part, names in (
            (model, ("n_layer", "n_head", "n_embd")),
            (training, ("steps", "batch_size", "sequence_length", "evaluate_every")),
        ):
            for name in names:
                if getattr(part, name) < 1:
                    raise UsageError(f"{name}={getattr(part, name)} must be 1 or more")
        # 256 bytes and the end-of-text token are the smallest byte-level vocabulary.
        if model.vocab_size < 257:
            raise UsageError(f"vocab_size={model.vocab_size} must be 257 or more")
        if model.n_embd % model.n_head:
            raise UsageError(f"n_embd={model.n_embd} must be a multiple of n_head={model.n_head}")
        if not 0 < self.data.held_out < 0.5:
            raise UsageError(f"held_out={self.data.held_out} must be between 0 and 0.5")
        if not training.lr > 0:
            raise UsageError(f"lr={training.lr} must be above 0")
        if not self.arms or set(self.arms) - set(ARMS) or len(set(self.arms)) < len(self.arms):
            raise UsageError(f"arms={self.arms} must be some of {list(ARMS)}, each once")

    @property
    def tokens(self) -> int:
        """D: the tokens that one run trains on."""
        return self.training.steps * self.training.batch_size * self.training.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as in the YAML file."""
        data = dataclasses.asdict(self)
        data["training"]["betas"] = list(self.training.betas)
        return data


def load_recipe(name: str) -> Recipe:
    """Read a recipe of the package by its name, or a YAML file by its path.

    Raises:
        UsageError: no such recipe or file; a key or value that does not belong.
    """
    known = sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir())
    path = _FOLDER / f"{name}.yaml" if name in known else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"recipe {name!r}: not one of {known}, and as a file: {error.strerror}"
        ) from None
    return parse_recipe(text, name)


def parse_recipe(text: str, source: str) -> Recipe:
    """Read a recipe from YAML text; ``source`` names it in errors."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Recipe)
    try:
        values = parser.parse_string(text, defaults=False)
        recipe: Recipe = Recipe(**parser.instantiate(values).as_dict())
    except (jsonargparse.ArgumentError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise UsageError(f"recipe {source!r}: {message}") from None
    return recipe
