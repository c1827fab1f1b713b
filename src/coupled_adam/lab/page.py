"""A report as one HTML page that needs nothing else."""

import base64
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from coupled_adam.lab.figures import Picture
from coupled_adam.lab.runs import Run, short
from coupled_adam.lab.tables import Column, Row, footnotes


def render(
    runs: Sequence[Run],
    left_out: Mapping[Path, str],
    rows: Sequence[Row],
    columns: Sequence[Column],
    pictures: Sequence[Picture],
    folder: Path,
) -> str:
    """The page, with the pictures that were saved in ``folder`` embedded; all text is escaped."""
    template = importlib.resources.files("coupled_adam.lab") / "templates" / "report.html"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["short"] = short
    first = {run.experiment: run for run in reversed(runs)}
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        rows=rows,
        columns=columns,
        footnotes=footnotes(rows),
        pictures=[
            {
                "caption": picture.caption,
                "data": _data_uri(folder / picture.file),
                "wide": picture.figure.get_figwidth() > 8,
            }
            for picture in pictures
        ],
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


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _environment(run: Run) -> dict[str, Any]:
    try:
        text = (run.folder / "environment.json").read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, Any] = json.loads(text)
    return {
        "command": " ".join(map(str, found.get("command", []))),
        "git commit": found.get("git_commit"),
        "machine": f"{found.get('processor')}, {found.get('cores')} cores; "
        + (", ".join(found.get("gpus", [])) or "no GPU"),
        "python": found.get("python"),
        "packages": ", ".join(f"{k} {v}" for k, v in found.get("packages", {}).items()),
        "corpus": (found.get("corpus") or {}).get("source"),
        "time": found.get("time"),
    }
