"""Plots of finished runs; each function draws one picture into matplotlib axes."""

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from coupled_adam.embeddings import pictures, row_norms
from coupled_adam.embeddings.measures import Measure
from coupled_adam.lab.arms import ARMS
from coupled_adam.lab.reporting.frame import COLUMNS, TEST_LOSS, groups
from coupled_adam.lab.reporting.statistics import second_moment_fit
from coupled_adam.lab.run import Run
from coupled_adam.rendering.pictures import (
    ADAMW_COLOR,
    COLORS,
    COUPLED_ADAM_COLOR,
    plot_means,
    scatter,
)
from coupled_adam.rendering.tables import short


def optimizer_color(optimizer: str) -> str:
    """The color of an optimizer in all reports, by its place among all that there are."""
    return COLORS[[*ARMS].index(optimizer) % len(COLORS)]


def arm_colors(frame: pd.DataFrame) -> dict[str, str]:
    """A color for each arm: its optimizer's, darker for each further arm with that optimizer."""
    colors: dict[str, str] = {}
    for optimizer, arms in frame.groupby("optimizer", sort=False).arm_name:
        names = arms.unique()
        color = np.array(matplotlib.colors.to_rgb(optimizer_color(str(optimizer))))
        for name, darkness in zip(names, np.linspace(0, 0.6, len(names))):
            colors[name] = matplotlib.colors.to_hex((1 - darkness) * color)
    return colors


def plot_loss(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Plot the validation loss, and in the background the training loss, against tokens."""
    for run in runs:
        color = colors[run.arm_name]
        ax.plot(*run.curve("train_loss"), color=color, alpha=0.2, linewidth=0.8)
        ax.plot(*run.curve("valid_loss"), color=color, label=_label(run, runs), linewidth=1.2)
    # The training losses begin far above the part worth seeing.
    held_out = [loss for run in runs for loss in run.curve("valid_loss")[1]]
    if held_out:
        ax.set_ylim(top=1.02 * max(held_out))
    ax.set(title="Loss (held-out; faint: training)", xlabel="tokens", ylabel="nats per token")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def plot_drift(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Plot the norm of the mean embedding, relative to the mean norm, against tokens."""
    for run in runs:
        drift = run.curve("mean_norm_ratio")
        ax.plot(*drift, color=colors[run.arm_name], label=_label(run, runs))
    ylabel = "‖μ‖ʳ = ‖μ‖ / mean ‖eᵢ‖"
    ax.set(title="Drift of the mean embedding", xlabel="tokens", ylabel=ylabel)
    # From 0, where the mean of LEAN and Coupled Adam stays.
    ax.set_ylim(0)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def plot_projection(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Plot embeddings in the plane of their mean and of the largest variance orthogonal to it."""
    for run in runs:
        pictures.plot_cloud(ax, run.embeddings(), colors[run.arm_name], _label(run, runs))
    pictures.finish_clouds(ax)


def plot_frequency(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Plot the norms of the embeddings against the tokens' frequencies in the training text."""
    for run in runs:
        norms, p = row_norms(run.embeddings()), run.probabilities()
        pictures.plot_norms(ax, norms, p, colors[run.arm_name], _label(run, runs))


def plot_spectra(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Plot the singular values relative to the largest one."""
    for run in runs:
        singular_values = np.array(run.evaluation["embeddings"]["singular_values"])
        pictures.plot_spectrum(ax, singular_values, colors[run.arm_name], run.label)


def plot_second_moment(ax: Axes, run: Run) -> None:
    """Plot AdamW's second moment of each token against the token's unigram probability."""
    # The last evaluation, whose moments have seen most of the text.
    moments = run.second_moments()
    moment, probability = moments[max(moments)], run.probabilities()
    seen = (probability > 0) & (moment > 0)
    p, v = probability[seen], moment[seen]
    scatter(ax, p, v, ADAMW_COLOR, "tokens")
    # The least-squares fit, of which the paper gives R², follows the few most frequent tokens, and
    # lies above nearly all points of these axes; the other follows most of them.
    fit = second_moment_fit(probability, moment)
    line = np.array([p.min(), p.max()])
    least = f"A p̃, A = {fit.A:.2g}, least squares, R² = {fit.r_squared:.2f}"
    ax.plot(line, fit.A * line, color="black", linestyle="--", label=least)
    logarithms = f"A p̃, A = {fit.A_of_logarithms:.2g}, fitted to the logarithms"
    ax.plot(line, fit.A_of_logarithms * line, color="black", label=logarithms)
    ax.set(title="AdamW's second moment follows frequency", xscale="log", yscale="log")
    ax.set(xlabel="unigram probability p̃", ylabel="E[v̂]")


def plot_fitted_a(ax: Axes, frame: pd.DataFrame) -> None:
    """Plot the fitted A at each evaluation, for each number of parameters."""
    sizes = sorted(frame.parameters.unique())
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(sizes)))
    for size, color in zip(sizes, scale):
        # One entry in the legend for all runs of a size.
        label: str | None = f"N = {short(size)}"
        for run in frame.run[frame.parameters == size]:
            probability = run.probabilities()
            fits = {
                tokens: second_moment_fit(probability, moment).A
                for tokens, moment in run.second_moments().items()
            }
            ax.plot([*fits], [*fits.values()], color=color, label=label)
            label = None
    ax.set(title="Fit of E[v̂] = A p̃", xlabel="tokens seen D'", ylabel="A", yscale="log")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def plot_sweep(ax: Axes, swept: pd.DataFrame, experiment: pd.DataFrame, xlabel: str) -> None:
    """Plot the test loss, as mean and range over seeds, against the swept option, and AdamW's."""
    # A value without a loss that can be compared has no point.
    losses = _values_by(swept, "x", TEST_LOSS)
    color = optimizer_color(swept.optimizer.iloc[0])
    plot_means(ax, losses, marker="o", color=color, label="swept")
    for arm, style in (("adamw", "--"), ("coupled_adam", ":")):
        runs, color = experiment[experiment.arm_name == arm], optimizer_color(arm)
        if runs.test_loss.notna().any() and arm not in {*swept.arm_name}:
            mean, label = runs.test_loss.mean(), runs.label.iloc[0]
            ax.axhline(mean, color=color, linestyle=style, label=label)
    ax.set(title="Test loss", xlabel=xlabel, ylabel="nats per token")


def _values_by(frame: pd.DataFrame, column: str, measure: Measure) -> dict[float, list[float]]:
    """The values of a measure that were measured and can be compared, by those of a column."""
    values: dict[float, list[float]] = (
        frame.dropna(subset=measure.key).groupby(column)[measure.key].apply(list).to_dict()
    )
    return values


def plot_sweep_measures(ax: Axes, swept: pd.DataFrame, xlabel: str) -> None:
    """Plot isotropy, relative mean norm and correlation with frequency against the swept option."""
    for key, color in (
        ("isotropy", "#009e73"),
        ("mean_norm_ratio", "#cc79a7"),
        ("norm_frequency_correlation", "#e69f00"),
    ):
        means = swept.groupby("x")[key].mean().dropna()
        ax.plot(means.index, means, marker="o", color=color, label=COLUMNS[key].symbol)
    ax.set(title="Measures of the embeddings", xlabel=xlabel)


def plot_against_tokens(ax: Axes, frame: pd.DataFrame, measure: Measure) -> None:
    """Plot a result against D for each N and optimizer, as mean and range over seeds."""
    for marker, same_size in zip(itertools.cycle("osD^vP*"), groups(frame, "parameters")):
        # A line for each size and optimizer, of which each D may have several seeds.
        for line in groups(same_size, "optimizer"):
            points = _values_by(line, "tokens", measure)
            if points:
                row = line.iloc[0]
                label = f"{row.arm.name}, N = {short(row.parameters)}"
                color = optimizer_color(row.optimizer)
                plot_means(ax, points, marker=marker, color=color, label=label)
    title = measure.label.capitalize()
    ax.set(title=title, xlabel="D (tokens)", ylabel=measure.label, xscale="log")


def plot_map(ax: Axes, frame: pd.DataFrame) -> None:
    """Plot each experiment at its number of tokens and of parameters."""
    # The line reaches beyond the experiments, so that a single one has some, too.
    sizes = frame[["tokens", "parameters"]].drop_duplicates()
    line = np.array([sizes.tokens.min() / 2, sizes.tokens.max() * 2])
    ax.plot(line, line / 20, color="grey", linestyle="--", label="N = D / 20")
    ax.plot(sizes.tokens, sizes.parameters, "o", color=COUPLED_ADAM_COLOR, label="experiments")
    ax.set(title="The experiments", xlabel="D (tokens)", ylabel="N (parameters)")
    ax.set(xscale="log", yscale="log")


def _label(run: Run, runs: Sequence[Run]) -> str | None:
    """The arm's label for the arm's first run, and None for others: once in a legend."""
    return run.label if run is next(r for r in runs if r.arm_name == run.arm_name) else None
