"""A recipe as a complete YAML file, with the meaning of each key."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from coupled_adam.lab.arms import OPTIMIZERS
from coupled_adam.lab.recipe import Recipe


def explained(recipe: Recipe) -> str:
    """The recipe as YAML, with the meaning of each key in a comment above it."""
    lines: list[str] = []
    values = recipe.to_dict()
    for key, meaning in meanings(Recipe).items():
        section = getattr(recipe, key)
        if dataclasses.is_dataclass(section):
            lines += [f"# {meaning}", f"{key}:"]
            for name, text in meanings(type(section)).items():
                lines += _commented({name: values[key][name]}, text, "  ")
        else:
            lines += _commented({key: values.get(key)}, meaning)
    for optimizer, arm in OPTIMIZERS.items():
        lines.append(f"# The options of an arm with optimizer: {optimizer}")
        for name, text in meanings(arm).items():
            lines += textwrap.wrap(
                f"{name}: {text}", 100, initial_indent="#   ", subsequent_indent="#       "
            )
    return "\n".join(lines) + "\n"


def _commented(value: dict[str, Any], meaning: str, indent: str = "") -> Iterator[str]:
    """The lines of a key with its value, below those of its meaning."""
    mark = f"{indent}# "
    yield from textwrap.wrap(meaning, 100, initial_indent=mark, subsequent_indent=mark)
    dumped = yaml.safe_dump(value, sort_keys=False, width=1000)
    yield from textwrap.indent(dumped, indent).splitlines()


def meanings(section: type[Any]) -> dict[str, str]:
    """What the docstring of a dataclass says about each of its fields, by name."""
    # Entries begin with the names of one or several fields; their further lines are indented.
    text = re.sub(r"``|:(?:class|func):", "", inspect.getdoc(section) or "")
    entries = re.findall(r"^([\w, ]+): (.*(?:\n {4}.*)*)", text, flags=re.MULTILINE)
    texts = {name: text for names, text in entries for name in names.split(", ")}
    fields = [field.name for field in dataclasses.fields(section)]
    return {name: " ".join(texts.get(name, "").split()) for name in fields}
