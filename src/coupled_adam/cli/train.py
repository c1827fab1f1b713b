"""Train and evaluate one run of a comparison.

Trains one arm of a recipe with one seed, as one job in a cluster's queue. coupled-adam report
compares the runs in a folder.

example: coupled-adam train --recipe tiny --arm lean --arms.lean.lr_factor 4 --seed 2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coupled_adam.cli.options import DEFAULT_RECIPE, RunOptions, arm_names
from coupled_adam.cli.terminal import show
from coupled_adam.errors import UsageError
from coupled_adam.fields import Seed, require


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of ``coupled-adam train``.

    arm: an arm of the recipe.
    seed: the seed of the run.
    out: the run's folder (default: runs/NAME/ARM-seed-SEED).
    """

    arm: str
    seed: Seed = 1
    out: Path | None = None


def run(options: Options) -> None:
    """Train and evaluate the run."""
    from coupled_adam.lab import comparison
    from coupled_adam.lab.data.corpus import default_cache
    from coupled_adam.lab.recipe import load_values
    from coupled_adam.lab.run import Run, read_run
    from coupled_adam.runs import CONFIG, run_name

    # A run that is resumed has its recipe in its own folder.
    if options.recipe is None and options.resume and options.out is not None:
        if not (options.out / CONFIG).is_file():
            raise UsageError(f"--out {options.out} holds no run to resume: leave out --resume")
        recipe = options.recipe_of(read_run(options.out).recipe.to_dict())
    else:
        plain = load_values(options.recipe or DEFAULT_RECIPE)
        recipe = options.recipe_of(plain, [options.arm])
    (arm, *more), seed = arm_names(options.arm, recipe), options.seed
    require(not more, f"--arm {options.arm} has several values: name {arm}, or one of {more}")
    # Where a comparison would put it, so that one report has the runs of several jobs.
    folder = options.out or Path("runs") / recipe.name / run_name(arm, seed)
    comparison.train_and_evaluate(
        Run(recipe, arm, seed, folder),
        execution=options.execution(recipe),
        cache=default_cache(),
        resume=options.resume,
    )
    show(f"the run: {folder}")
