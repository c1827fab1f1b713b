"""Evaluate a run, or any causal language model.

Prints the test loss, measures of the embeddings, word similarity and downstream tasks. The results
of a run are also written to its evaluation.json; those of any other model, in a folder in Hugging
Face format or on the hub, to the file --out.

example: coupled-adam evaluate runs/tiny/lean-seed-1 --batches 50
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupled_adam.cli.options import MeasuringOptions
from coupled_adam.cli.terminal import show
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count, require
from coupled_adam.outputs import check_outputs, write_file

if TYPE_CHECKING:
    from coupled_adam.lab.data.corpus import Corpus
    from coupled_adam.lab.evaluation.downstream import Downstream


@dataclass(frozen=True, kw_only=True)
class Options(MeasuringOptions):
    """The options of ``coupled-adam evaluate``.

    model: the folder of a run or of a model, or its id on the hub.
    batches: how many batches of held-out text to use (default: the recipe's number, or all).
    lm_eval: tasks of the lm-evaluation-harness; without names, the seven of the paper.
    lm_eval_path: a folder with tasks of your own; Python that they name with !function is executed.
    limit: use only the first N examples of each task, for a trial.
    text: held-out text for a model, a file or a folder of text files.
    variant: execute the code of this variant, MODULE:NAME, with which a run was trained.
    out: write a model's results to this JSON file.
    """

    model: str = field(metadata={"metavar": "MODEL"})
    batches: Count | None = None
    lm_eval: list[str] | None = field(default=None, metadata={"nargs": "*"})
    lm_eval_path: Path | None = None
    limit: Count | None = None
    text: Path | None = None
    variant: str | None = None
    out: Path | None = None


def run(options: Options) -> None:
    """Evaluate, and print the numbers."""
    from coupled_adam.embeddings.analysis import word_similarity_sets
    from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
    from coupled_adam.lab.evaluation.evaluate import evaluate_model, evaluate_run
    from coupled_adam.lab.evaluation.evaluation_table import evaluation_table
    from coupled_adam.lab.evaluation.load_model import trusted_run
    from coupled_adam.runs import EVALUATION, is_run

    check_outputs(options.overwrite, out=options.out)
    published, written = options.word_similarity, options.out
    model, folder = options.model, Path(options.model)
    # Loaded first: a misspelt task or a missing set would otherwise show after hours.
    asked: dict[str, Any] = {
        "batches": options.batches,
        "device": options.usable_device(),
        "sets": None if published is None else word_similarity_sets(published),
        "downstream": _downstream(options),
    }
    # An option for the other of the two is refused, not ignored.
    for name in ("text", "out", "revision") if is_run(folder) else ("variant",):
        kind = "run" if is_run(folder) else "model"
        require(getattr(options, name) is None, f"--{name} is not for {folder}, which is a {kind}")
    if is_run(folder):
        run, written = trusted_run(folder, options.variant), folder / EVALUATION

        def corpus() -> Corpus:  # prepared only if there is no test loss yet
            return prepare_corpus(run.recipe, default_cache())

        result = evaluate_run(run, corpus, **asked)
    else:
        result = evaluate_model(model, revision=options.revision, text=options.text, **asked)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(evaluation_table(result, folder.name or model))
    if options.out is not None:  # after they are shown, as the disk may be full
        write_file(options.out, json.dumps(result, indent=2))
    if written is not None and not options.json:
        show(f"all numbers: {written}")


def _downstream(options: Options) -> Downstream | None:
    """The downstream tasks to run."""
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream

    if options.lm_eval is not None:
        return Downstream(options.lm_eval or PAPER_TASKS, options.lm_eval_path, options.limit)
    if options.limit is not None or options.lm_eval_path is not None:
        raise UsageError("--limit and --lm-eval-path need --lm-eval, with the names of the tasks")
    return None
