"""Evaluate a run, or any causal language model.

Computes the test loss, measures of the embeddings, word similarity and downstream tasks, and prints
them. The results of a finished run are also written to its evaluation.json; those of any other
causal language model, in a folder in Hugging Face format or on the hub, to the file --out, if it is
given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.cli.options import (
    CacheOption,
    Count,
    ModelOptions,
    WordSimilarityOption,
    argument,
    option,
)
from coupled_adam.cli.outputs import check_files, check_folder, write_file
from coupled_adam.cli.terminal import print_path, print_table
from coupled_adam.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options(WordSimilarityOption, ModelOptions, CacheOption):
    """The options of ``coupled-adam evaluate``."""

    model: str = argument("the folder of a run or of a model, or its id on the hub")
    batches: Count | None = option(
        "how many batches of held-out text to use (default: the recipe's number, or all)"
    )
    lm_eval: list[str] | None = option(
        "tasks of the lm-evaluation-harness; without names, the seven of the paper",
        metavar="TASK",
        nargs="*",
    )
    lm_eval_path: Path | None = option(
        "a folder with tasks of your own; Python that they name with !function is executed",
        metavar="DIR",
    )
    limit: Count | None = option(
        "use only the first N examples of each task, to try things out", metavar="N"
    )
    text: Path | None = option("held-out text for a model: a file, or a folder of text files")
    variant: str | None = option(
        "execute the code of this variant, with which a run was trained", metavar="MODULE:NAME"
    )
    out: str | None = option("write a model's results to this JSON file")


def run(options: Options) -> None:
    """Evaluate, and print the numbers."""
    from coupled_adam.embeddings.analysis import word_similarity_sets
    from coupled_adam.lab.data.corpus import prepare_corpus
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream
    from coupled_adam.lab.evaluation.evaluate import evaluate_model, evaluate_run
    from coupled_adam.lab.evaluation.evaluation_table import evaluation_table
    from coupled_adam.lab.evaluation.loading import recipe_of_run
    from coupled_adam.runs import EVALUATION, is_run

    check_files([options.text], out=options.out)
    target = options.usable_device()
    folder = Path(options.model)
    name = options.word_similarity
    sets = None if name is None else word_similarity_sets(name)
    downstream = None
    if options.lm_eval is not None:
        downstream = Downstream(options.lm_eval or PAPER_TASKS, options.lm_eval_path, options.limit)
    elif options.lm_eval_path is not None or options.limit is not None:
        name = "--limit" if options.lm_eval_path is None else "--lm-eval-path"
        raise UsageError(f"{name} needs --lm-eval, with the names of the tasks")
    if is_run(folder):
        check_folder("MODEL", folder)
        if options.text is not None or options.out is not None or options.revision is not None:
            raise UsageError(
                f"--text, --out and --revision are for models; {folder} is a run, which has its "
                "own text and output file"
            )
        # The corpus is prepared only if there is no test loss yet.
        recipe = recipe_of_run(folder, options.variant)
        result = evaluate_run(
            folder,
            lambda: prepare_corpus(recipe, options.cache_folder()),
            batches=options.batches,
            sets=sets,
            downstream=downstream,
            device=target,
            variant=options.variant,
        )
        written: Path | None = folder / EVALUATION
    else:
        result = evaluate_model(
            options.model,
            revision=options.revision,
            text=options.text,
            batches=options.batches,
            sets=sets,
            downstream=downstream,
            device=target,
        )
        written = Path(options.out) if options.out else None
    # The numbers are shown even if the file cannot be written after all.
    try:
        if options.out is not None:
            write_file("--out", options.out, json.dumps(result, indent=2))
    finally:
        if options.json:
            print(json.dumps(result, indent=2))
        else:
            print_table(evaluation_table(result, folder.name or options.model))
    if written is not None and not options.json:
        print_path("all numbers:", written)
