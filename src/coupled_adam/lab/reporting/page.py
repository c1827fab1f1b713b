"""A report as a single, self-contained HTML page."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from coupled_adam.lab.reporting.runs import Run, short
from coupled_adam.lab.reporting.tables import Column, Row
from coupled_adam.rendering import page
from coupled_adam.rendering.pictures import Picture


@dataclasses.dataclass(frozen=True)
class PageTable:
    """The table of a page: its rows, the columns to show, and the notes below it."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    footnotes: Sequence[str]


def render(
    runs: Sequence[Run],
    left_out: Mapping[Path, str],
    table: PageTable,
    pictures: Sequence[Picture],
) -> str:
    """Create the page of a report, with embedded pictures; all text is escaped."""
    first = {run.experiment: run for run in reversed(runs)}
    values = {
        "rows": table.rows,
        "columns": table.columns,
        "footnotes": table.footnotes,
        "experiments": [
            {
                "name": name,
                "config": yaml.safe_dump(run.recipe.to_dict(), sort_keys=False),
                "environment": _environment(run),
            }
            for name, run in reversed(first.items())
        ],
        "runs": len(runs),
        "left_out": {str(path): reason for path, reason in left_out.items()},
        "short": short,
    }
    return page.render("report.html", values, pictures, package="coupled_adam.lab.reporting")


def _environment(run: Run) -> dict[str, Any]:
    """The environment of a run; empty if its file is missing or not as training writes it."""
    try:
        found = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
        return {
            "command": " ".join(map(str, found.get("command", []))),
            "git commit": found.get("git_commit"),
            "machine": f"{found.get('processor')}, {found.get('cores')} cores; "
            + (", ".join(map(str, found.get("gpus", []))) or "no GPU"),
            "python": found.get("python"),
            "packages": ", ".join(f"{k} {v}" for k, v in found.get("packages", {}).items()),
            "corpus": (found.get("corpus") or {}).get("source"),
            "time": found.get("time"),
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
