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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from coupled_adam.cli.options import (
    CacheOption,
    ModelOptions,
    OverwriteOption,
    Words,
    WordSimilarityOption,
    write_file,
)
from coupled_adam.cli.parser import Positional
from coupled_adam.cli.terminal import console, print_path, print_table
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count, NotNegative, WholeNumber

if TYPE_CHECKING:
    from rich.console import RenderableType

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

    models: Annotated[list[str], Positional("MODEL")]
    batches: Count | None = None
    lm_eval: Words[str] | None = None
    lm_eval_path: Path | None = None
    limit: Count | None = None
    text: Path | None = None
    variant: str | None = None
    out: Path | None = None


def run(options: Options) -> None:
    """Evaluate, and print the numbers; or print texts."""
    from coupled_adam.embeddings.analysis import word_similarity_sets
    from coupled_adam.lab.data.corpus import prepare_corpus
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream
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
    target = options.usable_device()
    folder = Path(model)
    name = options.word_similarity
    sets = None if name is None else word_similarity_sets(name)
    downstream = None
    if options.lm_eval is not None:
        downstream = Downstream(options.lm_eval or PAPER_TASKS, options.lm_eval_path, options.limit)
    elif options.lm_eval_path is not None or options.limit is not None:
        name = "--limit" if options.lm_eval_path is None else "--lm-eval-path"
        raise UsageError(f"{name} needs --lm-eval, with the names of the tasks")
    if is_run(folder):
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
    else:
        result = evaluate_model(
            model,
            revision=options.revision,
            text=options.text,
            batches=options.batches,
            sets=sets,
            downstream=downstream,
            device=target,
        )
    written = folder / EVALUATION if is_run(folder) else options.out
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


def _sample(options: Options) -> None:
    """Let the models write texts, and print them."""
    from coupled_adam.lab.comparison import runs_to_sample
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
    for name in (folder for place in options.models for folder in runs_to_sample(place)):
        source = str(Path(name) / MODEL) if is_run(Path(name)) else name
        model = load_model(source, target, options.revision)
        require_causal(model, source)
        tokenizer = load_model_tokenizer(source, options.revision)
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
    else:
        terminal = console()
        terminal.print(side_by_side(options.prompt, texts, terminal.width))


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
