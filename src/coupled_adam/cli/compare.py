"""Compare AdamW with Coupled Adam on real text.

Trains a language model with AdamW and with Coupled Adam, with everything else the same, and shows
the difference in a table, and in pictures in OUT/report. Without options, it trains a small GPT-2
on Python's built-in documentation, in a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from coupled_adam.cli.options import (
    DEFAULT_RECIPE,
    RunOptions,
    add_run_arguments,
    cache_folder,
    check_folder,
    execution,
    known_arm,
    overridden,
    whole_number,
)
from coupled_adam.cli.terminal import console, print_path, print_table
from coupled_adam.errors import UsageError

_MOST_SEEDS = 1000  # of one number, which is how many there are


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """The arguments."""

    arms: list[str] | None
    seeds: list[int] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    add_run_arguments(
        parser, "a new folder for the results (default: runs/NAME, with the recipe's name)"
    )
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


def run(options: Options) -> None:
    """Run the comparison and print its table."""
    from coupled_adam.lab import comparison
    from coupled_adam.lab.recipe import load_recipe

    named = None if options.recipe is None else load_recipe(options.recipe)
    out = Path(options.out or Path("runs") / (named.name if named else DEFAULT_RECIPE))
    check_folder("--out", out)
    stored = comparison.stored_recipe(out) if options.resume else None
    recipe = overridden(named or stored or load_recipe(DEFAULT_RECIPE), options)
    if named and stored:  # as the one in OUT, which has more arms and seeds if it was extended
        recipe = dataclasses.replace(
            recipe,
            arms={**stored.arms, **recipe.arms},
            seeds=sorted({*stored.seeds, *recipe.seeds}),
        )
    if options.seeds is not None:
        recipe = dataclasses.replace(recipe, seeds=_seeds(options.seeds))
    if options.arms is not None:
        if len({*options.arms}) < len(options.arms):
            raise UsageError(f"--arms {' '.join(options.arms)} names an arm twice")
        arms = {arm: recipe.arms[known_arm(arm, recipe)] for arm in options.arms}
        recipe = dataclasses.replace(recipe, arms=arms)
    how = execution(options, recipe)
    console().print(
        f"[bold]{recipe.name}[/]: {' against '.join(recipe.arms)}; {recipe.steps} steps, "
        f"{recipe.tokens:,} tokens each; seeds {', '.join(map(str, recipe.seeds))}",
        highlight=False,
    )
    print_path("results in", out)
    cache = cache_folder(options.cache)
    table = comparison.compare(recipe, out, execution=how, cache=cache, resume=options.resume)
    if table is not None:
        print_table(table)
        print_path("the whole report:", out / "report" / "index.html")


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
