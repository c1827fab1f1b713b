"""A report, or an analysis, as one HTML page that needs nothing else."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from coupled_adam.lab.reporting.figures import Picture
from coupled_adam.lab.reporting.runs import Run, short
from coupled_adam.lab.reporting.tables import Column, Row, footnotes


def render(
    runs: Sequence[Run],
    left_out: Mapping[Path, str],
    rows: Sequence[Row],
    columns: Sequence[Column],
    pictures: Sequence[Picture],
) -> str:
    """The page of a report, with the pictures embedded; all text is escaped."""
    first = {run.experiment: run for run in reversed(runs)}
    return _template("report.html").render(
        rows=rows,
        columns=columns,
        footnotes=footnotes(rows),
        pictures=[_embedded(picture) for picture in pictures],
        experiments=[
            {
                "name": name,
                "config": yaml.safe_dump(run.recipe.to_dict(), sort_keys=False),
                "environment": _environment(run),
            }
            for name, run in reversed(first.items())
        ],
        runs=len(runs),
        left_out={str(path): reason for path, reason in left_out.items()},
    )


def render_analysis(
    title: str,
    columns: Sequence[str],
    sections: Sequence[tuple[str, Sequence[tuple[str, str, Sequence[str]]]]],
    pictures: Sequence[Picture],
    note: str,
) -> str:
    """A page of one table, in sections of rows (label, symbol, values), and of pictures."""
    return _template("analysis.html").render(
        title=title,
        labels=columns,
        sections=sections,
        pictures=[_embedded(picture) for picture in pictures],
        note=note,
    )


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coupled_adam.lab.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["short"] = short
    return environment.get_template(name)


def _embedded(picture: Picture) -> dict[str, Any]:
    """A picture for the template, as a data URI."""
    return {
        "caption": picture.caption,
        "data": "data:image/png;base64," + base64.b64encode(picture.png).decode(),
        "wide": picture.figure.get_figwidth() > 8,
    }


def _environment(run: Run) -> dict[str, Any]:
    """What a run ran on; nothing of a file that is not there, or not as we write it."""
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
