"""Evaluate a run, or any causal language model, or print texts that they write.

Prints the test loss, measures of the embeddings, word similarity and downstream tasks. Those of a
finished run are also written to its evaluation.json; those of another model, in a folder in Hugging
Face format or on the hub, to the file --out. With --sample, prints texts that models write instead:
for a comparison those of all its arms, for the same prompt with the same random numbers.

examples: coupled-adam evaluate runs/tiny/lean-seed-1 --batches 50
          coupled-adam evaluate --sample runs/demo --prompt "The list"
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupled_adam.cli.options import MeasuringOptions, check_outputs, write_file
from coupled_adam.cli.terminal import show
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count, NotNegative, WholeNumber

if TYPE_CHECKING:
    from coupled_adam.lab.data.corpus import Corpus
    from coupled_adam.lab.evaluation.downstream import Downstream


@dataclass(frozen=True, kw_only=True)
class Options(MeasuringOptions):
    """The options of ``coupled-adam evaluate``.

    models: the folder of a run or of a model, or its id on the hub; with --sample several, and
        comparisons.
    batches: how many batches of held-out text to use (default: the recipe's number, or all).
    lm_eval: tasks of the lm-evaluation-harness; without names, the seven of the paper.
    lm_eval_path: a folder with tasks of your own; Python that they name with !function is executed.
    limit: use only the first N examples of each task, to try things out.
    text: held-out text for a model, a file or a folder of text files.
    variant: execute the code of this variant, MODULE:NAME, with which a run was trained.
    out: write a model's results to this JSON file.
    sample: print texts that the models write, instead of an evaluation.
    prompt: the beginning of the text (default: a new document).
    tokens: how many to write at most.
    temperature: lower is less random; 0 takes the most probable token every time.
    seed: of the random numbers.
    """

    models: list[str] = field(metadata={"metavar": "MODEL"})
    batches: Count | None = None
    lm_eval: list[str] | None = None
    lm_eval_path: Path | None = None
    limit: Count | None = None
    text: Path | None = None
    variant: str | None = None
    out: Path | None = None
    sample: bool = False
    prompt: str = ""
    tokens: Count = 100
    temperature: NotNegative = 0.8
    seed: WholeNumber = 1


def run(options: Options) -> None:
    """Evaluate, and print the numbers; or print texts."""
    from coupled_adam.embeddings.analysis import word_similarity_sets
    from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
    from coupled_adam.lab.evaluation.evaluate import evaluate_model, evaluate_run
    from coupled_adam.lab.evaluation.evaluation_table import evaluation_table
    from coupled_adam.lab.evaluation.loading import trusted_run
    from coupled_adam.runs import EVALUATION, is_run

    if options.sample:
        _sample(options)
        return
    model, *others = options.models
    if others:
        raise UsageError(f"one model is evaluated at a time, without --sample: {model}, {others}")
    check_outputs(options.overwrite, out=options.out)
    published, folder, written = options.word_similarity, Path(model), options.out
    asked: dict[str, Any] = {
        "batches": options.batches,
        "device": options.usable_device(),
        "sets": None if published is None else word_similarity_sets(published),
        "downstream": _downstream(options),
    }
    if is_run(folder):
        if options.text is not None or options.out is not None:
            raise UsageError(f"--text and --out are for models; {folder} is a run, which has both")
        evaluated, written = trusted_run(folder, options.variant), folder / EVALUATION

        def corpus() -> Corpus:  # prepared only if there is no test loss yet
            return prepare_corpus(evaluated.recipe, default_cache())

        result = evaluate_run(evaluated, corpus, **asked)
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
    """The downstream tasks that are asked for."""
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream

    if options.lm_eval is not None:
        return Downstream(options.lm_eval or PAPER_TASKS, options.lm_eval_path, options.limit)
    if options.limit is not None or options.lm_eval_path is not None:
        raise UsageError("--limit and --lm-eval-path need --lm-eval, with the names of the tasks")
    return None


def _sample(options: Options) -> None:
    """Let the models write texts, and print them."""
    from coupled_adam.lab.evaluation import loading
    from coupled_adam.lab.evaluation.sample import sample
    from coupled_adam.runs import MODEL, is_run

    device = options.usable_device()
    texts = {}
    for name in (folder for place in options.models for folder in _finished_runs(place)):
        source = str(Path(name) / MODEL) if is_run(Path(name)) else name
        model = loading.load_model(source, device, options.revision)
        loading.require_causal(model, source)
        tokenizer = loading.load_model_tokenizer(source, options.revision)
        texts[name] = sample(
            model,
            tokenizer,
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    if options.json:
        samples = [
            {"model": name, "prompt": options.prompt, "text": text} for name, text in texts.items()
        ]
        print(json.dumps(samples, indent=2))
        return
    for name, text in texts.items():
        show(f"{name}:\n{options.prompt}{text}\n")


def _finished_runs(name: str) -> list[str]:
    """The finished runs of a comparison with its first seed; or ``name`` itself."""
    from coupled_adam.lab.comparison import stored_recipe
    from coupled_adam.runs import MODEL, run_name

    recipe = stored_recipe(Path(name))
    if recipe is None:
        return [name]
    runs = [Path(name) / run_name(arm, recipe.seeds[0]) for arm in recipe.arms]
    finished = [str(run) for run in runs if (run / MODEL).exists()]
    if not finished:
        raise UsageError(f"{name}: none of its runs has finished; continue it with --resume")
    return finished
