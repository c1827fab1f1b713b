"""Compare optimizers of the embeddings on real text.

Trains a language model with AdamW, with Coupled Adam and with LEAN, with everything else the same,
and shows the difference in a table, and in pictures in OUT/report. Without options, it trains a
small GPT-2 on Python's built-in documentation, in four minutes on two cores.

example: coupled-adam compare --text my-text/ --seeds 3 --training.lr 1e-3
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.cli.options import DEFAULT_RECIPE, RunOptions, arm_names
from coupled_adam.cli.terminal import show
from coupled_adam.errors import UsageError
from coupled_adam.fields import Seed, require
from coupled_adam.runs import COMPARISON

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.reporting.report import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of ``coupled-adam compare``.

    out: a new folder for the results (default: runs/NAME, with the recipe's name).
    arms: run only these arms of the recipe.
    seeds: one number N is the seeds 1 to N; several numbers are these seeds.
    dry_run: show the arms, and how long their runs would take here, and run nothing.
    """

    out: Path | None = None
    arms: list[str] | None = None
    seeds: list[Seed] | None = None
    dry_run: bool = False

    def selected(self, recipe: Recipe) -> Recipe:
        """The recipe with these arms and seeds; UsageError if it cannot have them."""
        seeds = recipe.seeds
        if self.seeds is not None:
            typed = " ".join(["--seeds", *map(str, self.seeds)])
            require(self.seeds != [0], f"{typed}: there must be at least one seed")
            require(len({*self.seeds}) == len(self.seeds), f"{typed}: a seed is given twice")
            # A single number is how many, as in --seeds 3; several are the seeds themselves.
            is_number = len(self.seeds) == 1
            seeds = [*range(1, self.seeds[0] + 1)] if is_number else sorted(self.seeds)
        named = (arm_names(name, recipe) for name in self.arms or recipe.arms)
        arms = {arm: recipe.arms[arm] for arm in itertools.chain(*named)}
        return dataclasses.replace(recipe, arms=arms, seeds=seeds)


def run(options: Options) -> None:
    """Run the comparison and print its table."""
    from coupled_adam.lab.recipe import load_values

    # A recipe that is mistyped is refused before the libraries are loaded, which takes seconds.
    plain = load_values(options.recipe or DEFAULT_RECIPE)
    out = options.out or Path("runs") / str(plain.get("name"))
    # A comparison that is resumed has its recipe in its own folder.
    if options.resume and options.recipe is None:
        if (out / COMPARISON).is_file():
            plain = load_values(str(out / COMPARISON))
        elif options.out:
            raise UsageError(f"--out {out} holds no comparison to resume: leave out --resume")
    recipe = options.recipe_of(plain, options.arms or ())

    from coupled_adam.lab import comparison
    from coupled_adam.lab.data.corpus import default_cache
    from coupled_adam.lab.training.train import try_out
    from coupled_adam.rendering.tables import Table

    # An extended comparison has more arms and seeds than the recipe that is named.
    recipe = options.selected(comparison.extended(recipe, out) if options.resume else recipe)
    execution, steps = options.execution(recipe), recipe.training.total_steps
    show(
        f"{recipe.name}: {' against '.join(recipe.arms)}; {steps} steps, {recipe.tokens:,} "
        f"tokens each; seeds {', '.join(map(str, recipe.seeds))}"
    )

    if options.dry_run:
        rows = [[name, arm.label] for name, arm in recipe.arms.items()]
        shape = (recipe.training.batch_size, recipe.training.sequence_length + 1)
        minutes = try_out(recipe, execution, shape) * steps / 60
        runs = len(recipe.arms) * len(recipe.seeds)
        note = f"{runs} runs, whose steps would take about {minutes:,.1f} min each here"
        show(Table(("arm", "optimizer and options"), rows, notes=[note], left=(0, 1)))
        return

    def on_report(report: Report) -> None:
        show(report)
        show(f"the whole report: {report.page}")

    comparison.compare(
        recipe,
        out,
        execution=execution,
        cache=default_cache(),
        resume=options.resume,
        on_start=lambda: show(f"results in {out}"),
        on_report=on_report,
    )
