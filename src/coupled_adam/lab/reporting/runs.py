"""Read the folders of finished runs."""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings.loading import load_embeddings
from coupled_adam.embeddings.measures import LOGGED, MEASURES, Measure
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import read_text
from coupled_adam.lab.arms import AdamWArm
from coupled_adam.lab.grid import as_text
from coupled_adam.lab.recipe import Recipe, recipe_from
from coupled_adam.lab.safe_yaml import read_yaml
from coupled_adam.lab.training.schemas import check_evaluation
from coupled_adam.runs import CONFIG, COUNTS, EVALUATION, METRICS, MODEL, SECOND_MOMENTS, by_step

TEST_LOSS = Measure(
    "test_loss", "test loss", "L", 3, "lower", ("test_loss",), "test loss in nats per token"
)
ACCURACY = Measure(
    "accuracy",
    "accuracy",
    "Acc",
    3,
    "higher",
    ("lm_eval", "accuracy"),
    "mean accuracy of the downstream tasks",
)


def _in_evaluation(measure: Measure) -> Measure:
    """A measure of embeddings, as ``evaluation.json`` has it."""
    if measure.path[0] == "word_similarity":
        return measure
    return dataclasses.replace(measure, path=("embeddings", *measure.path))


COLUMNS = {"test_loss": TEST_LOSS, "accuracy": ACCURACY} | {
    key: _in_evaluation(measure) for key, measure in MEASURES.items() if measure.column
}
"""In the order of the paper's Table 1; accuracy and word similarity are shown if measured."""

MORE_COLUMNS = {
    key: _in_evaluation(measure) for key, measure in LOGGED.items() if not measure.column
}
"""What the paper's tables do not show; on the page and in the CSV files, if measured."""

_STATE = "embedding_state_bytes"
_LARGEST = 1e100  # the limit of all numbers; its square is still a float


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of a finished run. Its arrays are read only when they are needed.

    ``experiment`` is the title of the experiment that the run belongs to. Runs of one experiment
    may be compared; their recipes differ only in name, arms and seeds. ``settings`` are the values
    by which it differs from other experiments in the report, by their dotted keys in the recipe.
    ``other_tokens`` is the number of tokens of the test loss, if it is another one than that of
    most runs of the experiment, with which the loss cannot be compared.
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
        number: int = self.evaluation["parameters"]
        return number

    def value(self, measure: Measure) -> float | None:
        """A number of the evaluation; None if it was not measured, or cannot be compared."""
        if measure is TEST_LOSS and self.other_tokens is not None:
            return None
        return measure.of(self.evaluation)

    @property
    def spectrum(self) -> list[float] | None:
        """The singular values of the output embeddings; None if they were not measured."""
        values: list[float] | None = (self.evaluation.get("embeddings") or {}).get(
            "singular_values"
        )
        return values

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """The numbers of training tokens, and the metric at each of them, where it is finite."""
        points = [
            (line["step"], line[metric])
            for line in self.metrics
            if math.isfinite(line.get(metric, math.nan))
        ]
        return [step * self.recipe.tokens_per_step for step, _ in points], [y for _, y in points]

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
        return next(
            (line[_STATE] for line in reversed(self.metrics) if line.get(_STATE) is not None), None
        )

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
        model = self.recipe.model
        path = self.folder / MODEL / "model.safetensors"

        def read() -> NDArray[Any]:
            return load_embeddings(path)[-1].matrix.double().numpy()  # the input ones come first

        return _checked(path, read, (model.vocab_size, model.n_embd))

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
        values = _checked(path, lambda: read_array(path), (self.recipe.model.vocab_size,))
        if values.min() < 0:
            raise UsageError(f"{path} is damaged (numbers below 0): move it away")
        return values


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Find the finished runs below some folders, in the table's order, and why others are left out.

    Raises:
        UsageError: a file of a run is damaged.
    """
    runs, left_out = [], {}
    # A run that is found through several of the folders, or through links, counts once.
    configs = {path.resolve(): path for folder in folders for path in folder.rglob(CONFIG)}
    for _, path in sorted(configs.items()):
        folder = path.parent
        try:
            config = read_yaml(read_text(path), path.name)
            if not isinstance(config, dict) or not {"arm", "seed", "recipe"} <= config.keys():
                continue
            evaluation = _json(folder / EVALUATION)
            # The parts of an evaluation are written one after the other; these two come first.
            if not all({"test_loss", "parameters"} <= {*entry} for entry in evaluation):
                left_out[folder] = "not evaluated yet"
            elif not evaluation:
                left_out[folder] = _why_unfinished(folder)
            else:
                metrics = _json(folder / METRICS)
                recipe = recipe_from(config["recipe"], path.name)
                run = Run(folder, config["arm"], config["seed"], recipe, metrics, *evaluation)
                _check(run)
                runs.append(run)
        except (UsageError, ValueError, OSError) as error:
            reason = one_line(error, longest=None)
            raise UsageError(f"{folder} is damaged ({reason}): move it away") from None
    runs = sorted(_name_experiments(runs), key=_place)
    unique: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        first = unique.setdefault((run.experiment, run.setup, run.seed), run)
        if first is not run:  # counting a run twice would make p too small
            left_out[run.folder] = f"the same arm and seed as {first.folder}"
    return _with_other_tokens([*unique.values()]), left_out


def _with_other_tokens(runs: Sequence[Run]) -> list[Run]:
    """Mark the runs whose test loss is over other data than that of most of their experiment."""
    tokens: dict[str, collections.Counter[int | None]] = {}
    for run in runs:
        counter = tokens.setdefault(run.experiment, collections.Counter())
        counter[run.evaluation.get("test_tokens")] += 1
    marked = []
    for run in runs:
        counter = tokens[run.experiment]
        # Of two numbers that occur equally often, the larger: more tokens measure better.
        usual = max(counter, key=lambda number: (counter[number], number or 0))
        number = run.evaluation.get("test_tokens")
        different = None if number == usual or number is None else number
        marked.append(dataclasses.replace(run, other_tokens=different))
    return marked


def _why_unfinished(folder: Path) -> str:
    """Why a run has no evaluation: its log may end with a loss or gradient that is not finite."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        *_, last = read_text(folder / METRICS).splitlines()
        line = json.loads(last)
        if not all(math.isfinite(line.get(name, 0.0)) for name in ("train_loss", "grad_norm")):
            return f"diverged at step {line['step']}"
    return "not finished"


def _json(path: Path) -> list[Any]:
    """The objects in a JSON or JSON Lines file; an empty list if there is no file."""
    if not path.exists():
        return []
    text = read_text(path)
    try:
        parts = [json.loads(p) for p in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not all(isinstance(entry, dict) for entry in parts):
        raise ValueError(f"{path.name}: not JSON objects")
    return parts


def _check(run: Run) -> None:
    """Raise ValueError if a run is not as training and evaluation write it."""
    if run.arm not in [*run.recipe.arms] or run.seed not in run.recipe.seeds:
        raise ValueError(f"config.yaml: arm {run.arm!r} and seed {run.seed!r} are not its recipe's")
    # Not isinstance, since true and false are whole numbers to Python.
    if type(run.seed) is not int:
        raise ValueError(f"config.yaml: seed={run.seed!r} is not a whole number")
    try:
        check_evaluation(run.evaluation)
    except ValueError as error:
        raise ValueError(f"evaluation.json: {error}") from None
    for measure in (COLUMNS | MORE_COLUMNS).values():
        value = run.value(measure)
        if not _is_number(value) and (value is not None or measure is TEST_LOSS):
            name = ".".join(measure.path)
            raise ValueError(f"evaluation.json: {name}={value!r} is not a number")
    spectrum: Any = run.spectrum
    if spectrum is not None and not (
        isinstance(spectrum, list)
        and all(_is_number(value) and math.isfinite(value) for value in spectrum)
        and max(spectrum, default=0) > 0
        and spectrum == sorted(map(abs, spectrum), reverse=True)
    ):
        raise ValueError("evaluation.json: embeddings.singular_values are not descending to 0")
    for line in run.metrics:
        if not _is_count(line.get("step")) or not all(map(_is_number, line.values())):
            raise ValueError(f"metrics.jsonl: {str(line)[:100]} is not numbers at a step")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """Whether a value is a number, including NaN and infinity, which diverged runs contain."""
    if type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is float and (not math.isfinite(value) or abs(value) <= _LARGEST)


def _checked(
    path: Path, read: Callable[[], NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Read finite numbers of the given shape.

    Raises:
        UsageError: the file has other contents or cannot be read.
    """
    try:
        values = read()
        if values.shape != shape:
            raise ValueError(f"shape {list(values.shape)}, where its recipe has {list(shape)}")
        if not (np.abs(values) <= _LARGEST).all():
            raise ValueError("numbers that are not finite, or beyond 1e100")
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}): move it away") from None
    return values.astype(np.float64)


def _name_experiments(runs: Sequence[Run]) -> list[Run]:
    """Set ``experiment``: the recipe's name, and the settings that differ under the same name."""
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
        flat["variant"] = run.recipe.variant
        key = json.dumps(flat, sort_keys=True)
        keys.append(key)
        settings[key] = flat
        # 124M-20B-scaled and 124M-20B are one experiment, with the shorter name.
        names[key] = min(names.get(key, recipe["name"]), recipe["name"], key=lambda n: (len(n), n))
    # What tells experiments of one name apart, for all of them, so that a table has one column.
    apart = [
        setting
        for setting in next(iter(settings.values()), ())
        if any(
            settings[a][setting] != settings[b][setting]
            for a, b in itertools.combinations(names, 2)
            if names[a] == names[b]
        )
    ]
    sizes: dict[tuple[int, int], set[str]] = {}
    for run, key in zip(runs, keys):
        sizes.setdefault((run.parameters, run.recipe.tokens), set()).add(names[key])
    has_names = any(len(sharing) > 1 for sharing in sizes.values())  # D and N do not tell them
    named = []
    for run, key in zip(runs, keys):
        values = {setting: settings[key][setting] for setting in apart}
        namesakes = [settings[k] for k in names if names[k] == names[key]]
        telling = [s for s in values if any(namesake[s] != values[s] for namesake in namesakes)]
        listed = ", ".join(f"{short_key(s, apart)}={setting_text(values[s])}" for s in telling)
        title = f"{names[key]} ({listed})" if listed else names[key]
        if has_names:
            values = {"recipe": names[key], **values}
        named.append(dataclasses.replace(run, experiment=title, settings=values))
    return named


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of an experiment by their arms' options."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.setup, []).append(run)
    return arms


def baseline_of(arms: Iterable[list[Run]]) -> list[Run] | None:
    """The arm with which the others of an experiment are compared: AdamW without options.

    Without that one it is the only arm with AdamW; None if there are several, or none.
    """
    adamws = [(arm[0].recipe.arm(arm[0].arm), arm) for arm in arms]
    adamws = [(optimizer, arm) for optimizer, arm in adamws if isinstance(optimizer, AdamWArm)]
    plain = [arm for optimizer, arm in adamws if optimizer == AdamWArm()]
    candidates = plain or [arm for _, arm in adamws]
    return candidates[0] if len(candidates) == 1 else None


def short_key(key: str, keys: Sequence[str]) -> str:
    """A dotted key without its section, if that is the only one of its name among these keys."""
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def setting_text(value: Any) -> str:
    """A value of a recipe as in YAML, without control characters."""
    text = as_text(value) if value is None or isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)


def _place(run: Run) -> tuple[Any, ...]:
    """The sort key: size, experiment, AdamW before Coupled Adam, a plain arm before its sweep."""
    options = run.options
    kind = {"adamw": 0, "coupled_adam": 1}.get(options["optimizer"], 2)
    scale = float(options.get("second_moment_scale", 1))  # YAML reads 1e-3 as text
    swept = -np.log2(scale) if scale != 1 else -np.inf, float(options.get("lr_factor", 0))
    size = run.parameters, run.recipe.tokens, run.experiment
    return size, kind, swept, run.setup, run.seed


def short(number: float) -> str:
    """Abbreviate a number to three digits: 123456789 becomes 123M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
