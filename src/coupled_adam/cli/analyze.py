"""Measure the token embeddings of any model.

Shows the measures of one or several models side by side, for the embeddings as they are, with their
mean removed, and with their mean and their top principal directions removed. On request, names the
tokens that were hardly trained, neighbours and hubs, and what changed from one model to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coupled_adam.cli.options import (
    Count,
    ModelOptions,
    TokenizerOption,
    WholeNumber,
    WordSimilarityOption,
    argument,
    option,
)
from coupled_adam.cli.outputs import check_files, write_file
from coupled_adam.cli.terminal import console, print_table, progress_bar
from coupled_adam.errors import UsageError, printable

if TYPE_CHECKING:
    from coupled_adam.embeddings.analysis import Analysis, AnalysisInputs
    from coupled_adam.embeddings.undertrained import UndertrainedReport


@dataclass(frozen=True, kw_only=True)
class Options(TokenizerOption, WordSimilarityOption, ModelOptions):
    """The options of ``coupled-adam analyze``."""

    models: list[str] = argument(
        "a folder in Hugging Face format, a model's id on the hub, a run, a checkpoint, or a file: "
        ".safetensors, .npy, .npz, .gguf, or vectors of word2vec, GloVe or fastText",
        metavar="MODEL",
    )
    tensor: str | None = option("the name of the embeddings in the file")
    counts: Path | None = option("a .npy file with a unigram count for each token")
    text: Path | None = option("count the tokens of this file, or of this folder's files")
    tokens: list[Path] | None = option("count these token files", metavar="FILE")
    exclude: list[Literal["padding", "unseen"]] = option(
        "leave out padding (rows that belong to no token of the tokenizer), or unseen tokens (with "
        "a count of zero)",
        [],
    )
    top: WholeNumber | None = option(
        "how many top principal directions to remove (default: H / 100, rounded up)", metavar="N"
    )
    all: bool = option(
        "show all measures, also with the mean removed, and without the top directions",
        default=False,
    )
    undertrained: bool = option("name the tokens that were hardly trained", default=False)
    verify: bool = option(
        "ask the model to repeat them, which shows those that it can write (needs [lab])",
        default=False,
    )
    neighbours: list[str] | None = option(
        "the nearest neighbours of these tokens (texts, or ids as '#42'; default: of the most "
        "frequent ones), and the hubs",
        metavar="TOKEN",
        nargs="*",
    )
    duplicates: bool = option("name the rows that are nearly equal to another one", default=False)
    compare: bool = option("show what changed from the first MODEL to the second", default=False)
    show: Count = option(
        "how many tokens a table in the terminal names; --json has all", 20, metavar="N"
    )
    csv: str | None = option("write all numbers as a table", metavar="FILE")
    html: str | None = option("write a page with the table and pictures", metavar="FILE")
    explore: str | None = option("write a page with a map of the tokens to explore", metavar="FILE")
    export: str | None = option(
        "write all that is known of each token as Parquet (.parquet, for embedding-atlas) or as "
        "vectors and metadata for the embedding projector (.tsv)",
        metavar="FILE",
    )


def run(options: Options) -> None:
    """Analyze the models, and print or write the reports."""
    from rich.text import Text

    from coupled_adam.embeddings import analysis, analysis_tables, changes
    from coupled_adam.embeddings.neighbours import find_duplicates, find_neighbours
    from coupled_adam.embeddings.undertrained import find_undertrained

    _check(options)
    target = options.usable_device()
    name = options.word_similarity
    sets = None if name is None else analysis.word_similarity_sets(name)
    inputs = analysis.AnalysisInputs(
        tensor=options.tensor,
        revision=options.revision,
        tokenizer=options.tokenizer,
        counts=options.counts,
        text=options.text,
        tokens=options.tokens or [],
    )
    # A model that cannot be asked is refused before the matrices are measured.
    folders = _verifiable(options.models, inputs) if options.verify else {}
    by_model = [
        analysis.analyze_model(
            model,
            inputs,
            sets=sets,
            exclude=options.exclude,
            directions=options.top,
            tokens=options.neighbours or (),
            device=target,
        )
        for model in options.models
    ]
    # A model whose matrices are not tied has an analysis for each of the two.
    analyses = [entry for of_model in by_model for entry in of_model]
    undertrained: list[UndertrainedReport] = []
    neighbours, duplicates, comparisons = [], [], []
    # The map colors tokens by how well they were trained, so it needs these answers, too.
    if options.undertrained or options.explore or options.export:
        for entry in analyses:
            with progress_bar(f"under-trained tokens, {entry.label}") as progress:
                undertrained.append(find_undertrained(entry, progress=progress))
    if options.verify:
        undertrained = _verified(undertrained, folders, target)
    if options.neighbours is not None:
        for entry in analyses:
            with progress_bar(f"neighbours, {entry.label}") as progress:
                neighbours.append(find_neighbours(entry, options.neighbours, progress))
    if options.duplicates:
        for entry in analyses:
            with progress_bar(f"duplicates, {entry.label}") as progress:
                duplicates.append(find_duplicates(entry, progress))
    if options.compare:
        with progress_bar("what changed") as progress:
            comparisons = changes.compare_analyses(by_model[0], by_model[1], progress)
    # Pages are made before anything is printed, so that an error leaves no half of a result.
    listed = undertrained if options.undertrained else []
    files: list[tuple[str, str, str | bytes]] = []
    if options.csv is not None:
        files.append(("--csv", options.csv, analysis_tables.analyses_csv(analyses)))
    if options.html is not None:
        from coupled_adam.embeddings.analysis_page import analyses_page

        files.append(("--html", options.html, analyses_page(analyses, listed)))
    if options.export is not None:
        from coupled_adam.embeddings.explorer import export

        with progress_bar("neighbours for the export") as progress:
            exported = export(undertrained, comparisons, options.export, progress)
        files += [("--export", name, content) for name, content in exported.items()]
    if options.explore is not None:
        from coupled_adam.embeddings.explorer import explorer_page

        with progress_bar("neighbours for the map") as progress:
            page = explorer_page(undertrained, comparisons, progress)
        files.append(("--explore", options.explore, page))
    try:
        for file in files:
            write_file(*file)
    finally:  # the numbers are shown even if a file cannot be written after all
        if options.json:
            print(
                analysis_tables.analyses_json(analyses, listed, neighbours, duplicates, comparisons)
            )
        else:
            diagnosed: Sequence[Analysis | UndertrainedReport] = listed or analyses
            for analyzed, diagnosis in zip(analyses, diagnosed):
                sentences = f"{analyzed.label}: {' '.join(diagnosis.diagnosis)}"
                console().print(Text(printable(sentences), "bold"))
            print_table(analysis_tables.analyses_table(analyses, options.all))
            tables = [named.table(options.show) for named in listed]
            tables += [table for entry in neighbours for table in entry.tables()]
            tables += [entry.table(options.show) for entry in duplicates]
            tables += [table for entry in comparisons for table in entry.tables(options.show)]
            for table in tables:
                print_table(table)


def _verifiable(models: Sequence[str], inputs: AnalysisInputs) -> dict[str, Path]:
    """The folder of each model; what cannot be prompted is refused before it is measured."""
    from coupled_adam.embeddings.analysis import own_tokenizer
    from coupled_adam.embeddings.repair import model_folder

    folders = {}
    for model in models:
        if Path(model).is_file():
            raise UsageError(
                f"--verify asks a model, and {model} is a file with a matrix: name the folder of "
                "its model, or leave out --verify"
            )
        folders[model] = model_folder(model, inputs.revision)
        if inputs.tokenizer is None:
            own_tokenizer(model, inputs.revision, needed=True)
    return folders


def _verified(
    undertrained: Sequence[UndertrainedReport], folders: Mapping[str, Path], device: str
) -> list[UndertrainedReport]:
    """The under-trained tokens with the answers of their models."""
    from coupled_adam.embeddings.undertrained import verify_undertrained
    from coupled_adam.lab.evaluation.loading import block_length, load_model, require_causal

    # A model is loaded once, for both of its matrices.
    verified = []
    for name, matrices in groupby(undertrained, lambda named: named.analysis.model):
        model = load_model(folders[name], device)
        require_causal(model, name)
        for named in matrices:
            with progress_bar(f"repeating tokens, {named.analysis.label}") as progress:
                verified.append(verify_undertrained(named, model, block_length(model), progress))
    return verified


def _check(options: Options) -> None:
    """Refuse what can be refused before a matrix is read, which may take minutes."""
    names = [n for n in ("counts", "text", "tokens") if getattr(options, n) is not None]
    if len(names) > 1:
        raise UsageError(f"--{' and --'.join(names)} exclude each other: pass only one of them")
    options.check_revision(options.models)
    if options.verify and not options.undertrained:
        raise UsageError("--verify is about under-trained tokens: add --undertrained")
    if options.compare and len(options.models) != 2:
        raise UsageError(f"--compare needs two models, not {len(options.models)}")
    check_files(
        [*options.models, options.counts, options.text, *(options.tokens or ())],
        csv=options.csv,
        html=options.html,
        explore=options.explore,
        export=options.export,
    )
    if options.explore or options.export:
        from coupled_adam.embeddings.explorer import check_installed

        check_installed(options.explore is not None, options.export)
