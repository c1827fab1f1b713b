"""The table of results for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coupled_adam.bench.optimizers import BASELINE
from coupled_adam.bench.results import Timed

if TYPE_CHECKING:
    from coupled_adam.rendering.tables import Table

_COLUMNS = ["V × H", "optimizer", "ms", "ratio", "quartiles", "bandwidth", "state MB", "extra MB"]


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
        _COLUMNS,
        rows,
        f"Time of a step, and its ratio to that of torch's {BASELINE}, in pairs",
        ["Bandwidth: of the bytes that a step has to move, relative to a copy."],
        left=(0, 1, 4),
    )
