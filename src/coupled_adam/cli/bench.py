"""Measure the time and memory of an optimizer step.

Compares Coupled Adam and torch's AdamW; each is timed in alternation with torch's fused AdamW.
With --recipe, whole training steps are timed instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coupled_adam.cli.options import Count, Positive, RecipeValues, ResultOptions, option
from coupled_adam.cli.outputs import check_files, write_file
from coupled_adam.cli.terminal import print_table
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    from coupled_adam.bench.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Options(RecipeValues, ResultOptions):
    """The options of ``coupled-adam bench``."""

    shapes: list[str] | None = option("embedding matrices: 50304x768 128256x2048", metavar="VxH")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = option(
        "the dtype of parameters and gradients (default: float32)"
    )
    clip: bool = option("also clip the norm of the gradients", default=False)
    recipe: str | None = option("time whole training steps of this recipe instead")
    steps: Count | None = option("training steps of each optimizer, with --recipe (default: 20)")
    optimizers: list[str] | None = option("time only these optimizers of the table", metavar="NAME")
    seconds: Positive | None = option("about how long each optimizer is timed for (default: 4)")
    picture: str | None = option("write a picture: .png, .svg or .pdf", metavar="FILE")


def run(options: Options) -> None:
    """Time steps, of the optimizer alone or of a whole training, and print them."""
    from tqdm import tqdm

    from coupled_adam.bench import steps
    from coupled_adam.bench.cases import SHAPES, check_memory, parse_case
    from coupled_adam.bench.machine import describe_machine
    from coupled_adam.bench.optimizers import OPTIMIZERS
    from coupled_adam.bench.results import bench_picture, bench_table
    from coupled_adam.lab.training.environment import environment

    check_files(picture=options.picture)
    # Those of formats in which a picture can be marked as ours.
    kind = Path(options.picture or "any.png").suffix
    if kind not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--picture {options.picture}: end its name with .png, .svg or .pdf")
    target = options.usable_device()
    # Read before anything is timed: the code may be changed, and the machine busy, by the end.
    facts = environment()
    machine = describe_machine(target)
    conditions = {"environment": facts, "machine": machine.to_dict()}
    if options.recipe is not None:
        _time_training(options, options.recipe, machine, conditions)
        return
    if options.steps is not None:
        raise UsageError("--steps are those of a recipe: name it with --recipe")
    if options.overrides:
        raise UsageError(f"{options.overrides[0]} changes a recipe: name the recipe with --recipe")
    shapes = options.shapes or SHAPES["cuda" if target == "cuda" else "cpu"]
    cases = [parse_case(shape, options.dtype or "float32", options.clip) for shape in shapes]
    check_memory(cases, target)
    names = options.optimizers or list(OPTIMIZERS)
    for name in names:
        if name not in OPTIMIZERS:
            raise UsageError(f"--optimizers: no {name!r}; available: {', '.join(OPTIMIZERS)}")
    if not options.json:
        print("\n".join(machine.notes))
    timed = steps.bench(cases, names, device=target, seconds=options.seconds or 4.0)
    results = list(tqdm(timed, total=len(cases) * len(names), disable=None, leave=False))
    # The numbers took long to measure, and are shown even if the picture cannot be written.
    try:
        if options.picture is not None:
            from coupled_adam.rendering.pictures import drawn

            picture = drawn(bench_picture(results), kind[1:])
            write_file("--picture", options.picture, picture)
    finally:
        if options.json:
            print(json.dumps({**conditions, "results": [result.to_dict() for result in results]}))
        else:
            print_table(bench_table(results))


def _time_training(
    options: Options, recipe_name: str, machine: Machine, conditions: Mapping[str, object]
) -> None:
    from coupled_adam.bench.training import training_speed
    from coupled_adam.lab.recipe import load_recipe, override, parse_overrides

    # These say what is timed where a recipe does not.
    for name in ("shapes", "dtype", "seconds", "clip", "optimizers", "picture"):
        if getattr(options, name):
            raise UsageError(f"--recipe times whole training steps; leave out --{name}")
    recipe = override(load_recipe(recipe_name), parse_overrides(options.overrides))
    if recipe.variant is not None:
        raise UsageError(f"variant={recipe.variant} cannot be timed: set it to null")
    if not options.json:
        print("\n".join(machine.notes))
    speed = training_speed(recipe, device=options.usable_device(), steps=options.steps or 20)
    if options.json:
        print(json.dumps({**conditions, **speed.to_dict()}, indent=1))
    else:
        print(speed.summary)
