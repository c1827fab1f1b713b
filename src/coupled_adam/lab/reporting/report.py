"""Write the report of finished runs: tables, pictures and one page."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from coupled_adam.errors import UsageError
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
    missing. If ``out`` is already a report, it is replaced as a whole once the new one is complete;
    anything else is never replaced.

    Raises:
        UsageError: there is no finished run, a run is damaged, or ``out`` is not a report.
    """
    if out.exists() and not _is_report(out):
        raise UsageError(
            f"--out {out} holds something other than a report, which would be lost: choose a "
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
    out = out.resolve()  # so that a symbolic link stays one
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        (temporary / "figures").mkdir(parents=True)
        _write(temporary / "table.md", markdown(rows, columns))
        _write(temporary / "table.tex", latex(rows, columns))
        _write(temporary / "summary.csv", summary_csv(rows, columns))
        _write(temporary / "runs.csv", runs_csv(runs))
        results = [
            {
                "recipe": r.recipe.name,
                "settings": r.settings,
                "arm": r.arm,
                "seed": r.seed,
                **r.evaluation,
            }
            for r in runs
        ]
        _write(temporary / "results.json", json.dumps(results, indent=2))
        pictures = draw_all(runs)
        for picture in pictures:
            path = temporary / picture.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.png)
        page = render(runs, left_out, rows, columns, pictures)
        _write(temporary / "index.html", page)
        if out.exists():
            before = out.with_name(f"{out.name}.{os.getpid()}.old")
            out.rename(before)
            temporary.rename(out)
            shutil.rmtree(before)
        else:
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return terminal(rows, columns)


def _write(path: Path, text: str) -> None:
    # Folder names and JSON may contain lone surrogates, which UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="replace")


_FILES = {
    "index.html",
    "table.md",
    "table.tex",
    "summary.csv",
    "runs.csv",
    "results.json",
    "overview.png",
    "figures",
}


def _is_report(folder: Path) -> bool:
    """Whether a folder is empty or contains only files that this module writes."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= _FILES
