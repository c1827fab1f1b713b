"""A finished run: what a report takes from its folder."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings.loading import load_embeddings
from coupled_adam.embeddings.measures import LOGGED, MEASURES, Measure
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.lab.recipe import Recipe
from coupled_adam.runs import COUNTS, MODEL, SECOND_MOMENTS, by_step

TEST_LOSS = Measure(
    "test_loss",
    "test loss",
    "L",
    3,
    "lower",
    ("test_loss",),
    "test loss in nats per token",
    column=True,
)
ACCURACY = Measure(
    "accuracy",
    "accuracy",
    "Acc",
    3,
    "higher",
    ("lm_eval", "accuracy"),
    "mean accuracy of the downstream tasks",
    column=True,
)

_OF_EMBEDDINGS = [measure for measure in MEASURES.values() if measure.column]
_OF_EMBEDDINGS += [measure for measure in LOGGED.values() if not measure.column]

COLUMNS = {"test_loss": TEST_LOSS, "accuracy": ACCURACY} | {
    # In evaluation.json all measures except this one are in the part of the output embeddings.
    measure.key: measure
    if measure.key == "word_similarity"
    else dataclasses.replace(measure, path=("embeddings", *measure.path))
    for measure in _OF_EMBEDDINGS
}
"""What is reported of a run: first the columns of the paper's Table 1, then those with ``column``
false, which are on the page and in the CSV files only."""

_STATE = "embedding_state_bytes"
LARGEST = 1e100
"""The limit of all numbers; its square is still a float."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of a finished run. Its arrays are read only when they are needed.

    Attributes:
        experiment: the title of the experiment that the run belongs to. Runs of one experiment may
            be compared; their recipes differ only in name, arms and seeds.
        settings: the values by which that differs from the other experiments in the report, by
            their dotted keys in the recipe.
        other_tokens: the number of tokens of the test loss, if it is another one than that of most
            runs of the experiment, with which the loss cannot be compared.
    """

    folder: Path
    arm: str
    seed: int
    recipe: Recipe
    metrics: list[dict[str, float]]
    evaluation: dict[str, Any]
    experiment: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    other_tokens: int | None = None

    @property
    def label(self) -> str:
        """The arm's name in tables and pictures."""
        return self.recipe.arm(self.arm).label

    @property
    def options(self) -> dict[str, Any]:
        """The arm's optimizer and options, as the recipe has them."""
        return self.recipe.arms[self.arm]

    @property
    def setup(self) -> str:
        """The arm's optimizer and options, which are equal for the same arm under another name."""
        return repr(self.recipe.arm(self.arm))

    @property
    def parameters(self) -> int:
        """N, the number of parameters."""
        return int(self.evaluation["parameters"])

    @property
    def size(self) -> tuple[int, int]:
        """D and N: the numbers of training tokens and of parameters."""
        return self.recipe.tokens, self.parameters

    def value(self, measure: Measure) -> float | None:
        """A number of the evaluation; None if it was not measured, or cannot be compared."""
        if measure is TEST_LOSS and self.other_tokens is not None:
            return None
        return measure.of(self.evaluation)

    @property
    def spectrum(self) -> list[float] | None:
        """The singular values of the output embeddings; None if they were not measured."""
        embeddings: dict[str, Any] = self.evaluation.get("embeddings") or {}
        return embeddings.get("singular_values")

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """The numbers of training tokens, and the metric at each of them, where it is finite."""
        lines = [line for line in self.metrics if math.isfinite(line.get(metric, math.nan))]
        tokens = [line["step"] * self.recipe.tokens_per_step for line in lines]
        return tokens, [line[metric] for line in lines]

    @property
    def tokens_per_second(self) -> float | None:
        """The mean speed of training; None if it was not logged."""
        speeds = [line.get("tokens_per_second", 0.0) for line in self.metrics]
        inverse = [1 / speed for speed in speeds if math.isfinite(speed) and speed > 0]
        return len(inverse) / math.fsum(inverse) if inverse else None

    @property
    def seconds(self) -> float | None:
        """How long the training took, without evaluations and checkpoints; None if unknown."""
        speed = self.tokens_per_second
        return None if speed is None else self.recipe.tokens / speed

    @property
    def embedding_state(self) -> float | None:
        """Bytes of optimizer state of the token embeddings; None if they were not logged."""
        sizes = [line[_STATE] for line in self.metrics if line.get(_STATE) is not None]
        return sizes[-1] if sizes else None

    @property
    def has_model(self) -> bool:
        """Whether model and counts still exist; some users delete them to save space."""
        files = (f"{MODEL}/model.safetensors", COUNTS)
        return all((self.folder / file).exists() for file in files)

    def embeddings(self) -> NDArray[np.float64]:
        """The output embeddings [V, H] of the run's model.

        Raises:
            UsageError: the file is damaged or belongs to another model.
        """
        path = self.folder / MODEL / "model.safetensors"

        def read() -> NDArray[Any]:
            return load_embeddings(path)[-1].matrix.double().numpy()  # the input ones come first

        return _read_numbers(path, read, (self.recipe.model.vocab_size, self.recipe.model.n_embd))

    def probabilities(self) -> NDArray[np.float64]:
        """The unigram probabilities [V] of the training text; raises like :meth:`embeddings`."""
        counts = self._of_tokens(self.folder / COUNTS)
        if not counts.any():
            raise UsageError(f"{self.folder} is damaged (no token was ever seen): move it away")
        probabilities: NDArray[np.float64] = counts / counts.sum()
        return probabilities

    def second_moments(self) -> dict[int, NDArray[np.float64]]:
        """AdamW's second moments [V], averaged over H, by the number of training tokens.

        Raises the same errors as :meth:`embeddings`.
        """
        saved = by_step(self.folder / SECOND_MOMENTS, ".npy")
        per_step = self.recipe.tokens_per_step
        return {step * per_step: self._of_tokens(path) for step, path in saved.items()}

    def _of_tokens(self, path: Path) -> NDArray[np.float64]:
        """Read an array [V] of numbers that are at least 0."""
        values = _read_numbers(path, lambda: read_array(path), (self.recipe.model.vocab_size,))
        if values.min() < 0:
            raise UsageError(f"{path} is damaged (numbers below 0): move it away")
        return values


def _read_numbers(
    path: Path, read: Callable[[], NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Finite numbers of the given shape; UsageError if the file has other contents."""
    try:
        values = read()
        if values.shape != shape:
            raise ValueError(f"shape {list(values.shape)}, where its recipe has {list(shape)}")
        if not (np.abs(values) <= LARGEST).all():
            raise ValueError("numbers that are not finite, or beyond 1e100")
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}): move it away") from None
    return values.astype(np.float64)


def short(number: float) -> str:
    """Abbreviate a number to three digits: 123456789 becomes 123M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
