"""The choice of a report's pictures: all those for which its runs have the data."""

import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.lab.reporting import plots
from coupled_adam.lab.reporting.experiments import Experiment, experiments
from coupled_adam.lab.reporting.finished_run import ACCURACY, TEST_LOSS, Run
from coupled_adam.rendering.pictures import Picture, single

Draw = tuple[Callable[[Axes], None], str]
"""A function that draws a picture into axes, and the picture's caption."""


def draw_all(runs: Sequence[Run]) -> list[Picture]:
    """Draw every picture for which the runs have the data, those of single experiments first."""
    pictures = []
    drawn = experiments(runs)
    for number, experiment in enumerate(drawn, 1):
        title, name = experiment.name, experiment.runs[0].recipe.name
        # The recipe's name is one for a folder; a title may have any characters.
        folder = f"figures/{name}" if title == name else f"figures/{name}~{number}"
        figure, captions = _overview(experiment.runs)
        file = "overview.png" if len(drawn) == 1 else f"{folder}/overview.png"
        pictures.append(Picture(figure, f"{title}. {captions}", file))
        for file, (draw, caption) in _details(experiment).items():
            pictures.append(single(draw, f"{title}. {caption}", f"{folder}/{file}.png"))
    return [*pictures, *_across(runs)]


def _first_seeds(runs: Sequence[Run]) -> list[Run]:
    """The run with the lowest seed of each arm, for the pictures that show single models."""
    return [run for run in runs if run.seed == min(r.seed for r in runs if r.arm == run.arm)]


def _overview(runs: Sequence[Run]) -> tuple[Figure, str]:
    """The four most informative pictures of an experiment as one figure, and its caption."""
    # Three clouds in one picture are as many as can be told apart.
    colors = plots.arm_colors(run.arm for run in runs)
    first = _first_seeds(runs)
    models = [run for run in first if run.arm in ("adamw", "coupled_adam", "lean")] or first[:2]
    models = [run for run in models if run.has_model]
    draws: list[Draw] = [
        (
            partial(plots.plot_loss, runs=runs, colors=colors),
            "Loss against tokens: held-out, and faint behind it on the training text.",
        ),
        (
            partial(plots.plot_drift, runs=runs, colors=colors),
            "Drift of the mean embedding: its norm relative to the mean norm, over training.",
        ),
        (
            partial(plots.plot_projection, runs=models, colors=colors),
            "The embeddings seen from the side: along their mean, and along their largest "
            "spread across it. X: the mean; +: the origin.",
        ),
        (
            partial(plots.plot_frequency, runs=models, colors=colors),
            "Norms of the embeddings against how often their tokens occur in the training text.",
        ),
    ]
    # Without models, only what the logs hold.
    drawn = draws[: 4 if models else 2]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    for (draw, _), ax in zip(drawn, figure.subplots(len(drawn) // 2, 2).flat, strict=True):
        draw(ax)
    return figure, " ".join(caption for _, caption in drawn)


def _details(experiment: Experiment) -> dict[str, Draw]:
    """The other pictures of an experiment, by file name."""
    runs = experiment.runs
    colors = plots.arm_colors(run.arm for run in runs)
    pictures: dict[str, Draw] = {
        "mean_norm_absolute": (
            partial(plots.plot_drift, runs=runs, colors=colors, metric="mean_norm"),
            "Norm of the mean embedding over training.",
        ),
    }
    spectra = [run for run in _first_seeds(runs) if run.spectrum]
    if spectra:
        pictures["spectrum"] = (
            partial(plots.plot_spectra, runs=spectra, colors=colors),
            "Singular values of the output embeddings, relative to the largest.",
        )
    # Of AdamW alone, and of one run, since the points of several would hide each other.
    with_moments = [run for run in experiment.baseline or () if run.second_moments()]
    if with_moments:
        pictures["second_moment"] = (
            partial(plots.plot_second_moment, run=min(with_moments, key=lambda run: run.seed)),
            "AdamW's second moment of each token's row, averaged over H, against the token's "
            "unigram probability, with the fit E[v̂] = A p̃ (as Fig. 4 of arXiv 2502.08441).",
        )
    scaled = _sweep(runs, "coupled_adam", "second_moment_scale", lambda scale: -np.log2(scale))
    factors = _sweep(runs, "sgd", "lr_factor", float)
    for file, sweep, xlabel, title in (
        ("scale", scaled, "n (ν is scaled by 2⁻ⁿ)", "Scaled Coupled Adam (Sec. 6.1)"),
        ("sgd", factors, "factor f", "SGD for the embeddings (Table 7)"),
    ):
        if len(sweep) > 1:
            pictures[file] = (
                partial(plots.plot_sweep, sweep=sweep, runs=runs, xlabel=xlabel),
                f"{title}: loss against the {xlabel}.",
            )
            pictures[f"{file}_measures"] = (
                partial(plots.plot_sweep_measures, sweep=sweep, xlabel=xlabel),
                f"{title}: the measures against the {xlabel}.",
            )
    return pictures


def _across(runs: Sequence[Run]) -> list[Picture]:
    """The pictures that compare experiments."""
    pictures: dict[str, Draw] = {}
    # The two arms that all experiments have; more lines could not be told apart.
    pairs = [run for run in runs if run.arm in ("adamw", "coupled_adam")]
    if len({run.recipe.tokens for run in pairs}) > 1:
        pictures["loss_against_tokens"] = (
            partial(plots.plot_against_tokens, runs=pairs, measure=TEST_LOSS),
            "Test loss against the tokens trained on, for each number of parameters (App. G).",
        )
        if any(run.value(ACCURACY) is not None for run in pairs):
            pictures["accuracy_against_tokens"] = (
                partial(plots.plot_against_tokens, runs=pairs, measure=ACCURACY),
                "Mean accuracy of the downstream tasks against the tokens trained on (App. G).",
            )
    baselines = [run for experiment in experiments(runs) for run in experiment.baseline or ()]
    with_moments = [run for run in baselines if len(run.second_moments()) > 1]
    if with_moments:
        pictures["second_moment_fit"] = (
            partial(plots.plot_fitted_a, runs=with_moments),
            "The fitted A of E[v̂] = A p̃ against the tokens seen (as Fig. 5).",
        )
    if len({run.size for run in runs}) > 1:
        pictures["map"] = (
            partial(plots.plot_map, runs=runs),
            "The experiments: parameters against tokens, and the compute-optimal N = D / 20 "
            "(as Fig. 6).",
        )
    return [single(*draw, f"figures/{file}.png") for file, draw in pictures.items()]


def _sweep(
    runs: Sequence[Run], optimizer: str, option: str, number: Callable[[float], float]
) -> dict[float, list[Run]]:
    """Runs by the value of the option that is swept, in order; unscaled Coupled Adam has scale 1.

    Runs that also differ in another option form separate sweeps; the sweep with the most values is
    returned.
    """
    sweeps: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        options = dict(run.options)
        if options.pop("optimizer") == optimizer:
            value = number(float(options.pop(option, 1.0)))
            sweep = sweeps.setdefault(json.dumps(options, sort_keys=True), {})
            sweep.setdefault(value, []).append(run)
    return dict(sorted(max(sweeps.values(), key=len, default={}).items()))
