"""What was measured of optimizers: as JSON, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.cases import Case
from bench.optimizers import BASELINE
from bench.timing import Quartiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coupled_adam.rendering.tables import Table


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measurements of one optimizer in one case.

    Attributes:
        samples: triples of times in seconds: of a step, of a step of the baseline, and of a copy of
            the embedding matrix, measured immediately after one another.
        state_bytes: size of the optimizer's state in bytes.
        extra_bytes: the peak of what a step allocates in addition to parameters, gradients and
            state, in bytes; None if the device does not count allocations.
        moved_bytes: the least number of bytes that a step has to move between memory and processor;
            None if it is not known.
        launches: how often a step launches something on the GPU: kernels, and operations that set
            or copy memory; None on other devices.
    """

    case: Case
    optimizer: str
    samples: list[tuple[float, float, float]]
    state_bytes: int
    extra_bytes: int | None
    moved_bytes: int | None
    launches: int | None = None

    @property
    def seconds(self) -> float:
        """Median time of a step in seconds."""
        return statistics.median(step for step, _, _ in self.samples)

    @property
    def baseline_seconds(self) -> float:
        """Median time of a step of the baseline in seconds."""
        return statistics.median(baseline for _, baseline, _ in self.samples)

    @property
    def ratio(self) -> Quartiles:
        """Time of a step relative to the baseline's, computed within each pair."""
        return Quartiles.of(step / baseline for step, baseline, _ in self.samples)

    @property
    def bandwidth(self) -> float | None:
        """``moved_bytes`` per second, as a share of the bandwidth of copying the matrix."""
        if self.moved_bytes is None:
            return None
        # A copy reads and writes the matrix once.
        copies = self.moved_bytes / (2 * self.case.matrix_bytes)
        return statistics.median(copies * copy / step for step, _, copy in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """All fields and a summary, for JSON; samples are rounded to nanoseconds."""
        samples = [[round(seconds, 9) for seconds in sample] for sample in self.samples]
        summary = {
            "seconds": self.seconds,
            "baseline_seconds": self.baseline_seconds,
            "ratio": self.ratio,
            "noisy": self.ratio.noisy,
            "bandwidth": self.bandwidth,
        }
        return {**dataclasses.asdict(self), "samples": samples, **summary}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timed:
        """Inverse of :meth:`to_dict`; the summary is recomputed from the samples."""
        fields = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        samples = [(step, baseline, copy) for step, baseline, copy in values["samples"]]
        return cls(**{**fields, "case": Case(**values["case"]), "samples": samples})


def bench_table(results: Sequence[Timed]) -> Table:
    """A table with one row for each optimizer in each case."""
    from coupled_adam.rendering.tables import Table

    rows: list[list[str] | str] = []
    case = None
    for result in results:
        # The case stands in the first of its rows, and cases are set apart.
        if case is not None and result.case != case:
            rows.append("")
        ratio = result.ratio
        rows.append(
            [
                "" if result.case == case else result.case.label,
                result.optimizer,
                f"{result.seconds * 1e3:.3g}",
                f"{ratio.median:.2f}",
                f"({ratio.low:.2f}–{ratio.high:.2f}) {ratio.remark}".rstrip(),
                "–" if result.bandwidth is None else f"{result.bandwidth:.0%}",
                f"{result.state_bytes / 1e6:,.1f}",
                "–" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:,.2f}",
            ]
        )
        case = result.case
    return Table(
        ["V × H", "optimizer", "ms", "ratio", "quartiles", "bandwidth", "state MB", "extra MB"],
        rows,
        f"Time of a step, and its ratio to that of torch's {BASELINE}, in pairs",
        ["Bandwidth: of the bytes that a step has to move, relative to a copy."],
        left=(0, 1, 4),
    )


def bench_picture(results: Sequence[Timed]) -> Figure:
    """Draw the median ratio and quartiles of each optimizer, in one group for each case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(result.case for result in results))
    names = list(dict.fromkeys(result.optimizer for result in results))
    figure = Figure(figsize=(9, 1 + 0.55 * len(cases) + 0.12 * len(names)), layout="constrained")
    ax = figure.subplots()
    for number, name in enumerate(names):
        measurements = [result for result in results if result.optimizer == name]
        ratios = [result.ratio for result in measurements]
        place = (number + 0.5) / len(names) * 0.8 - 0.4  # in the group of a case
        heights = [cases.index(result.case) + place for result in measurements]
        spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        medians = [r.median for r in ratios]
        ax.errorbar(medians, heights, xerr=spread, fmt="o", markersize=4, color=f"C{number}")
        ax.plot([], [], "o", color=f"C{number}", label=name)
    ax.axvline(1, color="gray", linewidth=1)
    ax.set_yticks(range(len(cases)), [case.label for case in cases])
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel=f"time of a step, as a multiple of torch's {BASELINE}")
    quartiles = [quartile for result in results for quartile in result.ratio]
    low, high = min(quartiles) / 1.5, max(quartiles) * 1.5
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20) if low < tick < high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure
