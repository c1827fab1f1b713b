"""Pictures with captions, and the elements that their plots share."""

import base64
import dataclasses
import functools
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.float64]

COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#6a3d9a", "#56b4e9")
"""Colors that the color-blind can tell apart, on dark pages, too (templates/base.html)."""
ADAMW_COLOR, COUPLED_ADAM_COLOR, *_ = COLORS


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

    @functools.cached_property
    def svg(self) -> bytes:
        """The image at any size; points that are many are pixels in it."""
        return drawn(self.figure, "svg")

    @property
    def data(self) -> str:
        """The image as a URI, which embeds it in a page."""
        # As an image, and not as elements: the ids of several SVGs in one page would clash.
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()

    @property
    def wide(self) -> bool:
        """Whether it needs the whole width of a page."""
        return self.figure.get_figwidth() > 8


def drawn(figure: Figure, format: str = "png") -> bytes:  # noqa: A002
    """The image of a figure as PNG, SVG or PDF."""
    image = io.BytesIO()
    # The same figure gives the same bytes: no date, and the same names of what is in it.
    metadata = {"Date": None} if format == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "coupled-adam"}):
        figure.savefig(image, dpi=130, format=format, metadata=metadata)
    return image.getvalue()


def single(draw: Callable[[Axes], None], caption: str, file: str = "") -> Picture:
    """Draw a picture with a single plot."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    draw(figure.subplots())
    legend(figure)
    return Picture(figure, caption, file)


def scatter(ax: Axes, x: Array, y: Array, color: str, label: str | None) -> None:
    """Draw thousands of small points, rasterized even in vector formats."""
    # As vectors they would make files of many megabytes, which browsers draw slowly.
    ax.scatter(x, y, s=3, alpha=0.35, color=color, linewidths=0, label=label, rasterized=True)


def plot_means(ax: Axes, points: Mapping[float, Sequence[float]], **style: Any) -> None:
    """Draw the mean of several values at each place, and the range from least to largest."""
    # errorbar() takes the lengths of the bars, not where they end.
    means = np.array([np.mean(values) for values in points.values()])
    low = means - [min(values) for values in points.values()]
    high = [max(values) for values in points.values()] - means
    ax.errorbar([*points], means, [low, high], capsize=3, **style)


def legend(figure: Figure) -> None:
    """Add one legend for all axes, below them, where it covers nothing; none without labels."""
    entries: dict[str, Any] = {}  # the first with each label
    for ax in figure.axes:
        handles: Iterable[Any] = (*ax.collections, *ax.patches, *ax.lines, *ax.containers)
        for handle in handles:
            # Those that matplotlib makes up; it takes all that begin with _ for such.
            if not re.match("_(child|container|nolegend)|None$", label := str(handle.get_label())):
                entries.setdefault(label, handle)
    if entries:
        # Points as small as in scatter() could not be told apart by their color.
        has_small_points = any(isinstance(x, PathCollection) for x in entries.values())
        # As many entries in a row as fit; a letter takes about a fourteenth of an inch.
        widest = max(map(len, entries)) / 14 + 0.6
        columns = max(1, min(len(entries), int(figure.get_figwidth() / widest)))
        drawn_legend = figure.legend(
            [*entries.values()],
            [*entries],
            loc="outside lower center",
            ncols=columns,
            markerscale=3 if has_small_points else 1,
        )
        for text in drawn_legend.get_texts():
            text.set_parse_math(False)  # a name may have $ in it
        for entry in filter(None, drawn_legend.legend_handles):
            entry.set_alpha(1)  # a single point of many that are nearly transparent
