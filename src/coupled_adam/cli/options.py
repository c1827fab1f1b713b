"""Arguments from dataclasses, those that several commands share, and what they mean.

A command is a dataclass ``Options``, whose fields are its arguments: a name, a type, a default and
a help text, each written once. :func:`add_arguments` makes the parser from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from coupled_adam.cli.terminal import quiet_libraries
from coupled_adam.errors import UsageError, did_you_mean, one_line
from coupled_adam.runs import COMPARISON, CONFIG

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.training.config import Execution

N = TypeVar("N", int, float)
T = TypeVar("T", str, Path)

DEFAULT_RECIPE = "demo"

_MOST_SEEDS = 1000  # of one number, which is how many there are


def option(text: str, default: Any = None, **settings: Any) -> Any:
    """A field that is an option, ``--name``; ``text`` is its help.

    Args:
        default: ``dataclasses.MISSING`` for an option that must be given.
        settings: further arguments for :meth:`argparse.ArgumentParser.add_argument`.
    """
    metadata = {"help": text, **settings}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(text: str, **settings: Any) -> Any:
    """A field that is a positional argument; otherwise as :func:`option`."""
    return dataclasses.field(metadata={"help": text, "positional": True, **settings})


def add_arguments(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the fields of a dataclass to a parser: its own first, then those of its bases."""
    hints = get_type_hints(options, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(options)}
    for base in options.__mro__:
        for name in inspect.get_annotations(base):
            _add_argument(parser, fields[name], hints[name])


def _add_argument(
    parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any
) -> None:
    # The type of the field says how its text is read, and how many texts there are.
    settings = dict(field.metadata)
    is_positional = settings.pop("positional", False)
    # None stands for an option that is left out, and is nothing that can be typed.
    if type(None) in get_args(kind):
        (kind,) = [member for member in get_args(kind) if member is not type(None)]
    if get_origin(kind) is list:
        settings.setdefault("nargs", "+")
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    elif get_origin(kind) is Annotated:
        settings["type"] = kind.__metadata__[0]
    elif kind is bool:
        settings["action"] = "store_true"
    # A default that is empty, as that of --prompt, allows an empty text.
    elif field.default != "":
        settings["type"] = _not_empty(kind)
    if is_positional:
        parser.add_argument(field.name, **settings)
        return
    if field.default_factory is not dataclasses.MISSING:
        settings["default"] = field.default_factory()
    # A dataclass field without a default is an option that must be given.
    elif field.default is dataclasses.MISSING:
        settings["required"] = True
    else:
        settings["default"] = field.default
    parser.add_argument(f"--{field.name.replace('_', '-')}", **settings)


def _not_empty(kind: type[T]) -> Callable[[str], T]:
    """The type of names and paths: Path("") would be the current folder."""

    def convert(text: str) -> T:
        if not text:
            raise argparse.ArgumentTypeError("'' is empty: give a value, or leave it out")
        return kind(text)

    return convert


def _number(kind: type[N], fits: Callable[[N], bool], meaning: str) -> Callable[[str], N]:
    """The type of numbers that fit; ``meaning`` says which these are."""

    def convert(text: str) -> N:
        try:
            number = kind(text)
        except ValueError:
            number = kind(-1)
        if not fits(number):
            raise argparse.ArgumentTypeError(f"{one_line(text, 50)!r} must be {meaning}")
        return number

    return convert


Count = Annotated[
    int, _number(int, lambda n: 1 <= n < 2**63, "a whole number, 1 or more, below 2^63")
]
WholeNumber = Annotated[
    int, _number(int, lambda n: 0 <= n < 2**63, "a whole number, 0 or more, below 2^63")
]
NotNegative = Annotated[float, _number(float, lambda x: 0 <= x < math.inf, "a number, 0 or more")]
Positive = Annotated[float, _number(float, lambda x: 0 < x < math.inf, "a number above 0")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """For commands that compute."""

    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "where to compute; auto takes cuda, mps or cpu, the first that is available", "auto"
    )

    def usable_device(self) -> str:
        """The device, or with ``"auto"`` the fastest one; UsageError if it is not available."""
        return usable_device(self.device)


def usable_device(device: str) -> str:
    """The device, or for ``"auto"`` the fastest one; UsageError if it is not available."""
    import torch

    usable = ["cuda"] if torch.cuda.is_available() else []
    usable += ["mps"] if torch.backends.mps.is_available() else []
    usable += ["cpu"]
    if device == "auto":
        return usable[0]
    if device not in usable:
        available = f"available: {', '.join(usable)}"
        raise UsageError(f"--device {device} is not available here; {available}")
    return device


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultOptions(DeviceOption):
    """For commands with results."""

    json: bool = option("print all results as JSON, and nothing else", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(ResultOptions):
    """For commands that take models, also on the hub."""

    revision: str | None = option("the branch, tag or commit, for models on the hub")

    def check_revision(self, models: Iterable[str]) -> None:
        """Raise UsageError if ``--revision`` is given for a model that is not on the hub."""
        local = [model for model in models if Path(model).exists()]
        if self.revision is not None and local:
            raise UsageError(f"--revision is for models on the hub, and {local[0]} is a path here")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerOption:
    """For commands that name tokens."""

    tokenizer: str | None = option(
        "a tokenizer's folder, or its id on the hub (default: the model's own)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordSimilarityOption:
    """For commands that measure embeddings."""

    word_similarity: str | None = option(
        "a folder with word-similarity sets as published; 'download' downloads and keeps them",
        metavar="DIR",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOption:
    """For commands that need a corpus."""

    cache: Path | None = option(
        "the folder that keeps prepared corpora (default: in the user's cache)"
    )

    def cache_folder(self) -> Path:
        """The folder of prepared corpora."""
        from coupled_adam.lab.data.corpus import default_cache

        return self.cache or default_cache()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeValues:
    """For commands that take a recipe: its values, as positional arguments."""

    overrides: list[str] = argument(
        "change a value of the recipe, such as model.n_layer=24", metavar="key=value", nargs="*"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(RecipeValues, CacheOption, DeviceOption):
    """For commands that train: a recipe, and how its runs are executed."""

    recipe: str | None = option(
        "the name of a recipe (coupled-adam recipes lists them), or a YAML file (default: demo; "
        "with --resume, the recipe in OUT)"
    )
    text: str | None = option("train on this file, or on all text files in this folder (data.text)")
    steps: Count | None = option("training steps (training.steps)")
    resume: bool = option(
        "continue the runs in OUT from their last checkpoints, with their recipe and text",
        default=False,
    )
    skip_damaged: bool = option(
        "with --resume: if the last checkpoint is damaged, continue from the one before it",
        default=False,
    )
    strategy: Literal["ddp", "fsdp2"] = option(
        "how several processes (torchrun, srun) share a run; fsdp2 shards the model", "ddp"
    )
    micro_batch_size: Count | None = option(
        "sequences that a process takes at a time (default: its whole share of the batch)"
    )
    compile: bool = option("compile the model", default=False)
    logger: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = option(
        "loggers in addition to metrics.jsonl (default: tensorboard); none without a value",
        ["tensorboard"],
        nargs="*",
    )

    def overridden(self, recipe: Recipe) -> Recipe:
        """The recipe with the values of the command line; UsageError if they are not valid."""
        from coupled_adam.lab.recipe import override, parse_overrides

        values = parse_overrides(self.overrides)
        # Each of these options is a key of the recipe, and takes the place of others.
        for option, value, keys in (
            ("--steps", self.steps, ("training.steps", "training.tokens")),
            ("--text", self.text, ("data.text", "data.hub", "data.tokens")),
        ):
            if value is None:
                continue
            for key in keys:
                if (other := values.get(key)) is not None:
                    raise UsageError(
                        f"{option} {value} and {key}={other} exclude each other: give only one"
                    )
            content = str(Path(value).resolve()) if isinstance(value, str) else value
            values |= {**dict.fromkeys(keys), keys[0]: content}
        recipe = override(recipe, values)
        # Files in the folder of runs may be another person's, and what they name is code.
        of_runs = self.recipe is None or Path(self.recipe).name in (CONFIG, COMPARISON)
        if of_runs and recipe.variant is not None and "variant" not in values:
            raise UsageError(
                f"the recipe in OUT executes the code of {recipe.variant}: if you trust it, add "
                f"variant={recipe.variant} to the command"
            )
        return recipe

    def execution(self, recipe: Recipe) -> Execution:
        """How the runs of a recipe are executed; UsageError if they cannot be executed here."""
        from coupled_adam.lab.models import parameters
        from coupled_adam.lab.training.config import Execution

        quiet_libraries()  # after their imports, which set the levels they like
        if self.skip_damaged and not self.resume:
            raise UsageError("--skip-damaged is for --resume: add it, or leave --skip-damaged out")
        # A logger that is missing would show only after the corpus has been prepared.
        for name in self.logger:
            if importlib.util.find_spec(name) is None:
                raise UsageError(f"--logger {name} needs a package: pip install {name}")
        device = self.usable_device()
        number = parameters(recipe)  # an error, if transformers cannot build the architecture
        if self.strategy != "fsdp2":  # which shares a model among machines
            _check_memory(recipe, number, device)
        return Execution(
            device=device,
            strategy=self.strategy,
            micro_batch_size=self.micro_batch_size,
            compile=self.compile,
            log=tuple(self.logger),
            skip_damaged=self.skip_damaged,
        )


def _check_memory(recipe: Recipe, parameters: int, device: str) -> None:
    """Raise UsageError if weights, gradients and first moments alone do not fit into the memory."""
    import torch

    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    # The least that any training takes, so that nothing is refused that could have worked.
    needed = 3 * 4 * parameters  # float32
    if needed > available:
        raise UsageError(
            f"a model of {parameters / 1e9:,.1f} billion parameters (model.n_embd="
            f"{recipe.model.n_embd}, model.n_layer={recipe.model.n_layer}, model.vocab_size="
            f"{recipe.model.vocab_size}) needs at least {needed / 1e9:,.0f} GB for its training, "
            f"and {device} has {available / 1e9:,.0f} GB: make it smaller, or share it with "
            "--strategy fsdp2"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """For commands that train several runs: which arms and seeds."""

    arms: list[str] | None = option("run only these arms of the recipe", metavar="ARM")
    seeds: list[WholeNumber] | None = option(
        "one number N: the seeds 1 to N; several numbers: these seeds", metavar="N"
    )

    def selected(self, recipe: Recipe) -> Recipe:
        """The recipe with these arms and seeds; UsageError if it cannot have them."""
        if self.seeds is not None:
            recipe = dataclasses.replace(recipe, seeds=_seeds(self.seeds))
        if self.arms is not None:
            if len({*self.arms}) < len(self.arms):
                raise UsageError(f"--arms {' '.join(self.arms)} names an arm twice")
            arms = {arm: recipe.arms[arm_name(arm, recipe)] for arm in self.arms}
            recipe = dataclasses.replace(recipe, arms=arms)
        return recipe


def _seeds(numbers: list[int]) -> list[int]:
    """The seeds that ``--seeds`` means: one number counts them, several name them."""
    # As it was typed, since a count and a list look alike.
    typed = f"--seeds {' '.join(map(str, numbers))}"
    if len({*numbers}) < len(numbers):
        raise UsageError(f"{typed} names a seed twice: each is run once")
    if len(numbers) > 1:
        return sorted(numbers)
    if not 1 <= numbers[0] <= _MOST_SEEDS:
        raise UsageError(
            f"{typed}: one number is how many seeds there are, and must be from 1 to "
            f"{_MOST_SEEDS}; several numbers are the seeds"
        )
    return list(range(1, numbers[0] + 1))


def arm_name(name: str, recipe: Recipe) -> str:
    """The name, which must be that of an arm of the recipe; otherwise UsageError is raised."""
    if name not in recipe.arms:
        hint = did_you_mean(name, recipe.arms, f"its arms are {', '.join(recipe.arms)}")
        raise UsageError(f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return name
