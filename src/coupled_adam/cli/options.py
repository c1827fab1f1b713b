"""Arguments that several commands share, and their conversion for the library."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from coupled_adam.cli.terminal import quiet_libraries
from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import write_atomically
from coupled_adam.lab.training.errors import TrainingError

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.training.config import Execution

Device = Literal["auto", "cpu", "cuda", "mps"]
N = TypeVar("N", int, float)

DEFAULT_RECIPE = "tiny"

_MOST_SEEDS = 1000  # of one number, which is how many there are


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What ``compare`` and ``train`` have in common: a recipe, and how its runs are executed."""

    overrides: list[str]
    recipe: str | None
    text: str | None
    steps: int | None
    out: str | None
    cache: str | None
    resume: bool
    skip_damaged: bool
    device: Device
    strategy: Literal["ddp", "fsdp2"]
    micro_batch_size: int | None
    compile: bool
    log: list[Literal["tensorboard", "wandb"]]


def positive_int(text: str) -> int:
    """The type of options that count: a whole number from 1 on."""
    return _number(
        text, int, lambda number: 1 <= number < 2**63, "a whole number, 1 or more, below 2^63"
    )


def whole_number(text: str) -> int:
    """The type of options that may be 0: a whole number from 0 on."""
    return _number(
        text, int, lambda number: 0 <= number < 2**63, "a whole number, 0 or more, below 2^63"
    )


def number_from_0(text: str) -> float:
    """The type of strengths: a finite number from 0 on."""
    return _number(text, float, lambda number: 0 <= number < math.inf, "a number, 0 or more")


def positive_number(text: str) -> float:
    """The type of durations: a finite number above 0."""
    return _number(text, float, lambda number: 0 < number < math.inf, "a number above 0")


def _number(text: str, kind: type[N], fits: Callable[[N], bool], what: str) -> N:
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if not fits(number):
        raise argparse.ArgumentTypeError(f"{one_line(text, 50)!r} must be {what}")
    return number


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Values of the recipe as positional arguments."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, such as model.n_layer=24",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """``--cache``."""
    parser.add_argument(
        "--cache", help="the folder that keeps prepared corpora (default: in the user's cache)"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="where to compute; auto takes cuda, mps or cpu, the first that is available",
    )


def add_json(parser: argparse.ArgumentParser, what: str = "numbers") -> None:
    """``--json``."""
    parser.add_argument(
        "--json", action="store_true", help=f"print all {what} as JSON, and nothing else"
    )


def add_run_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The arguments of :class:`RunOptions`; ``out`` is the help of ``--out``."""
    add_overrides(parser)
    parser.add_argument(
        "--recipe",
        help="the name of a recipe (coupled-adam recipes lists them), or a YAML file (default: "
        "tiny; with --resume, the recipe in OUT)",
    )
    parser.add_argument(
        "--text", help="train on this file, or on all text files in this folder (data.text)"
    )
    parser.add_argument("--steps", type=positive_int, help="training steps (training.steps)")
    parser.add_argument("--out", help=out)
    add_cache(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the runs in OUT from their last checkpoints, with their recipe and text",
    )
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="with --resume: if the last checkpoint is damaged, continue from the one before it",
    )
    add_device(parser)
    parser.add_argument(
        "--strategy",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="how several processes (torchrun, srun) share a run; fsdp2 shards the model",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=positive_int,
        help="sequences that a process takes at a time (default: its whole share of the batch)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument(
        "--log",
        choices=("tensorboard", "wandb"),
        nargs="*",
        default=["tensorboard"],
        help="loggers in addition to metrics.jsonl: tensorboard (default), wandb, both or none",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """``--arms`` and ``--seeds``."""
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="run only these arms of the recipe"
    )
    parser.add_argument(
        "--seeds",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="one number N: the seeds 1 to N; several numbers: these seeds",
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


def _seeds(given: list[int]) -> list[int]:
    """The seeds that ``--seeds`` means: one number counts them, several name them."""
    shown = f"--seeds {' '.join(map(str, given))}"
    if len(given) == 1:
        if not 1 <= given[0] <= _MOST_SEEDS:
            raise UsageError(
                f"{shown}: one number is how many seeds there are, and must be from 1 to "
                f"{_MOST_SEEDS}; several numbers are the seeds"
            )
        return list(range(1, given[0] + 1))
    if len({*given}) < len(given):
        raise UsageError(f"{shown} names a seed twice: each is run once")
    return sorted(given)


def overridden(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the values that the command line gives.

    Raises:
        UsageError: a value is not valid, or is given twice in different ways.
    """
    from coupled_adam.lab.recipe import override, parse_overrides

    values = parse_overrides(options.overrides)
    for option, given, others in (
        ("--steps", options.steps, ("training.steps", "training.tokens")),
        ("--text", options.text, ("data.text", "data.hub", "data.tokens")),
    ):
        for key in others:
            if given is not None and values.get(key) is not None:
                raise UsageError(
                    f"{option} {given} and {key}={values[key]} exclude each other: give only one"
                )
    if options.steps is not None:
        values |= {"training.steps": options.steps, "training.tokens": None}
    if options.text is not None:
        text = str(Path(options.text).resolve())
        values |= {"data.text": text, "data.hub": None, "data.tokens": None}
    return override(recipe, values)


def known_arm(name: str, recipe: Recipe) -> str:
    """The name of an arm, if the recipe has it.

    Raises:
        UsageError: it does not.
    """
    if name not in recipe.arms:
        near = difflib.get_close_matches(name, recipe.arms, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its arms are {', '.join(recipe.arms)}"
        raise UsageError(f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return name


def execution(options: RunOptions, recipe: Recipe) -> Execution:
    """How the runs of a recipe are executed.

    Raises:
        UsageError: a device or a logger is not available here, or the model is too large for it.
    """
    from coupled_adam.lab.training.config import Execution

    quiet_libraries()  # after their imports, which set the levels they like
    if options.skip_damaged and not options.resume:
        raise UsageError("--skip-damaged is for --resume: add it, or leave --skip-damaged out")
    for name in options.log:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log {name} needs a package: pip install {name}")
    target = device(options.device)
    if options.strategy != "fsdp2":  # which shares a model among machines
        _check_memory(recipe, target)
    return Execution(
        device=target,
        strategy=options.strategy,
        micro_batch_size=options.micro_batch_size,
        compile=options.compile,
        log=tuple(options.log),
        skip_damaged=options.skip_damaged,
    )


def _check_memory(recipe: Recipe, target: str) -> None:
    """Raise UsageError if weights, gradients and first moments alone do not fit into the memory."""
    import torch

    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if target == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    needed = 3 * 4 * recipe.parameters  # float32
    if needed > available:
        raise UsageError(
            f"a model of {recipe.parameters / 1e9:,.1f} billion parameters (model.n_embd="
            f"{recipe.model.n_embd}, model.n_layer={recipe.model.n_layer}, model.vocab_size="
            f"{recipe.model.vocab_size}) needs at least {needed / 1e9:,.0f} GB for its training, "
            f"and {target} has {available / 1e9:,.0f} GB: make it smaller, or share it with "
            "--strategy fsdp2"
        )


def device(name: Device) -> str:
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
        UsageError: a file cannot be written, or would replace another result, an input, or what has
            the ending of weights, counts or tokens; nothing has been changed.
    """
    from coupled_adam.embeddings.weights import SUFFIXES

    read = {Path(name).resolve() for name in inputs if name is not None}
    written: dict[Path, str] = {}
    for option, name in files.items():
        if name is None:
            continue
        path = Path(name).resolve()  # a link stays one
        with _explaining(f"--{option} {name}", "name another file"):
            if not path.parent.exists():
                raise UsageError(f"--{option}: there is no folder {path.parent}: create it first")
            if path.exists() and not path.is_file():
                raise UsageError(f"--{option} {name} exists and is not a file: name another one")
            if path in read or (path.exists() and path.suffix in SUFFIXES):
                what = "is read by this command" if path in read else f"is a {path.suffix} file"
                raise UsageError(f"--{option} {name} {what}: name another file")
            if path in written:
                raise UsageError(
                    f"--{written[path]} and --{option} {name} are the same file: name two"
                )
            written[path] = option
            with tempfile.TemporaryFile(dir=path.parent):
                pass


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
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass


def write_file(option: str, name: str, content: str | bytes) -> None:
    """Write a file that an option names.

    Raises:
        TrainingError: it cannot be written, such as when the disk is full.
    """
    try:
        write_atomically(Path(name).resolve(), content)  # a link stays one
    except OSError as error:
        raise TrainingError(f"{option} {name} cannot be written ({error.strerror})") from None


@contextmanager
def _explaining(what: str, instead: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be written ({error.strerror}): {instead}") from None
