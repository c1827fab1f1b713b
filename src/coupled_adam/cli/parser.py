"""The command line: a parser from a dataclass of options, whose fields are its arguments.

A field's type says what is typed, and the docstring of its class what it means: see
:mod:`coupled_adam.fields`. Commands that take a recipe also take its keys, as ``--training.lr``.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from coupled_adam.errors import UsageError
from coupled_adam.fields import checked, meanings, require, sections

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Raises its errors instead of printing the usage and leaving."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError."""
        raise UsageError(message)


@dataclasses.dataclass(frozen=True)
class Positional:
    """Marks a field, in an ``Annotated`` type, as an argument without a name."""

    metavar: str


def parsed(options: type[T], parser: Parser, words: Sequence[str]) -> T:
    """The options in a command line; UsageError if one is unknown, missing or out of range."""
    # Keys of a recipe may also be given as training.lr=1e-3.
    key = re.compile(r"((model|data|training|arms)\..*|variant)=")
    words = [f"--{word}" if key.match(word) else word for word in words]
    add_arguments(parser, options, words)
    try:
        namespace, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; {_hint(parser, unknown[0])}")
    values = vars(namespace)
    _take_from_a_list(parser, options, values)
    for name, value in values.items():
        require(value != "", f"--{name.replace('_', '-')} is empty: give a value, or leave it out")
    keys = {key: values.pop(key) for key in [*values] if "." in key}
    if keys:
        values["keys"] = keys

    def shown(key: str, value: str) -> str:
        return f"--{key.partition('.')[0].replace('_', '-')} {value}"  # also of one in a list

    return checked(options, values, shown)


def _hint(parser: Parser, word: str) -> str:
    """What an unknown option may have been meant as."""
    name = word.lstrip("-").partition("=")[0]
    options = [option for action in parser._actions for option in action.option_strings]
    # The key of a recipe may have been given without its section, as --lr.
    near = [option for option in options if option.endswith(f".{name.replace('-', '_')}")]
    near = near or difflib.get_close_matches(f"--{name}", options, n=1, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else f"see {parser.prog} --help"


def _take_from_a_list(parser: Parser, options: type[Any], values: dict[str, Any]) -> None:
    """Take the argument without a name from the list before it.

    argparse gives all words after an option of several values to that option, so that in
    ``--neighbours king MODEL`` the model is a neighbour. The values are in the order in which their
    options were typed.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = get_type_hints(options, include_extras=True)
    for action in parser._actions:
        if action.option_strings or action.dest in values:
            continue
        lists = [
            value
            for name, value in values.items()
            if isinstance(value, list) and value
            # A word that belongs to the list, as in --exclude padding, is no model.
            if not {*value[-1].split(",")} <= {*get_args(_parts(hints[name])[0])}
        ]
        if lists:
            values[action.dest] = [lists[-1].pop()] if action.nargs == "*" else lists[-1].pop()
        elif fields[action.dest].default is dataclasses.MISSING:
            parser.error(f"the following arguments are required: {action.metavar}")


def _parts(kind: Any) -> tuple[Any, bool, list[Any]]:
    """The type of a value, whether a field is a list of such values, and the marks of its type."""
    marks: list[Any] = []
    # None stands for an option that is left out, and is nothing that can be typed.
    if type(None) in get_args(kind):
        (kind,) = [member for member in get_args(kind) if member is not type(None)]
    if get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
    is_list = get_origin(kind) is list
    return get_args(kind)[0] if is_list else kind, is_list, marks


def add_arguments(parser: Parser, options: type[Any], words: Sequence[str] = ()) -> None:
    """Add the fields of a dataclass to a parser: its own first, then those of its bases.

    ``words`` is the command line, which may name arms and their options.
    """
    hints = get_type_hints(options, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(options)}
    for base in options.__mro__[:-1]:
        title = (base.__doc__ or "").partition(".")[0]
        group = parser if base is options else parser.add_argument_group(title)
        texts = meanings(base)
        for name in inspect.get_annotations(base):
            if name in texts:
                _add_argument(group, fields[name], hints[name], texts[name])
    if "keys" in fields:  # of a recipe
        _add_recipe(parser, words)
    named = [action.metavar for action in parser._actions if not action.option_strings]
    parser.usage = " ".join([parser.prog, "[options]", *map(str, named)])


def _add_argument(
    group: argparse._ActionsContainer, field: dataclasses.Field[Any], kind: Any, text: str
) -> None:
    # What is not given is left to the dataclass, whose type checks the rest.
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field, text)}
    kind, is_list, marks = _parts(kind)
    position = next((mark for mark in marks if isinstance(mark, Positional)), None)
    if is_list:
        settings["nargs"] = "*"
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    if position is not None:  # "?" as it may be in a list, see _take_from_a_list
        group.add_argument(field.name, metavar=position.metavar, **{"nargs": "?", **settings})
        return
    if kind is bool:
        settings["action"] = "store_true"
    elif "choices" not in settings:
        settings["metavar"] = field.name.upper()
    if field.default is field.default_factory is dataclasses.MISSING:
        settings["required"] = True
    group.add_argument(f"--{field.name.replace('_', '-')}", **settings)


def _help(field: dataclasses.Field[Any], text: str) -> str:
    says_nothing = field.default in (None, False, "", dataclasses.MISSING) or "default" in text
    text = text.removesuffix(".").replace("%", "%%")
    return text if says_nothing else f"{text} (default: {field.default})"


def _add_recipe(parser: Parser, words: Sequence[str]) -> None:
    """Add the keys of a recipe, as ``--training.lr``; their values are YAML."""
    from coupled_adam.lab.recipe import Recipe

    texts = meanings(Recipe)
    for section, kind in sections(Recipe).items():
        group = parser.add_argument_group(f"the recipe's {section}: {texts[section]}".rstrip("."))
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for name, text in meanings(kind).items():
            group.add_argument(
                f"--{section}.{name}",
                default=argparse.SUPPRESS,
                help=_help(fields[name], text),
                metavar="VALUE",
            )
    group = parser.add_argument_group(
        "the recipe's arms, by their names",
        "--arms.lean.lr_factor 8 sets an option of an arm, --arms.NAME '{optimizer: lean}' adds an "
        "arm, and a list of values makes an arm of each; --arms.*.lr is that option of all arms. "
        "coupled-adam recipes demo prints all options.",
    )
    for word in dict.fromkeys(word.partition("=")[0] for word in words):
        if re.match(r"--(arms|model\.config)\.", word):
            group.add_argument(word, dest=word[2:], default=argparse.SUPPRESS)
