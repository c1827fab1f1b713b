"""The table of results for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from coupled_adam.bench.optimizers import BASELINE
from coupled_adam.bench.results import Timed

if TYPE_CHECKING:
    from rich.table import Table

_HEADERS: dict[str, Literal["left", "right"]] = {
    "V × H": "left",
    "optimizer": "left",
    "ms": "right",
    "ratio": "right",
    "quartiles": "left",
    "bandwidth": "right",
    "state MB": "right",
    "extra MB": "right",
}


def bench_table(results: Sequence[Timed]) -> "Table":
    """A table with one row for each optimizer in each case."""
    from coupled_adam.rendering.tables import terminal_table

    table = terminal_table(
        title=f"Time of a step, and its ratio to that of torch's {BASELINE}, in pairs",
        caption="Bandwidth: of the bytes that a step has to move, relative to a copy.",
    )
    for header, side in _HEADERS.items():
        table.add_column(header, justify=side, no_wrap=True)
    case = None
    for result in results:
        if case is not None and result.case != case:
            table.add_section()
        ratio = result.ratio
        table.add_row(
            "" if result.case == case else result.case.label,
            result.optimizer,
            f"{result.seconds * 1e3:.3g}",
            f"{ratio.median:.2f}",
            f"({ratio.low:.2f}–{ratio.high:.2f}) {ratio.remark}".rstrip(),
            "–" if result.bandwidth is None else f"{result.bandwidth:.0%}",
            f"{result.state_bytes / 1e6:,.1f}",
            "–" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:,.2f}",
        )
        case = result.case
    return table
