"""The ``coupled-adam`` command."""

import dataclasses
import difflib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

try:
    import jsonargparse
    from jsonargparse.typing import PositiveInt

    from coupled_adam.lab import UsageError
except ModuleNotFoundError as error:
    sys.exit(f"coupled-adam: {error}; install the command with: pip install 'coupled-adam[lab]'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for unusable input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        _compare(options.compare)
    except (jsonargparse.ArgumentError, UsageError) as error:
        message = " ".join(str(error).split())
        print(f"coupled-adam: error: {message}{_hint(arguments, message)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("coupled-adam: interrupted; add --resume to the command to continue", file=sys.stderr)
        return 130
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    from coupled_adam import __version__

    compare = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="Train a language model with AdamW and with Coupled Adam, all else the same, "
        "and show the difference: a table, and pictures in OUT/report. Without options: a small "
        "GPT-2 on the documentation inside Python, in a few minutes on two cores.",
    )
    compare.add_argument("--recipe", default="tiny", help="name of a recipe, or a YAML file")
    compare.add_argument("--text", help="train on this text file, or all text files in this folder")
    compare.add_argument(
        "--steps", type=PositiveInt, help="training steps, instead of the recipe's"
    )
    compare.add_argument(
        "--seeds",
        type=PositiveInt,
        nargs="+",
        metavar="N",
        help="one number: that many seeds, 1 to N; several: these seeds (default: 1)",
    )
    compare.add_argument(
        "--out", help="a new folder for the results (default: runs/NAME, after the recipe)"
    )
    compare.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")
    compare.add_argument(
        "--resume",
        action="store_true",
        help="continue what OUT holds: its recipe, text and seeds, from the last checkpoint",
    )
    parser = jsonargparse.ArgumentParser(
        prog="coupled-adam", exit_on_error=False, version=__version__
    )
    subcommands = parser.add_subcommands(dest="command")
    subcommands.add_subcommand("compare", compare, help="AdamW against Coupled Adam on real text")
    return parser


def _compare(options: jsonargparse.Namespace) -> None:
    from rich.console import Console

    from coupled_adam.lab import comparison, reporting
    from coupled_adam.lab.recipe import load_recipe

    _quiet_libraries()  # after their imports, which set the levels they like
    console = Console()
    recipe = load_recipe(options.recipe)
    out = Path(options.out or Path("runs") / recipe.name)
    stored = comparison.stored(out) if options.resume else None
    seeds = [1]
    if stored is not None:
        recipe, seeds = stored
    if options.steps is not None:
        recipe = _replaced(recipe, "training", steps=int(options.steps))
    if options.text is not None:
        recipe = _replaced(recipe, "data", text=str(Path(options.text).resolve()))
    if options.seeds is not None:
        count, *more = map(int, options.seeds)
        seeds = sorted({count, *more}) if more else list(range(1, count + 1))

    console.print(
        f"[bold]{recipe.name}[/]: {' against '.join(recipe.arms)} on "
        f"{recipe.data.text or 'the documentation inside Python'}; {recipe.training.steps} steps, "
        f"{recipe.tokens:,} tokens each; seeds {', '.join(map(str, seeds))}; results in {out}",
        highlight=False,
    )
    comparison.compare(recipe, seeds, out, device=options.device, resume=options.resume)
    console.print(reporting.report(out))
    console.print(f"pictures and numbers: {out / 'report'}", highlight=False)


def _replaced(recipe: Any, part: str, **values: Any) -> Any:
    changed = dataclasses.replace(getattr(recipe, part), **values)
    return dataclasses.replace(recipe, **{part: changed})


def _quiet_libraries() -> None:
    """Leave the terminal to our own lines and bars; warnings and errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _hint(arguments: list[str], message: str) -> str:
    """For an option that does not exist: the nearest that does, and where they are listed."""
    if "nrecognized arguments" not in message:
        return ""
    known = ["--recipe", "--text", "--steps", "--seeds", "--out", "--device", "--resume"]
    near = [
        match
        for argument in arguments
        if argument not in known
        for match in difflib.get_close_matches(argument.partition("=")[0], known, n=1)
    ]
    return f"; did you mean {near[0]}?" if near else "; see coupled-adam compare --help"


if __name__ == "__main__":
    sys.exit(main())
