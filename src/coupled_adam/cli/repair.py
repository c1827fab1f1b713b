"""Write a copy of a model in which dead embeddings are repaired.

Rows that are not finite or nearly zero get values like those of healthy rows. The rest of the model
is copied as it is, and the model itself is never changed.

example: coupled-adam repair my-model --out repaired --text validation.txt
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from coupled_adam.cli.options import ModelOptions
from coupled_adam.cli.terminal import show, working
from coupled_adam.outputs import check_outputs

_NAMED = 20  # rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of ``coupled-adam repair``.

    model: the folder of a model or a run, a model's id on the hub, or a .npy file with a matrix.
    out: the folder (or file) to write, which must not exist.
    recenter: subtract the mean from the output embeddings, which does not change the predictions.
    from_output: give dead input embeddings the directions of the output embeddings.
    text: show the loss on this text before and after.
    """

    model: str = dataclasses.field(metadata={"metavar": "MODEL"})
    out: Path
    recenter: bool = False
    from_output: bool = False
    text: Path | None = None


def run(options: Options) -> None:
    """Repair, and say what was changed."""
    from coupled_adam.embeddings.repair import model_folder, repair_model
    from coupled_adam.lab.evaluation.evaluate import loss_on_text

    device, text = options.usable_device(), options.text
    check_outputs(out=options.out)
    folder = model_folder(options.model, options.revision)
    # The first loss comes before the repair: a model that cannot be loaded needs no copy.
    losses: dict[str, float | None] = {}
    if text is not None:
        losses["before"] = loss_on_text(folder, text, None, device)
    with working("repairing the embeddings"):
        reports = repair_model(folder, options.out, options.recenter, options.from_output)
    if text is not None:
        losses["after"] = loss_on_text(options.out, text, None, device)
    if options.json:
        content = {"matrices": [dataclasses.asdict(report) for report in reports], "loss": losses}
        print(json.dumps(content, indent=2, allow_nan=False))
        return
    # A line for each matrix, then what it did to the loss.
    for report in reports:
        named = ", ".join(f"#{row} {reason}" for row, reason in [*report.rows.items()][:_NAMED])
        more = ", ..." if len(report.rows) > _NAMED else ""
        matrix = f"{report.role} matrix {report.tensor}".rstrip()
        line = f"{matrix}: {len(report.rows)} rows replaced" + (named and f": {named}")
        if report.mean_removed is not None:
            more += f"; a mean of norm {report.mean_removed:.4g} removed from all rows"
        show(line + more)
    for when, loss in losses.items():
        show(f"loss {when}: {'not finite' if loss is None else f'{loss:.4f}'}")
    show(f"repaired model: {options.out}")
