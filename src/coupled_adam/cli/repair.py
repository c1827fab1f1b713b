"""Write a copy of a model in which dead or under-trained embeddings are repaired.

Rows of the embeddings that are not finite or nearly zero get values like those of healthy rows. The
rest of the model is copied as it is, and the model itself is never changed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coupled_adam.cli.options import (
    Device,
    add_device,
    add_json,
    check_folder,
    device,
    optional_path,
    positive_int,
    whole_number,
)
from coupled_adam.cli.terminal import (
    console,
    print_path,
    print_table,
    progress_bar,
    quiet_libraries,
)
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    from coupled_adam.embeddings.repair import RepairedMatrix


@dataclass(frozen=True)
class Options:
    """The arguments."""

    model: str
    revision: str | None
    out: str
    undertrained: bool
    method: Literal["sample", "partner"]
    recenter: bool
    seed: int
    tokenizer: str | None
    text: str | None
    batches: int | None
    show: int
    json: bool
    device: Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    parser.add_argument("model", help="the folder of a model or a run, or a model's id on the hub")
    parser.add_argument("--revision", help="the branch, tag or commit, for a model on the hub")
    parser.add_argument("--out", required=True, help="the folder to write, which must not exist")
    parser.add_argument(
        "--undertrained",
        action="store_true",
        help="also repair the tokens that cannot be told from unused rows",
    )
    parser.add_argument(
        "--method",
        choices=("sample", "partner"),
        default="sample",
        help="draw new rows like the healthy ones; or take the direction of the same token in the "
        "other matrix, where input and output embeddings are not tied",
    )
    parser.add_argument(
        "--recenter",
        action="store_true",
        help="subtract the mean from the output embeddings, which does not change the predictions",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the rows drawn")
    parser.add_argument(
        "--tokenizer", help="a tokenizer's folder, or its id on the hub (default: the model's own)"
    )
    parser.add_argument("--text", help="show the loss on this text before and after")
    parser.add_argument(
        "--batches", type=positive_int, help="how many batches of the text to use (default: all)"
    )
    parser.add_argument(
        "--show", type=positive_int, default=20, metavar="N", help="how many rows the table names"
    )
    add_json(parser, "changes")
    add_device(parser)


def run(options: Options) -> None:
    """Repair, and say what was changed."""
    from rich.text import Text

    from coupled_adam.embeddings.analysis import Source, find_tokenizer
    from coupled_adam.embeddings.repair import Repair, model_folder, repair_model
    from coupled_adam.embeddings.vocabulary import Vocabulary, read_vocabulary
    from coupled_adam.lab.evaluation.evaluate import loss_on_text

    if options.revision is not None and Path(options.model).exists():
        raise UsageError(f"--revision is for models on the hub, and {options.model} is a path here")
    if options.batches is not None and options.text is None:
        raise UsageError("--batches is for the loss: name a text for it with --text")
    target = device(options.device)
    check_folder("--out", Path(options.out))
    quiet_libraries()
    out, text = Path(options.out), optional_path(options.text)
    folder = model_folder(options.model, options.revision)
    needed = options.undertrained or text is not None
    tokenizer = find_tokenizer(str(folder), Source(tokenizer=options.tokenizer), needed)

    def vocabulary(rows: int) -> Vocabulary:
        return Vocabulary.of_ids(rows) if tokenizer is None else read_vocabulary(tokenizer, rows)

    losses: dict[str, float | None] = {}
    if text is not None:
        losses["before"] = loss_on_text(folder, text, options.batches, target)
    repair = Repair(options.undertrained, options.method, options.recenter, options.seed)
    with progress_bar("reading the embeddings") as progress:
        reports = repair_model(folder, out, repair, vocabulary, progress)
    if text is not None:
        losses["after"] = loss_on_text(out, text, options.batches, target)
    if options.json:
        content = {"matrices": [dataclasses.asdict(report) for report in reports], "loss": losses}
        print(json.dumps(content, indent=2, allow_nan=False))
        return
    for report in reports:
        _print(report, options.show)
    for when, loss in losses.items():
        console().print(Text(f"loss {when}: {'not finite' if loss is None else f'{loss:.4f}'}"))
    print_path("repaired model:", out)


def _print(report: RepairedMatrix, number: int) -> None:
    """Print what was changed in a matrix, and the first of its rows."""
    from rich.text import Text

    from coupled_adam.rendering.tables import terminal_table

    reasons = collections.Counter(row.reason for row in report.rows)
    said = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    if report.mean_removed is not None:
        said += f"; a mean of norm {report.mean_removed:.4g} removed from all rows"
    table = terminal_table(f"{report.role}: {', '.join(report.tensors)}", f"rows changed: {said}")
    for column in ("id", "token", "reason", "new value", "norm before", "after"):
        left = column in ("token", "reason", "new value")
        table.add_column(column, justify="left" if left else "right")
    for row in report.rows[:number]:
        before = "–" if row.norm_before is None else f"{row.norm_before:.4g}"
        cells = (str(row.row), row.token, row.reason, row.method, before, f"{row.norm_after:.4g}")
        table.add_row(*map(Text, cells))
    print_table(table)
