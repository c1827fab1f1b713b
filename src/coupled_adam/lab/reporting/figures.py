"""The pictures of a report, from finished runs."""

import dataclasses
import functools
import io
import json
import math
from collections.abc import Callable, Sequence
from functools import partial

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from coupled_adam import CoupledAdam
from coupled_adam.embeddings import pictures, row_norms
from coupled_adam.lab.reporting.runs import Run, short

Array = NDArray[np.float64]
TOY_EMBEDDINGS = ((-0.5, 0.9), (1.4, -0.3), (-0.1, -0.7))


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure, where it is saved below the report, and its caption."""

    figure: Figure
    file: str
    caption: str

    @functools.cached_property
    def png(self) -> bytes:
        """The image, drawn once."""
        image = io.BytesIO()
        self.figure.savefig(image, dpi=130, format="png")
        return image.getvalue()


def draw_all(runs: Sequence[Run]) -> list[Picture]:
    """Every picture for which the runs have the data; those of single experiments come first."""
    drawn = []
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    for number, experiment in enumerate(experiments, 1):
        mine = [run for run in runs if run.experiment == experiment]
        name = mine[0].recipe.name  # which is fit for a folder, and has no ~
        folder = f"figures/{name}" if experiment == name else f"figures/{name}~{number}"
        colors = arm_colors(mine)
        # Pictures of single models show the first seed; curves show all.
        first = [run for run in mine if run.seed == min(r.seed for r in mine if r.arm == run.arm)]
        pair = [run for run in first if run.arm in ("adamw", "coupled_adam")] or first[:2]
        pair = [run for run in pair if run.has_model]
        draws: dict[str, tuple[Callable[[Axes], None], str]] = {
            "loss": (
                partial(plot_loss, runs=mine, colors=colors),
                "Loss against tokens: held-out, and faint behind it on the training text.",
            ),
            "mean_norm": (
                partial(plot_drift, runs=mine, colors=colors),
                "Drift of the mean embedding: its norm relative to the mean norm, over training.",
            ),
            "projection": (
                partial(plot_projection, runs=pair, colors=colors),
                "The embeddings seen from the side: along their mean, and along their largest "
                "spread across it. X: the mean; +: the origin.",
            ),
            "frequency": (
                partial(plot_frequency, runs=pair, colors=colors),
                "Norms of the embeddings against how often their tokens occur in the training "
                "text.",
            ),
        }
        overview = Figure(figsize=(11, 8.5), layout="constrained")
        shown = list(draws.values())[: 4 if pair else 2]
        for (draw, _), ax in zip(shown, overview.subplots(len(shown) // 2, 2).flat, strict=True):
            draw(ax)
        file = "overview.png" if len(experiments) == 1 else f"{folder}/overview.png"
        captions = " ".join(caption for _, caption in shown)
        drawn.append(Picture(overview, file, f"{experiment}. {captions}"))
        more: dict[str, tuple[Callable[[Axes], None], str]] = {
            "mean_norm_absolute": (
                partial(plot_drift, runs=mine, colors=colors, metric="mean_norm"),
                "Norm of the mean embedding over training.",
            ),
        }
        spectra = [run for run in first if run.value(("embeddings", "singular_values"))]
        if spectra:
            more["spectrum"] = (
                partial(plot_spectra, runs=spectra, colors=colors),
                "Singular values of the output embeddings, relative to the largest.",
            )
        baseline = [run for run in first if run.is_baseline and run.second_moments()]
        if baseline:
            more["second_moment"] = (
                partial(plot_second_moment, run=baseline[0]),
                "AdamW's second moment of each token's row, averaged over H, against the token's "
                "unigram probability, with the fit E[v̂] = A p̃ (as Fig. 4 of arXiv 2502.08441).",
            )
        scaled = _sweep(mine, "coupled_adam", "second_moment_scale", lambda s: -np.log2(s))
        if len(scaled) > 1:
            more["scale"] = (
                partial(plot_sweep, sweep=scaled, runs=mine, xlabel="n (ν is scaled by 2⁻ⁿ)"),
                "Scaled Coupled Adam: loss against n (Sec. 6.1).",
            )
            more["scale_measures"] = (
                partial(plot_sweep_measures, sweep=scaled, xlabel="n (ν is scaled by 2⁻ⁿ)"),
                "Scaled Coupled Adam: the measures against n.",
            )
        factors = _sweep(mine, "sgd", "lr_factor", float)
        if len(factors) > 1:
            more["sgd"] = (
                partial(plot_sweep, sweep=factors, runs=mine, xlabel="factor f"),
                "SGD for the embeddings: loss against the factor on the learning rate (Table 7).",
            )
            more["sgd_measures"] = (
                partial(plot_sweep_measures, sweep=factors, xlabel="factor f"),
                "SGD for the embeddings: the measures against the factor.",
            )
        for file, (draw, caption) in more.items():
            drawn.append(_single(draw, f"{folder}/{file}.png", f"{experiment}. {caption}"))
    return [*drawn, *_across(runs)]


def _across(runs: Sequence[Run]) -> list[Picture]:
    """The pictures that compare experiments, and the toy example."""
    drawn = []
    pairs = [run for run in runs if run.arm in ("adamw", "coupled_adam")]
    if len({run.recipe.tokens for run in pairs}) > 1:
        drawn.append(
            _single(
                partial(plot_against_tokens, runs=pairs, path=("test_loss",), ylabel="test loss"),
                "figures/loss_against_tokens.png",
                "Test loss against the tokens trained on, for each number of parameters (App. G).",
            )
        )
        if any(run.value(("lm_eval", "accuracy")) is not None for run in pairs):
            drawn.append(
                _single(
                    partial(
                        plot_against_tokens,
                        runs=pairs,
                        path=("lm_eval", "accuracy"),
                        ylabel="accuracy",
                    ),
                    "figures/accuracy_against_tokens.png",
                    "Mean accuracy of the downstream tasks against the tokens trained on (App. G).",
                )
            )
    with_moments = [run for run in runs if run.is_baseline and len(run.second_moments()) > 1]
    if with_moments:
        drawn.append(
            _single(
                partial(plot_fitted_a, runs=with_moments),
                "figures/second_moment_fit.png",
                "The fitted A of E[v̂] = A p̃ against the tokens seen (as Fig. 5).",
            )
        )
    if len({(run.parameters, run.recipe.tokens) for run in runs}) > 1:
        drawn.append(
            _single(
                partial(plot_map, runs=runs),
                "figures/map.png",
                "The experiments: parameters against tokens, and the compute-optimal N = D / 20 "
                "(as Fig. 6).",
            )
        )
    drawn.append(
        Picture(
            draw_toy_example(),
            "figures/toy_example.png",
            "The effect in small (as Fig. 1): one hidden state h, three embeddings, and the first "
            "update of each by three optimizers. Only Adam's updates do not sum to zero (red).",
        )
    )
    return drawn


def arm_colors(runs: Sequence[Run]) -> dict[str, str]:
    """The same two colours for the two main arms everywhere; the others along a scale."""
    fixed = {"adamw": "#d55e00", "coupled_adam": "#0072b2"}
    others = [arm for arm in dict.fromkeys(run.arm for run in runs) if arm not in fixed]
    scale = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.9, max(len(others), 1)))
    return fixed | {
        arm: matplotlib.colors.to_hex(color) for arm, color in zip(others, scale.tolist())
    }


def plot_loss(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Validation loss, and the training loss behind it, against tokens."""
    for run in runs:
        color = colors[run.arm]
        ax.plot(*run.curve("train_loss"), color=color, alpha=0.2, linewidth=0.8)
        ax.plot(*run.curve("valid_loss"), color=color, label=_label(run, runs), linewidth=1.2)
    # Arms that break down must not squeeze the others: all are seen where they end.
    main = [run for run in runs if run.arm in ("adamw", "coupled_adam")] or runs
    highest = [max(run.curve("valid_loss")[1], default=0) for run in main]
    ends = [loss for run in runs for loss in run.curve("valid_loss")[1][-1:]]
    if highest and ends:
        ax.set_ylim(top=1.02 * max(*highest, *ends))
    ax.set(title="Loss (held-out; faint: training)", xlabel="tokens", ylabel="nats per token")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(ax)


def plot_drift(
    ax: Axes, runs: Sequence[Run], colors: dict[str, str], metric: str = "mean_norm_ratio"
) -> None:
    """The norm of the mean embedding against tokens, relative or absolute."""
    for run in runs:
        ax.plot(*run.curve(metric), color=colors[run.arm], label=_label(run, runs))
    relative = metric == "mean_norm_ratio"
    ax.set(
        title="Drift of the mean embedding",
        xlabel="tokens",
        ylabel="‖μ‖ʳ = ‖μ‖ / mean ‖eᵢ‖" if relative else "‖μ‖",
    )
    ax.set_ylim(0)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(ax)


def plot_projection(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Each cloud in the plane of its mean and of its largest spread across the mean."""
    for run in runs:
        pictures.plot_cloud(ax, run.embeddings(), colors[run.arm], _label(run, runs))
    pictures.finish_clouds(ax)


def plot_frequency(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Norms of the embeddings against how often their tokens occur in the training text."""
    for run in runs:
        norms, label = row_norms(run.embeddings()), _label(run, runs)
        pictures.plot_norms(ax, norms, run.probabilities(), colors[run.arm], label)


def plot_spectra(ax: Axes, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """The singular values relative to the largest."""
    for run in runs:
        values = np.array(run.value(("embeddings", "singular_values")))
        pictures.plot_spectrum(ax, values, colors[run.arm], run.label)
    _legend(ax)


def fit_proportional(x: Array, y: Array) -> tuple[float, float]:
    """A and R^2 of the least-squares fit y = A x, through the origin; NaN where all y are one."""
    a = float(x @ y / (x @ x))
    residual = float(((y - a * x) ** 2).sum())
    variation = float(((y - y.mean()) ** 2).sum())
    return a, 1 - residual / variation if variation else math.nan


def plot_second_moment(ax: Axes, run: Run) -> None:
    """AdamW's second moment of each token against its unigram probability."""
    moments = run.second_moments()
    moment, probability = moments[max(moments)], run.probabilities()
    seen = probability > 0
    a, r_squared = fit_proportional(probability[seen], moment[seen])
    _scatter(ax, probability[seen], moment[seen], "#d55e00", "tokens")
    line = np.array([probability[seen].min(), probability.max()])
    ax.plot(line, a * line, color="black", label=f"A p̃, A = {a:.2g}, R² = {r_squared:.2f}")
    ax.set(
        title="AdamW's second moment follows frequency",
        xlabel="unigram probability p̃",
        ylabel="E[v̂]",
        xscale="log",
        yscale="log",
    )
    ax.legend(markerscale=3)


def plot_fitted_a(ax: Axes, runs: Sequence[Run]) -> None:
    """A of the fit at each evaluation, for each number of parameters."""
    sizes = sorted({run.parameters for run in runs})
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(sizes)))
    for run in runs:
        probability = run.probabilities()
        seen = probability > 0
        fits = {
            tokens: fit_proportional(probability[seen], moment[seen])[0]
            for tokens, moment in run.second_moments().items()
        }
        first = run is next(r for r in runs if r.parameters == run.parameters)
        ax.plot(
            list(fits),
            list(fits.values()),
            color=scale[sizes.index(run.parameters)],
            label=f"N = {short(run.parameters)}" if first else None,
        )
    ax.set(title="Fit of E[v̂] = A p̃", xlabel="tokens seen D'", ylabel="A", yscale="log")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(ax)


def plot_sweep(ax: Axes, sweep: dict[float, list[Run]], runs: Sequence[Run], xlabel: str) -> None:
    """The test loss against what is swept, mean and range over seeds, with AdamW's beside it."""
    losses = [[run.evaluation["test_loss"] for run in sweep[x]] for x in sweep]
    means = np.array([np.mean(values) for values in losses])
    ranges = np.array(
        [[m - min(v) for m, v in zip(means, losses)], [max(v) - m for m, v in zip(means, losses)]]
    )
    ax.errorbar(list(sweep), means, ranges, marker="o", capsize=3, color="#0072b2", label="swept")
    for arm, color, style in (("adamw", "#d55e00", "--"), ("coupled_adam", "#0072b2", ":")):
        values = [run.evaluation["test_loss"] for run in runs if run.arm == arm]
        if values and not any(run.arm == arm for group in sweep.values() for run in group):
            label = next(run.label for run in runs if run.arm == arm)
            ax.axhline(float(np.mean(values)), color=color, linestyle=style, label=label)
    ax.set(title="Test loss", xlabel=xlabel, ylabel="nats per token")
    _legend(ax)


def plot_sweep_measures(ax: Axes, sweep: dict[float, list[Run]], xlabel: str) -> None:
    """Isotropy, relative mean norm and the correlation with frequency against what is swept."""
    measures = {
        "isotropy": ("Iso", "#009e73"),
        "mean_norm_ratio": ("‖μ‖ʳ", "#cc79a7"),
        "norm_frequency_correlation": ("ρ", "#e69f00"),
    }
    for name, (label, color) in measures.items():
        values = [
            [v for run in sweep[x] if (v := run.value(("embeddings", name))) is not None]
            for x in sweep
        ]
        points = [(x, float(np.mean(v))) for x, v in zip(sweep, values) if v]
        ax.plot(*zip(*points), marker="o", color=color, label=label)
    ax.set(title="Measures of the embeddings", xlabel=xlabel)
    _legend(ax)


def plot_against_tokens(ax: Axes, runs: Sequence[Run], path: tuple[str, ...], ylabel: str) -> None:
    """A number against D, for each N and arm: mean over seeds, with their range."""
    markers = "osD^vP*"
    colors = arm_colors(runs)
    sizes = sorted({run.parameters for run in runs})
    for size in sizes:
        for arm in dict.fromkeys(run.arm for run in runs):
            mine = [run for run in runs if (run.parameters, run.arm) == (size, arm)]
            points: dict[int, list[float]] = {}
            for run in mine:
                value = run.value(path)
                if value is not None:
                    points.setdefault(run.recipe.tokens, []).append(value)
            if points:
                xs = sorted(points)
                means = np.array([np.mean(points[x]) for x in xs])
                low = means - [min(points[x]) for x in xs]
                high = np.array([max(points[x]) for x in xs]) - means
                ax.errorbar(
                    xs,
                    means,
                    [low, high],
                    marker=markers[sizes.index(size) % len(markers)],
                    capsize=3,
                    color=colors[arm],
                    label=f"{mine[0].label}, N = {short(size)}",
                )
    ax.set(title=ylabel.capitalize(), xlabel="D (tokens)", ylabel=ylabel, xscale="log")
    _legend(ax)


def plot_map(ax: Axes, runs: Sequence[Run]) -> None:
    """Where the experiments lie in the plane of tokens and parameters."""
    points = sorted({(run.recipe.tokens, run.parameters) for run in runs})
    tokens, parameters = np.array(points, dtype=float).T
    line = np.array([tokens.min() / 2, tokens.max() * 2])
    ax.plot(line, line / 20, color="grey", linestyle="--", label="N = D / 20")
    ax.plot(tokens, parameters, "o", color="#0072b2", label="experiments")
    ax.set(
        title="The experiments",
        xlabel="D (tokens)",
        ylabel="N (parameters)",
        xscale="log",
        yscale="log",
    )
    ax.legend()


def toy_updates() -> dict[str, Array]:
    """The first update of three embeddings in the plane by three optimizers, [3, 2] each.

    The head's gradient for hidden state h and true token 0 is -(delta_i0 - p_i) h, which sums to
    zero over the tokens.
    """
    hidden = torch.tensor([1.0, 0.5], dtype=torch.float64)
    start = torch.tensor(TOY_EMBEDDINGS, dtype=torch.float64)
    optimizers: dict[str, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD([p], lr=1.0),
        "Adam": lambda p: torch.optim.Adam([p], lr=0.5),
        "Coupled Adam": lambda p: CoupledAdam([p], lr=0.25, coupled=True),
    }
    updates = {}
    for name, make in optimizers.items():
        embeddings = torch.nn.Parameter(start.clone())
        loss = torch.nn.functional.cross_entropy(embeddings @ hidden, torch.tensor(0))
        loss.backward()
        make(embeddings).step()
        updates[name] = (embeddings.detach() - start).numpy()
    return updates


def draw_toy_example() -> Figure:
    """The updates as arrows from the embeddings, and their sum from the origin."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    start = np.array(TOY_EMBEDDINGS)
    for ax, (name, updates) in zip(figure.subplots(1, 3, sharey=True), toy_updates().items()):
        arrows = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.012}
        ax.quiver(0, 0, 1.0, 0.5, color="lightgrey", **arrows)
        ax.annotate("h", (1.02, 0.5), color="grey")
        ax.plot(*start.T, "o", color="#0072b2")
        for i, point in enumerate(start, 1):
            ax.annotate(f"e{'₀₁₂₃'[i]}", point, xytext=(-4, 8), textcoords="offset points")
        ax.quiver(*start.T, *updates.T, color="#0072b2", **arrows)
        total = updates.sum(0).round(9) + 0.0  # and no minus before a zero
        if np.linalg.norm(total) > 1e-6:
            ax.quiver(0, 0, *total, color="#d00000", **arrows)
        ax.plot(0, 0, "+", color="black", markersize=14)
        ax.set(
            title=f"{name}: sum ({total[0]:.2f}, {total[1]:.2f})",
            xlim=(-1.9, 2.3),
            ylim=(-1.3, 1.7),
            aspect="equal",
        )
    return figure


def _sweep(
    runs: Sequence[Run], optimizer: str, option: str, number: Callable[[float], float]
) -> dict[float, list[Run]]:
    """Runs by the number that is swept, in order; Coupled Adam itself has the scale 1.

    Runs that have another option besides do not belong to it; of several such sweeps, the widest.
    """
    found: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        options = dict(run.recipe.arms[run.arm])
        if options.pop("optimizer") == optimizer:
            value = number(float(options.pop(option, 1.0)))
            sweep = found.setdefault(json.dumps(options, sort_keys=True), {})
            sweep.setdefault(value, []).append(run)
    return dict(sorted(max(found.values(), key=len, default={}).items()))


def _single(draw: Callable[[Axes], None], file: str, caption: str) -> Picture:
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    draw(figure.subplots())
    return Picture(figure, file, caption)


def _scatter(ax: Axes, x: Array, y: Array, color: str, label: str | None) -> None:
    ax.scatter(x, y, s=3, alpha=0.35, color=color, linewidths=0, label=label, rasterized=True)


def _label(run: Run, runs: Sequence[Run]) -> str | None:
    """The arm's label, once in a legend."""
    return run.label if run is next(r for r in runs if r.arm == run.arm) else None


def _legend(ax: Axes) -> None:
    """A legend, small where there are many arms; none where there is nothing to tell apart."""
    many = len(ax.get_legend_handles_labels()[0]) > 5
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="x-small" if many else None, ncols=2 if many else 1)
