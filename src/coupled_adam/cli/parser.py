"""The command line: argparse's parser, made from a dataclass of options.

A field's type says what is typed, and the docstring of its class what it means: see
:mod:`coupled_adam.fields`. Commands that take a recipe also take its keys, as ``--training.lr``.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from coupled_adam.cli import COMMANDS, load_command
from coupled_adam.errors import UsageError
from coupled_adam.fields import checked, meanings, sections

_KEYS = """\
Any key of the recipe but its name is an option, too: --training.lr 1e-3. --arms.lean.lr_factor 8
sets an option of an arm, --arms.*.lr of all arms, and --arms.NAME '{optimizer: lean}' adds an arm;
a list of values makes an arm of each. coupled-adam recipes demo explains all keys.
"""


_ELSEWHERE = {
    "config": "recipe",
    "data": "text",
    "dataset": "data.hub",
    "layers": "model.n_layer",
    "learning-rate": "training.lr",
    "model": "model.architecture",
    "tasks": "lm-eval",
    "epochs": "training.tokens",
    "num-train-epochs": "training.tokens",
    "max-new-tokens": "tokens",
    "max-length": "tokens",
    "optimizer": "arms.NAME",
    "optim": "arms.NAME",
}
"""Our options, by their names in other programs."""


class Parser(argparse.ArgumentParser):
    """Raises its errors instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that says what to type instead."""
        if unknown := re.match(r"unrecognized arguments: (.+)", message):
            hint = self._meant(unknown[1].split())
            hint = f"did you mean {hint}?" if hint else f"see {self.prog} --help"
            raise UsageError(f"{message}; {hint}")
        if missing := re.fullmatch(r"the following arguments are required: ([A-Z]+)", message):
            message += f". It comes first: {self.prog} {missing[1]} ..."
        raise UsageError(message)

    def _meant(self, words: Sequence[str]) -> str:
        """The option that unknown words probably mean; empty if there is none."""
        typed, _, value = words[0].partition("=")
        if value and not typed.startswith("-"):
            return f"--{typed} {value}"
        # Without the dashes, which would make short names look alike.
        name = typed.lstrip("-")
        names = [option.lstrip("-") for option in self._option_string_actions]
        if self.epilog == _KEYS:
            from coupled_adam.lab.arms import ARMS
            from coupled_adam.lab.recipe import Recipe, recipe_names

            for word in (value, *words):
                if word in recipe_names() or word.endswith((".yaml", ".yml")):
                    return f"--recipe {word}"
            if "/" in typed:
                return f"--out {typed}"
            keys = [
                f"{section}.{field.name}"
                for section, cls in sections(Recipe).items()
                for field in dataclasses.fields(cls)
            ]
            names += [*(key for key in keys if key not in names), "arms.NAME"]
            options = dict.fromkeys(option for arm in ARMS.values() for option in meanings(arm))
            keys += [f"arms.*.{option}" for option in options]
            exact = [key for key in keys if key.rpartition(".")[2] == name.replace("-", "_")]
            if exact:
                return f"--{exact[0]}"
        if (known := _ELSEWHERE.get(name.replace("_", "-"))) in names:
            is_arm = known == "arms.NAME"
            return f"--{known}" + f" '{{optimizer: {value or words[-1]}}}'" * is_arm
        if near := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
            return f"--{near[0]}"
        for command in COMMANDS if typed.startswith("--") else ():
            if name.replace("-", "_") in meanings(load_command(command).Options):
                return f"coupled-adam {command} ... --{name}"
        return ""


def parsed(command: ModuleType, words: Sequence[str]) -> Any:
    """The options in a command line; UsageError if one is unknown, missing or out of range."""
    values = vars(make_parser(command, words).parse_args(words))
    # Several words are a list, as in YAML.
    keys = {key: values.pop(key) for key in [*values] if "." in key}
    if keys:
        values["keys"] = {k: v[0] if len(v) == 1 else f"[{', '.join(v)}]" for k, v in keys.items()}
    try:
        return checked(command.Options, values, shown=_typed)
    except UsageError as error:
        # A list with commas, as in --seeds 1,2,3, is one word, and not a number.
        if listed := re.match(r"(--\S+) ([\d.]+(?:,[\d.]+)+): ", str(error)):
            typed = f"{listed[1]} {listed[2].replace(',', ' ')}"
            raise UsageError(f"{error}; separate several by spaces: {typed}") from None
        raise


def make_parser(command: ModuleType, words: Sequence[str] = ()) -> Parser:
    """The parser of a command; ``words`` may name keys of a recipe."""
    parser = Parser(
        f"coupled-adam {command.__name__.rpartition('.')[2]}",
        description=command.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # get_type_hints, as annotations are texts in modules with `from __future__ import annotations`.
    texts, hints = meanings(command.Options), get_type_hints(command.Options)
    fields = {field.name: field for field in dataclasses.fields(command.Options)}
    # A command's own options come first, then those that it shares with others.
    for base in command.Options.__mro__:
        for key in inspect.get_annotations(base):
            if key in texts:
                _add_argument(parser, fields[key], hints[key], texts.pop(key))
    # The recipe checks its keys itself.
    if "keys" in fields:
        parser.epilog = _KEYS
        for word in dict.fromkeys(word.partition("=")[0] for word in words):
            # Only those that are given: no parser knows the names of arms and their options.
            if re.match(r"--(model|data|training|arms)\.", word):
                parser.add_argument(word, dest=word[2:], nargs="+", default=argparse.SUPPRESS)
    named = [str(action.metavar) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join([parser.prog, "[options]", *named])
    return parser


def _add_argument(parser: Parser, field: dataclasses.Field[Any], kind: Any, text: str) -> None:
    # None stands for an option that is left out, and cannot be typed.
    if type(None) in get_args(kind):
        (kind,) = [member for member in get_args(kind) if member is not type(None)]
    # What is not given is left to the dataclass, whose type checks the rest.
    text = text.removesuffix(".").replace("%", "%%")  # argparse formats it
    if field.default not in (None, False, "", dataclasses.MISSING) and "default" not in text:
        text += f" (default: {field.default})"
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    is_list, is_required = get_origin(kind) is list, field.default is dataclasses.MISSING
    # A field with a metavar is given by its place, without the name of an option.
    if "metavar" in field.metadata:
        nargs = "+" if is_list else None if is_required else "?"
        parser.add_argument(field.name, nargs=nargs, **field.metadata, **settings)
        return
    (kind,) = get_args(kind) if is_list else [kind]
    if kind is bool:
        settings["action"] = "store_true"
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    else:
        settings["metavar"] = field.name.upper()
    if is_list:  # what is given twice is one list, too
        settings |= {"nargs": "+", "action": "extend", **field.metadata}
    elif is_required:
        settings["required"] = True
    parser.add_argument(_typed(field.name), **settings)


def _typed(key: str, value: str = "") -> str:
    """An option as it is typed, also for a value in a list, whose key is ``option.0``."""
    return f"--{key.partition('.')[0].replace('_', '-')} {value}".strip()
