"""Experiments: which finished runs may be compared with each other, and what each is called."""

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.arms import AdamWArm
from coupled_adam.lab.grid import as_text
from coupled_adam.lab.reporting.finished_run import Run


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs whose recipes differ only in name, arms and seeds, and the name that tells them."""

    name: str
    runs: Sequence[Run]

    @functools.cached_property
    def arms(self) -> list[list[Run]]:
        """The runs of each arm; equal options under another name are the same arm."""
        arms: dict[str, list[Run]] = {}
        for run in self.runs:
            arms.setdefault(run.setup, []).append(run)
        return [*arms.values()]

    @functools.cached_property
    def baseline(self) -> list[Run] | None:
        """The arm that the others are compared with, as :func:`baseline_of` chooses it."""
        return baseline_of(self.arms)

    @property
    def rivals(self) -> list[list[Run]]:
        """All other arms."""
        return [arm for arm in self.arms if arm is not self.baseline]


def experiments(runs: Sequence[Run]) -> list[Experiment]:
    """The experiments of runs that have been given their names, in the order of the runs."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.experiment, []).append(run)
    return [Experiment(name, members) for name, members in by_name.items()]


def baseline_of(arms: Iterable[list[Run]]) -> list[Run] | None:
    """The arm with which the others of an experiment are compared: AdamW without options.

    Without that one it is the only arm with AdamW; None if there are several, or none.
    """
    adamws = [(arm[0].recipe.arm(arm[0].arm), arm) for arm in arms]
    adamws = [(optimizer, arm) for optimizer, arm in adamws if isinstance(optimizer, AdamWArm)]
    plain = [arm for optimizer, arm in adamws if optimizer == AdamWArm()]
    candidates = plain or [arm for _, arm in adamws]
    return candidates[0] if len(candidates) == 1 else None


def values_by_seed(runs: Iterable[Run], measure: Measure) -> dict[int, float]:
    """A measure of the runs that have it, by seed."""
    values = {run.seed: run.value(measure) for run in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def with_experiments(runs: Sequence[Run]) -> list[Run]:
    """Give each run its experiment: the recipe's name, and the settings that tell namesakes apart.

    The runs of an experiment have the same ``settings``, which differ from one to the other.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    settings = {key: _settings(members[0]) for key, members in groups.items()}
    # 124M-20B-scaled and 124M-20B are one experiment, with the shorter name.
    names = {
        key: min((run.recipe.name for run in members), key=lambda name: (len(name), name))
        for key, members in groups.items()
    }

    def tells(key: str, setting: str) -> bool:
        """Whether a setting differs between an experiment and any of its namesakes."""
        namesakes = [settings[k] for k in groups if names[k] == names[key]]
        return any(namesake[setting] != settings[key][setting] for namesake in namesakes)

    # The same for all experiments, so that a table has one column for each.
    keys = [
        setting
        for setting in next(iter(settings.values()), ())
        if any(tells(key, setting) for key in groups)
    ]
    # Where D and N are the same for experiments of different names, a column has the name.
    names_of_size: dict[tuple[int, int], set[str]] = {}
    for key, members in groups.items():
        for run in members:
            size = (run.parameters, run.recipe.tokens)
            names_of_size.setdefault(size, set()).add(names[key])
    has_names = any(len(sharing) > 1 for sharing in names_of_size.values())
    runs_with_names = []
    for key, members in groups.items():
        values = {setting: settings[key][setting] for setting in keys}
        listed = ", ".join(
            f"{short_key(setting, keys)}={setting_text(value)}"
            for setting, value in values.items()
            if tells(key, setting)
        )
        title = f"{names[key]} ({listed})" if listed else names[key]
        columns = {"recipe": names[key]} if has_names else {}
        runs_with_names += [
            dataclasses.replace(run, experiment=title, settings=columns | values) for run in members
        ]
    return runs_with_names


def with_other_tokens(runs: Sequence[Run]) -> list[Run]:
    """Mark the runs whose test loss is over other data than that of most of their experiment."""
    compared = []
    for experiment in experiments(runs):
        numbers = collections.Counter(run.evaluation.get("test_tokens") for run in experiment.runs)
        # Of two numbers that occur equally often, the larger: more tokens measure better.
        usual = max(numbers, key=lambda number: (numbers[number], number or 0))
        for run in experiment.runs:
            tokens = run.evaluation.get("test_tokens")
            other_tokens = None if tokens in (usual, None) else tokens
            compared.append(dataclasses.replace(run, other_tokens=other_tokens))
    return compared


def _settings(run: Run) -> dict[str, Any]:
    """What the runs of an experiment have in common, by dotted keys."""
    recipe = run.recipe.to_dict()
    sections = ("model", "data", "training")
    values = {
        f"{section}.{key}": recipe[section][key] for section in sections for key in recipe[section]
    }
    return {**values, "variant": run.recipe.variant}


def short_key(key: str, keys: Sequence[str]) -> str:
    """A dotted key without its section, if that is the only one of its name among these keys."""
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def setting_text(value: Any) -> str:
    """A value of a recipe as in YAML, without control characters."""
    text = as_text(value) if value is None or isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)
