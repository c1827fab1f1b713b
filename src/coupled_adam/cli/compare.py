"""Compare optimizers of the embeddings on real text.

Trains a language model with AdamW, with Coupled Adam and with LEAN, with everything else the same,
and shows the difference in a table, and in pictures in OUT/report. Without options, it trains a
small GPT-2 on Python's built-in documentation, in three minutes on two cores.

example: coupled-adam compare --text my-text/ --seeds 3 --training.lr 1e-3
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.cli.options import (
    DEFAULT_RECIPE,
    RunOptions,
    Selection,
    check_output,
    nothing_to_resume,
)
from coupled_adam.cli.terminal import console, print_path, print_table

if TYPE_CHECKING:
    from coupled_adam.lab.reporting.report import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions, Selection):
    """The options of ``coupled-adam compare``.

    out: a new folder for the results (default: runs/NAME, with the recipe's name).
    """

    out: Path | None = None


def run(options: Options) -> None:
    """Run the comparison and print its table."""
    from coupled_adam.lab import comparison
    from coupled_adam.lab.recipe import load_values

    plain = load_values(options.recipe or DEFAULT_RECIPE)
    out = options.out or Path("runs") / str(plain.get("name"))
    check_output("--out", out)
    stored = comparison.stored_recipe(out) if options.resume else None
    if options.resume and not stored:
        nothing_to_resume(out, "comparison", named=options.recipe or not options.out)
    if stored and not options.recipe:
        plain = stored.to_dict()
    recipe = options.recipe_of(plain)
    # A comparison that was extended has more arms and seeds than the recipe that is named.
    if options.recipe and stored:
        recipe = recipe.joined(stored)
    recipe = options.selected(recipe)
    how = options.execution(recipe)
    console().print(
        f"[bold]{recipe.name}[/]: {' against '.join(recipe.arms)}; {recipe.steps} steps, "
        f"{recipe.tokens:,} tokens each; seeds {', '.join(map(str, recipe.seeds))}",
        highlight=False,
    )
    if recipe.warmup_steps >= recipe.steps:
        console().print(
            f"The warmup of {recipe.warmup_steps} steps does not end within these: "
            "--training.warmup 0.1 is a tenth of them."
        )

    def on_start() -> None:
        print_path("results in", out)
        if "tensorboard" in options.logger:
            print_path("to watch the runs: tensorboard --logdir", out)

    def on_report(report: Report) -> None:
        print_table(report)
        print_path("the whole report:", report.page)

    comparison.compare(
        recipe,
        out,
        execution=how,
        cache=options.cache_folder(),
        resume=options.resume,
        on_start=on_start,
        on_report=on_report,
    )
