"""Write the report of finished runs: tables, pictures and one page."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from tqdm import tqdm

from coupled_adam.fields import require
from coupled_adam.files import new_folder
from coupled_adam.lab.reporting.conclusion import conclusion
from coupled_adam.lab.reporting.figures import draw_all, overview
from coupled_adam.lab.reporting.frame import read_runs
from coupled_adam.lab.reporting.report_page import notebook_part, report_page
from coupled_adam.lab.reporting.results import (
    Bold,
    arm_results,
    footnotes,
    results_table,
    runs_csv,
    shown_columns,
    summary_csv,
)
from coupled_adam.rendering.tables import Table

_FILES = {"index.html", "table.md", "table.tex", "summary.csv", "runs.csv", "results.json"}


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
    replaced as a whole once the new one is complete; anything else is never replaced. ``bold`` is
    explained at :func:`arm_results`.

    Raises:
        UsageError: there is no finished run, a run is damaged, runs of one recipe name cannot be
            compared, or ``out`` is not a report.
    """
    given, out = out, out.resolve()  # so that a symbolic link stays one
    # Beside a report's own files there may be somebody's, which would be lost.
    there = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    is_report = there >= _FILES and all(name.endswith(".png") for name in there - _FILES)
    require(
        not out.exists() or (out.is_dir() and (is_report or not there)),
        f"--out {given} holds something other than a report, which would be lost: move it away, or "
        "choose a new folder",
    )
    frame, left_out = read_runs(folders)
    places = ", ".join(map(str, folders))
    require(
        not frame.empty,
        f"{places}: there is no finished run in it; coupled-adam compare makes some",
    )
    rows = arm_results(frame, bold)
    columns, all_columns = shown_columns(frame), shown_columns(frame, more=True)
    notes, sentences = footnotes(rows, bold), conclusion(frame, left_out)
    pictures, first = draw_all(frame), overview(frame)
    page_table = results_table(rows, all_columns, notes, seeds=True)
    paper_table = results_table(rows, columns, notes)
    results = [
        {"recipe": run.recipe.name, "arm": run.arm, "seed": run.seed, **run.evaluation}
        for run in frame.run
    ]
    files = {
        "table.md": paper_table.markdown(),
        "table.tex": paper_table.latex(),
        "summary.csv": summary_csv(rows, all_columns),
        "runs.csv": runs_csv(frame),
        "results.json": json.dumps(results, indent=2),
        "index.html": report_page(frame, left_out, sentences, page_table, pictures, out),
    }
    # The folder appears as a whole, so that nobody sees one report's table beside another's page.
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        for name, text in files.items():
            # Folder names and JSON may contain lone surrogates, which UTF-8 cannot encode.
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        drawing = tqdm([first, *pictures], "drawing the report", disable=None, leave=False)
        for picture in drawing:
            path = folder / picture.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".png").write_bytes(picture.png)
            path.with_suffix(".svg").write_bytes(picture.svg)
    shown = results_table(rows, columns, notes, titled=True)
    return Report(given / "index.html", sentences, shown, first.png)
