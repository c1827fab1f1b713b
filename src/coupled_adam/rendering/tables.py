"""A table, and the one writer of all tables: as text, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coupled_adam.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table as RichTable


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text in a table that stands out.

    Attributes:
        text: what is shown.
        bold: whether it is better than others, by a test.
        note: small print below it; on pages only.
    """

    text: str
    bold: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for the terminal (where it prints), for pages and for papers.

    A row is a text or a :class:`Cell` for each column. A text in place of a row is the title of the
    rows below it; an empty one only sets them apart. ``notes`` are paragraphs below the table, and
    ``left`` the columns that are aligned to the left.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell] | str]
    title: str = ""
    notes: Sequence[str] = ()
    left: Collection[int] = (0,)

    def cells(self) -> Iterator[list[Cell] | str]:
        """The rows, in which each text is a cell; titles stay texts."""
        for row in self.rows:
            cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
            yield row if isinstance(row, str) else [*cells]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=1000, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(printable(line).rstrip() for line in captured.get()[:-1].split("\n"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield from ("", self._for_terminal())
        yield from (Text(note, "dim") for note in self.notes)
        yield ""

    # Without this, rich would take the table to be as wide as the terminal, however narrow that is.
    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return console.measure(self._for_terminal(), options=options)

    def _for_terminal(self) -> RichTable:
        """The table for rich."""
        from rich import box
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=box.SIMPLE_HEAD,
            border_style="dim",
            header_style="bold",
            pad_edge=False,
            padding=(0, 1, 0, 0),
            show_edge=False,
            show_header=any(self.columns),
            title=Text(self.title, "bold") if self.title else None,
            title_justify="left",
        )
        rows = [*self.cells()]
        texts = [[cell.text for cell in row] for row in rows if not isinstance(row, str)]
        for index, (header, *cells) in enumerate(zip(self.columns, *texts)):
            # In a narrow terminal texts take several lines, and numbers do not. A title between
            # rows stands in the first column, which a long one must not widen.
            is_text, width = index in self.left, max(map(cell_len, [header, *cells]))
            table.add_column(
                Text(header),
                justify="left" if is_text else "right",
                overflow="fold",
                no_wrap=not is_text,
                min_width=None if is_text else width,
                max_width=None if index else max(width, 30),
            )
        # A title between rows has an empty line above it, except at the top.
        for number, row in enumerate(rows):
            if not isinstance(row, str):
                table.add_row(*(Text(cell.text, "bold" if cell.bold else "") for cell in row))
                continue
            if number:
                table.add_row()
            if row:
                table.add_row(Text(row, "bold"))
        return table

    # Other formats

    def markdown(self) -> str:
        """The table in Markdown, with its notes below."""
        sides = ["---" if index in self.left else "---:" for index in range(len(self.columns))]
        # Markdown has no titles between rows: a row whose first cell is in italics stands for one.
        lines = [[*map(_markdown_text, self.columns)], sides]
        for row in self.cells():
            if not isinstance(row, str):
                texts = [_markdown_text(cell.text) for cell in row]
                lines.append([f"**{t}**" if cell.bold else t for cell, t in zip(row, texts)])
            elif row:
                lines.append([f"*{_markdown_text(row)}*", *[""] * (len(self.columns) - 1)])
        table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
        return table + "".join(f"\n{_markdown_text(note)}\n" for note in self.notes)

    def latex(self) -> str:
        """The table in LaTeX, for the package booktabs; symbols become formulas."""
        sides = "".join("l" if index in self.left else "r" for index in range(len(self.columns)))
        lines = [" & ".join(map(_latex_text, self.columns)) + r" \\"]
        if self.rows and not isinstance(self.rows[0], str):  # a title has a rule of its own
            lines.append(r"\midrule")
        for row in self.cells():
            if not isinstance(row, str):
                texts = [_latex_text(cell.text) for cell in row]
                texts = [rf"\textbf{{{t}}}" if cell.bold else t for cell, t in zip(row, texts)]
                lines.append(" & ".join(texts) + r" \\")
                continue
            lines.append(r"\midrule")
            if row:
                lines.append(rf"\multicolumn{{{len(sides)}}}{{l}}{{{_latex_text(row)}}} \\")
        head = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule"]
        return "\n".join([*head, *lines, r"\bottomrule", r"\end{tabular}", ""])

    def __html__(self) -> str:
        """The table and its notes as a part of a page; all text is escaped. Jinja calls this."""
        from coupled_adam.rendering.page import render

        return render("table.html", {"table": self}, [])

    _repr_html_ = __html__


def _markdown_text(text: str) -> str:
    """Text without a meaning in Markdown."""
    return re.sub(r"([\\`*\[\]|]|<(?=[A-Za-z!/?]))", r"\\\1", text)


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "–": "--",
    "‖": r"$\|$",
    "μ": r"$\mu$",
    "ʳ": "$^r$",
    "ρ": r"$\rho$",
    "κ": r"$\kappa$",
    "r̄": r"$\bar{r}$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}
_IN_LATEX = re.compile("|".join(map(re.escape, _LATEX)))


def _latex_text(text: str) -> str:
    escaped = _IN_LATEX.sub(lambda match: _LATEX[match[0]], text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # a minus, not a hyphen


def fixed(number: float, decimals: int) -> str:
    """A number with this many decimals, and without a minus before a zero."""
    return f"{round(number, decimals) + 0.0:.{decimals}f}"  # -0.0 + 0.0 is 0.0


def short(number: float) -> str:
    """Abbreviate a number to three digits: 123456789 becomes 123M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            # Through float(), since .3g alone may write 1e+03.
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"


def csv_text(lines: Sequence[Sequence[Any]]) -> str:
    """Format lines of values as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
