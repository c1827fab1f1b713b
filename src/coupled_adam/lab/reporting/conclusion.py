"""What the runs of an experiment show, in sentences that say no more than their tests."""

import dataclasses
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
    for start, fate in (
        ("diverged", "diverged and cannot be compared."),
        ("not ", "not finished or evaluated yet, and not used."),
    ):
        number = sum(reason.startswith(start) for reason in left_out.values())
        if number:
            paragraphs.append(f"{number} run{'s' if number > 1 else ''} {fate}")
    return paragraphs


def _sentences(experiment: Experiment) -> list[str]:
    sentences = []
    for arm in experiment.arms:
        seeds = [str(run.seed) for run in arm if not _is_finite(run)]
        if seeds:
            sentences.append(
                f"{arm[0].label} diverged with {len(seeds)} of {len(arm)} seeds "
                f"({', '.join(seeds)}), which {'is' if len(seeds) == 1 else 'are'} not compared."
            )
    sentences += _best_of_each(experiment)
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


def _best_of_each(experiment: Experiment) -> list[str]:
    """Which of several arms with one optimizer is the best, and how the best ones compare.

    The validation loss at the end of training chooses, so that the test loss of what is chosen is
    a fair estimate. An arm of which a run is missing, as one that diverged, is not chosen.
    """
    most = max(map(len, experiment.arms))
    by_optimizer: dict[str, dict[float, list[Run]]] = {}
    for arm in experiment.arms:
        losses = [loss for run in arm for loss in run.curve("valid_loss")[1][-1:]]
        if len(losses) == most and all(map(_is_finite, arm)):
            arms = by_optimizer.setdefault(str(arm[0].options["optimizer"]), {})
            arms.setdefault(math.fsum(losses) / most, arm)
    if all(len(arms) < 2 for arms in by_optimizer.values()):
        return []
    best = {optimizer: arms[min(arms)] for optimizer, arms in by_optimizer.items()}
    chosen = "; ".join(
        f"of {len(arms)} with {optimizer}, {best[optimizer][0].label} ({min(arms):.3f})"
        for optimizer, arms in by_optimizer.items()
    )
    sentences = [f"The arms with the lowest validation loss are: {chosen}."]
    if "adamw" in best:
        sentences += [_loss(best["adamw"], arm) for name, arm in best.items() if name != "adamw"]
    return sentences


def _is_finite(run: Run) -> bool:
    loss = run.value(TEST_LOSS)
    return loss is None or math.isfinite(loss)


def _one_seed(arms: Sequence[list[Run]]) -> list[str]:
    """The results of each arm, the baseline first, and the command for more seeds."""
    runs = [arm[0] for arm in arms if _is_finite(arm[0])]
    facts: dict[str, list[str]] = {}
    for phrase, (number, text) in _FACTS.items():
        numbers = [x for x in map(number, runs) if x is not None]
        # A fact that one of the runs lacks cannot be compared, and is left out for all of them.
        if len(numbers) == len(runs):
            facts[phrase] = [text(x) for x in numbers]
    if len(runs) < 2 or not facts:
        return []
    names = [run.label.replace(", ", " (", 1) + ")" * (", " in run.label) for run in runs]
    first = ", ".join(phrase.format(texts[0]) for phrase, texts in facts.items())
    comparisons = [
        f"{name}: {', '.join(texts[place] for texts in facts.values())}"
        for place, name in enumerate(names[1:], 1)
    ]
    folder, command = runs[0].folder.parent, " --seeds 3 --resume"
    if (folder / COMPARISON).exists():
        command = f"\ncoupled-adam compare --seeds 3 --out {shlex.quote(str(folder))} --resume"
    return [
        f"With one seed, {'; '.join([f'{names[0]} has {first}', *comparisons])}.",
        f"One seed cannot tell whether a loss is lower; three can:{command}",
    ]


def _bytes(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


_FACTS: dict[str, tuple[Callable[[Run], float | None], Callable[[float], str]]] = {
    "a test loss of {}": (lambda run: run.value(TEST_LOSS), "{:.3f}".format),
    "a mean embedding of relative norm {}": (lambda run: run.value(_MEAN), "{:.2g}".format),
    "{} of optimizer state for the embeddings": (lambda run: run.embedding_state, _bytes),
    "{} a step": (
        lambda run: run.seconds and 1000 * run.seconds / run.recipe.steps,
        "{:.0f} ms".format,
    ),
}
"""What a single run shows: the words, the number and its text."""


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """A measure of the runs of two arms with the same seeds, and the test of the differences."""

    mean: float
    baseline: float
    test: Paired | None


def _pairs(baseline: Sequence[Run], arm: Sequence[Run], measure: Measure) -> _Pairs | None:
    """Compare an arm with the baseline; None if they have no seed in common."""
    # Runs that diverged are left out for all measures, not only for their losses.
    values, baseline_values = (
        values_by_seed(filter(_is_finite, runs), measure) for runs in (arm, baseline)
    )
    seeds = [
        seed
        for seed in sorted(values.keys() & baseline_values.keys())
        if math.isfinite(values[seed]) and math.isfinite(baseline_values[seed])
    ]
    if not seeds:
        return None
    values = {seed: values[seed] for seed in seeds}
    mean, baseline_mean = (
        math.fsum(v[seed] for seed in seeds) / len(seeds) for v in (values, baseline_values)
    )
    return _Pairs(mean, baseline_mean, paired_t_test(values, baseline_values))


def _loss(baseline: Sequence[Run], arm: Sequence[Run]) -> str:
    """The sentence about an arm's test loss."""
    name, reference = arm[0].label, baseline[0].label
    pairs = _pairs(baseline, arm, TEST_LOSS)
    if pairs is None:
        return f"{name} and {reference} have no finished seed in common, and cannot be compared."
    test = pairs.test
    if test is None:
        return (
            f"{name} and {reference} have one finished seed in common, with which no test is "
            f"possible: the test loss is {pairs.mean:.3f} and {pairs.baseline:.3f}."
        )
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


def _geometry(baseline: Sequence[Run], arm: Sequence[Run]) -> list[str]:
    """A sentence with the most important measures of the embeddings, if they were measured."""
    clauses = []
    for name, measure in _GEOMETRY.items():
        pairs = _pairs(baseline, arm, measure)
        if pairs is not None:
            clause = f"{name} is {pairs.mean:.2g} against {pairs.baseline:.2g}"
            clauses.append(clause + (f" ({shown_p(pairs.test.p)})" if pairs.test else ""))
    return [f"With {arm[0].label}, {' and '.join(clauses)}."] if clauses else []


def _overview(baseline: Sequence[Run], rivals: Sequence[Sequence[Run]]) -> str:
    """One sentence about the test losses of many arms."""
    # Arms with the same verdict are listed together, so that the sentence stays readable.
    arms_by_verdict: dict[str, list[str]] = {}
    for arm in rivals:
        pairs, label = _pairs(baseline, arm, TEST_LOSS), arm[0].label
        if pairs is None or pairs.test is None:
            verdict = "no test possible with fewer than two seeds"
        else:
            label += f" ({shown_p(pairs.test.p)})"
            alike = f"cannot be told apart (p ≥ {SIGNIFICANCE})"
            verdict = pairs.test.direction if pairs.test.significant else alike
        arms_by_verdict.setdefault(verdict, []).append(label)
    listed = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in arms_by_verdict.items())
    return (
        f"Test losses of {len(rivals)} arms against {baseline[0].label} (paired t-tests over the "
        f"seeds in common, not corrected for {len(rivals)} comparisons): {listed}."
    )
