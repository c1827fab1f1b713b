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
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from coupled_adam.errors import TrainingError, UsageError, did_you_mean, one_line
from coupled_adam.files import clear_leftovers, is_result, write_atomically
from coupled_adam.runs import COMPARISON, CONFIG, ENVIRONMENT, SWEEP

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.training.config import Execution

N = TypeVar("N", int, float)

DEFAULT_RECIPE = "demo"

_MOST_SEEDS = 1000  # of one number, which is how many there are


def option(text: str, default: Any = None, metavar: str | None = None, **settings: Any) -> Any:
    """A field that is an option, ``--name``; ``text`` is its help.

    Args:
        default: ``dataclasses.MISSING`` for an option that must be given.
        settings: further arguments for :meth:`argparse.ArgumentParser.add_argument`.
    """
    metadata = {"help": text, "metavar": metavar, **settings}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(text: str, metavar: str | None = None, nargs: str | None = None) -> Any:
    """A field that is a positional argument."""
    metadata = {"help": text, "metavar": metavar, "nargs": nargs, "positional": True}
    return dataclasses.field(metadata=metadata)


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
    settings = {name: value for name, value in field.metadata.items() if value is not None}
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
    elif field.default != "":
        settings["type"] = _not_empty
    if settings.pop("positional", False):
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


def _not_empty(text: str) -> str:
    """The type of names and paths: Path("") would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: give a value, or leave it out")
    return text


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonOption:
    """For commands with results."""

    json: bool = option("print all results as JSON, and nothing else", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RevisionOption:
    """For commands that take models on the hub."""

    revision: str | None = option("the branch, tag or commit, for models on the hub")


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

    cache: str | None = option(
        "the folder that keeps prepared corpora (default: in the user's cache)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeValues:
    """For commands that take a recipe: its values, as positional arguments."""

    overrides: list[str] = argument(
        "change a value of the recipe, such as model.n_layer=24", "key=value", nargs="*"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """For commands that train several runs: which arms and seeds."""

    arms: list[str] | None = option("run only these arms of the recipe", metavar="ARM")
    seeds: list[WholeNumber] | None = option(
        "one number N: the seeds 1 to N; several numbers: these seeds", metavar="N"
    )


def selected(recipe: Recipe, arms: list[str] | None, seeds: list[int] | None) -> Recipe:
    """The recipe with the arms and seeds that ``--arms`` and ``--seeds`` give.

    Raises:
        UsageError: an arm is not known, or an arm or a seed is given twice.
    """
    if seeds is not None:
        recipe = dataclasses.replace(recipe, seeds=_seeds(seeds))
    if arms is not None:
        if len({*arms}) < len(arms):
            raise UsageError(f"--arms {' '.join(arms)} names an arm twice")
        chosen = {arm: recipe.arms[known_arm(arm, recipe)] for arm in arms}
        recipe = dataclasses.replace(recipe, arms=chosen)
    return recipe


def _seeds(numbers: list[int]) -> list[int]:
    """The seeds that ``--seeds`` means: one number counts them, several name them."""
    typed = f"--seeds {' '.join(map(str, numbers))}"
    if len(numbers) == 1:
        if not 1 <= numbers[0] <= _MOST_SEEDS:
            raise UsageError(
                f"{typed}: one number is how many seeds there are, and must be from 1 to "
                f"{_MOST_SEEDS}; several numbers are the seeds"
            )
        return list(range(1, numbers[0] + 1))
    if len({*numbers}) < len(numbers):
        raise UsageError(f"{typed} names a seed twice: each is run once")
    return sorted(numbers)


def overridden(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the values that the command line gives.

    Raises:
        UsageError: a value is not valid, or is given twice in different ways.
    """
    from coupled_adam.lab.recipe import override, parse_overrides

    values = parse_overrides(options.overrides)
    for option, value, keys in (
        ("--steps", options.steps, ("training.steps", "training.tokens")),
        ("--text", options.text, ("data.text", "data.hub", "data.tokens")),
    ):
        for key in keys:
            if value is not None and values.get(key) is not None:
                raise UsageError(
                    f"{option} {value} and {key}={values[key]} exclude each other: give only one"
                )
    if options.steps is not None:
        values |= {"training.steps": options.steps, "training.tokens": None}
    if options.text is not None:
        text = str(Path(options.text).resolve())
        values |= {"data.text": text, "data.hub": None, "data.tokens": None}
    changed = override(recipe, values)
    # Files in the folder of runs may be another person's, and what they name is code.
    of_runs = options.recipe is None or Path(options.recipe).name in (CONFIG, COMPARISON, SWEEP)
    if of_runs and changed.variant is not None and "variant" not in values:
        raise UsageError(
            f"the recipe in OUT executes the code of {changed.variant}: if you trust it, add "
            f"variant={changed.variant} to the command"
        )
    return changed


def known_arm(name: str, recipe: Recipe) -> str:
    """The name of an arm, if the recipe has it.

    Raises:
        UsageError: it does not.
    """
    if name not in recipe.arms:
        hint = did_you_mean(name, recipe.arms, f"its arms are {', '.join(recipe.arms)}")
        raise UsageError(f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return name


def execution(options: RunOptions, recipe: Recipe) -> Execution:
    """How the runs of a recipe are executed.

    Raises:
        UsageError: a device or a logger is not available here, or the model is too large for it.
    """
    from coupled_adam.lab.models import parameters
    from coupled_adam.lab.training.config import Execution

    quiet_libraries()  # after their imports, which set the levels they like
    if options.skip_damaged and not options.resume:
        raise UsageError("--skip-damaged is for --resume: add it, or leave --skip-damaged out")
    for name in options.logger:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--logger {name} needs a package: pip install {name}")
    target = device(options.device)
    number = parameters(recipe)  # an error, if transformers cannot build the architecture
    if options.strategy != "fsdp2":  # which shares a model among machines
        _check_memory(recipe, number, target)
    return Execution(
        device=target,
        strategy=options.strategy,
        micro_batch_size=options.micro_batch_size,
        compile=options.compile,
        log=tuple(options.logger),
        skip_damaged=options.skip_damaged,
    )


def _check_memory(recipe: Recipe, parameters: int, target: str) -> None:
    """Raise UsageError if weights, gradients and first moments alone do not fit into the memory."""
    import torch

    # The least that any training takes, so that nothing is refused that could have worked.
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if target == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    needed = 3 * 4 * parameters  # float32
    if needed > available:
        raise UsageError(
            f"a model of {parameters / 1e9:,.1f} billion parameters (model.n_embd="
            f"{recipe.model.n_embd}, model.n_layer={recipe.model.n_layer}, model.vocab_size="
            f"{recipe.model.vocab_size}) needs at least {needed / 1e9:,.0f} GB for its training, "
            f"and {target} has {available / 1e9:,.0f} GB: make it smaller, or share it with "
            "--strategy fsdp2"
        )


def device(name: str) -> str:
    """The device of that name, or with ``"auto"`` the fastest one that is available.

    Raises:
        UsageError: it is not available here.
    """
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    usable = [device for device, is_usable in available.items() if is_usable]
    if name == "auto":
        return usable[0]
    if name not in usable:
        raise UsageError(f"--device {name} is not available here; available: {', '.join(usable)}")
    return name


def cache_folder(cache: str | None) -> Path:
    """The folder of prepared corpora that ``--cache`` names, or the default one."""
    from coupled_adam.lab.data.corpus import default_cache

    return default_cache() if cache is None else Path(cache)


def optional_path(path: str | None) -> Path | None:
    """A path, where one was given."""
    return None if path is None else Path(path)


def check_files(inputs: Iterable[str | None] = (), **files: str | None) -> None:
    """Check, before any work is done for them, that files can be written.

    Args:
        inputs: what the command reads, which its results must not replace.
        files: paths, by the names of their options.

    Raises:
        UsageError: a file cannot be written, would replace an input, another result or anything
            that is no earlier result of this package, or would lie in the folder of a run or a
            model; nothing has been changed.
    """
    read = {Path(name).resolve() for name in inputs if name is not None}
    written: dict[Path, str] = {}
    for option, name in files.items():
        if name is None:
            continue
        if name == "-":
            raise UsageError(f"--{option} - would be a file called -: name a file, or use --json")
        path = Path(name).resolve()  # a link stays one
        with _explaining(f"--{option} {name}", "name another file"):
            if not path.parent.exists():
                raise UsageError(f"--{option}: there is no folder {path.parent}: create it first")
            if path.exists() and not path.is_file():
                raise UsageError(f"--{option} {name} exists and is not a file: name another one")
            if path in read:
                raise UsageError(f"--{option} {name} is read by this command: name another file")
            home = next((folder for folder in path.parents if _is_run_or_model(folder)), None)
            if home is not None:
                raise UsageError(
                    f"--{option} {name} would lie in {home}, the folder of a run or a model: name "
                    "a file outside"
                )
            if path.exists() and not is_result(path):
                raise UsageError(
                    f"--{option} {name} exists, and is no earlier result of this command: name "
                    "another file"
                )
            if path in written:
                raise UsageError(
                    f"--{written[path]} and --{option} {name} are the same file: name two"
                )
            written[path] = option
            # The only sure way to find out whether a file can be made there is to make one.
            with tempfile.TemporaryFile(dir=path.parent):
                pass


def _is_run_or_model(folder: Path) -> bool:
    """Whether a folder is a run's or a model's; a config.yaml alone does not make one."""
    is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return is_model or ((folder / CONFIG).is_file() and (folder / ENVIRONMENT).is_file())


def check_revision(options: RevisionOption, models: Iterable[str]) -> None:
    """Raise UsageError if ``--revision`` is given for a model that is not on the hub."""
    local = [model for model in models if Path(model).exists()]
    if options.revision is not None and local:
        raise UsageError(f"--revision is for models on the hub, and {local[0]} is a path here")


def check_folder(option: str, folder: Path) -> None:
    """Check, before any work is done for it, that a folder can be created or written to.

    Raises:
        UsageError: it cannot be; nothing has been changed.
    """
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:  # as safetensors and tokenizers need it
        raise UsageError(f"{option} {folder} is not UTF-8: choose another folder") from None
    with _explaining(f"{option} {folder}", "choose another folder"):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{option} {folder} exists and is not a folder: choose another one")
        # The innermost folder that exists is the one in which the others will be made.
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass


def write_file(option: str, name: str, content: str | bytes) -> None:
    """Write a file that an option names.

    Raises:
        TrainingError: it cannot be written, such as when the disk is full.
    """
    path = Path(name).resolve()  # a link stays one
    try:
        clear_leftovers(path.parent)
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(f"{option} {name} cannot be written ({error.strerror})") from None


@contextmanager
def _explaining(subject: str, instead: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{subject} cannot be written ({error.strerror}): {instead}") from None
