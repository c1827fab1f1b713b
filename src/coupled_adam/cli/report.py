"""Write the report of finished runs.

Tables, pictures, and a page that holds all of them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coupled_adam.cli.options import check_folder
from coupled_adam.cli.terminal import print_path, print_table
from coupled_adam.errors import UsageError


@dataclass(frozen=True)
class Options:
    """The arguments of ``coupled-adam report``."""

    folders: list[str]
    out: str | None
    bold: Literal["adamw", "all"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders with runs in them")
    parser.add_argument("--out", help="the report's folder (default: report in the first DIR)")
    parser.add_argument(
        "--bold",
        choices=("adamw", "all"),
        default="adamw",
        help="make values bold that are better than AdamW's (default), or than those of all other "
        "arms, as in the paper's Table 7",
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
