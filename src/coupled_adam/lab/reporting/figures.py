"""The choice of a report's pictures: all those for which its runs have the data."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.lab.reporting import plots
from coupled_adam.lab.reporting.frame import ACCURACY, TEST_LOSS, baseline_of, groups
from coupled_adam.rendering.pictures import Picture, single

Draw = tuple[Callable[[Axes], None], str]
"""A function that draws a picture into axes, and the picture's caption."""


def draw_all(frame: pd.DataFrame) -> list[Picture]:
    """Draw every picture for which the runs have the data, those of single experiments first."""
    pictures = []
    experiments = groups(frame, "experiment")
    for experiment in experiments:
        name = experiment.experiment.iloc[0]
        figure, captions = _overview(experiment)
        file = "overview.png" if len(experiments) == 1 else f"figures/{name}/overview.png"
        pictures.append(Picture(figure, f"{name}. {captions}", file))
        for file, (draw, caption) in _details(experiment).items():
            pictures.append(single(draw, f"{name}. {caption}", f"figures/{name}/{file}.png"))
    across = _across(frame).items()
    return [*pictures, *(single(*draw, f"figures/{file}.png") for file, draw in across)]


def _first_seeds(experiment: pd.DataFrame) -> pd.DataFrame:
    """The run with the lowest seed of each arm, for the pictures that show single models."""
    return experiment[experiment.seed == experiment.groupby("arm").seed.transform("min")]


def _overview(experiment: pd.DataFrame) -> tuple[Figure, str]:
    """The four most informative pictures of an experiment as one figure, and its caption."""
    colors = plots.arm_colors(experiment.arm)
    # Three clouds in one picture are as many as can be told apart.
    first = _first_seeds(experiment)
    main = first[first.arm.isin(["adamw", "coupled_adam", "lean"])]
    models = [run for run in (first[:2] if main.empty else main).run if run.has_model]
    runs = [*experiment.run]
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


def _details(experiment: pd.DataFrame) -> dict[str, Draw]:
    """The other pictures of an experiment, by file name."""
    runs, colors = [*experiment.run], plots.arm_colors(experiment.arm)
    spectra = [run for run in _first_seeds(experiment).run if run.spectrum]
    baseline = baseline_of(groups(experiment, "setup"))
    with_moments = [] if baseline is None else [r for r in baseline.run if r.second_moments()]
    pictures: dict[str, Draw] = {
        "mean_norm_absolute": (
            partial(plots.plot_drift, runs=runs, colors=colors, metric="mean_norm"),
            "Norm of the mean embedding over training.",
        ),
    }
    if spectra:
        pictures["spectrum"] = (
            partial(plots.plot_spectra, runs=spectra, colors=colors),
            "Singular values of the output embeddings, relative to the largest.",
        )
    # Of one run, since the points of several would hide each other.
    if with_moments:
        pictures["second_moment"] = (
            partial(plots.plot_second_moment, run=with_moments[0]),
            "AdamW's second moment of each token's row, averaged over H, against the token's "
            "unigram probability, with the fit E[v̂] = A p̃ (as Fig. 4 of arXiv 2502.08441).",
        )
    for file, optimizer, option, xlabel, title in (
        (
            "scale",
            "coupled_adam",
            "second_moment_scale",
            "n (ν is scaled by 2⁻ⁿ)",
            "Scaled Coupled Adam (Sec. 6.1)",
        ),
        ("sgd", "sgd", "lr_factor", "factor f", "SGD for the embeddings (Table 7)"),
    ):
        swept = _swept(experiment, optimizer, option)
        if swept.x.nunique() > 1:
            pictures[file] = (
                partial(plots.plot_sweep, swept=swept, experiment=experiment, xlabel=xlabel),
                f"{title}: loss against the {xlabel}.",
            )
            pictures[f"{file}_measures"] = (
                partial(plots.plot_sweep_measures, swept=swept, xlabel=xlabel),
                f"{title}: the measures against the {xlabel}.",
            )
    return pictures


def _across(frame: pd.DataFrame) -> dict[str, Draw]:
    """The pictures that compare experiments, by file name."""
    pictures: dict[str, Draw] = {}
    # The two arms that all experiments have; more lines could not be told apart.
    pairs = frame[frame.arm.isin(["adamw", "coupled_adam"])]
    if pairs.tokens.nunique() > 1:
        pictures["loss_against_tokens"] = (
            partial(plots.plot_against_tokens, frame=pairs, measure=TEST_LOSS),
            "Test loss against the tokens trained on, for each number of parameters (App. G).",
        )
        if pairs.accuracy.notna().any():
            pictures["accuracy_against_tokens"] = (
                partial(plots.plot_against_tokens, frame=pairs, measure=ACCURACY),
                "Mean accuracy of the downstream tasks against the tokens trained on (App. G).",
            )
    baselines = frame[frame.is_baseline]
    with_moments = baselines[[len(run.second_moments()) > 1 for run in baselines.run]]
    if len(with_moments):
        pictures["second_moment_fit"] = (
            partial(plots.plot_fitted_a, frame=with_moments),
            "The fitted A of E[v̂] = A p̃ against the tokens seen (as Fig. 5).",
        )
    if len(frame[["tokens", "parameters"]].drop_duplicates()) > 1:
        pictures["map"] = (
            partial(plots.plot_map, frame=frame),
            "The experiments: parameters against tokens, and the compute-optimal N = D / 20 "
            "(as Fig. 6).",
        )
    return pictures


def _swept(experiment: pd.DataFrame, optimizer: str, option: str) -> pd.DataFrame:
    """The runs that differ in one option of an optimizer alone, by its value in a column ``x``.

    Unscaled Coupled Adam has scale 1; of a scale, ``x`` is the binary logarithm, negated. Runs
    that also differ in another option are separate sweeps, of which the one with the most values
    is returned.
    """
    runs = experiment[experiment.optimizer == optimizer]
    values = [float(run.options.get(option, 1.0)) for run in runs.run]
    runs = runs.assign(
        x=-np.log2(values) if option == "second_moment_scale" else np.array(values),
        others=[repr(sorted({**run.options, option: 1.0}.items())) for run in runs.run],
    )
    sweeps = groups(runs, "others")
    return max(sweeps, key=lambda sweep: sweep.x.nunique(), default=runs).sort_values("x")
