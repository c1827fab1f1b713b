"""A table, and the one writer of all tables: as text, Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coupled_adam.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_GAP = "  "
_LONGEST_NOTE = 100

Line = list[tuple[str, str]]
"""A line of text: its pieces, each with its style."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text in a table that stands out.

    Attributes:
        text: what is shown.
        bold: whether it is better than others, by a test.
        outside: whether it is outside of its healthy range.
        note: small print below it; on pages only.
        link: where it leads to; on pages only.
    """

    text: str
    bold: bool = False
    outside: bool = False
    note: str = ""
    link: str = ""

    @property
    def style(self) -> str:
        """Its style in a terminal."""
        return "bold" if self.bold else "yellow" if self.outside else ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for the terminal (where it prints), for pages and for papers.

    Attributes:
        columns: the headers.
        rows: a text or a :class:`Cell` for each column. A text in place of a row is the title of
            the rows below it; an empty one only sets them apart.
        title: what is above the table.
        notes: what is below it, a paragraph each.
        left: the columns that are aligned to the left.
        lead: how many columns each piece begins with, if the table is too wide for the terminal and
            falls into pieces; 0 if it never does.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell] | str]
    title: str = ""
    notes: Sequence[str] = ()
    left: Collection[int] = (0,)
    lead: int = 0

    def cells(self) -> Iterator[list[Cell] | str]:
        """The rows, in which each text is a cell; titles stay texts."""
        for row in self.rows:
            if isinstance(row, str):
                yield row
            else:
                yield [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]

    # Text

    def __str__(self) -> str:
        return "\n".join(_plain(line) for line in self.lines(_LONGEST_NOTE))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self.lines(options.max_width):
            yield Text.assemble(*line, no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        widest = max(_width(_plain(line)) for line in self.lines(console.width))
        return Measurement(widest, widest)

    def lines(self, width: int) -> Iterator[Line]:
        """The table as text, in pieces if it is wider than ``width`` and may fall into pieces.

        No text in it can control a terminal.
        """
        texts = [[cell.text for cell in row] for row in self.cells() if not isinstance(row, str)]
        widths = [max(map(_width, column)) for column in zip(self.columns, *texts)]
        title = self.title
        for columns in self._pieces(widths, width):
            yield from self._piece(columns, widths, title)
            title = ""
        # Notes are wrapped, as long lines of small print are hard to read.
        widest = min(max(width, 40), _LONGEST_NOTE)
        for note in self.notes:
            yield from ([(line, "dim")] for line in textwrap.wrap(printable(note), widest))
        yield [("", "")]

    def _pieces(self, widths: Sequence[int], width: int) -> Iterator[list[int]]:
        """The columns of each piece: the leading ones, and as many as fit, but at least one."""
        columns = [*range(self.lead)]
        for index in range(self.lead, len(widths)):
            total = sum(widths[i] + len(_GAP) for i in [*columns, index]) - len(_GAP)
            if self.lead and total > width and len(columns) > self.lead:
                yield columns
                columns = [*range(self.lead)]
            columns.append(index)
        yield columns

    def _piece(self, columns: Sequence[int], widths: Sequence[int], title: str) -> Iterator[Line]:
        # Spaces are pieces of their own, so that underlines and colors end with the text.
        def line(cells: Sequence[Cell], style: str = "") -> Line:
            pieces: Line = []
            for index in columns:
                text = printable(cells[index].text)
                space = " " * (widths[index] - _width(text))
                before, after = ("", space) if index in self.left else (space, "")
                pieces += [(before, ""), (text, style or cells[index].style), (after + _GAP, "")]
            return pieces[:-1]

        yield [("", "")]
        if title:
            yield [(printable(title), "bold")]
        if any(self.columns):
            yield line([Cell(header) for header in self.columns], "bold")
        total = sum(widths[index] + len(_GAP) for index in columns) - len(_GAP)
        yield [("─" * total, "dim")]
        for number, row in enumerate(self.cells()):
            if not isinstance(row, str):
                yield line(row)
                continue
            if number:
                yield [("", "")]
            if row:
                yield [(printable(row), "bold")]

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
        """The table in LaTeX, for the package booktabs; symbols in headers become formulas."""
        sides = "".join("l" if index in self.left else "r" for index in range(len(self.columns)))
        lines = [" & ".join(map(_latex_header, self.columns)) + r" \\"]
        if self.rows and not isinstance(self.rows[0], str):
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

        def side(index: int) -> str:
            return ' class="left"' if index in self.left else ""

        heads = (f"<th{side(i)}>{html.escape(head)}</th>" for i, head in enumerate(self.columns))
        lines = [f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>"]
        # A title, or an empty text, sets the next row of cells apart from those before it.
        apart = ""
        for row in self.cells():
            if isinstance(row, str):
                apart = ' class="first"'
                if row:
                    head = f'<th colspan="{len(self.columns)}" class="left">{html.escape(row)}</th>'
                    lines.append(f"<tr{apart}>{head}</tr>")
                    apart = ""
                continue
            cells = (
                f'<td{side(i)} data-name="{html.escape(self.columns[i])}">{_html_cell(cell)}</td>'
                for i, cell in enumerate(row)
            )
            lines.append(f"<tr{apart}>{''.join(cells)}</tr>")
            apart = ""
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        notes = "".join(f'<p class="note">{html.escape(note)}</p>\n' for note in self.notes)
        table = "\n".join([*lines, "</tbody>"])
        return f'<div class="wide"><table>{caption}{table}</table></div>\n{notes}'

    _repr_html_ = __html__


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in printable(text)
    )


def _html_cell(cell: Cell) -> str:
    text = html.escape(cell.text)
    if cell.link:
        text = f'<a href="{html.escape(cell.link)}">{text}</a>'
    tag = "b" if cell.bold else "em" if cell.outside else ""
    text = f"<{tag}>{text}</{tag}>" if tag else text
    return text + (f"<small>{html.escape(cell.note)}</small>" if cell.note else "")


def _markdown_text(text: str) -> str:
    """Text without a meaning in Markdown."""
    return re.sub(r"([\\`*\[\]|]|<(?=[A-Za-z!/?]))", r"\\\1", text)


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "–": "--",
}
_SYMBOLS = {
    "‖": r"\|",
    "μ": r"\mu",
    "ʳ": "^r",
    "ρ": r"\rho",
    "κ": r"\kappa",
    "r̄": r"\bar{r}",
    "↑": r"\uparrow",
    "↓": r"\downarrow",
}


def _latex_text(text: str) -> str:
    escaped = "".join(_LATEX.get(c, c) for c in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # a minus, not a hyphen


def _latex_header(text: str) -> str:
    """Escape a header, with its symbols as formulas."""
    symbol = "|".join(_SYMBOLS)

    def formula(symbols: re.Match[str]) -> str:
        return "$" + re.sub(symbol, lambda match: _SYMBOLS[match[0]], symbols[0]) + "$"

    return re.sub(f"(?:{symbol})+", formula, _latex_text(text))


def fixed(number: float, decimals: int) -> str:
    """A number with so many decimals, and without a minus before a zero."""
    return f"{round(number, decimals) + 0.0:.{decimals}f}"


def csv_text(lines: Sequence[Sequence[Any]]) -> str:
    """Format lines of values as CSV; text that looks like a formula is prefixed with '."""
    # Spreadsheets would calculate a text that begins like a formula, and names are not ours.
    text = io.StringIO()
    safe = (
        [f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in line]
        for line in lines
    )
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()
