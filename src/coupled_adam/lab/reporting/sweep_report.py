"""The report of a sweep: the best setting of each arm, and the losses of all that were tried."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import yaml
from matplotlib.axes import Axes

from coupled_adam.lab.grid import Setting, as_text, is_number
from coupled_adam.lab.models import parameters
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.reporting.plots import arm_colors
from coupled_adam.lab.reporting.statistics import paired_t_test, shorthand
from coupled_adam.rendering import page
from coupled_adam.rendering.pictures import Picture, legend, plot_means, single
from coupled_adam.rendering.tables import Cell, Table, csv_text, short


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting, and the losses of its runs by seed, in nats per token.

    validation: at the end of training; infinite for a run that diverged.
    test: of the setting that the validation losses have chosen for the arm; empty for all others.
    """

    setting: Setting
    validation: Mapping[int, float]
    test: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def arm(self) -> str:
        """The arm's name in the recipe."""
        return self.setting.arm

    @property
    def mean(self) -> float:
        """The mean validation loss over the seeds, by which the best setting is chosen."""
        return float(np.mean(list(self.validation.values())))

    @property
    def text(self) -> str:
        """The validation loss, or how many runs diverged."""
        losses = [*self.validation.values()]
        diverged = sum(not math.isfinite(loss) for loss in losses)
        if not diverged:
            return shorthand(losses)
        return "diverged" + (f" ({diverged} of {len(losses)})" if diverged < len(losses) else "")


def best_of_arms(tried: Sequence[Tried]) -> list[Tried]:
    """The setting of each arm with the lowest mean validation loss.

    An arm has none if in each of its settings at least one run has diverged.
    """
    best: dict[str, Tried] = {}
    for trial in tried:
        is_first = trial.arm not in best
        if math.isfinite(trial.mean) and (is_first or trial.mean < best[trial.arm].mean):
            best[trial.arm] = trial
    return [*best.values()]


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """What a sweep of a recipe has found; ``tried`` has test losses where a setting is chosen."""

    recipe: Recipe
    tried: Sequence[Tried]

    @functools.cached_property
    def best(self) -> list[Tried]:
        """The chosen setting of each arm, the one that the others are compared with first."""
        return best_of_arms(self.tried)

    @functools.cached_property
    def by_arm(self) -> dict[str, list[Tried]]:
        """What was tried for each arm."""
        arms = dict.fromkeys(trial.arm for trial in self.tried)
        return {arm: [trial for trial in self.tried if trial.arm == arm] for arm in arms}

    def label(self, arm: str) -> str:
        """The optimizer's name; the arm's own name if that is not enough to tell it."""
        # "Coupled Adam" if that is enough; options after a comma would be those that are swept.
        labels = {name: self.recipe.arm(name).label for name in self.recipe.arms}
        label = labels[arm]
        is_clear = "," not in label and [*labels.values()].count(label) == 1
        return label if is_clear else arm

    def conclusions(self) -> list[str]:
        """Sentences: the test losses of the chosen settings compared, and what restricts them."""
        diverged = [
            f"Every setting of {self.label(arm)} has a run that diverged."
            for arm in self.by_arm
            if arm not in [trial.arm for trial in self.best]
        ]
        compared = [self._comparison(trial, self.best[0]) for trial in self.best[1:]]
        return [*diverged, *compared, *self._edges()]

    def _comparison(self, trial: Tried, baseline: Tried) -> str:
        difference = float(np.mean([trial.test[s] - baseline.test[s] for s in trial.test]))
        name, baseline_name = self.label(trial.arm), self.label(baseline.arm)
        paired = paired_t_test(trial.test, baseline.test)
        distance = f"{'lower' if difference < 0 else 'higher'} by {abs(difference):.2g}"
        # The same clause, whether there is a test of it or not.
        sentence = (
            f"the test loss of the best setting of {name} is {distance} than that of "
            f"{baseline_name}"
        )
        if paired is None:
            return f"With one seed, {sentence}; a test needs two seeds or more."
        test = f"two-sided paired t-test over {paired.pairs} seeds: p = {paired.p:.2g}"
        if paired.significant:
            return f"T{sentence[1:]} ({test})."
        return (
            f"The test losses of the best settings of {name} and {baseline_name} cannot be told "
            f"apart: that of {name} is {distance} ({test})."
        )

    def _edges(self) -> Iterator[str]:
        for trial in self.best:
            for name, value in trial.setting.values.items():
                numbers = self._numbers(trial.arm, name)
                if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
                    is_lowest = value == numbers[0]
                    place, further = ("lowest", "lower") if is_lowest else ("highest", "higher")
                    yield (
                        f"The best {name} of {self.label(trial.arm)}, {as_text(value)}, is the "
                        f"{place} that was tried: a {further} one may be better."
                    )

    def _numbers(self, arm: str, name: str) -> list[float]:
        """The numbers that were tried for an option of an arm, in ascending order."""
        values = [trial.setting.values.get(name) for trial in self.by_arm[arm]]
        return sorted({*filter(is_number, values)})

    def terminal(self) -> Table:
        """The table for the terminal; the chosen settings are bold."""
        recipe = self.recipe
        size = f"D = {short(recipe.tokens)} tokens, N = {short(parameters(recipe))} parameters"
        return self.table(self.tried, title=f"{recipe.name}: {size}", notes=self.notes())

    def table(self, tried: Sequence[Tried], *, title: str = "", notes: Sequence[str] = ()) -> Table:
        """A table of settings, with links to their folders."""
        rows: list[list[str | Cell]] = [
            [
                self.label(trial.arm),
                trial.setting.title,
                Cell(trial.text, bold=trial in self.best),
                shorthand([*trial.test.values()]) if trial.test else "",
            ]
            for trial in tried
        ]
        columns = ("Optimizer", "setting", "L (validation) ↓", "L (test) ↓")
        return Table(columns, rows, title, notes, left=(0, 1))

    def notes(self) -> list[str]:
        """The conclusions, and how they were found."""
        seeds = len(self.recipe.seeds)
        over = ", of one seed"
        if seeds > 1:
            over = f", mean (standard deviation in the last digit) over {seeds} seeds"
        return [
            *self.conclusions(),
            f"Nats per token{over}. The validation loss at the end of training chooses the best "
            "setting of each arm, in bold; the test loss is evaluated for these only.",
        ]

    def csv(self) -> str:
        """A line for each run, in full precision."""
        names = list(dict.fromkeys(name for trial in self.tried for name in trial.setting.values))
        lines = []
        for trial in self.tried:
            values = [trial.setting.values.get(name) for name in names]
            cells = [None if value is None else as_text(value) for value in values]
            for seed, loss in trial.validation.items():
                folder = f"{trial.setting.name}/{trial.arm}-seed-{seed}"
                result = [seed, loss, trial.test.get(seed), trial in self.best, folder]
                lines.append([trial.arm, *cells, *result])
        header = ["arm", *names, "seed", "valid_loss", "test_loss", "chosen", "folder"]
        return csv_text([header, *lines])

    def page(self) -> str:
        """The page, with the losses as pictures; all text is escaped."""
        config = yaml.safe_dump(self.recipe.to_dict(), sort_keys=False)
        values = {"report": self, "config": config}
        package = "coupled_adam.lab.reporting"
        return page.render("sweep.html", values, self._pictures(), package=package)

    def _pictures(self) -> list[Picture]:
        # A picture for each option that had several numbers; others have no order to draw.
        names = dict.fromkeys(
            name
            for trial in self.tried
            for name in trial.setting.values
            if len(self._numbers(trial.arm, name)) > 1
        )
        return [
            single(
                functools.partial(self._plot, name=name),
                f"Validation loss against {name}: for each of its values the best setting of the "
                "other options, with the range over seeds; faint, all other settings. A cross at "
                "the top: diverged.",
            )
            for name in names
        ]

    def _plot(self, ax: Axes, name: str) -> None:
        """Plot the validation loss against one option."""
        colors = arm_colors(self.by_arm)
        ticks: set[float] = set()
        for arm, trials in self.by_arm.items():
            color = colors[arm]
            lines: dict[str, list[Tried]] = {}
            for trial in trials:
                other_options = {k: v for k, v in trial.setting.values.items() if k != name}
                lines.setdefault(str(other_options), []).append(trial)
            for line in lines.values():
                points = [(x, trial.mean) for x, trial in _lowest(line, name).items()]
                if points and len(lines) > 1:
                    ax.plot(*zip(*points), color=color, alpha=0.25, linewidth=0.8, marker=".")
            lowest = _lowest(trials, name)
            losses = {x: [*trial.validation.values()] for x, trial in lowest.items()}
            plot_means(ax, losses, marker="o", color=color, label=self.label(arm))
            values = self._numbers(arm, name)
            # What diverged has no finite loss to be drawn at.
            diverged = [x for x in values if x not in lowest]
            top = ax.get_xaxis_transform()
            ax.plot(diverged, [1] * len(diverged), "x", color=color, clip_on=False, transform=top)
            ticks.update(values)
        ax.set(title=f"Validation loss against {name}", xlabel=name, ylabel="nats per token")
        if min(ticks) > 0:
            ax.set_xscale("log")
        if len(ticks) <= 10:
            ax.set_xticks(sorted(ticks), labels=[as_text(tick) for tick in sorted(ticks)])
            ax.minorticks_off()
        legend(ax)


def _lowest(tried: Sequence[Tried], name: str) -> dict[float, Tried]:
    """The best setting for each value of an option, in ascending order, if it has not diverged."""
    best: dict[float, Tried] = {}
    for trial in sorted(tried, key=lambda trial: trial.mean):
        value = trial.setting.values.get(name)
        if is_number(value) and math.isfinite(trial.mean):
            best.setdefault(value, trial)
    return dict(sorted(best.items()))
