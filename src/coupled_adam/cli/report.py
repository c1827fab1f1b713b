"""Write the report of finished runs: tables, pictures, and a page that holds all of them.

example: coupled-adam report runs/124M-5B runs/124M-10B --out report
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coupled_adam.cli.terminal import show


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``coupled-adam report``.

    folders: folders with runs in them.
    out: the report's folder; a report in it is replaced (default: report in the first DIR).
    bold: which values are bold: adamw, better than AdamW's; all, better than every other arm's, as
        in the paper's Table 7; value, the best without a test, as of single runs in Table 2.
    """

    folders: list[Path] = field(metadata={"metavar": "DIR"})
    out: Path | None = None
    bold: Literal["adamw", "all", "value"] = "adamw"


def run(options: Options) -> None:
    """Write the report and print its table."""
    from coupled_adam.lab.reporting.report import report
    from coupled_adam.runs import REPORT

    out = options.out or options.folders[0] / REPORT
    written = report(options.folders, out, options.bold)
    show(written)
    show(f"the whole report: {written.page}")
