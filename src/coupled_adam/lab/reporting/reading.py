"""Find finished runs below some folders, and check that they are as training leaves them."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coupled_adam.errors import UsageError, one_line
from coupled_adam.files import read_text
from coupled_adam.lab.recipe import recipe_from
from coupled_adam.lab.reporting.experiments import with_experiments, with_other_tokens
from coupled_adam.lab.reporting.finished_run import COLUMNS, LARGEST, TEST_LOSS, Run
from coupled_adam.lab.safe_yaml import read_yaml
from coupled_adam.runs import CONFIG, EVALUATION, METRICS


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Find the finished runs below some folders, in the table's order, and why others are left out.

    Raises:
        UsageError: a file of a run is damaged.
    """
    runs, left_out = [], {}
    # A run that is found through several of the folders, or through links, counts once.
    configs = {path.resolve(): path for folder in folders for path in folder.rglob(CONFIG)}
    for _, path in sorted(configs.items()):
        folder = path.parent
        try:
            config = read_yaml(read_text(path), path.name)
            if not isinstance(config, dict) or not {"arm", "seed", "recipe"} <= config.keys():
                continue
            evaluation = _json(folder / EVALUATION)
            # The parts of an evaluation are written one after the other; these two come first.
            if not all({"test_loss", "parameters"} <= {*entry} for entry in evaluation):
                left_out[folder] = "not evaluated yet"
            elif not evaluation:
                left_out[folder] = _why_unfinished(folder)
            else:
                metrics = _json(folder / METRICS)
                recipe = recipe_from(config["recipe"], path.name)
                run = Run(folder, config["arm"], config["seed"], recipe, metrics, *evaluation)
                _check(run)
                runs.append(run)
        except (UsageError, ValueError, OSError) as error:
            reason = one_line(error, longest=None)
            raise UsageError(f"{folder} is damaged ({reason}): move it away") from None
    runs = sorted(with_experiments(runs), key=_place)
    unique: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        first = unique.setdefault((run.experiment, run.setup, run.seed), run)
        if first is not run:  # counting a run twice would make p too small
            left_out[run.folder] = f"the same arm and seed as {first.folder}"
    return with_other_tokens([*unique.values()]), left_out


def _why_unfinished(folder: Path) -> str:
    """Why a run has no evaluation: its log may end with a loss or gradient that is not finite."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        *_, last = read_text(folder / METRICS).splitlines()
        line = json.loads(last)
        if not all(math.isfinite(line.get(name, 0.0)) for name in ("train_loss", "grad_norm")):
            return f"diverged at step {line['step']}"
    return "not finished"


def _json(path: Path) -> list[Any]:
    """The objects in a JSON or JSON Lines file; an empty list if there is no file."""
    if not path.exists():
        return []
    text = read_text(path)
    try:
        texts = text.splitlines() if path.suffix == ".jsonl" else [text]
        objects = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not all(isinstance(entry, dict) for entry in objects):
        raise ValueError(f"{path.name}: not JSON objects")
    return objects


def _check(run: Run) -> None:
    """Raise ValueError if a run is not as training and evaluation write it."""
    if run.arm not in [*run.recipe.arms] or run.seed not in run.recipe.seeds:
        raise ValueError(f"config.yaml: arm {run.arm!r} and seed {run.seed!r} are not its recipe's")
    # Not isinstance, since true and false are whole numbers to Python.
    if type(run.seed) is not int:
        raise ValueError(f"config.yaml: seed={run.seed!r} is not a whole number")
    for measure in COLUMNS.values():
        value = run.value(measure)
        if not _is_number(value) and (value is not None or measure is TEST_LOSS):
            name = ".".join(measure.path)
            raise ValueError(f"evaluation.json: {name}={value!r} is not a number")
    spectrum: Any = run.spectrum
    if spectrum is not None and not (
        isinstance(spectrum, list)
        and all(_is_number(value) and math.isfinite(value) for value in spectrum)
        and max(spectrum, default=0) > 0
        and spectrum == sorted(map(abs, spectrum), reverse=True)
    ):
        raise ValueError("evaluation.json: embeddings.singular_values are not descending to 0")
    for line in run.metrics:
        step = line.get("step")
        is_step = type(step) is int and step >= 0
        if not is_step or not all(map(_is_number, line.values())):
            raise ValueError(f"metrics.jsonl: {str(line)[:100]} is not numbers at a step")


def _is_number(value: Any) -> bool:
    """Whether a value is a number, including NaN and infinity, which diverged runs contain."""
    return type(value) in (int, float) and not LARGEST < abs(value) < math.inf


def _place(run: Run) -> tuple[Any, ...]:
    """The sort key: size, experiment, AdamW before Coupled Adam, a plain arm before its sweep."""
    options = run.options
    kind = {"adamw": 0, "coupled_adam": 1}.get(options["optimizer"], 2)
    scale = float(options.get("second_moment_scale", 1))  # YAML reads 1e-3 as text
    swept = -np.log2(scale) if scale != 1 else -np.inf, float(options.get("lr_factor", 0))
    return *reversed(run.size), run.experiment, kind, swept, run.setup, run.seed
