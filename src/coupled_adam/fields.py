"""Recipes and the options of commands are dataclasses: what their fields may be, and mean.

The type of a field says what a value may be, and pydantic checks it. The docstring of its class
says what it means, in an entry ``name: meaning``. The command line, its help, and the printed
recipe are made from the two.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from coupled_adam.errors import UsageError, did_you_mean, one_line

T = TypeVar("T")

LARGEST = 10**15
"""The limit of all counts: far larger than any in use, and exact as a float."""


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):  # which are 0 and 1 to Python
        raise ValueError("Input should be a number")
    return value


_Whole = Annotated[int, BeforeValidator(_no_truth_value)]
_Real = Annotated[float, BeforeValidator(_no_truth_value)]
Count = Annotated[_Whole, Field(ge=1, le=LARGEST)]
WholeNumber = Annotated[_Whole, Field(ge=0, le=LARGEST)]
Seed = Annotated[_Whole, Field(ge=0, lt=2**32)]
Finite = Annotated[_Real, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
PositiveOrInfinite = Annotated[_Real, Field(gt=0)]
NotNegative = Annotated[Finite, Field(ge=0)]
Share = Annotated[_Real, Field(ge=0, le=1)]
Beta = Annotated[_Real, Field(ge=0, lt=1)]


def require(condition: object, message: str) -> None:
    """Raise UsageError with the message unless the condition is true."""
    if not condition:
        raise UsageError(message)


def sections(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields of a dataclass that are dataclasses themselves, such as those of a recipe."""
    types = typing.get_type_hints(cls)
    return {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def meanings(cls: type[Any]) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of each of its fields, by name."""
    # Entries begin with the names of one or several fields; their further lines are indented:
    # "first, second: what they are, on a line that may go on\n    in the next".
    # Bases come first, so that a class may explain an inherited field anew; object is left out.
    own_first = [base for base in cls.__mro__ if base is not object]
    docs = (inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in reversed(own_first))
    text = re.sub(r"``|:(?:class|func):", "", "\n\n".join(docs))
    entries = re.findall(r"^([\w, ]+): (.*(?:\n {4}.*)*)", text, flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    fields = [field.name for field in dataclasses.fields(cls)]
    return {name: texts[name] for name in fields if name in texts}


def checked(cls: type[T], values: Any, shown: Callable[[str, str], str] = "{}={}".format) -> T:
    """An instance of a dataclass from plain values; ``shown`` shows a key and its value in errors.

    Raises UsageError if a key is unknown or missing, or a value has the wrong type or is out of
    range.
    """
    try:
        instance: T = _adapter(cls).validate_python(values)  # type: ignore[arg-type]  # it is hashable
        return instance
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # An unknown key comes first, since it is often why another one is missing.
    first = next((e for e in errors if e["type"] == "unexpected_keyword_argument"), errors[0])
    key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "unexpected_keyword_argument":
        section = sections(cls).get(str(first["loc"][0]), cls)
        unknown, texts = str(first["loc"][-1]), meanings(section)
        # A name may be the words by which another one is explained, such as learning_rate.
        words = unknown.replace("_", " ")
        explained = [name for name, text in texts.items() if " " in words and words in text][:1]
        hint = f"did you mean {explained[0]}?" if explained else did_you_mean(unknown, texts)
        raise UsageError(f"{key} is no key: {hint}")
    if first["type"] == "missing" or not key:
        raise UsageError(f"{key}: {message}".removeprefix(": "))
    message = _PLAIN.get(first["type"], message)
    raise UsageError(f"{shown(key, one_line(first['input'], 80))}: {message}")


_PLAIN = {
    "tuple_type": "must be several values in brackets, as in [0.9, 0.95]",
    "list_type": "must be values in brackets, as in [1, 2]",
    "dict_type": "must consist of keys and their values",
    "dataclass_type": "must consist of keys and their values",
    "string_pattern_mismatch": "must be a name of at most 50 letters, digits, _, + and -",
}
"""What pydantic says of Python's types, in the words of YAML."""


@functools.cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The checker of a dataclass and of those in it, which refuse keys that they do not have."""
    for section in (cls, *sections(cls).values()):
        with_config(ConfigDict(extra="forbid"))(section)
    return TypeAdapter(cls)
