"""List the recipes, or print one as a complete YAML file, with the meaning of each key.

example: coupled-adam recipes tiny > mine.yaml
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from coupled_adam.cli.terminal import show
from coupled_adam.fields import meanings

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``coupled-adam recipes``.

    name: the recipe to print (default: list all of them).
    """

    name: str | None = dataclasses.field(default=None, metadata={"metavar": "NAME"})


def run(options: Options) -> None:
    """Print the list of recipes, or one recipe."""
    from coupled_adam.lab.recipe import load_recipe, recipe_names
    from coupled_adam.rendering.tables import Table

    if options.name is not None:
        print(explained(load_recipe(options.name)), end="")
        return
    recipes = [load_recipe(name) for name in recipe_names()]
    # The small ones first: they are the ones to try.
    recipes.sort(key=lambda recipe: (recipe.model.n_layer * recipe.model.n_embd**2, recipe.tokens))
    rows = []
    for recipe in recipes:
        model, data = recipe.model, recipe.data
        size = f"{model.architecture}, {model.n_layer} x {model.n_embd}"
        tokens = f"{recipe.tokens / 1e6:,.0f}M"
        text = str(data.text or data.hub or data.tokens or "Python's documentation")
        arms, seeds = len(recipe.arms), len(recipe.seeds)
        rows.append([recipe.name, size, tokens, text, str(arms), str(seeds)])
    columns = ("recipe", "blocks x width", "tokens", "text", "arms", "seeds")
    show(Table(columns, rows, left=(0, 1, 3)))


def explained(recipe: Recipe) -> str:
    """The recipe as YAML, with the meaning of each key in a comment above it."""
    from coupled_adam.lab.arms import ARMS

    lines: list[str] = []
    values = recipe.to_dict()
    for key, meaning in meanings(type(recipe)).items():
        section = getattr(recipe, key)
        if dataclasses.is_dataclass(section):  # model, data and training
            lines += [f"# {meaning}", f"{key}:"]
            for name, text in meanings(type(section)).items():
                lines += _commented({name: values[key][name]}, text, "  ")
        else:
            lines += _commented({key: values[key]}, meaning)
    # The options of all arms; one that several optimizers take is listed once.
    options: dict[str, tuple[str, list[str]]] = {}
    for optimizer, arm in ARMS.items():
        for name, text in meanings(arm).items():
            options.setdefault(name, (text, []))[1].append(optimizer)
    lines.append("# The options of an arm, and the optimizers that take them:")
    for name, (text, optimizers) in options.items():
        takers = "all" if len(optimizers) == len(ARMS) else ", ".join(optimizers)
        entry = f"{name} ({takers}): {text}"
        lines += textwrap.wrap(entry, 100, initial_indent="#   ", subsequent_indent="#       ")
    return "\n".join(lines) + "\n"


def _commented(value: dict[str, Any], meaning: str, indent: str = "") -> Iterator[str]:
    """The lines of a key with its value, below those of its meaning."""
    import yaml

    mark = f"{indent}# "
    yield from textwrap.wrap(meaning, 100, initial_indent=mark, subsequent_indent=mark)
    dumped = yaml.safe_dump(value, sort_keys=False, width=1000)
    yield from textwrap.indent(dumped, indent).splitlines()
