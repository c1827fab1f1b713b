"""What the runs of an experiment show, in sentences that say no more than their tests."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.reporting.frame import COLUMNS, TEST_LOSS, baseline_of, by_seed, groups
from coupled_adam.lab.reporting.statistics import SIGNIFICANCE, Paired, paired_t_test, shown_p
from coupled_adam.runs import COMPARISON

_MOST = 3  # as many arms get sentences of their own
_GEOMETRY = {
    "the relative norm of the mean embedding": COLUMNS["mean_norm_ratio"],
    "isotropy": COLUMNS["isotropy"],
}


def conclusion(frame: pd.DataFrame, left_out: Mapping[Path, str]) -> list[str]:
    """A paragraph for each experiment, and one for the runs that are not used.

    The arms are compared with AdamW by two-sided t-tests over pairs of runs with the same seed,
    which start from the same weights and see the same batches. A difference is called one only if
    p < 0.05, and p-values are not corrected for the number of arms.
    """
    experiments = groups(frame, "experiment")
    paragraphs = [
        (f"{experiment.experiment.iloc[0]}: " if len(experiments) > 1 else "")
        + " ".join(_sentences(experiment))
        for experiment in experiments
    ]
    for start, fate in (
        ("diverged", "diverged and cannot be compared."),
        ("not ", "not finished or evaluated yet, and not used."),
    ):
        number = sum(reason.startswith(start) for reason in left_out.values())
        if number:
            paragraphs.append(f"{number} run{'s' if number > 1 else ''} {fate}")
    return paragraphs


def _sentences(experiment: pd.DataFrame) -> list[str]:
    arms = groups(experiment, "setup")
    baseline, sentences = baseline_of(arms), _best_of_each(experiment)
    rivals = [arm for arm in arms if arm is not baseline]
    if baseline is None:
        sentences.append("There is no run with AdamW to compare with.")
    elif not rivals:
        sentences.append("There are only runs with AdamW, and nothing to compare them with.")
    elif len(rivals) > _MOST:  # or nobody would read the page
        sentences.append(_overview(baseline, rivals))
    elif experiment.seed.nunique() == 1:
        sentences += _one_seed(pd.concat([baseline, *rivals]))
    else:
        for arm in rivals:
            sentences += [_loss(baseline, arm), *_geometry(baseline, arm)]
        if len(rivals) > 1:
            sentences.append(f"p is not corrected for {len(rivals)} comparisons.")
    return sentences


def _best_of_each(experiment: pd.DataFrame) -> list[str]:
    """Which of several arms with one optimizer is the best, and how the best ones compare.

    The validation loss at the end of training chooses, so that the test loss of what is chosen is
    a fair estimate. An arm of which a run is missing, as one that diverged, is not chosen.
    """
    arms = experiment.groupby(["optimizer", "setup"], sort=False).valid_loss.agg(["count", "mean"])
    complete = arms[arms["count"] == max(1, arms["count"].max())]
    tried = complete.groupby("optimizer", sort=False)["mean"]
    if not (tried.size() > 1).any():
        return []
    best = {name: experiment[experiment.setup == setup] for name, setup in tried.idxmin()}
    chosen = "; ".join(
        f"of {number} with {name}, {best[name].label.iloc[0]} ({loss:.3f})"
        for name, number, loss in zip(best, tried.size(), tried.min())
    )
    sentences = [f"The arms with the lowest validation loss are: {chosen}."]
    if "adamw" in best:
        sentences += [_loss(best["adamw"], arm) for name, arm in best.items() if name != "adamw"]
    return sentences


def _bytes(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


# What a single run shows: the words, the column, and the text of its number. There is no time in
# it: runs that are made one after the other meet different loads of the machine.
_FACTS = (
    ("a test loss of {}", "test_loss", "{:.3f}".format),
    ("a mean embedding of relative norm {}", "mean_norm_ratio", "{:.2g}".format),
    ("{} of optimizer state for the embeddings", "embedding_state_bytes", _bytes),
)


def _one_seed(runs: pd.DataFrame) -> list[str]:
    """The results of each arm, the baseline first, and the command for more seeds."""
    # A fact that one of the runs lacks cannot be compared, and is left out for all of them.
    facts = [fact for fact in _FACTS if runs[fact[1]].notna().all()]
    if not facts:
        return []
    texts = [[text(number) for number in runs[column]] for _, column, text in facts]
    first = ", ".join(words.format(text[0]) for (words, *_), text in zip(facts, texts))
    names = [label.replace(", ", " (", 1) + ")" * (", " in label) for label in runs.label]
    others = [f"{name}: {', '.join(row)}" for name, *row in zip(names, *texts)][1:]
    folder, command = runs.run.iloc[0].folder.parent, " --seeds 3 --resume"
    if (folder / COMPARISON).exists():
        command = f"\ncoupled-adam compare --seeds 3 --out {shlex.quote(str(folder))} --resume"
    return [
        f"With one seed, {'; '.join([f'{names[0]} has {first}', *others])}.",
        f"One seed cannot tell whether a loss is lower; three can:{command}",
    ]


def _pairs(
    baseline: pd.DataFrame, arm: pd.DataFrame, measure: Measure
) -> tuple[float, float, Paired | None] | None:
    """The means of arm and baseline over their common seeds, and the test; None without any."""
    values, baseline_values = by_seed(arm, measure), by_seed(baseline, measure)
    pairs = pd.DataFrame({"arm": values, "baseline": baseline_values}).dropna()
    if pairs.empty:
        return None
    return pairs.arm.mean(), pairs.baseline.mean(), paired_t_test(values, baseline_values)


def _loss(baseline: pd.DataFrame, arm: pd.DataFrame) -> str:
    """The sentence about an arm's test loss."""
    name, reference = arm.label.iloc[0], baseline.label.iloc[0]
    pairs = _pairs(baseline, arm, TEST_LOSS)
    if pairs is None:
        return f"{name} and {reference} have no finished seed in common, and cannot be compared."
    mean, baseline_mean, test = pairs
    if test is None:
        return (
            f"{name} and {reference} have one finished seed in common, with which no test is "
            f"possible: the test loss is {mean:.3f} and {baseline_mean:.3f}."
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


def _geometry(baseline: pd.DataFrame, arm: pd.DataFrame) -> list[str]:
    """A sentence with the most important measures of the embeddings, if they were measured."""
    clauses = []
    for name, measure in _GEOMETRY.items():
        pairs = _pairs(baseline, arm, measure)
        if pairs is not None:
            mean, baseline_mean, test = pairs
            clause = f"{name} is {mean:.2g} against {baseline_mean:.2g}"
            clauses.append(clause + (f" ({shown_p(test.p)})" if test else ""))
    return [f"With {arm.label.iloc[0]}, {' and '.join(clauses)}."] if clauses else []


def _overview(baseline: pd.DataFrame, rivals: Sequence[pd.DataFrame]) -> str:
    """One sentence about the test losses of many arms."""
    arms_by_verdict: dict[str, list[str]] = {}
    for arm in rivals:
        test = paired_t_test(by_seed(arm, TEST_LOSS), by_seed(baseline, TEST_LOSS))
        verdict, label = "no test possible with fewer than two seeds", arm.label.iloc[0]
        if test is not None:
            alike = f"cannot be told apart (p ≥ {SIGNIFICANCE})"
            verdict = test.direction if test.significant else alike
            label += f" ({shown_p(test.p)})"
        arms_by_verdict.setdefault(verdict, []).append(label)
    listed = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in arms_by_verdict.items())
    return (
        f"Test losses of {len(rivals)} arms against {baseline.label.iloc[0]} (paired t-tests over "
        f"the seeds in common, not corrected for {len(rivals)} comparisons): {listed}."
    )
