"""Recipes: what to train, read from YAML and validated.

A file with ``extends: NAME`` needs to contain only the values that differ from that recipe. Values
given as ``key=value`` on the command line are applied last. If a file has arms, they replace all
inherited arms.
"""

import dataclasses
import difflib
import json
import os
import re
import types
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jsonargparse

from coupled_adam.errors import UsageError, one_line
from coupled_adam.lab.arms import OPTIMIZERS, Arm
from coupled_adam.lab.safe_yaml import LONGEST, read_yaml
from coupled_adam.lab.sections import Model, Training, require, require_counts
from coupled_adam.text.source import Data

_parsers: dict[type[Any], jsonargparse.ArgumentParser] = {}  # creating one is slow
_arms: dict[str, Arm] = {}  # so is parsing; by name and options
_FOLDER = resources.files("coupled_adam.lab") / "recipes"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A comparison: what its runs have in common (model, data, training), its arms and seeds."""

    name: str
    model: Model
    data: Data
    training: Training
    arms: dict[str, dict[str, Any]]
    seeds: list[int]

    def __post_init__(self) -> None:
        """Raise UsageError for values that are out of range or do not fit together."""
        require(
            re.fullmatch(r"\w[\w.+-]{,49}", self.name) is not None,
            f"name={self.name!r} must be letters, digits and . _ + - (a folder), at most 50",
        )
        _check_data(self.data)
        positions, length = self.model.n_positions, self.training.sequence_length
        require(
            positions is None or positions >= length,
            f"training.sequence_length={length} must not exceed model.n_positions={positions}",
        )
        require(bool(self.arms), "arms must name at least one arm")
        _check_arms(self.arms, "recipe")  # jsonargparse converts the text "[]" to a list
        for name in self.arms:
            require(
                re.fullmatch(r"\w[\w+-]{,49}", name) is not None,
                f"arms: {name!r} must be letters, digits and _ + - (a folder), at most 50",
            )
            self.arm(name)
        different = len(set(self.seeds)) == len(self.seeds) > 0
        require(
            different and all(0 <= seed < 2**32 for seed in self.seeds),
            f"seeds={self.seeds} must be different whole numbers, 0 to 4294967295",
        )

    @property
    def steps(self) -> int:
        """The number of optimizer steps of one run."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None
        return self.training.tokens // self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in one batch."""
        return self.training.batch_size * self.training.sequence_length

    @property
    def tokens(self) -> int:
        """D, the number of tokens that one run is trained on."""
        return self.steps * self.tokens_per_step

    @property
    def parameters(self) -> int:
        """N, the number of trained parameters of a run's model; a tied matrix counts once."""
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
        """The number of warmup steps."""
        warmup = self.training.warmup
        return int(warmup) if warmup >= 1 else round(warmup * self.steps)

    def arm(self, name: str) -> Arm:
        """Create the arm of that name from its options."""
        key = repr((name, self.arms[name]))
        if key not in _arms:
            _arms[key] = self._parsed_arm(name)
        return _arms[key]

    def _parsed_arm(self, name: str) -> Arm:
        options = dict(self.arms[name])
        kind = options.pop("optimizer", None)
        if kind not in OPTIMIZERS:
            raise UsageError(
                f"arms.{name}.optimizer={kind!r} must be one of {', '.join(OPTIMIZERS)}"
            )
        _check_keys(options, OPTIMIZERS[kind], f"arms.{name}")
        try:
            arm: Arm = _parse(OPTIMIZERS[kind], options)
        except jsonargparse.ArgumentError as error:
            explained = _explained(error, OPTIMIZERS[kind], options, f"arms.{name}.")
            raise UsageError(explained) from None
        except (ValueError, OverflowError) as error:
            raise UsageError(f"arms.{name}: {one_line(error)}") from None
        return arm

    def only(self, arm: str, seed: int) -> "Recipe":
        """The recipe of a single run, which does not depend on the other arms and seeds."""
        return dataclasses.replace(self, arms={arm: self.arms[arm]}, seeds=[seed])

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists, dicts and numbers, as in the YAML file."""
        data = dataclasses.asdict(self)
        data["training"]["betas"] = list(self.training.betas)
        return data


def recipe_names() -> list[str]:
    """The names of the recipes in this package."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir())


def load_recipe(name: str) -> Recipe:
    """Read one of this package's recipes by name, or a YAML file (or a run's config) by path.

    Raises:
        UsageError: there is no such recipe or file, or it has an invalid key or value.
    """
    return _build(_read_inherited(name, []), f"recipe {name!r}")


def override(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Copy a recipe and replace values, given by dotted keys: ``{"model.n_layer": 24}``."""
    changed = recipe.to_dict()
    for key, value in values.items():
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UsageError(f"{key}: {section} has no keys of its own")
        target[last] = value
    return _build(changed, f"recipe {recipe.name!r}")


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as ``"model.n_layer=24"`` into a dict; the values are YAML."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key or not key.isprintable():
            raise UsageError(
                f"{argument!r} is neither an option nor of the form key=value, such as "
                "training.lr=1e-3"
            )
        if not value.strip():
            raise UsageError(f"{key}= has no value: give one, or write {key}=null")
        if key in values:
            raise UsageError(f"{key} is given twice: give it once")
        values[key] = read_yaml(value, repr(argument))
    return values


def parse_recipe(text: str, source: str) -> Recipe:
    """Read a complete recipe from YAML text; ``source`` is its name in errors."""
    return _build(_read_mapping(text, source), source)


class RecipeReader:
    """Reads many recipes, most of which differ in nothing but their seeds, in a short time."""

    def __init__(self) -> None:
        self._known: dict[str, Recipe] = {}

    def read(self, values: Any, source: str) -> Recipe:
        """A complete recipe from plain values; ``source`` is its name in errors.

        Raises:
            UsageError: they are not those of a recipe.
        """
        values = _mapping(values, source)
        seeds = values.get("seeds")
        if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
            return _build(values, source)
        key = repr({**values, "seeds": None})  # which tells 1 from 1.0 and "1"
        if key not in self._known:
            self._known[key] = _build(values, source)
        try:
            return dataclasses.replace(self._known[key], seeds=seeds)
        except UsageError as error:
            raise UsageError(f"{source}: {one_line(error)}") from None


def _read_inherited(name: str, extended: list[str]) -> dict[str, Any]:
    """Read the values of a recipe and of all recipes that it extends."""
    if name in extended:
        raise UsageError(f"recipe {name!r} extends itself, through {', '.join(extended)}")
    source = f"recipe {name!r}" + (f", which {extended[-1]!r} extends" if extended else "")
    path = Path(name) if name not in recipe_names() else _FOLDER / f"{name}.yaml"
    try:
        if extended and not path.is_file():  # reading a device could block
            raise OSError(None, "no such file")
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        near = difflib.get_close_matches(Path(name).name, recipe_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else "see coupled-adam recipes"
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{source}: {hint} (as a file: {reason})") from None
    values = _read_mapping(text, source)
    if isinstance(values.get("recipe"), dict):  # the config.yaml of a run
        values = values["recipe"]
    base = values.pop("extends", None)
    if base is None:
        return values
    base = str(base)
    if base not in recipe_names() and path != _FOLDER / f"{name}.yaml":
        # Beside this file, wherever the command was started; resolved, so that a circle is seen.
        base = os.path.realpath(Path(name).parent / base.replace("\0", ""))
    inherited = _read_inherited(base, [*extended, name])
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(inherited.get(key), dict) and key != "arms":
            inherited[key] = {**inherited[key], **value}
        else:
            inherited[key] = value
    return inherited


def _read_mapping(text: str, source: str) -> dict[str, Any]:
    return _mapping(read_yaml(text, source), source)


def _mapping(values: Any, source: str) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{source} must consist of keys and values, such as name: tiny")
    return values


def _check_data(data: Data) -> None:
    require_counts(data, "data", "max_tokens", "max_held_out_tokens")
    sources = [name for name in ("text", "hub", "tokens") if getattr(data, name) is not None]
    require(
        len(sources) <= 1, f"data.{' and data.'.join(sources)} exclude each other: give only one"
    )
    require(data.separator != "", "data.separator='' separates nothing: give some text, or null")
    require(0 < data.held_out < 0.5, f"data.held_out={data.held_out} must be between 0 and 0.5")


def _build(values: dict[str, Any], source: str) -> Recipe:
    try:
        _check_keys(values, Recipe, source)
    except UsageError as error:
        raise UsageError(one_line(error)) from None
    try:
        recipe: Recipe = _parse(Recipe, values)
    except jsonargparse.ArgumentError as error:
        raise UsageError(f"{source}: {_explained(error, Recipe, values)}") from None
    except (UsageError, ValueError, OverflowError) as error:
        raise UsageError(f"{source}: {one_line(error)}") from None
    return recipe


def _parse(cls: type[Any], values: dict[str, Any]) -> Any:
    """Create an instance of a dataclass from plain values, after checking their types."""
    parser = _parsers.get(cls)
    if parser is None:
        parser = _parsers[cls] = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
    return cls(**parser.instantiate(parser.parse_object(values, defaults=False)).as_dict())


def _explained(
    error: jsonargparse.ArgumentError, cls: type[Any], values: Any, prefix: str = ""
) -> str:
    """What jsonargparse finds wrong with the values of a dataclass, in words without its types."""
    if missing := re.search("arguments are required: (.*)", str(error)):
        keys = ", ".join(f"{prefix}{key}" for key in missing[1].split(", "))
        return f"{keys} must be given"
    found = re.search(r'Parser key "([\w.]+)"', str(error))
    kind: Any = cls
    for key in found[1].split(".") if found else ():
        kind = get_type_hints(kind).get(key) if dataclasses.is_dataclass(kind) else None
        values = values.get(key) if isinstance(values, dict) else None
    if not found or kind is None or dataclasses.is_dataclass(kind):
        return one_line(error)
    shown = values if isinstance(values, str) else json.dumps(values, default=str)
    return f"{prefix}{found[1]}={one_line(shown, 80)} must be {_in_words(kind)}"


def _in_words(kind: Any) -> str:
    """A type of a recipe's value, as one says it."""
    if get_origin(kind) in (Union, types.UnionType):
        *others, last = (_in_words(part) for part in get_args(kind))
        return f"{', '.join(others)} or {last}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (list, tuple, dict):
        return {
            list: "a list of whole numbers, such as [1, 2]",
            tuple: "two numbers, such as [0.9, 0.95]",
            dict: "keys and values",
        }[get_origin(kind)]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "null")


def suggestion(key: str) -> str:
    """The keys of a recipe that one without its section, or with a wrong one, may stand for."""
    sections = {"model": Model, "data": Data, "training": Training}
    full = [f"{name}.{f.name}" for name, cls in sections.items() for f in dataclasses.fields(cls)]
    keys = [field.name for field in dataclasses.fields(Recipe)]
    last = key.rpartition(".")[2]
    same = [name for name in full if name.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(key, [*keys, *full], n=1)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(keys)}"


def _check_keys(values: dict[str, Any], cls: type[Any], where: str) -> None:
    """Raise UsageError for a key that the dataclass does not have; suggest the nearest one."""
    types = get_type_hints(cls)
    known = {field.name: types[field.name] for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            if not near and cls in (Recipe, Model, Data, Training):
                hint = suggestion(str(key))
            raise UsageError(f"{where} has no key {key!r}: {hint}")
        if value is None and type(None) not in get_args(known[key]):
            raise UsageError(f"{where}: {key}=null must be a value")
        # If it is text, jsonargparse would open the file or import the class of that name.
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {key}={value!r} must be keys and values")
            _check_keys(value, known[key], f"{where}: {key}")
        elif key == "arms":
            _check_arms(value, where)


def _check_arms(arms: Any, where: str) -> None:
    """Raise UsageError unless this is a dict from names of arms to dicts of plain values."""
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
