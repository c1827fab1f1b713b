"""Tables for the terminal, and as CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def terminal_table(title: str = "", caption: str = "") -> Table:
    """An empty table in the style of this package; brackets in texts are not read as markup."""
    return Table(
        title=Text(title) if title else None,
        caption=Text(caption) if caption else None,
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
