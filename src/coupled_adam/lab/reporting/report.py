"""Write the report of finished runs: tables, pictures and one page."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from tqdm import tqdm

from coupled_adam.fields import require
from coupled_adam.files import new_file, remove, resolved, write_atomically
from coupled_adam.inputs import read_own
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
from coupled_adam.outputs import check_unused, claimed
from coupled_adam.rendering.tables import Table

_WRITTEN = ".files.json"  # the list of the files that a report has written
# By these a folder is known as a report where that list is missing.
_FILES = {"index.html", "table.md", "table.tex", "summary.csv", "runs.csv", "results.json"}


@dataclasses.dataclass(frozen=True)
class Report:
    """A report that was written: it prints as text and table, and shows itself in a notebook."""

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
    """Write a report of all finished runs in some folders; for ``bold`` see :func:`arm_results`.

    ``index.html`` contains everything, for a browser, with the test of its sentences; ``table.md``
    and ``table.tex`` have the paper's. If ``out`` is already a report, its files are replaced once
    all new ones are written, and pictures that it no longer has are removed; anything else is left
    as it is. Raises UsageError if a folder has no runs, or none has finished; a run is damaged,
    runs of one recipe name cannot be compared, or ``out`` is not a report.
    """
    for folder in folders:
        require(folder.is_dir(), f"{folder}: there is no such folder")
    given, out = out, resolved(out)  # so that a symbolic link stays one

    def check() -> None:
        if not (out / _WRITTEN).exists() and not all((out / name).exists() for name in _FILES):
            check_unused(out, "holds something other than a report")

    with claimed(out, check):
        page = _write(folders, out, bold)
    return dataclasses.replace(page, page=given / "index.html")


def _write(folders: Sequence[Path], out: Path, bold: Bold) -> Report:
    """Write the report into a folder that is claimed."""
    # 1. The runs
    frame, left_out = read_runs(folders)
    places = ", ".join(map(str, folders))
    require(not frame.empty, f"{places}: no finished run is there; coupled-adam compare makes some")
    # 2. What it says, in two tables: the page's has more columns, and the test of the sentences;
    # the paper's has the paper's test
    rows = arm_results(frame, bold)
    columns, all_columns = shown_columns(frame), shown_columns(frame, more=True)
    # Measures that only reproduce the paper's code to the digit are in the CSV files alone.
    page_columns = [column for column in all_columns if not column.key.endswith("_published")]
    notes, sentences = footnotes(frame, bold, paired=True), conclusion(frame, left_out)
    pictures, first = draw_all(frame), overview(frame)
    page_table = results_table(rows, page_columns, notes, on_page=True, seeds=True)
    paper_table = results_table(rows, columns, footnotes(frame, bold))
    results = [
        {"recipe": run.recipe.name, "arm": run.arm_name, "seed": run.seed, **run.evaluation}
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
    # 3. The files, all of them in memory before the first is replaced. Folder names
    # and JSON may contain lone surrogates, which UTF-8 cannot encode.
    contents = {name: text.encode(errors="replace") for name, text in files.items()}
    drawing = tqdm([first, *pictures], "drawing the report", disable=None, leave=False)
    for picture in drawing:
        contents |= {f"{picture.file}.png": picture.png, f"{picture.file}.svg": picture.svg}
    _replace(out, contents)
    shown = results_table(rows, columns, notes, on_page=True)
    return Report(out / "index.html", sentences, shown, first.png)


def _replace(out: Path, contents: Mapping[str, bytes]) -> None:
    """Replace the files of a report by new ones, and remove those that it no longer has."""
    listed = out / _WRITTEN

    def pictures(text: str) -> set[str]:
        # The list may be another person's: whatever else it names, it must not make us remove it.
        named = (name for name in json.loads(text) if name.endswith((".png", ".svg")))
        return {name for name in named if ".." not in name}

    written = read_own(listed, pictures) if listed.exists() else set()
    # Until all is done the list has the old files and the new ones.
    write_atomically(listed, json.dumps(sorted(written | contents.keys()), indent=1))
    # All are written under other names, and renamed when the last one has been.
    with contextlib.ExitStack() as stack:
        for name, content in contents.items():
            folder = (out / name).parent
            inside = resolved(folder).is_relative_to(out)
            require(inside, f"{folder} is, or is in, a link that leads out of {out}")
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(new_file(out / name)).write_bytes(content)
    for name in written - contents.keys():
        path = out / name
        if resolved(path.parent).is_relative_to(out):
            remove(path)
            with contextlib.suppress(OSError):  # the folder is not empty
                path.parent.rmdir()
    write_atomically(listed, json.dumps(sorted(contents), indent=1))
