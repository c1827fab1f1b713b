"""A report as a single, self-contained HTML page, which a browser shows without a network."""

import base64
import json
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from coupled_adam.embeddings.measures import small_print
from coupled_adam.lab.reporting.frame import COLUMNS, groups
from coupled_adam.lab.run import Run
from coupled_adam.rendering import page
from coupled_adam.rendering.pictures import Picture
from coupled_adam.rendering.tables import Table
from coupled_adam.runs import ENVIRONMENT


def report_page(
    frame: pd.DataFrame,
    left_out: Mapping[Path, str],
    conclusion: Sequence[str],
    table: Table,
    pictures: Sequence[Picture],
    out: Path,
) -> str:
    """Create the page of a report in the folder ``out``, with embedded pictures.

    All text is escaped. The links lead to the folders of the runs.
    """
    experiments = groups(frame, "experiment")
    values = {
        "conclusion": conclusion,
        "arms": [_arm(a, out) for runs in experiments for a in groups(runs, "setup")],
        "table": table,
        "measures": small_print(COLUMNS.values()),
        "names": ", ".join(frame.experiment.unique()),
        "experiments": [
            # The runs of an experiment have the same settings, so that any of them can show them.
            {
                "name": run.recipe.name,
                "config": yaml.safe_dump(run.recipe.to_dict(), sort_keys=False),
                "environment": _environment(run),
            }
            for run in (runs.run.iloc[0] for runs in experiments)
        ],
        "runs": len(frame),
        "left_out": {str(path): reason for path, reason in left_out.items()},
    }
    return page.render("report.html", values, pictures, package="coupled_adam.lab.reporting")


def notebook_part(conclusion: Sequence[str], table: Table, overview: bytes) -> str:
    """A conclusion, a table and a picture as a part of another page, such as a notebook."""
    image = base64.b64encode(overview).decode()
    values = {"conclusion": conclusion, "table": table, "overview": image}
    return page.render("notebook.html", values, [], package="coupled_adam.lab.reporting")


def _arm(arm: pd.DataFrame, out: Path) -> dict[str, Any]:
    """The options of an arm, its time, and links to its runs."""
    first: Run = arm.run.iloc[0]
    tokens = first.recipe.tokens
    seconds = math.fsum(tokens / run.tokens_per_second for run in arm.run)
    speed = len(arm) * tokens / seconds
    return {
        "experiment": first.recipe.name,
        "label": first.label,
        "options": ", ".join(f"{key}={value}" for key, value in first.options.items()),
        "seconds": _duration(seconds / len(arm)),
        "total": _duration(seconds),
        "speed": "–" if math.isnan(speed) else f"{speed:,.0f}",
        "runs": [(run.seed, _link(run.folder, out)) for run in arm.run],
    }


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    total = round(seconds)
    if total < 3600:
        return f"{total // 60}:{total % 60:02} min"
    return f"{total // 3600}:{total % 3600 // 60:02} h"


def _link(folder: Path, out: Path) -> str:
    """The folder's address, relative to the page so that the two can be moved together."""
    return urllib.parse.quote(os.path.relpath(folder.resolve(), out.resolve()), errors="replace")


def _environment(run: Run) -> dict[str, Any]:
    """Where and how a run was made; empty if its file is missing."""
    path = run.folder / ENVIRONMENT
    if not path.exists():
        return {}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    gpus = ", ".join(recorded.get("gpus", [])) or "no GPU"
    return {
        "command": " ".join(recorded.get("command", [])),
        "git commit": recorded.get("git_commit"),
        "machine": f"{recorded.get('processor')}, {recorded.get('cores')} cores; {gpus}",
        "python": recorded.get("python"),
        "packages": ", ".join(f"{k} {v}" for k, v in recorded.get("packages", {}).items()),
        "corpus": recorded.get("corpus", {}).get("source"),
        "time": recorded.get("time"),
    }
