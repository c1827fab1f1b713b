"""Tables for the terminal, and as CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coupled_adam.errors import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class _Table(Table):
    """A table whose texts, such as names of files and tokens, do not control the terminal."""

    def add_column(self, header: Any = "", *args: Any, **options: Any) -> None:
        super().add_column(_without_controls(header), *args, **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_without_controls, cells), **options)


def _without_controls(cell: Any) -> Any:
    if isinstance(cell, str):
        return "\n".join(map(printable, cell.split("\n")))
    if isinstance(cell, Text):
        cell = cell.copy()
        cell.plain = "\n".join(map(printable, cell.plain.split("\n")))
    return cell


def terminal_table(title: str = "", caption: str = "") -> Table:
    """An empty table in the style of this package; brackets in texts are not read as markup."""
    return _Table(
        title=Text(printable(title)) if title else None,
        caption=Text(printable(caption)) if caption else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def csv_text(lines: Sequence[Sequence[Any]]) -> str:
    """Format lines of values as CSV; text that looks like a formula is prefixed with '."""
    text = io.StringIO()
    safe = (
        [f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in line]
        for line in lines
    )
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()
