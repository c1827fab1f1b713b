"""Arguments that several commands share, and their conversion for the library."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonargparse
from jsonargparse.typing import PositiveInt

from coupled_adam.cli.terminal import quiet_libraries
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.training.config import Execution

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What ``compare`` and ``train`` have in common: a recipe, and how its runs are executed."""

    overrides: list[str]
    recipe: str
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


def add_overrides(parser: jsonargparse.ArgumentParser) -> None:
    """Values of the recipe as positional arguments."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, such as model.n_layer=24",
    )


def add_cache(parser: jsonargparse.ArgumentParser) -> None:
    """``--cache``."""
    parser.add_argument(
        "--cache", help="the folder that keeps prepared corpora (default: in the user's cache)"
    )


def add_device(parser: jsonargparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument(
        "--device",
        type=Device,
        default="auto",
        help="where to compute; auto takes cuda, mps or cpu, the first that is available",
    )


def add_json(parser: jsonargparse.ArgumentParser, what: str = "numbers") -> None:
    """``--json``."""
    parser.add_argument(
        "--json", action="store_true", help=f"print all {what} as JSON, and nothing else"
    )


def add_run_arguments(parser: jsonargparse.ArgumentParser, out: str) -> None:
    """The arguments of :class:`RunOptions`; ``out`` is the help of ``--out``."""
    add_overrides(parser)
    parser.add_argument(
        "--recipe",
        default="tiny",
        help="the name of a recipe (coupled-adam recipes lists them), or a YAML file",
    )
    parser.add_argument(
        "--text", help="train on this file, or on all text files in this folder (data.text)"
    )
    parser.add_argument("--steps", type=PositiveInt, help="training steps (training.steps)")
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
        type=Literal["ddp", "fsdp2"],
        default="ddp",
        help="how several processes (torchrun, srun) share a run; fsdp2 shards the model",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=PositiveInt,
        help="sequences that a process takes at a time (default: its whole share of the batch)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument(
        "--log",
        type=Literal["tensorboard", "wandb"],
        nargs="*",
        default=["tensorboard"],
        help="loggers in addition to metrics.jsonl: tensorboard (default), wandb, both or none",
    )


def add_selection(parser: jsonargparse.ArgumentParser) -> None:
    """``--arms`` and ``--seeds``."""
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="run only these arms of the recipe"
    )
    parser.add_argument(
        "--seeds",
        type=PositiveInt,
        nargs="+",
        metavar="N",
        help="one number N: the seeds 1 to N; several numbers: these seeds",
    )


def selected(recipe: Recipe, arms: list[str] | None, seeds: list[int] | None) -> Recipe:
    """The recipe with the arms and seeds that ``--arms`` and ``--seeds`` give."""
    if seeds is not None:
        count, *more = seeds
        numbers = sorted({count, *more}) if more else list(range(1, count + 1))
        recipe = dataclasses.replace(recipe, seeds=numbers)
    if arms is not None:
        chosen = {arm: recipe.arms[known_arm(arm, recipe)] for arm in arms}
        recipe = dataclasses.replace(recipe, arms=chosen)
    return recipe


def overridden(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe with the values that the command line gives."""
    from coupled_adam.lab.recipe import override, parse_overrides

    values = parse_overrides(options.overrides)
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


def execution(options: RunOptions) -> Execution:
    """How the runs are executed.

    Raises:
        UsageError: a device or a logger that is not available here.
    """
    from coupled_adam.lab.training.config import Execution

    quiet_libraries()  # after their imports, which set the levels they like
    for name in options.log:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log {name} needs a package: pip install {name}")
    return Execution(
        device=device(options.device),
        strategy=options.strategy,
        micro_batch_size=options.micro_batch_size,
        compile=options.compile,
        log=tuple(options.log),
        skip_damaged=options.skip_damaged,
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


def check_folders(**files: str | None) -> None:
    """Raise UsageError where a file is to be written into a folder that does not exist."""
    for option, path in files.items():
        if path is not None and not Path(path).parent.is_dir():
            raise UsageError(f"--{option}: there is no folder {Path(path).parent}: create it first")


def plain(value: Any) -> Any:
    """The same number or list as Python's own type: jsonargparse's subclasses are no YAML."""
    if isinstance(value, list):
        return [plain(element) for element in value]
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value
