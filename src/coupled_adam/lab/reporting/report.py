"""Write the report of finished runs: tables, pictures and one page."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from tqdm import tqdm

from coupled_adam.errors import UsageError
from coupled_adam.files import new_folder
from coupled_adam.lab.reporting.conclusion import conclusion
from coupled_adam.lab.reporting.figures import draw_all
from coupled_adam.lab.reporting.reading import read_runs
from coupled_adam.lab.reporting.report_page import notebook_part, report_page
from coupled_adam.lab.reporting.results import (
    Bold,
    arm_results,
    footnotes,
    results_table,
    runs_csv,
    shown_columns,
    summary_csv,
    terminal_table,
)
from coupled_adam.rendering.tables import Table


@dataclasses.dataclass(frozen=True)
class Report:
    """A report that was written: it prints as text and table, and shows itself in a notebook.

    Attributes:
        page: the path of its page.
        conclusion: what the runs show, a sentence or a few for each experiment.
        table: the results.
        overview: the most important picture, a PNG.
    """

    page: Path
    conclusion: Sequence[str]
    table: Table
    overview: bytes = dataclasses.field(repr=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table
        yield Text("\n".join([*self.conclusion, ""]))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return console.measure(self.table, options=options)

    def _repr_html_(self) -> str:
        return notebook_part(self.conclusion, self.table, self.overview)


def report(folders: Sequence[Path], out: Path, bold: Bold = "adamw") -> Report:
    """Write a report of all finished runs in some folders.

    ``index.html`` contains everything, for a browser. The other files are ``table.md``,
    ``table.tex``, ``summary.csv`` (a row for each arm), ``runs.csv`` and ``results.json`` (all
    results of all runs), ``overview.png`` and ``figures/``. If ``out`` is already a report, it is
    replaced as a whole once the new one is complete and on the disk; anything else is never
    replaced. ``bold`` is explained at :func:`arm_results`.

    Raises:
        UsageError: there is no finished run, a run is damaged, or ``out`` is not a report.
    """
    given, out = out, out.resolve()  # so that a symbolic link stays one
    if out.exists() and not _is_report(out):
        raise UsageError(
            f"--out {given} holds something other than a report, which would be lost: move it "
            "away, or choose a new folder"
        )
    runs, left_out = read_runs(folders)
    if not runs:
        places = ", ".join(map(str, folders))
        raise UsageError(
            f"{places}: there is no finished run in it; coupled-adam compare makes some"
        )
    rows = arm_results(runs, bold)
    columns, all_columns = shown_columns(rows), shown_columns(rows, more=True)
    notes = footnotes(rows, bold)
    # The folder appears as a whole, so that nobody sees one report's table beside another's page.
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        paper = results_table(rows, columns, notes=notes)
        results = [
            {"recipe": run.recipe.name, "settings": run.settings, "arm": run.arm, "seed": run.seed}
            | run.evaluation
            for run in runs
        ]
        _write(folder / "table.md", paper.markdown())
        _write(folder / "table.tex", paper.latex())
        _write(folder / "summary.csv", summary_csv(rows, all_columns))
        _write(folder / "runs.csv", runs_csv(runs))
        _write(folder / "results.json", json.dumps(results, indent=2))
        pictures = draw_all(runs)
        for picture in tqdm(pictures, "drawing the report", disable=None, leave=False):
            path = folder / picture.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.png)
        table = results_table(rows, all_columns, seeds=True, notes=notes)
        _write(folder / "index.html", report_page(runs, left_out, table, pictures, out))
    return Report(
        given / "index.html",
        conclusion(runs, left_out),
        terminal_table(rows, columns, notes),
        pictures[0].png,
    )


def _write(path: Path, text: str) -> None:
    # Folder names and JSON may contain lone surrogates, which UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="replace")


_FILES = re.compile(
    r"index\.html|table\.md|table\.tex|summary\.csv|runs\.csv|results\.json|overview\.png"
    r"|figures/.+\.png"
)


def _is_own(name: str) -> bool:
    """Whether a report has a file of this name, relative to its folder."""
    return _FILES.fullmatch(name) is not None


def _is_report(folder: Path) -> bool:
    """Whether a folder holds a page of ours, and no other files than belong to it."""
    entries = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if not folder.is_dir() or not all(
        _is_own(path.relative_to(folder).as_posix()) for path in entries
    ):
        return False
    # These name the program that made them; tables do not.
    signed = [path for path in entries if path.suffix in (".html", ".png")]
    return not entries or (folder / "index.html" in signed and all(map(_is_signed, signed)))


def _is_signed(path: Path) -> bool:
    """Whether a page or a picture names this program as the one that made it."""
    return b"coupled-adam" in path.read_bytes()
