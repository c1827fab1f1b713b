"""What the runs of an experiment show, in sentences that say no more than their tests."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from coupled_adam.errors import own_command
from coupled_adam.lab.reporting.frame import TEST_LOSS, baseline_of, best_of_each, by_seed, groups
from coupled_adam.lab.reporting.statistics import paired_t_test, shown_p
from coupled_adam.lab.run import Run
from coupled_adam.runs import COMPARISON


def conclusion(frame: pd.DataFrame, left_out: Mapping[Path, str]) -> list[str]:
    """A paragraph for each experiment, and one for the runs that are not used.

    The arms are compared with the best AdamW by two-sided t-tests over pairs of runs with the same
    seed, which start from the same weights and see the same batches. A difference counts
    only if p < 0.05, and p-values are not corrected for the number of arms.
    """
    experiments = groups(frame, "experiment")
    paragraphs = []
    for experiment in experiments:
        recipe = f"{experiment.experiment.iloc[0]}: " if len(experiments) > 1 else ""
        text = " ".join(_sentences(experiment))
        paragraphs.append(recipe + _with_short_names(text, experiment.run))
    # What else is left out, such as the copy of a run, is only listed on the page.
    for start, fate in (
        ("diverged", "diverged and cannot be compared."),
        ("not ", "not finished or evaluated yet, and not used."),
    ):
        number = sum(reason.startswith(start) for reason in left_out.values())
        if number:
            paragraphs.append(f"{number} run{'s' if number > 1 else ''} {fate}")
    return paragraphs


def _with_short_names(text: str, runs: Iterable[Run]) -> str:
    """A text that gives the options of an arm with its own name only at its first mention."""
    for name, label in {run.arm_name: run.label for run in runs}.items():
        first = text.find(label) + len(label)
        if label.startswith(f"{name}: ") and label in text:
            text = text[:first] + text[first:].replace(label, name)
    return text


def _label(arm: pd.DataFrame) -> str:
    """The label of an arm, which all of its runs have."""
    return str(arm.label.iloc[0])


def _sentences(experiment: pd.DataFrame) -> list[str]:
    """What the runs of an experiment show: about the losses, then notes."""
    arms = groups(experiment, "arm")
    baseline = baseline_of(arms)
    notes = []
    # Of the arms of a sweep only the best is compared.
    if len(arms) > experiment.family.nunique():
        arms = best_of_each(experiment, "family")
        losses = [f"{_label(arm)} ({arm.valid_loss.mean():.3f})" for arm in arms]
        notes.append(f"The arms with the lowest validation loss are {'; '.join(losses)}.")
        notes += _edges(experiment, arms)
        baseline = baseline_of(arms)
    rivals = [arm for arm in arms if arm is not baseline]
    notes += _states(arms)
    order = _order(arms)
    if baseline is None or not rivals:
        return [*order, "A test needs runs with AdamW and with another optimizer.", *notes]
    # With one seed the losses are shown, and how to find out more.
    if experiment.seed.nunique() == 1:
        folder, command = experiment.run.iloc[0].folder.parent, " --seeds 3 --resume"
        # The whole command if the recipe is in the folder; its end if only the user knows it.
        if (folder / COMPARISON).exists():
            command = f"\n{own_command()} compare{command} --out {shlex.quote(str(folder))}"
        ranked = sorted(arms, key=lambda arm: arm.test_loss.mean())
        losses = [f"{arm.test_loss.mean():.3f} ({_label(arm)})" for arm in ranked]
        return [
            f"Test loss with one seed: {', '.join(losses)}.",
            *notes,
            f"One seed cannot tell whether a loss is lower; three can:{command}",
        ]
    sentences = [_loss(baseline, arm) for arm in rivals]
    if len(rivals) > 1:
        sentences = [*order, *sentences, f"p is not corrected for {len(rivals)} comparisons."]
    return [*sentences, *notes]


def _order(arms: Sequence[pd.DataFrame]) -> list[str]:
    """The sentence that orders three arms or more by test loss, from the lowest."""
    first, *others = sorted(arms, key=lambda arm: arm.test_loss.mean())
    told = [f"{_label(first)} has the lowest test loss, {first.test_loss.mean():.3f}"]
    for arm in others:
        test = paired_t_test(by_seed(arm, TEST_LOSS), by_seed(first, TEST_LOSS))
        difference = arm.test_loss.mean() - first.test_loss.mean()
        doubt = ", which may be chance" if test is None or not test.significant else ""
        told.append(f"{_label(arm)} is {difference:.3f} higher{doubt}")
    return ["; ".join(told) + "."] if len(arms) > 2 else []


def _edges(experiment: pd.DataFrame, best: Sequence[pd.DataFrame]) -> list[str]:
    """Which options of the best arms have the lowest or the highest of the values tried."""
    sentences = []
    for arm in best:
        family = experiment[experiment.family == arm.family.iloc[0]].arm.unique()
        for option, value in vars(arm.arm.iloc[0]).items():
            values = (getattr(other, option, None) for other in family)
            tried = sorted({x for x in values if isinstance(x, float | int)})
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                side, beyond = ("lowest", "lower") if value == tried[0] else ("highest", "higher")
                sentences.append(
                    f"{option} {value:g} of {_label(arm)} is the {side} of the values tried: the "
                    f"best may be {beyond}."
                )
    return sentences


def _states(arms: Sequence[pd.DataFrame]) -> list[str]:
    """How much optimizer state each arm keeps for the embeddings, if all runs have logged it."""
    sizes = [arm.embedding_state_bytes.max() for arm in arms]
    if not np.isfinite(sizes).all():
        return []
    most = max(sizes)
    named = []
    for arm, size in zip(arms, sizes):
        number = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
        share = f", 1/{most / size:.0f} of the largest" if 0 < size <= most / 2 else ""
        named.append(f"{number} ({_label(arm)}{share})")
    return [f"Optimizer state of the embeddings: {', '.join(named)}."]


def _loss(baseline: pd.DataFrame, arm: pd.DataFrame) -> str:
    """The sentence about an arm's test loss."""
    name, reference = _label(arm), _label(baseline)
    test = paired_t_test(by_seed(arm, TEST_LOSS), by_seed(baseline, TEST_LOSS))
    if test is None:
        return f"{name} and {reference} have fewer than two seeds in common: no test is possible."
    if not test.significant:
        return (
            f"The test losses of {name} and {reference} cannot be told apart with {test.pairs} "
            f"seeds: the first minus the second is {test.difference:+.3f} (95 % confidence "
            f"interval {test.low:+.3f} to {test.high:+.3f}; paired t-test, {shown_p(test.p)})."
        )
    # As distances, since the word says in which direction.
    low, high = sorted((abs(test.low), abs(test.high)))
    return (
        f"The test loss of {name} is {test.direction} than that of {reference} by "
        f"{abs(test.difference):.3f} (95 % confidence interval {low:.3f} to {high:.3f}; paired "
        f"t-test over {test.pairs} seeds, {shown_p(test.p)})."
    )
