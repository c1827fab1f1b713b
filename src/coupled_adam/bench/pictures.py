"""Figures of step times."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.bench.optimizers import BASELINE
from coupled_adam.bench.results import Timed
from coupled_adam.errors import UsageError
from coupled_adam.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bench_picture(results: Sequence[Timed]) -> "Figure":
    """Draw the median ratio and quartiles of each optimizer, in one group for each case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(result.case for result in results))
    names = list(dict.fromkeys(result.optimizer for result in results))
    figure = Figure(figsize=(9, 1 + 0.55 * len(cases) + 0.12 * len(names)), layout="constrained")
    ax = figure.subplots()
    for number, name in enumerate(names):
        measurements = [result for result in results if result.optimizer == name]
        low, median, high = zip(*(result.ratio for result in measurements))
        within = (number + 0.5) / len(names) * 0.8 - 0.4  # the group of a case
        heights = [cases.index(result.case) + within for result in measurements]
        spread = [
            [m - q for m, q in zip(median, low)],
            [q - m for m, q in zip(median, high)],
        ]
        ax.errorbar(median, heights, xerr=spread, fmt="o", markersize=4, color=f"C{number}")
        ax.plot([], [], "o", color=f"C{number}", label=name)
    ax.axvline(1, color="gray", linewidth=1)
    ax.set_yticks(range(len(cases)), [case.label for case in cases])
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel=f"time of a step, as a multiple of torch's {BASELINE}")
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20) if _within(tick, results)]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _within(tick: float, results: Sequence[Timed]) -> bool:
    ratios = [quantile for result in results for quantile in result.ratio]
    return min(ratios) / 1.5 < tick < max(ratios) * 1.5


def check_format(path: Path) -> None:
    """Check that a file's extension is that of a format in which a picture can be marked as ours.

    Raises:
        UsageError: it is another one.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--picture {path}: end its name with .png, .svg or .pdf")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure atomically, in the format that the file's extension names."""
    image = io.BytesIO()
    key = "Software" if path.suffix == ".png" else "Creator"
    metadata = {key: "coupled-adam"}  # so that it may be replaced
    figure.savefig(image, dpi=130, format=path.suffix[1:], metadata=metadata)
    write_atomically(path, image.getvalue())
