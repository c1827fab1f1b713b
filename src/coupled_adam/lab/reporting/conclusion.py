"""What the runs of an experiment show, in sentences that say no more than their tests."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.experiments import Experiment, experiments, values_by_seed
from coupled_adam.lab.reporting.finished_run import COLUMNS, TEST_LOSS, Run
from coupled_adam.lab.reporting.statistics import SIGNIFICANCE, Paired, paired_t_test, shown_p
from coupled_adam.runs import COMPARISON

_MOST = 3  # as many arms get sentences of their own
_MEAN = COLUMNS["mean_norm_ratio"]
_GEOMETRY = {
    "the relative norm of the mean embedding": _MEAN,
    "isotropy": COLUMNS["isotropy"],
}


def conclusion(runs: Sequence[Run], left_out: Mapping[Path, str]) -> list[str]:
    """A paragraph for each experiment, and one for the runs that are not used.

    The arms are compared with AdamW by two-sided t-tests over pairs of runs with the same seed,
    which start from the same weights and see the same batches. A difference is called one only if
    p < 0.05, and p-values are not corrected for the number of arms.
    """
    compared = experiments(runs)
    paragraphs = [
        (f"{experiment.name}: " if len(compared) > 1 else "") + " ".join(_sentences(experiment))
        for experiment in compared
    ]
    diverged = sum(reason.startswith("diverged") for reason in left_out.values())
    unfinished = sum(reason.startswith("not ") for reason in left_out.values())
    if diverged:
        paragraphs.append(f"{_runs(diverged)} diverged and cannot be compared.")
    if unfinished:
        paragraphs.append(f"{_runs(unfinished)} not finished or evaluated yet, and not used.")
    return paragraphs


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _sentences(experiment: Experiment) -> list[str]:
    """What is said about an experiment."""
    sentences = []
    for arm in experiment.arms:
        seeds = [str(run.seed) for run in arm if not _is_finite(run)]
        if seeds:
            sentences.append(
                f"{arm[0].label} diverged with {len(seeds)} of {len(arm)} seeds "
                f"({', '.join(seeds)}), which {'is' if len(seeds) == 1 else 'are'} not compared."
            )
    baseline, rivals = experiment.baseline, experiment.rivals
    if baseline is None:
        return [*sentences, "There is no run with AdamW to compare with."]
    if not rivals:
        return [*sentences, "There are only runs with AdamW, and nothing to compare them with."]
    # A sweep's arms get one sentence together, or nobody would read the page.
    if len(rivals) > _MOST:
        return [*sentences, _overview(baseline, rivals)]
    if len({run.seed for run in experiment.runs}) == 1:
        return [*sentences, *_one_seed([baseline, *rivals])]
    for arm in rivals:
        sentences += [_loss(baseline, arm), *_geometry(baseline, arm)]
    if len(rivals) > 1:
        sentences.append(f"p is not corrected for {len(rivals)} comparisons.")
    return sentences


def _is_finite(run: Run) -> bool:
    loss = run.value(TEST_LOSS)
    return loss is None or math.isfinite(loss)


def _one_seed(arms: Sequence[list[Run]]) -> list[str]:
    """The results of each arm, the baseline first, and the command for more seeds."""
    runs = [arm[0] for arm in arms if _is_finite(arm[0])]
    facts = {phrase: [fact(run) for run in runs] for phrase, fact in _FACTS.items()}
    # A fact that one of the runs lacks cannot be compared, and is left out for all of them.
    facts = {phrase: texts for phrase, texts in facts.items() if None not in texts}
    if len(runs) < 2 or not facts:
        return []
    names = [run.label.replace(", ", " (", 1) + ")" * (", " in run.label) for run in runs]
    first = ", ".join(phrase.format(texts[0]) for phrase, texts in facts.items())
    comparisons = [
        f"{name}: {', '.join(str(texts[place]) for texts in facts.values())}"
        for place, name in enumerate(names[1:], 1)
    ]
    folder, command = runs[0].folder.parent, " --seeds 3 --resume"
    if (folder / COMPARISON).exists():
        command = f"\ncoupled-adam compare --seeds 3 --out {shlex.quote(str(folder))} --resume"
    return [
        f"With one seed, {'; '.join([f'{names[0]} has {first}', *comparisons])}.",
        f"One seed cannot tell whether a loss is lower; three can:{command}",
    ]


def _milliseconds(run: Run) -> str | None:
    speed = run.tokens_per_second
    return None if speed is None else f"{1000 * run.recipe.tokens_per_step / speed:.0f} ms"


def _bytes(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


def _number(value: float | None, digits: str) -> str | None:
    return None if value is None else f"{value:{digits}}"


_FACTS: dict[str, Callable[[Run], str | None]] = {
    "a test loss of {}": lambda run: _number(run.value(TEST_LOSS), ".3f"),
    "a mean embedding of relative norm {}": lambda run: _number(run.value(_MEAN), ".2g"),
    "{} of optimizer state for the embeddings": lambda run: _bytes(run.embedding_state),
    "{} a step": _milliseconds,
}
"""What a single run shows, in words."""

_BySeed = dict[int, float]


def _pairs(
    baseline: Sequence[Run], arm: Sequence[Run], measure: Measure
) -> tuple[_BySeed, _BySeed]:
    """The values of runs with the same seeds, by seed: those of the arm, and of the baseline."""
    # Runs that diverged are left out for all measures, not only for their losses.
    values, baseline_values = (
        {
            seed: value
            for seed, value in values_by_seed(filter(_is_finite, runs), measure).items()
            if math.isfinite(value)
        }
        for runs in (arm, baseline)
    )
    seeds = sorted(values.keys() & baseline_values.keys())
    return {seed: values[seed] for seed in seeds}, {seed: baseline_values[seed] for seed in seeds}


def _loss(baseline: Sequence[Run], arm: Sequence[Run]) -> str:
    """The sentence about an arm's test loss."""
    name, reference = arm[0].label, baseline[0].label
    losses, baseline_losses = _pairs(baseline, arm, TEST_LOSS)
    if not losses:
        return f"{name} and {reference} have no finished seed in common, and cannot be compared."
    test = paired_t_test(losses, baseline_losses)
    if test is None:
        return (
            f"{name} and {reference} have one finished seed in common, with which no test is "
            f"possible: the test loss is {_mean(losses):.3f} and {_mean(baseline_losses):.3f}."
        )
    if not test.significant:
        return (
            f"The test losses of {name} and {reference} cannot be told apart with {test.pairs} "
            f"seeds: the first minus the second is {test.difference:+.3f} (95 % confidence "
            f"interval {test.low:+.3f} to {test.high:+.3f}; paired t-test, {shown_p(test.p)})."
        )
    # As distances, since the word says in which direction.
    word = "lower" if test.difference < 0 else "higher"
    low, high = sorted((abs(test.low), abs(test.high)))
    return (
        f"The test loss of {name} is {word} than that of {reference} by "
        f"{abs(test.difference):.3f} (95 % confidence interval {low:.3f} to {high:.3f}; paired "
        f"t-test over {test.pairs} seeds, {shown_p(test.p)})."
    )


def _geometry(baseline: Sequence[Run], arm: Sequence[Run]) -> list[str]:
    """A sentence with the most important measures of the embeddings, if they were measured."""
    clauses = []
    for name, measure in _GEOMETRY.items():
        values, baseline_values = _pairs(baseline, arm, measure)
        if values:
            clause = f"{name} is {_mean(values):.2g} against {_mean(baseline_values):.2g}"
            test = paired_t_test(values, baseline_values)
            if test is not None:
                clause += f" ({shown_p(test.p)})"
            clauses.append(clause)
    return [f"With {arm[0].label}, {' and '.join(clauses)}."] if clauses else []


def _mean(values: _BySeed) -> float:
    return math.fsum(values.values()) / len(values)


def _overview(baseline: Sequence[Run], rivals: Sequence[Sequence[Run]]) -> str:
    """One sentence about the test losses of many arms."""
    by_verdict: dict[str, list[str]] = {}
    for arm in rivals:
        losses, baseline_losses = _pairs(baseline, arm, TEST_LOSS)
        test = paired_t_test(losses, baseline_losses)
        text = arm[0].label if test is None else f"{arm[0].label} ({shown_p(test.p)})"
        by_verdict.setdefault(_verdict(test), []).append(text)
    listed = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())
    return (
        f"Test losses of {len(rivals)} arms against {baseline[0].label} (paired t-tests over the "
        f"seeds in common, not corrected for {len(rivals)} comparisons): {listed}."
    )


def _verdict(test: Paired | None) -> str:
    if test is None:
        return "no test possible with fewer than two seeds"
    if not test.significant:
        return f"cannot be told apart (p ≥ {SIGNIFICANCE})"
    return "lower" if test.difference < 0 else "higher"
