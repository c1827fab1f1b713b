"""Write a copy of a model in which dead or under-trained embeddings are repaired.

Rows of the embeddings that are not finite or nearly zero get values like those of healthy rows. The
rest of the model is copied as it is, and the model itself is never changed.

example: coupled-adam repair my-model --out repaired --text validation.txt
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.cli.options import ModelOptions, TokenizerOption, check_outputs
from coupled_adam.cli.terminal import show, working
from coupled_adam.fields import Count

if TYPE_CHECKING:
    from coupled_adam.embeddings.repair import RepairedMatrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TokenizerOption, ModelOptions):
    """The options of ``coupled-adam repair``.

    model: the folder of a model or a run, a model's id on the hub, or a file with a matrix.
    out: the folder (or file) to write, which must not exist.
    undertrained: also repair the tokens that cannot be told from unused rows.
    recenter: subtract the mean from the output embeddings, which does not change the predictions.
    text: show the loss on this text before and after.
    show: how many rows the table names.
    """

    model: str = dataclasses.field(metadata={"metavar": "MODEL"})
    out: Path
    undertrained: bool = False
    recenter: bool = False
    text: Path | None = None
    show: Count = 20


def run(options: Options) -> None:
    """Repair, and say what was changed."""
    from coupled_adam.embeddings.analysis import find_tokenizer
    from coupled_adam.embeddings.repair import model_folder, repair_model
    from coupled_adam.embeddings.vocabulary import read_vocabulary
    from coupled_adam.lab.evaluation.evaluate import loss_on_text

    target = options.usable_device()
    check_outputs(out=options.out)
    out, text = options.out, options.text
    folder = model_folder(options.model, options.revision)
    # Dead rows are found without a tokenizer; which tokens are unused, only it can tell.
    needed = options.undertrained or text is not None
    tokenizer = find_tokenizer(str(folder), options.tokenizer, None, needed)
    vocabulary = functools.partial(read_vocabulary, tokenizer)
    # The first loss comes before the repair: a model that cannot be loaded needs no copy.
    losses: dict[str, float | None] = {}
    if text is not None:
        losses["before"] = loss_on_text(folder, text, None, target)
    with working("repairing the embeddings"):
        reports = repair_model(
            folder,
            out,
            vocabulary,
            undertrained=options.undertrained,
            recenter=options.recenter,
        )
    if text is not None:
        losses["after"] = loss_on_text(out, text, None, target)
    if options.json:
        content = {"matrices": [dataclasses.asdict(report) for report in reports], "loss": losses}
        print(json.dumps(content, indent=2, allow_nan=False))
        return
    for report in reports:
        _print(report, options.show)
    for when, loss in losses.items():
        show(f"loss {when}: {'not finite' if loss is None else f'{loss:.4f}'}")
    show(f"repaired model: {out}")


def _print(report: RepairedMatrix, number: int) -> None:
    """Print what was changed in a matrix, and the first of its rows."""
    from coupled_adam.rendering.tables import Table

    reasons = collections.Counter(row.reason for row in report.rows)
    summary = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    if report.mean_removed is not None:
        summary += f"; a mean of norm {report.mean_removed:.4g} removed from all rows"
    columns = ("id", "token", "reason", "norm before", "after")
    rows = []
    for row in report.rows[:number]:
        before = "–" if row.norm_before is None else f"{row.norm_before:.4g}"
        after = f"{row.norm_after:.4g}"
        rows.append([str(row.row), row.token, row.reason, before, after])
    notes = [f"rows changed: {summary}"]
    show(Table(columns, rows, f"{report.role} matrix", notes, left=(1, 2)))
