"""What to run: a recipe, typed and validated, from YAML.

A file may say ``extends: NAME`` and give only what differs from that recipe; on the command line
``key=value`` does the same once more. Arms are replaced as a whole by a file that has some.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import jsonargparse
import yaml

from coupled_adam.errors import UsageError, one_line
from coupled_adam.lab.arms import OPTIMIZERS, Arm
from coupled_adam.text.source import Data

_parsers: dict[type[Any], jsonargparse.ArgumentParser] = {}  # to make one takes a while
_FOLDER = resources.files("coupled_adam.lab") / "recipes"
_CHARACTERS = 100_000  # of a YAML file, and of what its aliases stand for
_LARGEST = 10**15  # of all numbers that count something: far beyond use, and exact as a float


@dataclasses.dataclass(frozen=True)
class Model:
    """The architecture; H = n_embd.

    ``n_positions`` null is the training's sequence length, ``intermediate_size`` null four times H.
    ``tied``: one matrix embeds the input and gives the logits.
    """

    architecture: Literal["gpt2", "stablelm"]
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int | None = None
    intermediate_size: int | None = None
    bias: bool = True
    tied: bool = True


@dataclasses.dataclass(frozen=True)
class Training:
    """One run. Times are in optimizer steps; ``batch_size`` is in sequences, over all machines.

    steps, tokens: one of the two says how long.
    schedule: cosine; constant; wsd (warmup, stable, decay). After the warmup, in steps or, below 1,
        as a share. ``decay`` is the share of the steps in which wsd goes down.
    final_lr: where cosine and wsd end, as a share of ``lr``.
    max_grad_norm: gradients are clipped to this norm; ``.inf`` never clips.
    precision: of parameters and arithmetic, as Lightning names it.
    evaluate_every: steps between two evaluations, each with a checkpoint.
    evaluation_batches: of the validation split; null is all of it.
    test_batches: of the test split in the final evaluation; null is all of it.
    """

    batch_size: int
    sequence_length: int
    lr: float
    warmup: float
    steps: int | None = None
    tokens: int | None = None
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    decay: float = 0.2
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    precision: Literal["64-true", "32-true", "bf16-mixed"] = "32-true"
    evaluate_every: int = 1000
    evaluation_batches: int | None = None
    test_batches: int | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A comparison: one model, one text, one way of training; the arms that differ; the seeds."""

    name: str
    model: Model
    data: Data
    training: Training
    arms: dict[str, dict[str, Any]]
    seeds: list[int]

    def __post_init__(self) -> None:
        """Raise UsageError for values that are out of range or do not fit together."""
        model, data, training = self.model, self.data, self.training
        if not re.fullmatch(r"\w[\w.+-]{,49}", self.name):
            raise UsageError(
                f"name={self.name!r} must be letters, digits and . _ + - (a folder), at most 50"
            )
        for section, part, names in (
            ("model", model, ("n_layer", "n_head", "n_embd", "n_positions", "intermediate_size")),
            (
                "training",
                training,
                (
                    *("batch_size", "sequence_length", "evaluate_every"),
                    *("steps", "tokens", "evaluation_batches", "test_batches"),
                ),
            ),
            ("data", data, ("max_tokens", "max_held_out_tokens")),
        ):
            for name in names:
                value = getattr(part, name)
                if value is not None and value < 1:
                    raise UsageError(f"{section}.{name}={value} must be 1 or more")
                if value is not None and value > _LARGEST:
                    raise UsageError(f"{section}.{name}={value} must be at most 1e15")
        # 256 bytes and the end-of-text token are the smallest byte-level vocabulary.
        if not 257 <= model.vocab_size <= _LARGEST:
            raise UsageError(
                f"model.vocab_size={model.vocab_size} must be 257 or more, and at most 1e15"
            )
        if model.n_embd % model.n_head:
            raise UsageError(
                f"model.n_embd={model.n_embd} must be a multiple of model.n_head={model.n_head}"
            )
        if model.architecture == "stablelm" and (model.n_embd // model.n_head) % 2:
            raise UsageError(
                f"model.n_embd={model.n_embd} with model.n_head={model.n_head} makes heads of odd "
                "width, which rotary positions cannot turn"
            )
        if model.n_positions is not None and model.n_positions < training.sequence_length:
            raise UsageError(
                f"training.sequence_length={training.sequence_length} must not exceed "
                f"model.n_positions={model.n_positions}"
            )
        sources = [name for name in ("text", "hub", "tokens") if getattr(data, name) is not None]
        if len(sources) > 1:
            raise UsageError(f"data.{' and data.'.join(sources)} exclude each other: give one")
        if data.separator == "":
            raise UsageError("data.separator='' separates nothing: give some text, or null")
        if not 0 < data.held_out < 0.5:
            raise UsageError(f"data.held_out={data.held_out} must be between 0 and 0.5")
        self._check_training()
        if not self.arms:
            raise UsageError("arms must name at least one arm")
        _check_arms(self.arms, "recipe")  # jsonargparse makes a list of the text "[]"
        for name in self.arms:
            if not re.fullmatch(r"\w[\w+-]{,49}", name):
                raise UsageError(
                    f"arms: {name!r} must be letters, digits and _ + - (a folder), at most 50"
                )
            self.arm(name)
        if (
            not self.seeds
            or len(set(self.seeds)) < len(self.seeds)
            or not all(0 <= seed < 2**32 for seed in self.seeds)
        ):
            raise UsageError(f"seeds={self.seeds} must be different whole numbers, 0 to 4294967295")

    def _check_training(self) -> None:
        training = self.training
        if (training.steps is None) == (training.tokens is None):
            raise UsageError("give one of training.steps and training.tokens, the other null")
        if training.tokens is not None and self.steps < 1:
            raise UsageError(
                f"training.tokens={training.tokens} is less than one batch of "
                f"{training.batch_size} x {training.sequence_length} tokens"
            )
        if not 0 < training.lr < math.inf:
            raise UsageError(f"training.lr={training.lr} must be above 0")
        if not 0 <= training.warmup <= _LARGEST:
            raise UsageError(
                f"training.warmup={training.warmup} must be 0 or more, and at most 1e15"
            )
        if training.warmup >= 1 and training.warmup != int(training.warmup):
            raise UsageError(
                f"training.warmup={training.warmup} must be a whole number of steps, or a share "
                "below 1"
            )
        if not 0 <= training.final_lr <= 1:
            raise UsageError(f"training.final_lr={training.final_lr} must be from 0 to 1")
        if not 0 < training.decay <= 1:
            raise UsageError(f"training.decay={training.decay} must be above 0 and at most 1")
        if not all(0 <= beta < 1 for beta in training.betas):
            raise UsageError(f"training.betas={list(training.betas)} must be at least 0, below 1")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(training, name) < math.inf:
                raise UsageError(f"training.{name}={getattr(training, name)} must be 0 or more")
        if not training.max_grad_norm > 0:
            raise UsageError(f"training.max_grad_norm={training.max_grad_norm} must be above 0")

    @property
    def steps(self) -> int:
        """The optimizer steps of one run."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None
        return self.training.tokens // self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one batch."""
        return self.training.batch_size * self.training.sequence_length

    @property
    def tokens(self) -> int:
        """D: the tokens that one run trains on."""
        return self.steps * self.tokens_per_step

    @property
    def parameters(self) -> int:
        """N: the trained parameters of a run's model, a tied matrix once."""
        model = self.model
        width, layers = model.n_embd, model.n_layer
        inner = model.intermediate_size or 4 * width
        matrices = 1 if model.tied else 2
        if model.architecture == "gpt2":
            embeddings = model.n_positions or self.training.sequence_length
            weights = 4 * width**2 + 2 * width * inner
            biases = 5 * width + inner
        else:
            embeddings = 0
            weights = 4 * width**2 + 3 * width * inner
            biases = 0
        norms = (2 * layers + 1) * width * (2 if model.bias else 1)
        block = weights + (biases if model.bias else 0)
        return (matrices * model.vocab_size + embeddings) * width + layers * block + norms

    @property
    def warmup_steps(self) -> int:
        """The warmup, in steps."""
        warmup = self.training.warmup
        return int(warmup) if warmup >= 1 else round(warmup * self.steps)

    def arm(self, name: str) -> Arm:
        """The arm of that name, from its options."""
        options = dict(self.arms[name])
        kind = options.pop("optimizer", None)
        if kind not in OPTIMIZERS:
            raise UsageError(
                f"arms.{name}.optimizer={kind!r} must be one of {', '.join(OPTIMIZERS)}"
            )
        _check_keys(options, OPTIMIZERS[kind], f"arms.{name}")
        try:
            arm: Arm = _parse(OPTIMIZERS[kind], options)
        except (jsonargparse.ArgumentError, ValueError, OverflowError) as error:
            raise UsageError(f"arms.{name}: {one_line(error)}") from None
        return arm

    def only(self, arm: str, seed: int) -> "Recipe":
        """The recipe of one run: the same for a run, whatever it was compared with."""
        return dataclasses.replace(self, arms={arm: self.arms[arm]}, seeds=[seed])

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as in the YAML file."""
        data = dataclasses.asdict(self)
        data["training"]["betas"] = list(self.training.betas)
        return data


def recipe_names() -> list[str]:
    """The recipes of the package."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir())


def load_recipe(name: str) -> Recipe:
    """Read a recipe of the package by its name, or a YAML file (also a run's config) by its path.

    Raises:
        UsageError: no such recipe or file; a key or value that does not belong.
    """
    return _recipe(_read(name, []), f"recipe {name!r}")


def override(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, by dotted keys: ``{"model.n_layer": 24}``."""
    changed = recipe.to_dict()
    for key, value in values.items():
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UsageError(one_line(f"{key}: {section} has no keys of its own"))
        target[last] = value
    return _recipe(changed, f"recipe {recipe.name!r}")


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """``["model.n_layer=24"]`` as a dict; values are YAML."""
    values = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(
                f"{argument!r}: what is no option must be key=value, such as training.lr=1e-3"
            )
        values[key] = read_yaml(value, repr(argument))
    return values


def parse_recipe(text: str, source: str) -> Recipe:
    """Read a complete recipe from YAML text; ``source`` names it in errors."""
    return _recipe(_mapping(text, source), source)


def _read(name: str, extended: list[str]) -> dict[str, Any]:
    """The keys of a recipe and of those it extends."""
    if name in extended:
        raise UsageError(f"recipe {name!r} extends itself, through {', '.join(extended)}")
    source = f"recipe {name!r}" + (f", which {extended[-1]!r} extends" if extended else "")
    path = Path(name) if name not in recipe_names() else _FOLDER / f"{name}.yaml"
    try:
        if extended and not path.is_file():  # a recipe must not make us wait for a device
            raise OSError(None, "no such file")
        with path.open(encoding="utf-8") as file:
            text = file.read(_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a zero byte in the name
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else "see coupled-adam recipes"
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{source}: {hint} (as a file: {reason})") from None
    values = _mapping(text, source)
    if isinstance(values.get("recipe"), dict):  # the config.yaml of a run
        values = values["recipe"]
    base = values.pop("extends", None)
    if base is None:
        return values
    inherited = _read(str(base), [*extended, name])
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(inherited.get(key), dict) and key != "arms":
            inherited[key] = {**inherited[key], **value}
        else:
            inherited[key] = value
    return inherited


def _mapping(text: str, source: str) -> dict[str, Any]:
    values = read_yaml(text, source)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{source}: keys and values are needed, such as name: tiny")
    return values


def read_yaml(text: str, source: str) -> Any:
    """Plain lists, dicts and values from YAML text; ``source`` names it in errors.

    Raises:
        UsageError: it is not YAML, names types other than these, or is too large.
    """
    if len(text) > _CHARACTERS:
        raise UsageError(f"{source} is too large: at most {_CHARACTERS} characters are read")
    try:
        return yaml.load(text, _Loader)  # which is a safe one
    except RecursionError:
        raise UsageError(f"{source} is not YAML: it is nested too deeply") from None
    except Exception as error:  # scalars that only look like a date or a number have their own
        raise UsageError(f"{source} is not YAML: {one_line(error)}") from None


class _Loader(yaml.SafeLoader):
    """YAML's safe one, which also refuses aliases that contain themselves, or expand without end.

    A few lines of aliases of aliases stand for more text than any memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """The next node; its ``size`` is that of all it stands for, in characters."""
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if is_alias and not hasattr(node, "size"):  # it is not even complete
            raise yaml.YAMLError("an alias stands for what it is in")
        if not is_alias and isinstance(node.value, str):
            node.size = 1 + len(node.value)
        elif not is_alias:
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            node.size = 1 + sum(part.size for pair in pairs for part in pair)
        if node.size > _CHARACTERS:
            raise yaml.YAMLError(f"its aliases stand for more than {_CHARACTERS} characters")
        return node


def _recipe(values: dict[str, Any], source: str) -> Recipe:
    try:
        _check_keys(values, Recipe, source)
    except UsageError as error:
        raise UsageError(one_line(error)) from None
    try:
        recipe: Recipe = _parse(Recipe, values)
    except (jsonargparse.ArgumentError, UsageError, ValueError, OverflowError) as error:
        raise UsageError(f"{source}: {one_line(error)}") from None
    return recipe


def _parse(cls: type[Any], values: dict[str, Any]) -> Any:
    """An instance of a dataclass from plain values, its types checked."""
    parser = _parsers.get(cls)
    if parser is None:
        parser = _parsers[cls] = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
    return cls(**parser.instantiate(parser.parse_object(values, defaults=False)).as_dict())


def _check_keys(values: dict[str, Any], cls: type[Any], where: str) -> None:
    """Raise UsageError for a key that the dataclass does not have, with the nearest that it has."""
    types = get_type_hints(cls)
    known = {field.name: types[field.name] for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{where} has no key {key!r}: {hint}")
        if value is None and type(None) not in get_args(known[key]):
            raise UsageError(f"{where}: {key}=null must be a value")
        # jsonargparse would open a file of that name, or import a class for what is in there.
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {key}={value!r} must be keys and values")
            _check_keys(value, known[key], f"{where}: {key}")
        elif key == "arms":
            _check_arms(value, where)


def _check_arms(arms: Any, where: str) -> None:
    """Raise UsageError unless these are options, plain values, by the names of arms."""
    if not isinstance(arms, dict):
        raise UsageError(f"{where}: arms={arms!r} must be keys and values")
    for name, options in arms.items():
        if not isinstance(name, str):
            raise UsageError(f"{where}: arms: {name!r} must be text, in quotes")
        if not isinstance(options, dict):
            raise UsageError(f"{where}: arms.{name}={options!r} must be keys and values")
        for key, value in options.items():
            if not isinstance(value, str | int | float | None):
                raise UsageError(f"{where}: arms.{name}.{key}={value!r} must be one value")
