"""A report as a single, self-contained HTML page, which a browser shows without a network."""

import base64
import math
import os
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from coupled_adam.embeddings.measures import small_print
from coupled_adam.files import resolved
from coupled_adam.lab.reporting.frame import COLUMNS, groups
from coupled_adam.lab.run import Run
from coupled_adam.rendering import page
from coupled_adam.rendering.pictures import Picture
from coupled_adam.rendering.tables import Table


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
        "arms": [_arm(a, out) for runs in experiments for a in groups(runs, "arm")],
        "table": table,
        "letters": [*_letters(frame, table)],
        "names": ", ".join(frame.experiment.unique()),
        # All runs of an experiment have the same settings, so any of them can show them.
        "experiments": [_experiment(runs.run.iloc[0]) for runs in experiments],
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
    """The options of an arm, the mean time of its runs, and links to them."""
    first: Run = arm.run.iloc[0]  # for what its runs have in common
    options = {"optimizer": first.arm.optimizer, **first.arm.options}
    speeds = arm.run.map(lambda run: run.tokens_per_second)
    # From the speed, as the time from start to end includes evaluations and interruptions.
    minutes = (first.recipe.tokens / 60 / speeds).mean()
    return {
        "experiment": first.recipe.name,
        "label": first.label,
        "options": ", ".join(f"{key}={value}" for key, value in options.items()),
        "time": "–" if math.isnan(minutes) else f"{minutes:,.1f} min",
        "runs": [(run.seed, _link(run.folder, out)) for run in arm.run],
    }


def _letters(frame: pd.DataFrame, table: Table) -> Iterator[str]:
    """The meanings of the letters and words that the page uses."""
    # Only what the table or the arms' labels show is explained.
    headers = " ".join(table.columns).replace(",", "").split()
    labels = " ".join(frame.label)
    yield from (meaning for name, meaning in _HEADERS.items() if name in headers)
    measures = [measure for measure in COLUMNS.values() if measure.header in table.columns]
    yield small_print(measures)
    yield from (meaning for option, meaning in _OPTIONS.items() if option in labels)


_HEADERS = {
    "D": "D: training tokens",
    "N": "N: parameters",
    "centered": "centered: with the mean removed",
}
_OPTIONS = {
    "f = ": "f: the learning rate of the embeddings, relative to that of all other parameters",
    "n = ": "n: ν is multiplied by 2⁻ⁿ",
    "a = ": "a: the exponent of each token's own second moment (row_exponent)",
}


def _link(folder: Path, out: Path) -> str:
    """The folder's address, relative to the page so that the two can be moved together."""
    return urllib.parse.quote(os.path.relpath(resolved(folder), out), errors="replace")


def _experiment(run: Run) -> dict[str, Any]:
    """What an experiment is, and where and how one of its runs was made."""
    made = run.environment
    gpus = ", ".join(made.get("gpus", [])) or "no GPU"
    return {
        "name": run.recipe.name,
        "config": yaml.safe_dump(run.recipe.to_dict(), sort_keys=False),
        "environment": {
            "command": shlex.join(made.get("command", [])),
            "git commit": made.get("git_commit"),
            "machine": f"{made.get('processor')}, {made.get('cores')} cores; {gpus}",
            "python": made.get("python"),
            "packages": ", ".join(f"{k} {v}" for k, v in made.get("packages", {}).items()),
            "corpus": made.get("corpus", {}).get("source"),
            "time": made.get("time"),
        },
    }
