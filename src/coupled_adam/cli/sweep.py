"""Try several values of a recipe's options, and compare the best of each arm.

For example: coupled-adam sweep training.lr=1e-3,3e-3 'arms.*.lr_factor=1,4,16' --seeds 3. The
validation loss chooses the best combination for each arm; the test loss is evaluated only for
these. The page OUT/sweep.html shows the losses of all combinations.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from coupled_adam.cli.options import DEFAULT_RECIPE, Count, RunOptions, Selection, option
from coupled_adam.cli.outputs import check_folder
from coupled_adam.cli.terminal import console, print_path, print_table
from coupled_adam.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions, Selection):
    """The options of ``coupled-adam sweep``."""

    out: str | None = option(
        "a new folder for the results (default: runs/NAME-sweep, with the recipe's name)"
    )
    optuna: Count | None = option(
        "let Optuna choose so many combinations for each arm (default: try all of them); ranges "
        "such as training.lr=1e-4..1e-2 are then possible, too",
        metavar="TRIALS",
    )


def run(options: Options) -> None:
    """Run the sweep and print its table."""
    from coupled_adam.lab.grid import make_grid, several_values
    from coupled_adam.lab.recipe import load_recipe
    from coupled_adam.lab.sweep import Sweep, stored_sweep, sweep

    named = None if options.recipe is None else load_recipe(options.recipe)
    name = named.name if named else DEFAULT_RECIPE
    out = Path(options.out or Path("runs") / f"{name}-sweep")
    check_folder("--out", out)
    stored = stored_sweep(out) if options.resume else None
    axes = stored.grid.axes if stored else ()
    # Only options with one value make the recipe; the others are what is varied in it.
    fixed, swept = several_values(options.overrides, axes)
    if options.resume and not stored and not swept:
        raise UsageError(f"--out {out} holds no sweep to resume: choose another folder")
    lengths = swept.keys() & {"training.steps", "training.tokens"}
    if options.steps is not None and lengths:
        raise UsageError(
            f"--steps gives one length, {lengths.pop()} several: leave out one of them"
        )
    trials = stored.trials if stored and options.optuna is None else options.optuna
    if trials is not None and importlib.util.find_spec("optuna") is None:
        raise UsageError("--optuna needs a package: pip install optuna")
    recipe = named or (stored.grid.recipe if stored else load_recipe(DEFAULT_RECIPE))
    recipe = dataclasses.replace(options, overrides=fixed).overridden(recipe)
    recipe = options.selected(recipe)
    # All settings are checked before the first is trained, and before the folder is touched.
    plan = Sweep(make_grid(recipe, swept, ranges=trials is not None, stored_axes=axes), trials)

    def on_start(plan: Sweep) -> None:
        recipe = plan.grid.recipe
        console().print(
            f"[bold]{recipe.name}[/]: {plan.settings} settings of {', '.join(plan.grid.arms)}; "
            f"seeds {', '.join(map(str, recipe.seeds))}",
            highlight=False,
        )
        print_path("results in", out)

    report = sweep(
        plan,
        out,
        execution=options.execution(plan.grid.recipe),
        cache=options.cache_folder(),
        resume=options.resume,
        on_start=on_start,
        announce=lambda line: console().print(line, highlight=False, markup=False),
    )
    if report is not None:
        print_table(report.terminal())
        print_path("the whole report:", out / "sweep.html")
