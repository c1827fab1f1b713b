"""The choice of a report's pictures: all those for which its runs have the data."""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.lab.reporting import plots
from coupled_adam.lab.reporting.frame import ACCURACY, TEST_LOSS, best_of_each, groups
from coupled_adam.rendering.pictures import Picture, legend, single

Draw = tuple[Callable[[Axes], None], str]
"""A function that draws a picture into axes, and the picture's caption."""


def draw_all(frame: pd.DataFrame) -> list[Picture]:
    """Draw every picture for which the runs have the data, those of single experiments first."""
    pictures = []
    for experiment in groups(frame, "experiment"):
        name = experiment.experiment.iloc[0]
        for file, (draw, caption) in {**_main(experiment), **_details(experiment)}.items():
            pictures.append(single(draw, f"{name}. {caption}", f"figures/{name}/{file}"))
    across = _across(frame).items()
    return [*pictures, *(single(*draw, f"figures/{file}") for file, draw in across)]


def overview(frame: pd.DataFrame) -> Picture:
    """The most informative pictures of the first experiment as one figure."""
    draws = _main(groups(frame, "experiment")[0]).values()
    figure = Figure(figsize=(11, 4.5 * len(draws) // 2), layout="constrained")
    for (draw, _), ax in zip(draws, figure.subplots(len(draws) // 2, 2).flat, strict=True):
        draw(ax)
    legend(figure)
    return Picture(figure, " ".join(caption for _, caption in draws), "overview")


def _first_seeds(experiment: pd.DataFrame) -> pd.DataFrame:
    """The run with the lowest seed of each arm, for the pictures that show single models."""
    return experiment[experiment.seed == experiment.groupby("arm_name").seed.transform("min")]


def _main(experiment: pd.DataFrame) -> dict[str, Draw]:
    """The two or four most informative pictures of an experiment, by file name."""
    colors = plots.arm_colors(experiment)
    # A model for each family, as more clouds could not be told apart: its arm with the lowest
    # validation loss.
    first = _first_seeds(experiment).sort_values("valid_loss", kind="stable")
    best = first.drop_duplicates("family").sort_index()
    models = [run for run in best.run if run.has_model]
    pictures: dict[str, Draw] = {
        "loss": (
            partial(plots.plot_loss, runs=[*experiment.run], colors=colors),
            "Loss against tokens: held-out, and faint behind it on the training text.",
        ),
        "drift": (
            partial(plots.plot_drift, runs=[*experiment.run], colors=colors),
            "Drift of the mean embedding: its norm relative to the mean norm, over training.",
        ),
    }
    if models:  # otherwise only what the logs hold
        pictures["cloud"] = (
            partial(plots.plot_projection, runs=models, colors=colors),
            "The embeddings seen from the side: along their mean, and along their largest spread "
            "across it. X: the mean; +: the origin.",
        )
        pictures["norms"] = (
            partial(plots.plot_frequency, runs=models, colors=colors),
            "Norms of the embeddings against how often their tokens occur in the training text.",
        )
    return pictures


def _details(experiment: pd.DataFrame) -> dict[str, Draw]:
    """The other pictures of an experiment, by file name."""
    colors = plots.arm_colors(experiment)
    pictures: dict[str, Draw] = {}
    measured = [run.evaluation.get("embeddings") or {} for run in _first_seeds(experiment).run]
    if all("singular_values" in measures for measures in measured):
        pictures["spectrum"] = (
            partial(plots.plot_spectra, runs=[*_first_seeds(experiment).run], colors=colors),
            "Singular values of the output embeddings, relative to the largest.",
        )
    # Of one run, since the points of several would hide each other.
    with_moments = [run for run in experiment.run[experiment.is_baseline] if run.second_moments()]
    if with_moments:
        pictures["second_moment"] = (
            partial(plots.plot_second_moment, run=with_moments[0]),
            "AdamW's second moment of each token's row, averaged over H, against the token's "
            "unigram probability p̃, and two fits of A p̃: to the numbers, of which the paper gives "
            "R², and to their logarithms (after Fig. 4 of arXiv 2502.08441).",
        )
    # The two sweeps of the paper, if more than one value has been tried.
    scaled, sgd = "Scaled Coupled Adam (Sec. 6.1)", "SGD for the embeddings (Table 7)"
    for file, optimizer, option, xlabel, title in (
        ("scale", "coupled_adam", "second_moment_scale", "n (ν is scaled by 2⁻ⁿ)", scaled),
        ("sgd", "sgd", "lr_factor", "factor f", sgd),
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


def _swept(experiment: pd.DataFrame, optimizer: str, option: str) -> pd.DataFrame:
    """The runs of an optimizer with no other option, by the option's value in a column ``x``.

    Unscaled Coupled Adam has scale 1; of a scale, ``x`` is the binary logarithm, negated.
    """
    runs = experiment[experiment.optimizer == optimizer]
    alone = runs.arm.map(lambda arm: arm.options.keys() <= {option})
    runs = runs[alone.astype(bool)]  # map() of no runs has no booleans
    values = np.array([getattr(arm, option) for arm in runs.arm], float)
    x = -np.log2(values) if option == "second_moment_scale" else values
    return runs.assign(x=x).sort_values("x")


def _best_arms(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of one arm for each experiment and optimizer, as more lines cannot be told apart."""
    compared = frame[frame.optimizer.isin(["adamw", "coupled_adam", "lean"])]
    chosen = (
        arm.index
        for experiment in groups(compared, "experiment")
        for arm in best_of_each(experiment, "optimizer")
    )
    return compared.loc[[*itertools.chain(*chosen)]]


def _across(frame: pd.DataFrame) -> dict[str, Draw]:
    """The pictures that compare experiments, by file name."""
    pictures: dict[str, Draw] = {}
    best = _best_arms(frame)
    for name, measure in (("loss", TEST_LOSS), ("accuracy", ACCURACY)):
        if best.tokens.nunique() > 1 and best[measure.key].notna().any():
            pictures[f"{name}_against_tokens"] = (
                partial(plots.plot_against_tokens, frame=best, measure=measure),
                f"The {measure.label} against the tokens trained on, for each number of "
                "parameters (App. G). Of several arms with one optimizer, the one with the lowest "
                "validation loss.",
            )
    baselines = frame[frame.is_baseline]
    # loc, as without a baseline the list is empty, which would choose among the columns.
    with_moments = baselines.loc[[len(run.second_moments()) > 1 for run in baselines.run]]
    # As the paper's, which compares models of several sizes.
    if with_moments.parameters.nunique() > 1:
        pictures["second_moment_fit"] = (
            partial(plots.plot_fitted_a, frame=with_moments),
            "The A of the least-squares fit E[v̂] = A p̃ against the tokens seen (as Fig. 5).",
        )
    if len(frame[["tokens", "parameters"]].drop_duplicates()) > 1:
        pictures["map"] = (
            partial(plots.plot_map, frame=frame),
            "The experiments: parameters against tokens, and the compute-optimal N = D / 20 "
            "(as Fig. 6).",
        )
    return pictures
