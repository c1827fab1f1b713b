"""Evaluate a run, or any causal language model, or print texts that they write.

Computes the test loss, measures of the embeddings, word similarity and downstream tasks, and prints
them. The results of a finished run are also written to its evaluation.json; those of any other
causal language model, in a folder in Hugging Face format or on the hub, to the file --out, if it is
given. With --sample, prints texts that models write instead, side by side: for a comparison those
of all its arms, with the same seed. They continue the same prompt with the same random numbers.

examples: coupled-adam evaluate runs/tiny/lean-seed-1 --batches 50
          coupled-adam evaluate --sample runs/demo --prompt "The list"
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupled_adam.cli.options import (
    CacheOption,
    ModelOptions,
    OverwriteOption,
    WordSimilarityOption,
    write_file,
)
from coupled_adam.cli.terminal import console, print_path, print_table
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count, NotNegative, WholeNumber

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coupled_adam.lab.evaluation.downstream import Downstream

_NARROWEST = 24  # characters of a column; with less, texts are printed one below the other


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Texts that models write.

    sample: print texts that the models write, instead of an evaluation.
    prompt: the beginning of the text (default: a new document).
    tokens: how many to write at most.
    temperature: lower is less random; 0 takes the most probable token every time.
    seed: of the random numbers.
    """

    sample: bool = False
    prompt: str = ""
    tokens: Count = 100
    temperature: NotNegative = 0.8
    seed: WholeNumber = 1


@dataclass(frozen=True, kw_only=True)
class Options(WordSimilarityOption, SampleOptions, ModelOptions, OverwriteOption, CacheOption):
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
    """

    models: list[str] = field(metadata={"metavar": "MODEL"})
    batches: Count | None = None
    lm_eval: list[str] | None = None
    lm_eval_path: Path | None = None
    limit: Count | None = None
    text: Path | None = None
    variant: str | None = None
    out: Path | None = None


def run(options: Options) -> None:
    """Evaluate, and print the numbers; or print texts."""
    from coupled_adam.embeddings.analysis import word_similarity_sets
    from coupled_adam.lab.data.corpus import prepare_corpus
    from coupled_adam.lab.evaluation.evaluate import evaluate_model, evaluate_run
    from coupled_adam.lab.evaluation.evaluation_table import evaluation_table
    from coupled_adam.lab.evaluation.loading import recipe_of_run
    from coupled_adam.runs import EVALUATION, is_run

    if options.sample:
        _sample(options)
        return
    model, *others = options.models
    if others:
        raise UsageError(f"one model is evaluated at a time, without --sample: {model}, {others}")
    options.check_files(out=options.out)
    published, folder = options.word_similarity, Path(model)
    asked: dict[str, Any] = {
        "batches": options.batches,
        "device": options.usable_device(),
        "sets": None if published is None else word_similarity_sets(published),
        "downstream": _downstream(options),
    }
    written = options.out
    if is_run(folder):
        if options.text is not None or options.out is not None or options.revision is not None:
            raise UsageError(
                f"--text, --out and --revision are for models; {folder} is a run, which has its "
                "own text and output file"
            )
        recipe, written = recipe_of_run(folder, options.variant), folder / EVALUATION
        # The corpus is prepared only if there is no test loss yet.
        result = evaluate_run(
            folder,
            lambda: prepare_corpus(recipe, options.cache_folder()),
            variant=options.variant,
            **asked,
        )
    else:
        result = evaluate_model(model, revision=options.revision, text=options.text, **asked)
    # The numbers are shown even if the file cannot be written after all.
    try:
        if options.out is not None:
            write_file("--out", options.out, json.dumps(result, indent=2))
    finally:
        if options.json:
            print(json.dumps(result, indent=2))
        else:
            print_table(evaluation_table(result, folder.name or model))
    if written is not None and not options.json:
        print_path("all numbers:", written)


def _downstream(options: Options) -> Downstream | None:
    """The downstream tasks that are asked for."""
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream

    if options.lm_eval is not None:
        return Downstream(options.lm_eval or PAPER_TASKS, options.lm_eval_path, options.limit)
    for option, value in (("--limit", options.limit), ("--lm-eval-path", options.lm_eval_path)):
        if value is not None:
            raise UsageError(f"{option} needs --lm-eval, with the names of the tasks")
    return None


def _sample(options: Options) -> None:
    """Let the models write texts, and print them."""
    from coupled_adam.lab.evaluation.loading import (
        load_model,
        load_model_tokenizer,
        require_causal,
    )
    from coupled_adam.lab.evaluation.sample import sample
    from coupled_adam.runs import MODEL, is_run

    # A terminal may pass bytes that are not text, for which Python has characters of its own.
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"--prompt {options.prompt!r} is not UTF-8") from None
    target = options.usable_device()
    texts = {}
    for name in (folder for place in options.models for folder in _finished_runs(place)):
        source = str(Path(name) / MODEL) if is_run(Path(name)) else name
        model = load_model(source, target, options.revision)
        require_causal(model, source)
        texts[name] = sample(
            model,
            load_model_tokenizer(source, options.revision),
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
    else:
        terminal = console()
        terminal.print(side_by_side(options.prompt, texts, terminal.width))


def _finished_runs(name: str) -> list[str]:
    """The finished runs of a comparison with one seed, a run for each arm; or ``name`` itself.

    The seed is the first one for which most arms have finished.

    Raises:
        UsageError: it is the folder of a comparison, and none of its runs has finished.
    """
    from coupled_adam.lab.comparison import stored_recipe
    from coupled_adam.runs import MODEL, run_name

    recipe = stored_recipe(Path(name))
    if recipe is None:
        return [name]
    folders = [[Path(name) / run_name(arm, seed) for arm in recipe.arms] for seed in recipe.seeds]
    finished = [[str(run) for run in runs if (run / MODEL).exists()] for runs in folders]
    most = max(finished, key=len)
    if not most:
        raise UsageError(f"{name}: none of its runs has finished; continue it with --resume")
    return most


def side_by_side(prompt: str, texts: dict[str, str], width: int) -> RenderableType:
    """A column for each model, or one below the other where the columns would be too narrow."""
    from rich.table import Table
    from rich.text import Text

    # As text and not as markup, since a model may write brackets.
    cells = [Text.assemble((_plain(prompt), "bold"), _plain(text)) for text in texts.values()]
    names = [Text(Path(name).name or name, "bold") for name in texts]
    rows = [names, cells]
    if width // len(cells) < _NARROWEST:
        rows = [[text] for pair in zip(names, cells) for text in pair]
    table = Table(box=None, expand=True, padding=(0, 2, 1, 0), show_header=False)
    for _ in rows[0]:
        table.add_column(ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _plain(text: str) -> str:
    """The text without characters that control the terminal."""
    expanded = text.expandtabs(4)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in expanded
    )
