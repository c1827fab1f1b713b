"""A sweep: the arms of a recipe, each with several settings of its options, in one folder.

The folder holds ``sweep.yaml`` (the recipe and the values), a folder for each setting, which holds
a run folder for each arm and seed, and the results: ``sweep.html`` and ``sweep.csv``.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coupled_adam.errors import DivergedError, UsageError
from coupled_adam.files import read_text, write_atomically
from coupled_adam.lab.comparison import (
    check_same,
    check_unused,
    evaluate_trained,
    prepare_and_claim,
)
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.evaluation.evaluate import held_out_loss
from coupled_adam.lab.evaluation.loading import load_trained
from coupled_adam.lab.grid import Axis, Grid, Setting, make_grid, parse_range
from coupled_adam.lab.recipe import flat, recipe_from
from coupled_adam.lab.reporting.sweep_report import SweepReport, Tried, best_of_arms
from coupled_adam.lab.safe_yaml import read_yaml
from coupled_adam.lab.training.config import Execution, TrainingRun
from coupled_adam.lab.training.distributed import on_rank_zero, process_group, rank
from coupled_adam.lab.training.run import train
from coupled_adam.runs import DIVERGED, METRICS, SWEEP, logged_lines, run_name


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings to try: all of a grid or, with Optuna, ``trials`` of them for each arm."""

    grid: Grid
    trials: int | None = None

    @property
    def settings(self) -> int:
        """The number of settings, over all arms."""
        if self.trials is not None:
            return self.trials * len(self.grid.arms)
        return sum(map(self.grid.number, self.grid.arms))

    def to_dict(self) -> dict[str, Any]:
        """The content of ``sweep.yaml``."""
        values = {axis.key: axis.to_plain() for axis in self.grid.axes}
        return {"recipe": self.grid.recipe.to_dict(), "values": values, "trials": self.trials}

    def settings_by_key(self) -> dict[str, Any]:
        """The recipe's values, or the values to try, by dotted keys."""
        content = self.to_dict()
        return {**flat(content["recipe"]), **content["values"], "--optuna": content["trials"]}


def sweep(
    given: Sweep,
    out: Path,
    *,
    execution: Execution,
    cache: Path,
    resume: bool = False,
    on_start: Callable[[Sweep], object] = lambda _: None,
    announce: Callable[[str], None] = lambda _: None,
) -> SweepReport | None:
    """Train all runs of a sweep into ``out``, evaluate the best setting of each arm, and report.

    The validation loss at the end of training, averaged over the seeds, chooses the setting. The
    test loss is evaluated only for what is chosen. A setting of which a run diverges is not chosen,
    and the sweep goes on.

    Args:
        given: what is tried, besides what a sweep that is continued has tried.
        resume: continue in a folder that holds the same sweep, with the same values and seeds or
            more of them; with Optuna, with the same number of trials or more.
        on_start: called with all that the folder is to hold, before the first run starts.
        announce: called with a line about each setting before its runs are trained.

    Returns and raises the same as :func:`~coupled_adam.lab.comparison.compare`.
    """
    with contextlib.ExitStack() as locks:
        with process_group(execution.device):
            # With the values and seeds of earlier calls as well.
            plan = on_rank_zero(lambda: _extended(given, out, resume))
            recipe = plan.grid.recipe
            corpus = prepare_and_claim(out / SWEEP, plan.to_dict(), recipe, cache, locks)
            on_start(plan)
            tried: list[Tried] = []

            def attempt(setting: Setting) -> Tried:
                place = f"[{len(tried) + 1}/{plan.settings}]"
                announce(f"{place} {setting.arm}: {setting.title}")
                runs = _runs(setting, out)
                losses = {run.seed: _validation_loss(run, corpus, execution) for run in runs}
                tried.append(Tried(setting, losses))
                return tried[-1]

            for arm in plan.grid.arms:
                if plan.trials is not None:
                    _search(plan.grid, arm, plan.trials, attempt)
                else:
                    for setting in plan.grid.settings(arm):
                        attempt(setting)
            is_first = rank() == 0
        # Outside of the group, so that no process waits for the evaluation until it times out.
        if not is_first:
            return None
        for best in best_of_arms(tried):
            test = {
                run.seed: evaluate_trained(run, corpus, execution)["test_loss"]
                for run in _runs(best.setting, out)
            }
            tried[tried.index(best)] = dataclasses.replace(best, test=test)
        report = SweepReport(recipe, tried)
        write_atomically(out / "sweep.csv", report.csv())
        write_atomically(out / "sweep.html", report.page())
        return report


def _runs(setting: Setting, out: Path) -> list[TrainingRun]:
    """The runs of a setting, one for each seed, in the setting's folder."""
    arm, folder = setting.arm, out / setting.name
    return [
        TrainingRun(setting.recipe, arm, seed, folder / run_name(arm, seed))
        for seed in setting.recipe.seeds
    ]


def _validation_loss(run: TrainingRun, corpus: Corpus, execution: Execution) -> float:
    """Train a run, and return its final validation loss; infinity if it diverges.

    ``diverged.json`` says that it did, so that it is not trained again when the sweep is resumed.
    """
    diverged = run.folder / DIVERGED
    if on_rank_zero(diverged.exists):
        return math.inf
    try:
        train(run, corpus, execution)
    except DivergedError as error:
        content = json.dumps({"step": error.step})
        on_rank_zero(lambda: write_atomically(diverged, content))
        return math.inf
    return on_rank_zero(lambda: _final_loss(run, corpus, execution.device))


def _final_loss(run: TrainingRun, corpus: Corpus, device: str) -> float:
    """The validation loss of a finished run: from its log or, without one there, of its model."""
    lines = logged_lines(run.folder / METRICS)
    end = (run.recipe.steps, "valid_loss")
    loss = next(
        (json.loads(line)["valid_loss"] for *place, line in lines if (*place,) == end), None
    )
    if loss is None:  # the last evaluation was before the end
        training = run.recipe.training
        batches = training.evaluation_batches
        sequences = None if batches is None else batches * training.batch_size
        model, variant = load_trained(run.folder, run.recipe, device)
        tokens, losses = corpus.tokens("valid"), variant.sequence_losses
        evaluated = held_out_loss(model, tokens, training.sequence_length, sequences, losses)
        loss = evaluated["test_loss"]
    return float(loss) if math.isfinite(loss) else math.inf


def _search(grid: Grid, arm: str, trials: int, attempt: Callable[[Setting], Tried]) -> None:
    """Let Optuna choose the settings of an arm, each after the losses of those before it.

    Its choice depends on these losses only. So a sweep that is resumed goes through its finished
    runs again, and continues as it would have without the interruption.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    tried: dict[str, Tried] = {}
    for _ in range(trials):
        trial = study.ask()
        setting = grid.setting(arm, [_suggestion(trial, axis) for axis in grid.of_arm(arm)])
        # Optuna may ask for a setting again, whose runs are there: it is told the same loss.
        if setting.name not in tried:
            tried[setting.name] = attempt(setting)
        study.tell(trial, tried[setting.name].mean)


def _suggestion(trial: Any, axis: Axis) -> Any:
    """A value that Optuna chooses; numbers of a range have three digits."""
    # By their index, since the categories that Optuna knows are single values, and betas are two.
    if not axis.is_range:
        return axis.values[trial.suggest_int(axis.key, 0, len(axis.values) - 1)]
    low, high = axis.values
    # Positive numbers are tried on a logarithmic scale, as rates and decays differ by factors.
    if isinstance(low, int):
        return trial.suggest_int(axis.key, low, high, log=low > 0)
    value = float(f"{trial.suggest_float(axis.key, low, high, log=low > 0):.3g}")
    return min(max(value, low), high)


def stored_sweep(out: Path) -> Sweep | None:
    """The sweep of a folder; None if it holds none."""
    path = out / SWEEP
    if not path.exists():
        return None
    content = read_yaml(read_text(path, "replace"), str(path))
    try:
        recipe = recipe_from(content["recipe"], str(path))
        values = {k: parse_range(str(v)) or v for k, v in content["values"].items()}
        trials = content["trials"]
        return Sweep(make_grid(recipe, values, ranges=trials is not None), trials)
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({error!r}): choose another --out") from None


def _extended(plan: Sweep, out: Path, resume: bool) -> Sweep:
    """The sweep with the values and seeds, or trials, of the one that is continued as well.

    With Optuna nothing but the number of trials may grow: its choice depends on everything else.
    """
    stored = stored_sweep(out) if resume else None
    if stored is None:
        check_unused(out, "sweep", resume)
        return plan
    grows = {"--optuna"}
    if stored.trials is None and plan.trials is None:
        # An axis may get more values, but there may be no further axis.
        keys, stored_keys = ({axis.key for axis in sweep.grid.axes} for sweep in (plan, stored))
        grows = {"seeds", *(keys & stored_keys)}
    elif stored.trials is None or plan.trials is None:
        grows = set()
    check_same(out, "sweep", stored.settings_by_key(), plan.settings_by_key(), grows.__contains__)
    if stored.trials is not None and plan.trials is not None:
        return dataclasses.replace(stored, trials=max(stored.trials, plan.trials))
    recipe = stored.grid.recipe.joined(plan.grid.recipe)
    values = {axis.key: axis.values for axis in plan.grid.axes}
    return Sweep(make_grid(recipe, values, stored_axes=stored.grid.axes))
