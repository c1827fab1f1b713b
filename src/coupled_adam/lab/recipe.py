"""Recipes: what to train, read from YAML and validated.

A file with ``extends: NAME`` needs only the values that differ from that recipe. If it has arms,
they replace all inherited arms. Values of the command line, such as ``--training.lr``, come last.
"""

import copy
import dataclasses
import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, InstanceOf

from coupled_adam.errors import UsageError, did_you_mean, one_line, prefixed_usage_error
from coupled_adam.fields import Seed, checked
from coupled_adam.inputs import read_text
from coupled_adam.lab.arms import Arm, arms_from
from coupled_adam.lab.sections import Data, Model, Training

_FOLDER = resources.files("coupled_adam.lab") / "recipes"
# Both name folders. An arm has no dot, which separates the keys of --arms.NAME.lr.
_Name = Annotated[str, Field(pattern=r"^\w[\w.+-]{0,49}$")]
_ArmName = Annotated[str, Field(pattern=r"^\w[\w+-]{0,49}$")]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A comparison: what its runs have in common, its arms and its seeds.

    name: the name of the comparison, and of its folder.
    model: the architecture.
    data: the text.
    training: the training of each run.
    arms: what is compared, by name: each an ``optimizer`` for the embeddings, and its options.
    seeds: each arm is trained once with each of these.
    variant: code for what a recipe cannot say: the module:name of a
        coupled_adam.lab.training.variant.Variant that Python can import; null for none.
    """

    name: _Name
    model: Model
    data: Data
    training: Training
    arms: Annotated[dict[_ArmName, InstanceOf[Arm]], Field(min_length=1)]
    seeds: Annotated[list[Seed], Field(min_length=1)]
    variant: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values of several sections or arms that do not fit together."""
        positions, length = self.model.n_positions, self.training.sequence_length
        if positions is not None and positions < length:
            raise UsageError(
                f"training.sequence_length={length} must not exceed model.n_positions={positions}"
            )
        tokens = self.data.max_tokens
        if tokens is not None and tokens <= length:
            raise UsageError(
                f"data.max_tokens={tokens} must be more than training.sequence_length={length}"
            )
        if len({*self.seeds}) < len(self.seeds):
            raise UsageError(f"seeds={self.seeds} must be different")
        if self.variant is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+", self.variant):
            raise UsageError(f"variant={self.variant} must be MODULE:NAME, as in my_models:WIDE")
        for name, arm in self.arms.items():
            couple = getattr(arm, "couple", "both")
            if self.model.tied and couple != "both":
                raise UsageError(
                    f"arms.{name}.couple={couple} needs model.tied=false: with input and output "
                    "embeddings in one matrix it would do the same as both"
                )

    @property
    def tokens(self) -> int:
        """D, the number of tokens that one run is trained on."""
        return self.training.total_steps * self.training.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """The number of warmup steps."""
        warmup = self.training.warmup
        return int(warmup) if warmup >= 1 else round(warmup * self.training.total_steps)

    def only(self, arm: str, seed: int) -> "Recipe":
        """The recipe of a single run, which does not depend on the other arms and seeds."""
        return dataclasses.replace(self, arms={arm: self.arms[arm]}, seeds=[seed])

    def joined(self, other: "Recipe") -> "Recipe":
        """This comparison, with the arms and seeds of another one added."""
        arms = {**other.arms, **self.arms}
        return dataclasses.replace(self, arms=arms, seeds=sorted({*other.seeds, *self.seeds}))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists, dicts and numbers, as in the YAML file."""
        data = dataclasses.asdict(self)
        # A list, as YAML reads it: the dicts of recipes are compared with those in files.
        data["training"]["betas"] = list(self.training.betas)
        return data


def recipe_names() -> list[str]:
    """The names of the recipes in this package."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir())


def load_recipe(name: str) -> Recipe:
    """Read one of this package's recipes by name, or a YAML file (or a run's config) by path.

    Raises UsageError if there is no such recipe or file, or it has an invalid key or value.
    """
    return recipe_from(load_values(name), f"recipe {name!r}")


def override(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Copy a recipe and replace values, given by dotted keys: ``{"model.n_layer": 24}``."""
    return recipe_from(with_values(recipe.to_dict(), values), f"recipe {recipe.name!r}")


def with_values(plain: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's plain values in which some are replaced, given by dotted keys.

    ``arms.*.lr_factor`` is that option of all arms.
    """
    changed = copy.deepcopy(dict(plain))
    for key, value in values.items():
        *places, last = key.split(".")
        targets = [changed]  # the dicts in which the last key is set: several below arms.*
        for place in places:
            names = fnmatch.filter(targets[0], place) if "*" in place else [place]
            for target in targets:
                if not names or not target.keys() >= {*names}:
                    raise UsageError(f"{key}: there is no {place}; {did_you_mean(place, target)}")
            targets = [target[name] for target in targets for name in names]
            if not all(isinstance(target, dict) for target in targets):
                raise UsageError(f"{key}: {place} has no keys of its own")
        # The last key may be new, such as an option of an arm; recipe_from() checks it.
        for target in targets:
            target[last] = value
    return changed


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with names such as ``training.lr``."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return result


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of each dotted key that differs between nested dicts; None where missing."""
    first, second = flat(first), flat(second)
    values = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
    return {key: both for key, both in values.items() if both[0] != both[1]}


def recipe_from(values: Any, source: str) -> Recipe:
    """A complete recipe from plain values; ``source`` is its name in errors.

    Raises UsageError if they are not those of a recipe.
    """
    with prefixed_usage_error(f"{source}: ", UsageError):
        if isinstance(values, dict) and isinstance(values.get("arms"), dict):
            values = {**values, "arms": arms_from(values["arms"])}
        return checked(Recipe, values)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML's own loader ignores the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written, before any merging."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        there = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in there:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key.value} is given twice")
                there.add((key.tag, key.value))
        return node


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML into plain lists, dicts and values; a UsageError names the source."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # scalars that only look like a date or a number have their own
        raise UsageError(f"{source} is not YAML: {one_line(error)}") from None


def load_values(name: str, extended: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of a recipe, a YAML file or a run's config, and of all that it extends.

    Those in ``extended`` extend this one. Raises UsageError if there is no such recipe or file, or
    it does not consist of keys and values.
    """
    if name in extended:
        raise UsageError(f"recipe {name!r} extends itself, through {', '.join(extended)}")
    source = f"recipe {name!r}" + (f", which {extended[-1]!r} extends" if extended else "")
    is_ours = name in recipe_names()
    path = _FOLDER / f"{name}.yaml" if is_ours else Path(name)
    try:
        text = path.read_text(encoding="utf-8") if is_ours else read_text(Path(name))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        reason = getattr(error, "strerror", None) or error
        hint = did_you_mean(Path(name).name, recipe_names(), "see coupled-adam recipes")
        if Path(name).suffix in (".yaml", ".yml"):
            message = f"{source}: {reason}. This package's recipes have no ending: {hint}"
        else:
            message = f"{source}: {hint} (as a file: {reason})"
        raise UsageError(message) from None
    values = read_yaml(text, source)
    if not isinstance(values, dict):
        raise UsageError(f"{source} must consist of keys, such as name: tiny")
    if isinstance(values.get("recipe"), dict):  # the config.yaml of a run
        values = values["recipe"]
    if values.get("extends") is None:
        return {key: value for key, value in values.items() if key != "extends"}
    base = str(values.pop("extends"))
    if base not in recipe_names():
        # Beside this file, wherever the command was started; normal, so that a circle is seen.
        base = os.path.normpath(Path(name).parent / base)
    if not extended:  # a file of one's own is not its parent, whose runs it would replace
        values.setdefault("name", Path(name).stem)
    inherited = load_values(base, [*extended, name])
    # The extended recipe may be somebody else's, and a variant is code that will be executed.
    variant = inherited.get("variant")
    if variant is not None and "variant" not in values:
        raise UsageError(
            f"{source} extends {base!r}, but its variant, {variant}, is code and not inherited: "
            f"write variant: {variant} here as well if you trust it, or variant: null"
        )
    # Sections are merged; arms are not, as half of them would be another recipe's.
    for key, value in values.items():
        both_sections = isinstance(value, dict) and isinstance(inherited.get(key), dict)
        merged = both_sections and key != "arms"
        inherited[key] = {**inherited[key], **value} if merged else value
    return inherited
