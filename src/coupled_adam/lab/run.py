"""A run: an arm of a recipe with a seed, and what its folder holds of it."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from coupled_adam.embeddings import load_embeddings
from coupled_adam.errors import prefixed_usage_error
from coupled_adam.fields import LARGEST, require
from coupled_adam.inputs import read_array, read_own, reading_own
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import Recipe, read_yaml, recipe_from
from coupled_adam.runs import (
    CONFIG,
    COUNTS,
    ENVIRONMENT,
    EVALUATION,
    METRICS,
    MODEL,
    SECOND_MOMENTS,
    by_step,
)

# What is computed with in a run's files; pydantic checks it, so that messages name a damaged file.
# Other keys, as of a newer version, are allowed. A text is not a number.
_Number = Annotated[float, Field(allow_inf_nan=False)] | None


class _Spectra(TypedDict, total=False, extra_items=_Number):  # type: ignore[call-arg]  # PEP 728
    singular_values: Annotated[list[float], Field(min_length=1)]


class _Measures(_Spectra, total=False):
    centered: _Spectra
    all_but_the_top: _Spectra


class _Similarity(TypedDict):
    mean: _Number
    sets: dict[str, dict[str, _Number]]


class _Accuracy(TypedDict):
    accuracy: float
    tasks: dict[str, dict[str, Any]]


class _Evaluation(TypedDict, total=False):
    test_loss: _Number
    test_tokens: int | None
    parameters: Annotated[int, Field(ge=1, le=LARGEST)]
    embeddings: _Measures
    input_embeddings: _Measures | None
    word_similarity: _Similarity | None
    lm_eval: _Accuracy | None


class _Environment(TypedDict, total=False):
    command: list[str]
    gpus: list[str]
    packages: dict[str, str]
    corpus: dict[str, Any]
    resumed: list[Any]


class _Entry(TypedDict, extra_items=float):  # type: ignore[call-arg]
    step: Annotated[int, Field(ge=0)]


_EVALUATION, _ENVIRONMENT = TypeAdapter(_Evaluation), TypeAdapter(_Environment)
_LOG = TypeAdapter(list[_Entry])


@dataclasses.dataclass(frozen=True)
class Run:
    """An arm of a recipe with a seed, trained or not, and its folder.

    The files in the folder are read only when they are needed.
    """

    recipe: Recipe
    arm_name: str
    seed: int
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.yaml``: the same whatever the run is compared with."""
        recipe = self.recipe.only(self.arm_name, self.seed)
        return {"arm": self.arm_name, "seed": self.seed, "recipe": recipe.to_dict()}

    @functools.cached_property
    def label(self) -> str:
        """The arm in tables and pictures: its optimizer and options, after its own name if any."""
        label = self.arm.label
        # "lean" and "lean-2" say no more than the label, but "short-warmup" does.
        return label if self.family == self.arm.optimizer else f"{self.arm_name}: {label}"

    @functools.cached_property
    def family(self) -> str:
        """What numbered arms have in common: their optimizer, or a name of their own."""
        named_after = self.arm.optimizer, self.arm.label.partition(",")[0].lower()
        # As arms_from() numbers the arms of a sweep.
        own = re.sub(r"-\d+$", "", self.arm_name)
        return self.arm.optimizer if self.arm_name.lower().startswith(named_after) else own

    @functools.cached_property
    def arm(self) -> Arm:
        """The arm itself: its optimizer with all options."""
        return self.recipe.arms[self.arm_name]

    # Cached, as a report asks many times; who adds to the file calls read_evaluation() itself.
    @functools.cached_property
    def evaluation(self) -> dict[str, Any]:
        """The content of ``evaluation.json``; empty before the first evaluation."""
        return read_evaluation(self.folder)

    @property
    def environment(self) -> dict[str, Any]:
        """The content of ``environment.json``; empty before the training."""
        return _read_json(self.folder / ENVIRONMENT, _ENVIRONMENT)

    @functools.cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The log: the metrics at a step in each entry; empty before the training."""
        return read_log(self.folder / METRICS)

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
        per_step = self.recipe.training.tokens_per_step
        return [line["step"] * per_step for line in lines], [line[metric] for line in lines]

    @property
    def tokens_per_second(self) -> float:
        """The mean speed of training, without evaluations and checkpoints; NaN if not logged."""
        # The harmonic mean, as each is of equally many tokens: all tokens by the whole time.
        speeds = [speed for speed in self.curve("tokens_per_second")[1] if speed > 0]
        return len(speeds) / math.fsum(1 / speed for speed in speeds) if speeds else math.nan

    @property
    def has_model(self) -> bool:
        """Whether model and counts still exist; some users delete them to save space."""
        files = (f"{MODEL}/model.safetensors", COUNTS)
        return all((self.folder / file).exists() for file in files)

    def embeddings(self) -> NDArray[np.float64]:
        """The output embeddings [V, H] of the run's model."""
        # The input embeddings of an untied model come first, and are not what is reported.
        path = self.folder / MODEL / "model.safetensors"
        with prefixed_usage_error("", ValueError):
            matrix = load_embeddings(path)[-1].matrix
        embeddings: NDArray[np.float64] = matrix.double().numpy()
        size = self.recipe.model.vocab_size
        require(
            len(embeddings) >= size and np.isfinite(embeddings).all(),
            f"{path} is damaged, or another run's: its embeddings are not those of {size} tokens",
        )
        return embeddings[:size]  # a variant may have tokens of its own behind those of the text

    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training text, [V]."""
        return self._numbers_of_tokens(self.folder / COUNTS).astype(np.int64)

    def probabilities(self) -> NDArray[np.float64]:
        """The unigram probabilities [V] of the training text."""
        counts = self.counts()
        probabilities: NDArray[np.float64] = counts / counts.sum()
        return probabilities

    def second_moments(self) -> dict[int, NDArray[np.float64]]:
        """AdamW's second moments [V], averaged over H, by the number of training tokens."""
        saved = by_step(self.folder / SECOND_MOMENTS, ".npy")
        per_step = self.recipe.training.tokens_per_step
        moments = {step: self._numbers_of_tokens(path) for step, path in saved.items()}
        return {step * per_step: values.astype(float) for step, values in moments.items()}

    def _numbers_of_tokens(self, path: Path) -> NDArray[Any]:
        """The array in a file, with a number for each token, [V]."""
        size = self.recipe.model.vocab_size
        with reading_own(path):
            values = read_array(path)
            is_whole = values.dtype.kind in "iuf" and values.ndim == 1 and len(values) >= size
            require(
                is_whole and values.min() >= 0 < values.sum(),
                f"it does not hold a number for each of {size} tokens",
            )
        return values[:size]  # as of the embeddings


def read_run(folder: Path) -> Run:
    """The run that the ``config.yaml`` of a folder describes.

    Raises UsageError if the file is missing, damaged, or another program's.
    """

    def parse(text: str) -> Run:
        config = read_yaml(text, "it")
        is_of_a_run = isinstance(config, dict) and {"arm", "seed", "recipe"} <= config.keys()
        require(is_of_a_run, "it does not have the keys arm, seed and recipe")
        recipe, arm, seed = recipe_from(config["recipe"], "recipe"), config["arm"], config["seed"]
        require(arm in recipe.arms and seed in recipe.seeds, f"its recipe has no {arm}, {seed}")
        return Run(recipe, arm, seed, folder)

    return read_own(folder / CONFIG, parse)


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The content of a run's ``evaluation.json``, as it is now; empty if there is none."""
    return _read_json(folder / EVALUATION, _EVALUATION)


def read_log(path: Path) -> list[dict[str, float]]:
    """The entries of a log, each of which has a ``step``; none if there is no file."""

    def parse(text: str) -> list[dict[str, float]]:
        # Whole lines only: the last one is cut off if the process was killed while it wrote it.
        entries = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        _LOG.validate_python(entries, strict=True)
        return entries

    return read_own(path, parse) if path.exists() else []


def _read_json(path: Path, kind: TypeAdapter[Any]) -> dict[str, Any]:
    """The content of a JSON file, checked to be of this kind; {} if there is no file."""

    def parse(text: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(text, parse_constant=int)  # refuses NaN
        kind.validate_python(content, strict=True)
        return content

    return read_own(path, parse) if path.exists() else {}
