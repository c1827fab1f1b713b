"""Pictures with captions, and the elements that their plots share."""

import base64
import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.float64]

ADAMW_COLOR, COUPLED_ADAM_COLOR = "#d55e00", "#0072b2"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure and its caption.

    Attributes:
        file: its file in a report, relative to the report's folder; empty if it is only embedded in
            a page.
    """

    figure: Figure
    caption: str
    file: str = ""

    @functools.cached_property
    def png(self) -> bytes:
        """The image, drawn once."""
        return drawn(self.figure)

    @property
    def data(self) -> str:
        """The image as a URI, which embeds it in a page."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()

    @property
    def wide(self) -> bool:
        """Whether it needs the whole width of a page."""
        return self.figure.get_figwidth() > 8


def drawn(figure: Figure, format: str = "png") -> bytes:  # noqa: A002
    """The image of a figure as PNG, SVG or PDF."""
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format=format)
    return image.getvalue()


def single(draw: Callable[[Axes], None], caption: str, file: str = "") -> Picture:
    """Draw a picture with a single plot."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    draw(figure.subplots())
    return Picture(figure, caption, file)


def scatter(ax: Axes, x: Array, y: Array, color: str, label: str | None) -> None:
    """Draw thousands of small points, rasterized even in vector formats."""
    ax.scatter(x, y, s=3, alpha=0.35, color=color, linewidths=0, label=label, rasterized=True)


def plot_means(ax: Axes, points: Mapping[float, Sequence[float]], **style: Any) -> None:
    """Draw the mean of several values at each place, and the range from least to largest."""
    means = np.array([np.mean(values) for values in points.values()])
    low = means - [min(values) for values in points.values()]
    high = [max(values) for values in points.values()] - means
    ax.errorbar([*points], means, [low, high], capsize=3, **style)


def legend(ax: Axes, markerscale: float = 1.0) -> None:
    """Add a legend, in small print if it has many entries; none if there are no labels."""
    if entries := len(ax.get_legend_handles_labels()[0]):
        size, columns = ("x-small", 2) if entries > 5 else ("medium", 1)
        ax.legend(markerscale=markerscale, fontsize=size, ncols=columns)
