"""The verdict on the rule for the embeddings' rate, by what was written down on its page."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import torch

from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.schedules import lr_scheduler
from coupled_adam.optim.lean import lean_lr_factor
from coupled_adam.rendering.tables import Table

from .questions import (
    FINAL_SETTINGS,
    MULTIPLES,
    QUESTIONS,
    RATE_SETTINGS,
    SECOND_EDITION,
    rate_rule,
)
from .referee import at_rates
from .rows import Line, by_seed
from .run import recipe_of

SEED = 7
ARMS = {"adamw": "AdamW, 0, 0.999", "lean": "LEAN"}


@dataclasses.dataclass(frozen=True)
class Tried:
    """An optimizer in a setting whose runs are complete.

    losses: validation losses with the first seed, by what the rule's factor is multiplied with.
    more: for each other seed, the rule's loss minus that of :attr:`best`.
    """

    recipe: Recipe
    losses: dict[float, float]
    more: list[float]

    @property
    def factor(self) -> float:
        """The rule's."""
        return rate_rule(self.recipe.steps)

    @property
    def best(self) -> float:
        """The multiple with the lowest loss."""
        return min(self.losses, key=lambda multiple: self.losses[multiple])

    def excess(self, rival: Callable[[Recipe], float]) -> float:
        """How far the loss at a rival's factor is above the lowest, with the first seed.

        It is read between the factors that were tried, linearly in their logarithms; beyond them
        the nearest one counts.
        """
        multiples = sorted(m for m in self.losses if math.isfinite(self.losses[m]))
        losses = [self.losses[multiple] for multiple in multiples]
        at = np.interp(math.log(rival(self.recipe) / self.factor), np.log(multiples), losses)
        return float(at) - min(losses)

    @property
    def rule_excess(self) -> float:
        """The rule's excess, with as many seeds as there are."""
        return float(np.mean([self.losses[1] - self.losses[self.best], *self.more]))


def tried(setting: str, arm: str) -> Tried | None:
    """The runs of an optimizer in a setting; None if some are missing."""
    question = "rate_rule" if setting in RATE_SETTINGS else "rate_rule_wiki"
    names = {multiple: f"{setting} {arm} x{multiple:g}" for multiple in MULTIPLES}
    by_multiple = {m: by_seed(Line("", question, name), "valid_loss") for m, name in names.items()}
    losses = {multiple: seeds[SEED] for multiple, seeds in by_multiple.items() if SEED in seeds}
    if not {1, 2} <= losses.keys():
        return None
    needed: set[float] = {4} if losses[2] < losses[1] else {0.5}
    if needed == {0.5} and losses.get(0.5, math.inf) < losses[1]:
        needed.add(0.25)
    if not needed <= losses.keys():
        return None
    tried_rates = Tried(recipe_of(QUESTIONS[question][names[1]]), losses, [])
    rule, best = by_multiple[1], by_multiple[tried_rates.best]
    more = [rule[seed] - best[seed] for seed in sorted(rule.keys() & best.keys() - {SEED})]
    return dataclasses.replace(tried_rates, more=more)


def rates(recipe: Recipe) -> float:
    """The sum of the core's rates over the steps of a run."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=recipe.training.lr)
    scheduler = lr_scheduler(optimizer, recipe)
    total = 0.0
    for _ in range(recipe.steps):
        total += optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    return total


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting in which LEAN has run at several rates; validation losses by seed and factor."""

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


_NAMES: dict[str, Callable[[Any], str]] = {
    "model.architecture": lambda _: "rotary",
    "model.n_embd": "H = {}".format,
    "model.n_layer": "{} layers".format,
    "model.tied": lambda _: "untied",
    "model.vocab_size": "V = {:,}".format,
    "training.batch_size": lambda sequences: f"{64 * sequences:,} tokens a step",
    "training.decay": lambda _: "linear to zero",
    "training.lr": "core at {:g}".format,
}
"""What is said of a setting in the table of costs; other overrides do not tell settings apart."""
_USUAL = {"model.n_embd": 64, "model.n_layer": 2, "training.lr": 5e-3}


def settings() -> list[Setting]:
    """All settings in which LEAN's first edition has run at two rates and more, by their steps."""
    lines: dict[str, list[tuple[float, Line]]] = {}
    steps_of: dict[str, int] = {}
    for question, entries in QUESTIONS.items():
        for name, entry in entries.items():
            is_lean = f" {name}".find(" lean ") >= 0 and " free " not in name
            is_rule = entry.variant == "table_rules:PLAIN_DELAYED"
            if question in SECOND_EDITION or not (is_lean or is_rule):
                continue
            differing = entry.overrides.items() - _USUAL.items()
            shown = {key: _NAMES[key](value) for key, value in differing if key in _NAMES}
            if entry.overrides.get("training.schedule") == "constant":
                shown["schedule"] = "constant"
            if question == "rate_rule_wiki":
                shown["text"] = "another text"
            # The overrides that change the model come first, in the order of the names.
            words = [shown[key] for key in (*_NAMES, "schedule", "text") if key in shown]
            label = ", ".join([f"{entry.overrides['training.steps']:,} steps", *words])
            steps_of[label] = entry.overrides["training.steps"]
            lines.setdefault(label, []).append((entry.arm["lr_factor"], Line("", question, name)))
    made = _settings(steps_of, lines)
    return sorted(made, key=lambda setting: (setting.steps, setting.label))


def settings_of_the_finals() -> list[Setting]:
    """Those in which LEAN's second edition has run at two rates and more, in their order."""
    steps_of = {name: final.overrides["training.steps"] for name, final in FINAL_SETTINGS.items()}
    return _settings(steps_of, {name: at_rates(name, "lean2 0 0.99").items() for name in steps_of})


def settings_of_the_second_edition() -> list[Setting]:
    """Those of the fewest steps, and of the finals."""
    lines: dict[str, list[tuple[float, Line]]] = {}
    for name, entry in QUESTIONS["fewest_steps"].items():
        label = name.partition(" lean2 ")[0]
        line = Line("", "fewest_steps", name)
        lines.setdefault(label, []).append((entry.arm["lr_factor"], line))
    steps_of = {label: RATE_SETTINGS[label]["training.steps"] for label in lines}
    return [*_settings(steps_of, lines), *settings_of_the_finals()]


def _settings(
    steps_of: Mapping[str, int], lines: Mapping[str, Iterable[tuple[float, Line]]]
) -> list[Setting]:
    """Those in which a seed has run at two rates and more, of runs with their factors by label."""
    made = []
    for label, steps in steps_of.items():
        losses: dict[int, dict[float, float]] = {}
        for factor, line in lines[label]:
            for seed, loss in by_seed(line, "valid_loss").items():
                losses.setdefault(seed, {})[factor] = loss
        several = {seed: by_factor for seed, by_factor in losses.items() if len(by_factor) > 1}
        if several:
            made.append(Setting(label, steps, several))
    return made


TESTED: dict[str, Callable[[int], float]] = {"15,000 / steps": rate_rule}
"""The rule that was tested with LEAN's first edition."""
SHIPPED: dict[str, Callable[[int], float]] = {"30,000 / steps": lean_lr_factor, **TESTED}
"""The rule that `steps=` follows, and its predecessor."""
CONSTANTS: dict[str, Callable[[int], float]] = {
    "a constant 2": lambda _: 2.0,
    "a constant 16": lambda _: 16.0,
}


def costs(
    settings: Callable[[], list[Setting]], rules: Mapping[str, Callable[[int], float]]
) -> Table:
    """What rules and two constants cost LEAN in each setting, on average and at most.

    The table has the factor of the first rule, too.
    """
    rows, all_costs = [], []
    compared = {**rules, **CONSTANTS}
    first, *others = compared
    for setting in settings():
        cost = [setting.cost(factor(setting.steps)) for factor in compared.values()]
        all_costs.append(cost)
        shown = [f"{setting.best:.3g}", f"{compared[first](setting.steps):.3g}"]
        seeds = str(len(setting.losses))
        cells = ("" if math.isnan(c) else f"{c:.3f}" for c in cost)
        rows.append([setting.label, seeds, *shown, *cells])
    for name, of in (("on average", np.nanmean), ("at most", np.nanmax)):
        rows.append([name, "", "", "", *map("{:.3f}".format, of(all_costs, axis=0))])
    header = ["setting", "seeds", "best of those tried", first, f"cost of {first}"]
    return Table([*header, *(f"of {name}" for name in others)], rows)


def fitted_anew() -> tuple[float, float]:
    """C and the cap of C / steps that cost least in every other one of these settings.

    After 9,768 steps a second rate was run when they had been chosen.
    """
    fitted = [x for x in settings_of_the_finals() if x.label != "9768 steps"][::2]
    tried = itertools.product(
        (15_000 * 2 ** (n / 2) for n in range(-2, 3)), (2 ** (n / 2) for n in range(7, 11))
    )

    def cost(constants: tuple[float, float]) -> float:
        c, cap = constants
        return float(np.nanmean([x.cost(min(cap, max(1.0, c / x.steps))) for x in fitted]))

    return min(tried, key=cost)


RIVALS: dict[str, Callable[[Recipe], float]] = {
    "10,000 / steps, 1 to 16": lambda recipe: min(16.0, max(1.0, 10_000 / recipe.steps)),
    "15,000 / steps, at least 1": lambda recipe: max(1.0, 15_000 / recipe.steps),
    "a rate of 50 / steps": lambda recipe: 50 / recipe.steps / recipe.training.lr,
    "rates that add up to 28": lambda recipe: 28 / rates(recipe),
}


def table() -> Table:
    """The excess in each setting, and its mean and its most, of the rule and of its rivals."""
    settings = [*RATE_SETTINGS, "wiki"]
    by_arm = {arm: {s: t for s in settings if (t := tried(s, arm))} for arm in ARMS}
    rows = []
    for setting in settings:
        cells = []
        for by_setting in by_arm.values():
            if setting in by_setting:
                here = by_setting[setting]
                seeds = f" ({1 + len(here.more)} seeds)" if here.more else ""
                best = f"{here.factor * here.best:.3g}"
                cells += [best, f"{here.rule_excess:.3f}{seeds}"]
            else:
                cells += ["", ""]
        if any(cells):
            (here, *_) = (arm[setting] for arm in by_arm.values() if setting in arm)
            rows.append([setting, f"{here.recipe.steps:,}", f"{here.factor:.3g}", *cells])

    def summary(name: str, excess: Callable[[Tried], float], least: int = 0) -> list[str]:
        cells = []
        for by_setting in by_arm.values():
            numbers = [excess(t) for t in by_setting.values() if t.recipe.steps >= least]
            cells += ["", f"{np.mean(numbers):.3f}, at most {max(numbers):.3f}" if numbers else ""]
        return [name, f"{least} and more" if least else "", "", *cells]

    rows.append(summary("the rule", attrgetter("rule_excess")))
    rows.append(summary("the rule", attrgetter("rule_excess"), least=600))
    rows += [summary(name, methodcaller("excess", rival)) for name, rival in RIVALS.items()]
    header = [f"{label}: {what}" for label in ARMS.values() for what in ("best factor", "excess")]
    return Table(["setting", "steps", "factor of the rule", *header], rows)
