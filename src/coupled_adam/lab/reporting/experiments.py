"""Experiments: which finished runs may be compared with each other, and what each is called."""

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.arms import AdamWArm
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
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(run.experiment, []).append(run)
    return [Experiment(name, own_runs) for name, own_runs in members.items()]


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
    # 124M-20B-scaled and 124M-20B are one experiment, with the shorter name.
    named = [
        (min((run.recipe.name for run in members), key=lambda name: (len(name), name)), members)
        for members in groups.values()
    ]
    namesakes: dict[str, list[dict[str, Any]]] = {}
    for name, members in named:
        namesakes.setdefault(name, []).append(_settings(members[0]))
    telling = {
        name: [key for key in first if any(other[key] != first[key] for other in others)]
        for name, (first, *others) in namesakes.items()
    }
    # The same for all experiments, so that a table has one column for each.
    keys = [
        key
        for run in runs[:1]
        for key in _settings(run)
        if any(key in differing for differing in telling.values())
    ]
    # Where D and N are the same for experiments of different names, a column has the name.
    names_of_sizes = {(*run.size, name) for name, members in named for run in members}
    has_names = len(names_of_sizes) > len({run.size for run in runs})
    titled = []
    for name, members in named:
        values = {key: _settings(members[0])[key] for key in keys}
        listed = ", ".join(
            f"{short_key(key, keys)}={setting_text(values[key])}"
            for key in keys
            if key in telling[name]
        )
        title = f"{name} ({listed})" if listed else name
        settings = {"recipe": name, **values} if has_names else values
        titled += [dataclasses.replace(run, experiment=title, settings=settings) for run in members]
    return titled


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
    values = {
        f"{section}.{key}": value
        for section in ("model", "data", "training")
        for key, value in recipe[section].items()
    }
    return {**values, "variant": run.recipe.variant}


def short_key(key: str, keys: Sequence[str]) -> str:
    """A dotted key without its section, if that is the only one of its name among these keys."""
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def setting_text(value: Any) -> str:
    """A value of a recipe as in YAML, without control characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)
