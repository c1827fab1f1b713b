"""Write the report of finished runs.

Tables, pictures, and a page that holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coupled_adam.cli.options import argument, option
from coupled_adam.cli.outputs import check_folder
from coupled_adam.cli.terminal import print_path, print_table
from coupled_adam.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``coupled-adam report``."""

    folders: list[str] = argument("folders with runs in them", metavar="DIR")
    out: str | None = option("the report's folder (default: report in the first DIR)")
    bold: Literal["adamw", "all"] = option(
        "make values bold that are better than AdamW's (default), or than those of all other arms, "
        "as in the paper's Table 7",
        "adamw",
    )


def run(options: Options) -> None:
    """Write the report and print its table."""
    from coupled_adam.lab.reporting.report import report
    from coupled_adam.runs import REPORT

    folders = [Path(folder) for folder in options.folders]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
    out = Path(options.out) if options.out else folders[0] / REPORT
    check_folder("--out", out)
    written = report(folders, out, options.bold)
    print_table(written)
    print_path("the whole report:", written.page)
