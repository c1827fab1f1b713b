"""What the rule for the embeddings' rate costs LEAN."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from coupled_adam.optim.lean import lean_lr_factor
from coupled_adam.rendering.tables import Table

from .finals import LEAN, Lines, at_rates, seeds_of
from .questions import FINAL_SETTINGS, QUESTIONS, rate_rule
from .rows import Line


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting in which an optimizer has run at several rates; losses by seed and factor."""

    label: str
    steps: int
    losses: dict[int, dict[float, float]]

    def cost(self, factor: float) -> float:
        """How far the loss at a factor is above the lowest that was tried, averaged over seeds.

        It is read between the factors that were tried, linearly in their logarithms, and beyond
        them from the last two. A seed of which these would go on falling says nothing about the
        cost, and is left out; it is nan if there is no other.
        """
        costs = [_cost(losses, factor) for losses in self.losses.values()]
        known = [max(0.0, cost) for cost in costs if cost > -1e-9]
        return float(np.mean(known)) if known else math.nan

    @property
    def best(self) -> float:
        """The factor with the lowest loss, averaged over the seeds that have them all."""
        most = max(map(len, self.losses.values()))
        full = [losses for losses in self.losses.values() if len(losses) == most]
        return min(full[0], key=lambda factor: np.mean([x[factor] for x in full if factor in x]))


def _cost(losses: Mapping[float, float], factor: float) -> float:
    """The cost of a factor with one seed; below 0 only where falling losses are continued."""
    tried_factors = sorted(losses)
    nearest = np.clip(np.searchsorted(tried_factors, factor), 1, len(tried_factors) - 1)
    low, high = tried_factors[nearest - 1], tried_factors[nearest]
    slope = (losses[high] - losses[low]) / math.log(high / low)
    return losses[low] + slope * math.log(factor / low) - min(losses.values())


def _setting(label: str, steps: int, tried: Iterable[tuple[float, Lines]]) -> Setting:
    """The losses of the seeds that have run at several factors."""
    losses: dict[int, dict[float, float]] = {}
    for factor, lines in tried:
        for seed, loss in seeds_of(lines, "valid_loss").items():
            losses.setdefault(seed, {})[factor] = loss
    return Setting(label, steps, {seed: x for seed, x in losses.items() if len(x) > 1})


def settings_of_the_finals(arm: str = LEAN) -> list[Setting]:
    """The thirteen settings, in their order."""
    return [
        _setting(name, setting.overrides["training.steps"], at_rates(name, arm).items())
        for name, setting in FINAL_SETTINGS.items()
    ]


def settings() -> list[Setting]:
    """Those of the fewest steps, and of the finals."""
    fewest = {
        steps: [
            (entry.arm["lr_factor"], [Line("", "fewest_steps", name)])
            for name, entry in QUESTIONS["fewest_steps"].items()
            if entry.overrides["training.steps"] == steps
        ]
        for steps in (150, 300)
    }
    shortest = [_setting(f"{steps} steps", steps, tried) for steps, tried in fewest.items()]
    return [*shortest, *settings_of_the_finals()]


RULES: dict[str, Callable[[int], float]] = {
    "30,000 / steps": lean_lr_factor,
    "15,000 / steps": rate_rule,
    "a constant 2": lambda _: 2.0,
    "a constant 16": lambda _: 16.0,
}
"""The rule that `steps=` follows, its predecessor, and constants."""


def table() -> Table:
    """What each of :data:`RULES` costs LEAN in each setting, on average and at most."""
    rows, costs = [], []
    for setting in settings():
        factors = [rule(setting.steps) for rule in RULES.values()]
        costs.append([*map(setting.cost, factors)])
        cells = ("" if math.isnan(cost) else f"{cost:.3f}" for cost in costs[-1])
        shown = [str(len(setting.losses)), f"{setting.best:.3g}", f"{factors[0]:.3g}"]
        rows.append([setting.label, *shown, *cells])
    for name, of in (("on average", np.nanmean), ("at most", np.nanmax)):
        rows.append([name, "", "", "", *map("{:.3f}".format, of(costs, axis=0))])
    first, *others = RULES
    header = ["setting", "seeds", "best of those tried", first, f"cost of {first}"]
    return Table([*header, *(f"of {name}" for name in others)], rows)
