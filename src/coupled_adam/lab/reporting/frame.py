"""The data frame of runs, a row for each finished run, from which a report is made."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from coupled_adam.embeddings.measures import LOGGED, MEASURES, Measure, numbers
from coupled_adam.errors import UsageError
from coupled_adam.fields import require
from coupled_adam.files import files_below, resolved
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import differences
from coupled_adam.lab.run import Run, read_run
from coupled_adam.runs import CONFIG, COUNTS, ENVIRONMENT, METRICS

_LOSS, _ACCURACY = "test loss in nats per token", "mean accuracy of the downstream tasks"
TEST_LOSS = Measure(
    "test_loss", "test loss", "L", 3, "lower", None, _LOSS, column=True, path=("test_loss",)
)
_PATH = ("lm_eval", "accuracy")
ACCURACY = Measure(
    "accuracy", "accuracy", "Acc", 3, "higher", None, _ACCURACY, column=True, path=_PATH
)

# The measures that have a column in the tables come first.
_EMBEDDING_MEASURES = [measure for measure in MEASURES.values() if measure.column]
_EMBEDDING_MEASURES += [measure for measure in LOGGED.values() if not measure.column]

COLUMNS = {"test_loss": TEST_LOSS, "accuracy": ACCURACY} | {
    # In evaluation.json all measures except this one are in the part of the output embeddings.
    measure.key: measure
    if measure.key == "word_similarity"
    else dataclasses.replace(measure, path=("embeddings", *measure.path))
    for measure in _EMBEDDING_MEASURES
}
"""What is reported of a run: first the columns of the paper's Table 1, then those with ``column``
false, which are on the page and in the CSV files only."""

_FROM_LOG = ("valid_loss", "embedding_state_bytes")


def read_runs(folders: Sequence[Path]) -> tuple[pd.DataFrame, dict[Path, str]]:
    """Find the runs below some folders: those that are finished, and why others are left out.

    Raises UsageError if a folder has no runs, a file of a run is damaged, or an experiment has runs
    of different settings.

    Returns:
        The finished runs in the table's order, a row each, with these columns:

        - ``run``: the :class:`Run`
        - ``experiment``: the recipe's name; runs of one experiment are compared
        - ``arm``: the optimizer with all options, by which an arm is the same under another name
        - ``arm_name``, ``label``: its names in the recipe, and in tables and pictures
        - ``family``: arms of which only the best is compared
        - ``optimizer``: the arm's, as in a recipe
        - ``is_baseline``: whether the others are compared with this arm, the AdamW with the lowest
          validation loss
        - ``seed``; ``tokens`` and ``parameters``, D and N
        - the keys of :data:`COLUMNS`: the numbers of the evaluation; NaN where not measured
        - ``valid_loss``, ``embedding_state_bytes``: the last validation loss, and the optimizer
          state of the token embeddings; NaN if not logged
    """
    # 1. The folders of runs
    runs: list[Run] = []
    left_out: dict[Path, str] = {}
    # A run that is found through several of the folders, or through links, counts once.
    configs: dict[Path, Path] = {}
    for folder in folders:
        there = [path for path in files_below(folder) if path.name in (CONFIG, COUNTS)]
        require(there, f"{folder}: no run is there; coupled-adam compare makes some")
        configs |= {resolved(path): path for path in there if path.name == CONFIG}
        # The counts are written before the configuration: a run that was killed then, or lost it.
        for path in there:
            if not path.with_name(CONFIG).exists():
                left_out[path.parent] = f"it has no {CONFIG}"
    for _, path in sorted(configs.items()):
        # 2. Which of them are used; only a damaged file of a run is an error
        try:
            run = read_run(path.parent)
        except UsageError:
            if any((path.parent / name).exists() for name in (ENVIRONMENT, METRICS)):
                raise
            continue  # it is another program's
        if run.problem:
            left_out[run.folder] = run.problem
        else:
            runs.append(run)
    runs.sort(key=_order)
    frame = frame_of(runs)
    # 3. Copies, by the optimizer with all options, whatever the arm's name is. Counting
    # a run twice would make p too small.
    first = frame.groupby(["experiment", "arm", "seed"], sort=False).run.transform("first")
    for run, counted in zip(frame.run, first):
        if run is not counted:
            left_out[run.folder] = f"the same arm and seed as {counted.folder}"
    return frame[frame.run == first].reset_index(drop=True), left_out


def frame_of(runs: Sequence[Run]) -> pd.DataFrame:
    """The data frame of some evaluated runs, as :func:`read_runs` describes it, in their order."""
    numbers = [*COLUMNS, *_FROM_LOG]
    names = ["run", "experiment", "arm", "arm_name", "family", "label", "optimizer"]
    columns = [*names, "seed", "tokens", "parameters", *numbers]
    # With all columns even if there is no run; None becomes NaN, which pandas leaves out of means.
    frame = pd.DataFrame([_row(run) for run in runs], columns=columns)
    frame = frame.astype(dict.fromkeys(numbers, float))
    frame["is_baseline"] = False
    for _, experiment in frame.groupby("experiment"):
        _check_comparable([*experiment.run])
        frame.loc[experiment.index, "is_baseline"] = experiment.arm == _baseline(experiment)
    return frame


def _row(run: Run) -> dict[str, Any]:
    """A row of the frame, without what depends on other runs."""
    return {
        "run": run,
        "experiment": run.recipe.name,
        "arm": run.arm,
        "arm_name": run.arm_name,
        "family": run.family,
        "label": run.label,
        "optimizer": run.arm.optimizer,
        "seed": run.seed,
        "tokens": run.recipe.tokens,
        "parameters": run.evaluation["parameters"],
        **numbers(COLUMNS, run.evaluation),
        **{metric: (run.curve(metric)[1] or [math.nan])[-1] for metric in _FROM_LOG},
    }


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise UsageError for two runs of one recipe name that differ in more than arm and seed."""

    def settings(run: Run) -> dict[str, Any]:
        # A test loss over other tokens is another quantity.
        tokens = run.evaluation.get("test_tokens")
        return {**run.recipe.to_dict(), "arms": None, "seeds": None, "test_tokens": tokens}

    first, *others = runs
    for run in others:
        for key, values in differences(settings(first), settings(run)).items():
            raise UsageError(
                f"{first.folder} and {run.folder} are both of the recipe {run.recipe.name}, but "
                f"differ in {key} ({values[0]} and {values[1]}): make a report of each"
            )


def _baseline(experiment: pd.DataFrame) -> Arm | None:
    """The AdamW that the others of an experiment are compared with: the best in validation.

    An arm with missing runs, such as diverged ones, is not chosen.
    """
    adamws = experiment[experiment.optimizer == "adamw"]
    arms = adamws.groupby("arm", sort=False).valid_loss.agg(["size", "mean"])
    # An arm without a validation loss in its logs is chosen only if there is no other.
    complete = arms[arms["size"] == arms["size"].max()]["mean"].fillna(math.inf)
    return None if adamws.empty else complete.idxmin()


def _order(run: Run) -> tuple[Any, ...]:
    """The sort key: size, experiment, AdamW before Coupled Adam, a plain arm before its sweep."""
    arm, options = run.arm, run.arm.options
    kind = {"adamw": 0, "coupled_adam": 1}.get(arm.optimizer, 2)
    scale = options.get("second_moment_scale")
    swept = -math.inf if scale is None else -math.log2(scale), options.get("lr_factor", 0.0)
    # Finally by repr(), since arms of different classes have no order.
    size = run.evaluation["parameters"], run.recipe.tokens
    return *size, run.recipe.name, kind, swept, repr(arm), run.seed


def groups(frame: pd.DataFrame, column: str) -> list[pd.DataFrame]:
    """The rows of a frame with equal values in a column, in the order of the frame."""
    return [rows for _, rows in frame.groupby(column, sort=False)]


def baseline_of(arms: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """The arm that the others of an experiment are compared with; None if there is none."""
    return next((arm for arm in arms if arm.is_baseline.all()), None)


def best_of_each(experiment: pd.DataFrame, column: str) -> list[pd.DataFrame]:
    """The best of the arms with each value of a column, such as the family or the optimizer.

    The validation loss at the end of training chooses, so that the test loss of what is chosen is
    a fair estimate. An arm with missing runs, such as diverged ones, is not chosen.
    """
    arms = experiment.groupby([column, "arm"], sort=False).valid_loss.agg(["count", "mean"])
    # Among all arms of the experiment, so that each comparison is over the same seeds. Without
    # any validation loss all are equal, and the first is taken.
    complete = arms[arms["count"] == arms["count"].max()]
    best = complete["mean"].fillna(0).groupby(column, sort=False).idxmin()
    return [experiment[experiment.arm == arm] for _, arm in best]


def by_seed(runs: pd.DataFrame, measure: Measure) -> dict[int, float]:
    """A measure of the runs that have it, by seed."""
    values: dict[int, float] = runs.set_index("seed")[measure.key].dropna().to_dict()
    return values
