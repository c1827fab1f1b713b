"""Plain values made into dataclasses by pydantic, and what is wrong with them in words."""

import dataclasses
import difflib
import functools
import json
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from coupled_adam.errors import UsageError, one_line

T = TypeVar("T")


def sections(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields of a dataclass that are dataclasses themselves, such as those of a recipe."""
    types = typing.get_type_hints(cls)
    return {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def checked(cls: type[T], values: Any, where: str = "") -> T:
    """An instance of a dataclass from plain values; ``where`` is its place in the recipe.

    Raises:
        UsageError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    try:
        instance: T = _adapter(cls).validate_python(values)  # type: ignore[arg-type]  # it is hashable
        return instance
    except ValidationError as error:
        errors = error.errors(include_url=False)
        missing = [
            e["loc"] for e in errors if e["type"] == "missing" and isinstance(e["loc"][-1], str)
        ]
        # An unknown key comes first, since it is often why another one is missing.
        first = next((e for e in errors if e["type"] == "unexpected_keyword_argument"), errors[0])
        if first["loc"] in missing:
            names = ", ".join(_key(where, loc) for loc in missing)
            raise UsageError(f"{names} must be given") from None
        raise UsageError(_explained(first, cls, values, where)) from None


def _explained(error: ErrorDetails, cls: type[Any], values: Any, where: str) -> str:
    """What pydantic finds wrong with a value, by its key, and what it should be."""
    *places, key = error["loc"] or ("",)
    if error["type"] == "unexpected_keyword_argument":
        hint = suggestion(cls, _key("", error["loc"]))
        return f"{_key(where, places)} has no key {key!r}: {hint}".strip()
    if error["type"] == "value_error":  # raised by the arms themselves
        return f"{where}: {error['ctx']['error']}"
    if key == "[key]":
        return f"{_key(where, places[:-1])}: {as_typed(places[-1])} must be text, in quotes"
    # An element of a list is wrong as a part of the whole.
    loc = [place for place in error["loc"] if isinstance(place, str)]
    value = values
    for name in loc:
        value = value[name]
    expected = _LISTS.get(loc[-1]) or _in_words(error)
    return f"{_key(where, loc)}={as_typed(value)} must be {expected}"


_LISTS = {
    "betas": "two numbers, each at least 0 and below 1, such as [0.9, 0.95]",
    "seeds": "a list of different whole numbers, 0 to 4294967295, such as [1, 2]",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "dataclass": "keys and values",
    "dict": "keys and values",
}
_BOUNDS = {"gt": "above {:g}", "ge": "{:g} or more", "lt": "below {:g}", "le": "at most {:g}"}


def _in_words(error: ErrorDetails) -> str:
    """What a value should be, in words."""
    facts = error.get("ctx", {})
    for name, words in _BOUNDS.items():
        if name in facts:
            return words.format(facts[name])
    if "expected" in facts:
        return str(facts["expected"]).replace("'", "")
    kind = error["type"].partition("_")[0]
    return _KINDS.get(kind, error["msg"].removeprefix("Input should be "))


def _key(where: str, parts: Iterable[Any]) -> str:
    """The dotted key of a place in the recipe."""
    return ".".join(map(str, [where, *parts] if where else parts))


def as_typed(value: Any) -> str:
    """A value as it is typed, not too long."""
    try:
        return one_line(value if isinstance(value, str) else json.dumps(value, default=str), 80)
    except ValueError:  # Python does not write numbers of thousands of digits
        return "..."


def keys(cls: type[Any], name: str | None = None) -> list[str]:
    """The keys in a dataclass's sections, ``training.lr``; of that name or in that section."""
    return [
        f"{section}.{field.name}"
        for section, kind in sections(cls).items()
        for field in dataclasses.fields(kind)
        if name in (None, section, field.name)
    ]


def suggestion(cls: type[Any], key: str) -> str:
    """What an unknown dotted key of a dataclass may stand for, or which keys there are."""
    section, _, name = key.rpartition(".")
    names = [field.name for field in dataclasses.fields(sections(cls).get(section, cls))]
    # In its own section, then under that name in another one, then anywhere.
    near = (
        difflib.get_close_matches(name, names, n=1)
        or keys(cls, name)
        or difflib.get_close_matches(key, keys(cls), n=1, cutoff=0.8)
    )
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"


@functools.cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The checker of a dataclass and of those in it, which refuse keys that they do not have."""
    # Configured here, so that the classes of the arms need not know of pydantic.
    for section in (cls, *sections(cls).values()):
        with_config(ConfigDict(extra="forbid"))(section)
    return TypeAdapter(cls)
