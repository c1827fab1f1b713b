"""The settings that a sweep tries: combinations of values of a recipe's options, for each arm."""

import dataclasses
import difflib
import fnmatch
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from coupled_adam.errors import UsageError
from coupled_adam.lab.checking import suggestion
from coupled_adam.lab.recipe import Recipe, override, parse_overrides

_LARGEST = 1000  # settings of an arm; all of them are checked before the first is trained
_OTHER_TEXT = ("data.*", "model.vocab_size", "training.evaluation_batches", "training.test_batches")
_EXAMPLE = "training.lr=1e-3,3e-3"


@dataclasses.dataclass(frozen=True)
class Axis:
    """An option of the recipe, by its dotted key, and the values to try; numbers ascend.

    If ``is_range`` is true, the two values are the ends of a range: any number between them may be
    tried.
    """

    key: str
    values: tuple[Any, ...]
    is_range: bool = False

    @property
    def name(self) -> str:
        """The key's last part, by which tables and folders call it."""
        return self.key.rpartition(".")[2]

    def to_plain(self) -> list[Any] | str:
        """The values as YAML can hold them; a range as it is written on the command line."""
        return "..".join(map(as_text, self.values)) if self.is_range else list(self.values)

    def belongs_to(self, arm: str) -> bool:
        """Whether it changes the runs of this arm."""
        return not self.key.startswith("arms.") or self.key.split(".")[1] == arm


@dataclasses.dataclass(frozen=True)
class Setting:
    """An arm with one value for each of its axes.

    recipe: has this arm alone, these values, and all seeds.
    values: by the names of the axes.
    """

    arm: str
    recipe: Recipe
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """All values, as in ``lr=0.001,lr_factor=4``: the name of a folder."""
        return ",".join(f"{k}={as_text(v)}" for k, v in self.values.items()) or "unchanged"

    @property
    def title(self) -> str:
        """All values, as tables have them."""
        return self.name.replace(",", ", ")


@dataclasses.dataclass(frozen=True)
class Grid:
    """A recipe, and the axes along which it is varied; each arm is varied on its own."""

    recipe: Recipe
    axes: tuple[Axis, ...]

    @property
    def arms(self) -> list[str]:
        """The arms, those of AdamW first: the others are compared with the first."""
        arms = self.recipe.arms
        return sorted(arms, key=lambda arm: arms[arm]["optimizer"] != "adamw")

    def of_arm(self, arm: str) -> list[Axis]:
        """The axes that change this arm."""
        return [axis for axis in self.axes if axis.belongs_to(arm)]

    def setting(self, arm: str, values: Sequence[Any]) -> Setting:
        """The setting with these values, one for each axis of the arm, of the axis's type.

        Raises:
            UsageError: a value is out of range, or the values do not fit together.
        """
        axes = self.of_arm(arm)
        recipe = dataclasses.replace(self.recipe, arms={arm: self.recipe.arms[arm]})
        recipe = override(recipe, {axis.key: value for axis, value in zip(axes, values)})
        return Setting(arm, recipe, {axis.name: value for axis, value in zip(axes, values)})

    def number(self, arm: str) -> int:
        """The number of combinations of the arm's values."""
        return math.prod(len(axis.values) for axis in self.of_arm(arm))

    def settings(self, arm: str) -> list[Setting]:
        """All combinations of the arm's values; of a range, its two ends."""
        combinations = itertools.product(*(axis.values for axis in self.of_arm(arm)))
        return [self.setting(arm, values) for values in combinations]


class Range(list[float]):
    """The two ends of a range."""


def parse_range(text: str) -> Range | None:
    """The range that is written as ``1e-4..1e-2``, if it is one."""
    low, dots, high = text.partition("..")
    # Whole numbers stay whole, so that nothing between them is tried for an option that counts.
    try:
        ends = [float(end) if re.search(r"[.e]", end.lower()) else int(end) for end in (low, high)]
    except ValueError:
        return None
    if not dots or not ends[0] < ends[1] < math.inf:
        raise UsageError(f"{text}: a range is written from its lower end to its higher end")
    return Range(ends)


def several_values(
    arguments: Sequence[str], stored_axes: Sequence[Axis] = ()
) -> tuple[list[str], dict[str, list[Any]]]:
    """Separate what is swept from what is given one value.

    Args:
        arguments: such as ``"training.lr=1e-3,3e-3"`` and ``"model.n_layer=4"``. A comma separates
            values, except in brackets, braces and quotes.
        stored_axes: the axes of a sweep that is continued; one value for these is a further one.

    Returns:
        The arguments with one value, and the values of the others by key; among these are keys with
        a pattern of arms, such as ``arms.*.lr_factor``.

    Raises:
        UsageError: an argument is not of that form, or a key is given twice.
    """
    fixed, swept = [], {}
    keys: set[str] = set()
    axes = {axis.key for axis in stored_axes}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key in keys:
            raise UsageError(f"{key} is given twice: separate its values by commas, as {_EXAMPLE}")
        keys.add(key)
        # As a list: YAML says which commas separate values, not those in brackets or quotes.
        listed = parse_overrides([f"{key}=[{value}]" if equals else argument]).get(key)
        if isinstance(listed, list) and (
            len(listed) > 1 or "*" in key or key in axes or parse_range(value)
        ):
            swept[key] = parse_range(value) or listed
        else:
            fixed.append(argument)
    return fixed, swept


def make_grid(
    recipe: Recipe,
    swept: Mapping[str, Sequence[Any]],
    *,
    ranges: bool = False,
    stored_axes: Sequence[Axis] = (),
) -> Grid:
    """Check the values of a sweep, and the recipes of all its settings.

    Args:
        swept: the values by key; ``arms.*.lr_factor`` stands for that option of every arm.
        ranges: whether ranges are possible.
        stored_axes: the axes of a sweep that is continued, which get further values.

    Raises:
        UsageError: there is nothing to sweep, an option does not exist, cannot be swept, or is
            given twice; or a value is invalid or given twice.
    """
    values: dict[str, Sequence[Any]] = {}
    for pattern, listed in swept.items():
        for key in _keys(pattern, recipe):
            if key in values:
                raise UsageError(f"{pattern} gives values to {key}, which has some already")
            values[key] = listed
        if isinstance(listed, Range) and not ranges:
            raise UsageError(
                f"{pattern}={as_text(listed[0])}..{as_text(listed[1])} is a range, which needs "
                "--optuna TRIALS; a grid needs single values, separated by commas"
            )
    axes = {axis.key: axis for axis in stored_axes}
    fixed = [key for key, listed in values.items() if len(listed) == 1 and key not in axes]
    recipe = override(recipe, {key: values.pop(key)[0] for key in fixed})
    if not values and not axes:
        raise UsageError(f"nothing to sweep: give two or more values of an option, as {_EXAMPLE}")
    # Read one by one before they are combined, so that the message names the one at fault.
    for key, listed in values.items():
        axes[key] = _axis(recipe, key, listed, axes.get(key))
    grid = Grid(recipe, tuple(axes.values()))
    for arm in grid.arms:
        if grid.number(arm) > _LARGEST:
            raise UsageError(
                f"arm {arm!r} has {grid.number(arm):,} combinations of values: at most "
                f"{_LARGEST:,} are possible; leave some out, or try ranges with --optuna TRIALS"
            )
        # Only for their checks: no run starts while a combination of a later one is impossible.
        grid.settings(arm)
    return grid


def _axis(recipe: Recipe, key: str, listed: Sequence[Any], stored: Axis | None) -> Axis:
    """The axis of an option: its values, and those that the sweep that is continued has tried."""
    section, _, option = key.partition(".")
    values: tuple[Any, ...] = ()
    for value in listed:
        # As the recipe reads them: 1e-3 is text in YAML, and would be another run than 0.001.
        changed = override(recipe, {key: value})
        if section == "arms":
            arm, _, arm_option = option.partition(".")
            read = getattr(changed.arm(arm), arm_option)
        else:
            read = changed.to_dict()[section][option]
        if read in values:
            raise UsageError(f"{key} has the value {as_text(read)} twice: leave one of them out")
        values += (read,)
    is_range, are_numbers = isinstance(listed, Range), all(map(is_number, values))
    if is_range and not are_numbers:
        low, high = map(as_text, values)
        raise UsageError(f"{key}={low}..{high}: a range needs two numbers")
    if stored is not None and not is_range and not stored.is_range:
        values = tuple(dict.fromkeys((*stored.values, *values)))
    return Axis(key, tuple(sorted(values)) if are_numbers else values, is_range)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_text(value: Any) -> str:
    """A value as in YAML, and without characters that a folder's name should not have."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "_".join(map(as_text, value))
    # Twelve digits hide the rounding of float64, as in 0.30000000000000004.
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _keys(pattern: str, recipe: Recipe) -> list[str]:
    """The keys that a pattern stands for; it stands for arms, which have options of one name."""
    section, _, option = pattern.partition(".")
    if any(fnmatch.fnmatchcase(pattern, excluded) for excluded in _OTHER_TEXT):
        raise UsageError(
            f"{pattern} cannot be swept, as losses on other text, or on other tokens of it, cannot "
            "be compared: give it one value, with commas in quotes"
        )
    if section in ("model", "training") and "*" not in pattern:
        return [pattern]
    if "." not in pattern:
        hint = "give them with --seeds 1 2 3" if pattern == "seeds" else suggestion(Recipe, pattern)
        raise UsageError(f"{pattern} cannot be swept: {hint}")
    # What is left are options of arms, in which * stands for any part of an arm's name.
    arm, _, option = option.partition(".")
    if section != "arms" or not option or option == "optimizer":
        raise UsageError(
            f"{pattern} cannot be swept: give several values of a key of model or training, or of "
            f"an option of the arms, such as {_EXAMPLE} or arms.*.lr_factor=1,4"
        )
    arms = fnmatch.filter(recipe.arms, arm)
    if not arms:
        near = difflib.get_close_matches(arm, recipe.arms, n=1)
        hint = f"did you mean arms.{near[0]}?" if near else f"there are {', '.join(recipe.arms)}"
        raise UsageError(f"{pattern} matches no arm of recipe {recipe.name!r}: {hint}")
    return [f"arms.{name}.{option}" for name in arms]
