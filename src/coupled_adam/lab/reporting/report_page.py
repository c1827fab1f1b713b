"""A report as a single, self-contained HTML page, which a browser shows without a network."""

import base64
import json
import math
import os
import statistics
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from coupled_adam.embeddings.measures import small_print
from coupled_adam.files import read_text
from coupled_adam.lab.reporting.conclusion import conclusion
from coupled_adam.lab.reporting.experiments import experiments
from coupled_adam.lab.reporting.finished_run import COLUMNS, Run
from coupled_adam.rendering import page
from coupled_adam.rendering.pictures import Picture
from coupled_adam.rendering.tables import Table
from coupled_adam.runs import ENVIRONMENT


def report_page(
    runs: Sequence[Run],
    left_out: Mapping[Path, str],
    table: Table,
    pictures: Sequence[Picture],
    out: Path,
) -> str:
    """Create the page of a report in the folder ``out``, with embedded pictures.

    All text is escaped. The links lead to the folders of the runs.
    """
    values = {
        "conclusion": conclusion(runs, left_out),
        "arms": _arms(runs, out),
        "table": table,
        "measures": small_print(COLUMNS.values()),
        "names": ", ".join(dict.fromkeys(run.experiment.partition(" ")[0] for run in runs)),
        "experiments": [
            # The runs of an experiment have the same settings, so that any of them can show them.
            {
                "name": experiment.name,
                "config": yaml.safe_dump(experiment.runs[0].recipe.to_dict(), sort_keys=False),
                "environment": _environment(experiment.runs[0]),
            }
            for experiment in experiments(runs)
        ],
        "runs": len(runs),
        "left_out": {str(path): reason for path, reason in left_out.items()},
    }
    return page.render("report.html", values, pictures, package="coupled_adam.lab.reporting")


def notebook_part(conclusion: Sequence[str], table: Table, overview: bytes) -> str:
    """A conclusion, a table and a picture as a part of another page, such as a notebook."""
    image = base64.b64encode(overview).decode()
    values = {"conclusion": conclusion, "table": table, "overview": image}
    return page.render("notebook.html", values, [], package="coupled_adam.lab.reporting")


def _arms(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """For each arm of each experiment: its options, its time, and links to its runs."""
    rows = []
    for experiment in experiments(runs):
        for arm in experiment.arms:
            seconds = [run.seconds for run in arm if run.seconds is not None]
            speeds = [run.tokens_per_second for run in arm if run.tokens_per_second is not None]
            timed = len(seconds) == len(arm)
            rows.append(
                {
                    "experiment": experiment.name,
                    "label": arm[0].label,
                    "options": ", ".join(f"{k}={v}" for k, v in arm[0].options.items()),
                    "seconds": _duration(statistics.fmean(seconds)) if timed else "–",
                    "total": _duration(math.fsum(seconds)) if timed else "–",
                    "speed": f"{statistics.harmonic_mean(speeds):,.0f}" if speeds else "–",
                    "runs": [(run.seed, _link(run.folder, out)) for run in arm],
                }
            )
    return rows


def _duration(seconds: float) -> str:
    total = round(seconds)
    if total < 3600:
        return f"{total // 60}:{total % 60:02} min"
    return f"{total // 3600}:{total % 3600 // 60:02} h"


def _link(folder: Path, out: Path) -> str:
    """The folder's address, relative to the page so that the two can be moved together."""
    return urllib.parse.quote(os.path.relpath(folder.resolve(), out.resolve()), errors="replace")


def _environment(run: Run) -> dict[str, Any]:
    """The environment of a run; empty if its file is missing or not as training writes it."""
    # Only readers need these facts: an old or odd file must not prevent a report.
    try:
        recorded = json.loads(read_text(run.folder / ENVIRONMENT))
        return {
            "command": " ".join(map(str, recorded.get("command", []))),
            "git commit": recorded.get("git_commit"),
            "machine": f"{recorded.get('processor')}, {recorded.get('cores')} cores; "
            + (", ".join(map(str, recorded.get("gpus", []))) or "no GPU"),
            "python": recorded.get("python"),
            "packages": ", ".join(f"{k} {v}" for k, v in recorded.get("packages", {}).items()),
            "corpus": (recorded.get("corpus") or {}).get("source"),
            "time": recorded.get("time"),
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
