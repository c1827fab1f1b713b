"""Draw the pictures in ``docs/images/study/`` from the study's results.

python -m study.figures
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .questions import QUESTIONS, RATES
from .referee import ADAMW_BEST, difference, with_documents
from .rows import BEST, LABELS, Arm, Line, by_seed, runs, values
from .run import HERE
from .tables import (
    ALTERNATIVES,
    BASE,
    RECOMMENDED,
    SCALE,
    alternative,
    exponents,
    movement,
    pair,
)

IMAGES = HERE.parent / "docs" / "images" / "study"
ORANGE, BLUE, GREEN = "#d55e00", "#0072b2", "#009e73"
COLORS = {"adamw": ORANGE, "coupled": BLUE}


def errors(ax: Axes, points: Mapping[float, Line], measure: str, **style: object) -> None:
    """Plot mean and sample standard deviation over seeds, if all of their values are finite."""
    measured = {x: values(line, measure) for x, line in points.items()}
    shown = {x: seeds for x, seeds in measured.items() if seeds and all(map(math.isfinite, seeds))}
    means = [float(np.mean(seeds)) for seeds in shown.values()]
    spread = [float(np.std(seeds, ddof=1)) if seeds[1:] else 0.0 for seeds in shown.values()]
    ax.errorbar([*shown], means, spread, marker="o", capsize=3, **style)  # type: ignore[arg-type]


def curves(ax: Axes, lines: Sequence[Line], measure: str) -> None:
    """Plot a measure against the step, with one curve for each seed."""
    for number, line in enumerate(lines):
        for seed, run in enumerate(runs(line).values()):
            steps = [point["step"] for point in run["curve"]]
            measured = [point[measure] for point in run["curve"]]
            label = None if seed else line.label
            # Dashed, since some curves coincide.
            style = (2 * number, (4, number))
            ax.plot(steps, measured, color=f"C{number}", linestyle=style, label=label)
    ax.set(xlabel="step")


def scale() -> Figure:
    """Plot the reduction of the loss by Coupled Adam against D and N."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (tokens, size), (question, name) in SCALE.items():
        adamw, coupled = (np.array(values(arm, "test_loss")) for arm in pair(question, name))
        for ax, x, shown in ((left, tokens, size == "0.4M"), (right, size, tokens == "1.2M")):
            if shown:
                ax.scatter([x] * len(adamw), adamw - coupled, color="0.6", s=12)
                ax.scatter([x], [(adamw - coupled).mean()], color=BLUE)
    left.set(xlabel="tokens D, at N = 0.4M", ylabel="test loss: AdamW - Coupled Adam")
    right.set(xlabel="parameters N, at D = 1.2M")
    for ax in (left, right):
        ax.axhline(0, color="black", linewidth=0.8)
    return figure


def scaled() -> Figure:
    """Plot loss and mean norm against n, and for AdamW at the same embedding learning rate."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for column, (question, title) in enumerate(
        (("scaled", "1.2M tokens"), ("scaled_longer", "4.9M tokens"))
    ):
        for row, (measure, label) in enumerate(
            (("test_loss", "test loss"), ("mean_norm_ratio", "‖μ‖ʳ"))
        ):
            ax = panels[row][column]
            for arm in get_args(Arm):
                points = exponents(question, arm)
                errors(ax, points, measure, color=COLORS[arm], label=LABELS[arm])
            ax.set(ylabel=label)
        panels[0][column].set(title=title)
        panels[1][column].set(xlabel="n: the embeddings' learning rate times 2^(n/2)")
    panels[0][0].legend()
    return figure


def between() -> Figure:
    """Plot each seed's loss minus AdamW's, mean norm and word similarity against D."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    tokens = [next(iter(runs(adamw).values()))["tokens"] for adamw, *_ in BEST.values()]
    arms = [*LABELS.values(), "a = 0.5, zero-sum"]
    for number, (label, color) in enumerate(zip(arms, (ORANGE, BLUE, GREEN))):
        lines = [group[number] for group in BEST.values()]
        shown = (
            [_difference(line, group[0]) for line, group in zip(lines, BEST.values())],
            [values(line, "mean_norm_ratio") for line in lines],
            [values(line, "men") for line in lines],
        )
        for ax, points in zip(panels, shown):
            for x, seeds in zip(tokens, points):
                ax.scatter([x] * len(seeds), seeds, color=color, s=12, alpha=0.4)
            ax.plot(tokens, [*map(np.mean, points)], color=color, marker="o", label=label)
    for ax, label in zip(panels, ("test loss − AdamW's", "‖μ‖ʳ", "r of MEN")):
        ax.set(xscale="log", xlabel="tokens D", ylabel=label)
        ax.set_xticks(tokens, BEST)
        ax.minorticks_off()
    panels[1].set(yscale="log")
    panels[0].legend()
    return figure


def _difference(line: Line, baseline: Line) -> list[float]:
    """The test losses minus those of the other row's runs with the same seeds."""
    base = by_seed(baseline, "test_loss")
    return [loss - base[s] for s, loss in by_seed(line, "test_loss").items() if s in base]


def sgd() -> Figure:
    """Plot the loss against the factor of SGD's learning rate."""
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    ax = figure.subplots()
    factors = [float(name.removeprefix("f=")) for name in QUESTIONS["sgd"]]
    points = {f: Line("", "sgd", f"f={f:g}") for f in factors}
    errors(ax, points, "test_loss", color="0.3", label="SGD")
    for line, color in zip(BASE, (ORANGE, BLUE)):
        mean = float(np.mean(values(line, "test_loss")))
        ax.axhline(mean, color=color, linestyle="--", label=line.label)
    ax.set(xscale="log", xlabel="factor f on the embeddings' learning rate", ylabel="test loss")
    ax.legend()
    return figure


def second_moment() -> Figure:
    """Plot the fit of E[v] = A p against the number of training tokens."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for number, (tokens, size) in enumerate((("4.9M", "0.4M"), ("1.2M", "1.1M"), ("1.2M", "2.6M"))):
        question, name = SCALE[tokens, size]
        (adamw, _) = pair(question, name)
        for seed, run in enumerate(runs(adamw).values()):
            for ax, key in zip(panels, ("A", "r_squared", "exponent")):
                ax.plot(
                    [fit["tokens"] for fit in run["second_moment"]],
                    [fit[key] for fit in run["second_moment"]],
                    color=f"C{number}",
                    marker=".",
                    label=None if seed else f"N = {size}",
                )
    for ax, title in zip(panels, ("A", "R²", "exponent of p")):
        ax.set(xlabel="tokens seen", title=title)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set(yscale="log")
    panels[0].legend()
    return figure


def alternatives() -> Figure:
    """Plot each seed's loss, and the mean over seeds, at each learning rate."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, len(RATES), sharey=True)
    for ax, lr in zip(panels, RATES):
        for row, name in enumerate(ALTERNATIVES):
            if line := alternative(lr, name):
                losses = values(line, "test_loss")
                ax.scatter(losses, [row] * len(losses), color="0.7", s=15)
                ax.scatter([np.mean(losses)], [row], color=COLORS.get(name, "0.2"))
        ax.set(title=f"learning rate {lr:g}", xlabel="test loss")
    panels[0].set_yticks(range(len(ALTERNATIVES)), ALTERNATIVES.values())
    panels[0].invert_yaxis()
    return figure


def tying() -> Figure:
    """Plot the drift of the output embeddings' mean, for tied and untied embeddings."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    lines = [
        dataclasses.replace(BASE[1], label="tied, coupled"),
        *(
            Line(f"untied, coupled {which}", "tying", f"untied coupled {which}")
            for which in ("both", "input", "output")
        ),
        Line("untied, AdamW", "tying", "untied adamw"),
    ]
    curves(ax, lines, "mean_norm")
    ax.set(ylabel="‖μ‖ of the output embeddings", yscale="log")
    ax.legend()
    return figure


def switching() -> Figure:
    """Plot mean norm and loss of the runs that change half-way."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    lines = [
        BASE[0],
        Line("then Coupled Adam", "switching", "switched"),
        Line("recentered, then Coupled Adam", "switching", "recentered_and_switched"),
        Line("recentered, on with AdamW", "switching", "recentered"),
        BASE[1],
    ]
    panels = figure.subplots(1, 2)
    curves(panels[0], lines, "mean_norm_ratio")
    curves(panels[1], lines, "valid_loss")
    panels[0].set(ylabel="‖μ‖ʳ")
    panels[1].set(ylabel="validation loss")
    panels[1].legend(fontsize="small")
    return figure


def bands() -> Figure:
    """Plot the loss by the frequency of the predicted token, relative to AdamW's best betas."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    for line in with_documents():
        losses = difference(line, "band_losses")
        ranks = 16 * 2 ** np.arange(len(losses))
        ax.plot(ranks, losses, marker="o", label=line.label)
    ax.set(
        xscale="log",
        xlabel="rank of the predicted token by frequency, up to",
        ylabel=f"test loss relative to {ADAMW_BEST.label}",
    )
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.minorticks_off()
    ax.legend(fontsize="small")
    return figure


def momentum() -> Figure:
    """Plot when rows move, and how far downhill, with and without momentum, by frequency."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    late, adamw_axes, lean_axes = figure.subplots(1, 3)
    absent = {rule: 1 - present for rule, present in movement("in_batch", "lean").items()}
    panels = (
        (late, absent),
        (adamw_axes, movement("cosine", "adamw")),
        (lean_axes, movement("cosine", "lean")),
    )
    for ax, by_rule in panels:
        for number, (rule, by_band) in enumerate(by_rule.items()):
            ranks = 16 * 2 ** np.arange(len(by_band))
            style = "-" if " 0.9," in rule else "--"  # with momentum, without
            ax.plot(ranks, by_band, style, marker="o", color=f"C{number}", label=rule)
        ax.set(xscale="log", xlabel="rank of the token by frequency, up to")
        ax.set_xticks(ranks[::2], [str(rank) for rank in ranks[::2]])
        ax.minorticks_off()
    late.set(title="squared movement in steps without the token", ylim=(0, 1))
    adamw_axes.set(title="cosine with downhill, AdamW's training", ylim=(0, 0.25))
    lean_axes.set(title="cosine with downhill, LEAN's training", ylim=(0, 0.25))
    late.legend(fontsize="small")
    return figure


def lean() -> Figure:
    """Plot what we recommend beside AdamW after 20M tokens: each seed, and the state's size."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    vocab_size, hidden_size = 50304, 768
    elements = vocab_size * hidden_size
    sizes = {
        "2 V x H": 2 * elements,  # torch keeps both moments, also without momentum
        "V x H + H": elements + hidden_size,
        "V + 2H": vocab_size + 2 * hidden_size,
        "V + H": vocab_size + hidden_size,
    }
    colors = (ORANGE, "#cc79a7", BLUE, GREEN, "0.4")
    for y, (row, color) in enumerate(zip(RECOMMENDED, colors)):
        size = sizes[row.state]
        for ax, measure in zip(panels, ("test_documents", "mean_norm_ratio")):
            seeds = values(row.line, measure)
            ax.scatter(seeds, [y] * len(seeds), color=color, s=14, alpha=0.5)
            ax.scatter([np.mean(seeds)], [y], color=color, s=70, marker="|", linewidth=2)
        megabytes = 4 * size / 1e6
        panels[2].barh(y, megabytes, color=color, height=0.6)
        panels[2].text(megabytes + 5, y, f"{megabytes:.3g} MB", va="center")
    panels[0].set_yticks(range(len(RECOMMENDED)), [row.line.label for row in RECOMMENDED])
    panels[0].invert_yaxis()
    for ax, title in zip(
        panels,
        (
            "test loss",
            "distance of the mean from the origin",
            f"state of an embedding {vocab_size:,} x {hidden_size}",
        ),
    ):
        ax.set_title(title, fontsize="medium")
    panels[1].set_xlim(left=-0.03)
    panels[2].set_xlim(0, 400)
    return figure


FIGURES = (
    scale,
    scaled,
    sgd,
    second_moment,
    alternatives,
    tying,
    switching,
    between,
    bands,
    momentum,
    lean,
)


def main() -> None:
    """Draw all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for draw in FIGURES:
        draw().savefig(IMAGES / f"{draw.__name__}.png", dpi=100)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
