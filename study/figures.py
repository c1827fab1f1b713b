"""Draw the pictures in ``docs/images/study/`` from the study's results.

python -m study.figures
"""

import argparse
import math
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .questions import QUESTIONS
from .rows import Line, runs, values
from .run import HERE
from .tables import BASE, RECOMMENDED, SCALE, pair

IMAGES = HERE.parent / "docs" / "images" / "study"
ORANGE, BLUE, GREEN = "#d55e00", "#0072b2", "#009e73"


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


def sgd() -> Figure:
    """Plot the loss against the factor of SGD's learning rate."""
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    ax = figure.subplots()
    names = {float(name.removeprefix("f=")): name for name in QUESTIONS["sgd"]}
    losses = {f: values(Line("", "sgd", name), "test_loss") for f, name in names.items()}
    losses = {f: seeds for f, seeds in losses.items() if seeds and all(map(math.isfinite, seeds))}
    means, spread = ([of(x) for x in losses.values()] for of in (np.mean, partial(np.std, ddof=1)))
    ax.errorbar([*losses], means, spread, marker="o", capsize=3, color="0.3", label="SGD")
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


BANDS = {
    "AdamW, 0, 0.99": "adamw 0 0.99 n=5",
    "AdamW, 0, 0.999": "adamw 0 0.999 n=5",
    "AdamW, 0.9, 0.999": "adamw 0.9 0.999 n=5",
    "AdamW, 0.9, 0.95": "adamw 0.9 0.95 n=5",
    "Coupled Adam, 0.9, 0.999": "coupled 0.9 0.999 n=4",
}
"""The runs of the picture by frequency, of which the first is what the others are held against."""


def bands() -> Figure:
    """Plot the loss by the frequency of the predicted token, relative to AdamW's best betas."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    first, *_ = losses = {
        label: {
            seed: np.array(run["documents"]["test"]["band_losses"])
            for seed, run in runs(Line("", "betas", name)).items()
            if "documents" in run
        }
        for label, name in BANDS.items()
    }
    for label, tried in losses.items():
        above = [tried[seed] - losses[first][seed] for seed in tried.keys() & losses[first]]
        ranks = 16 * 2 ** np.arange(len(above[0]))
        ax.plot(ranks, np.mean(above, axis=0), marker="o", label=label)
    ax.set(
        xscale="log",
        xlabel="rank of the predicted token by frequency, up to",
        ylabel=f"test loss relative to {first}",
    )
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.minorticks_off()
    ax.legend(fontsize="small")
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


FIGURES = (scale, sgd, second_moment, bands, lean)


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
