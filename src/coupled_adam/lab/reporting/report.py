"""Write the report of finished runs: tables, pictures and one page."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from coupled_adam.errors import UsageError
from coupled_adam.files import clear_leftovers, make_folder, new_folder
from coupled_adam.lab.reporting.figures import draw_all
from coupled_adam.lab.reporting.page import render
from coupled_adam.lab.reporting.runs import read_runs
from coupled_adam.lab.reporting.tables import (
    latex,
    markdown,
    runs_csv,
    shown_columns,
    summary_csv,
    table_rows,
    terminal,
)


def report(folders: Sequence[Path], out: Path) -> Table:
    """Write a report of all finished runs in some folders, and return the table for the terminal.

    ``index.html`` contains everything, for a browser. The other files are ``table.md``,
    ``table.tex``, ``summary.csv`` (a row for each arm), ``runs.csv`` and ``results.json`` (all
    results of all runs), ``overview.png`` and ``figures/``. A dash stands for a result that is
    missing. If ``out`` is already a report, it is replaced as a whole once the new one is complete
    and on the disk (:func:`coupled_adam.files.new_folder`); anything else is never replaced.

    Raises:
        UsageError: there is no finished run, a run is damaged, or ``out`` is not a report.
    """
    shown, out = out, out.resolve()  # so that a symbolic link stays one
    if out.parent.is_dir():
        clear_leftovers(out.parent)
    if out.exists() and not _is_report(out):
        raise UsageError(
            f"--out {shown} holds something other than a report, which would be lost: choose a "
            "new folder"
        )
    runs, left_out = read_runs(folders)
    if not runs:
        places = ", ".join(map(str, folders))
        raise UsageError(
            f"{places}: there is no finished run in it; coupled-adam compare makes some"
        )
    rows = table_rows(runs)
    columns = shown_columns(rows)
    make_folder(out.parent)
    with new_folder(out, _is_own) as folder:
        _write(folder / "table.md", markdown(rows, columns))
        _write(folder / "table.tex", latex(rows, columns))
        _write(folder / "summary.csv", summary_csv(rows, columns))
        _write(folder / "runs.csv", runs_csv(runs))
        results = [
            {"recipe": r.recipe.name, "arm": r.arm, "seed": r.seed, **r.evaluation} for r in runs
        ]
        _write(folder / "results.json", json.dumps(results, indent=2))
        pictures = draw_all(runs)
        for picture in pictures:
            path = folder / picture.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.png)
        page = render(runs, left_out, rows, columns, pictures)
        _write(folder / "index.html", page)
    return terminal(rows, columns)


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
    """Whether a folder holds no other files than this module writes."""
    entries = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return folder.is_dir() and all(_is_own(p.relative_to(folder).as_posix()) for p in entries)
