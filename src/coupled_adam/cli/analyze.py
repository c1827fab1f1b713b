"""Measure the token embeddings of any model.

Shows the measures of one or several models side by side, for the embeddings as they are, with their
mean removed, and with their mean and their top principal directions removed. On request, names the
tokens that were hardly trained, neighbours and hubs, and what changed from one model to another.

example: coupled-adam analyze gpt2 --undertrained --html page.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coupled_adam.cli.options import (
    MeasuringOptions,
    TokenizerOption,
    check_outputs,
    write_file,
)
from coupled_adam.cli.terminal import console, print_table, working
from coupled_adam.errors import UsageError, printable
from coupled_adam.fields import Count, WholeNumber

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coupled_adam.embeddings.analysis import Analysis, AnalysisInputs
    from coupled_adam.embeddings.analysis_tables import Answer
    from coupled_adam.embeddings.changes import Comparison
    from coupled_adam.embeddings.undertrained import UndertrainedReport


@dataclass(frozen=True, kw_only=True)
class Options(TokenizerOption, MeasuringOptions):
    """The options of ``coupled-adam analyze``.

    models: a folder in Hugging Face format, a model's id on the hub, a run, a checkpoint, or a
        file with .safetensors, .npy, .npz, .gguf, or vectors of word2vec, GloVe or fastText.
    tensor: the name of the embeddings in the file.
    counts: a .npy file with a unigram count for each token.
    text: count the tokens of this file, or of this folder's files.
    tokens: count these token files.
    token_dtype: the type of the ids in them (default: found out).
    exclude: leave out padding (rows that belong to no token of the tokenizer), or unseen tokens
        (with a count of zero).
    top: how many top principal directions to remove (default: H / 100, rounded up).
    all: show all measures, also with the mean removed, and without the top directions.
    undertrained: name the tokens that were hardly trained.
    verify: ask the model to repeat them, which shows those that it can write (needs [lab]).
    neighbours: the nearest neighbours of these tokens (texts, or ids as '#42'; default: of the most
        frequent ones), and the hubs.
    duplicates: name the rows that are nearly equal to another one.
    compare: show what changed from the first MODEL to the second.
    show: how many tokens a table in the terminal names; --json has all.
    csv: write all numbers as a table.
    html: write a page with the table and pictures.
    explore: write a page with a map of the tokens to explore.
    export: write all that is known of each token as Parquet (.parquet, for embedding-atlas) or as
        vectors and metadata for the embedding projector (.tsv).
    """

    models: list[str] = field(metadata={"metavar": "MODEL"})
    tensor: str | None = None
    counts: Path | None = None
    text: Path | None = None
    tokens: list[Path] | None = None
    token_dtype: Literal["uint16", "uint32", "int64"] | None = None
    exclude: list[Literal["padding", "unseen"]] | None = None
    top: WholeNumber | None = None
    all: bool = False
    undertrained: bool = False
    verify: bool = False
    neighbours: list[str] | None = None
    duplicates: bool = False
    compare: bool = False
    show: Count = 20
    csv: Path | None = None
    html: Path | None = None
    explore: Path | None = None
    export: Path | None = None


def run(options: Options) -> None:
    """Analyze the models, and print or write the reports."""
    from rich.text import Text

    from coupled_adam.embeddings import analysis, analysis_tables
    from coupled_adam.embeddings.changes import compare_analyses
    from coupled_adam.embeddings.undertrained import UndertrainedReport

    _check(options)
    device = options.usable_device()
    name = options.word_similarity
    sets = None if name is None else analysis.word_similarity_sets(name)
    inputs = analysis.AnalysisInputs(
        tensor=options.tensor,
        revision=options.revision,
        tokenizer=options.tokenizer,
        counts=options.counts,
        text=options.text,
        tokens=options.tokens or [],
        token_dtype=options.token_dtype,
    )
    # A model that cannot be asked is refused before the matrices are measured.
    folders = _verifiable(options.models, inputs) if options.verify else {}
    by_model = [
        analysis.analyze_model(
            model,
            inputs,
            sets=sets,
            exclude=options.exclude or [],
            directions=options.top,
            tokens=options.neighbours or (),
            device=device,
            status=working,
        )
        for model in options.models
    ]
    # A model whose matrices are not tied has an analysis for each of the two.
    analyses = [entry for of_model in by_model for entry in of_model]
    answers = _answers(options, analyses, folders, device)
    undertrained = [answer for answer in answers if isinstance(answer, UndertrainedReport)]
    comparisons = []
    if options.compare:
        with working("what changed"):
            comparisons = compare_analyses(*by_model)
    # Pages are made before anything is printed, so that an error leaves no half of a result.
    files = _files(options, analyses, undertrained, comparisons)
    listed = undertrained if options.undertrained else []
    if not options.undertrained:  # these were for a map alone
        answers = [answer for answer in answers if not isinstance(answer, UndertrainedReport)]
    try:
        for path, content in files:
            write_file(path, content)
    finally:  # the numbers are shown even if a file cannot be written after all
        if options.json:
            print(analysis_tables.analyses_json(analyses, answers, comparisons))
        else:
            diagnosed: Sequence[Analysis | UndertrainedReport] = listed or analyses
            for entry, answer in zip(analyses, diagnosed):
                sentences = f"{entry.label}: {' '.join(answer.diagnosis)}"
                console().print(Text(printable(sentences), "bold"))
            print_table(analysis_tables.analyses_table(analyses, options.all))
            tables = [table for answer in answers for table in answer.tables(options.show)]
            tables += [table for entry in comparisons for table in entry.tables(options.show)]
            for table in tables:
                print_table(table)


def _answers(
    options: Options, analyses: Sequence[Analysis], folders: Mapping[str, Path], device: str
) -> list[Answer]:
    """What is asked about the tokens of each matrix."""
    from coupled_adam.embeddings.neighbours import find_duplicates, find_neighbours
    from coupled_adam.embeddings.undertrained import find_undertrained, verify_undertrained

    @functools.lru_cache(maxsize=1)  # a model is loaded once, for both of its matrices
    def loaded(name: str) -> tuple[PreTrainedModel, int]:
        from coupled_adam.lab.evaluation.loading import block_length, load_model, require_causal

        model = load_model(folders[name], device)
        require_causal(model, name)
        return model, block_length(model)

    def trained(entry: Analysis) -> UndertrainedReport:
        found = find_undertrained(entry)
        return verify_undertrained(found, *loaded(entry.model)) if options.verify else found

    def near(entry: Analysis) -> Answer:
        return find_neighbours(entry, options.neighbours or ())

    # The map colors tokens by how well they were trained, so it needs these answers, too.
    is_mapped = options.explore is not None or options.export is not None
    questions: list[tuple[str, bool, Callable[[Analysis], Answer]]] = [
        ("under-trained tokens", options.undertrained or is_mapped, trained),
        ("neighbours", options.neighbours is not None, near),
        ("duplicates", options.duplicates, find_duplicates),
    ]
    answers = []
    for question, is_asked, answer in questions:
        for entry in analyses if is_asked else ():
            with working(f"{question}, {entry.label}"):
                answers.append(answer(entry))
    return answers


def _files(
    options: Options,
    analyses: Sequence[Analysis],
    undertrained: Sequence[UndertrainedReport],
    comparisons: Sequence[Comparison],
) -> list[tuple[Path, str | bytes]]:
    """The name and the content of each file that is asked for."""
    files: list[tuple[Path, str | bytes]] = []
    if options.csv is not None:
        from coupled_adam.embeddings.analysis_tables import analyses_csv

        files.append((options.csv, analyses_csv(analyses)))
    if options.html is not None:
        from coupled_adam.embeddings.analysis_page import analyses_page

        listed = undertrained if options.undertrained else []
        files.append((options.html, analyses_page(analyses, listed)))
    if options.export is not None:
        from coupled_adam.embeddings.explorer import export

        with working("neighbours for the export"):
            exported = export(undertrained, comparisons, str(options.export))
        files += [(Path(name), content) for name, content in exported.items()]
    if options.explore is not None:
        from coupled_adam.embeddings.explorer import explorer_page

        with working("neighbours for the map"):
            files.append((options.explore, explorer_page(undertrained, comparisons)))
    return files


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


def _check(options: Options) -> None:
    """Refuse what can be refused before a matrix is read, which may take minutes."""
    names = [n for n in ("counts", "text", "tokens") if getattr(options, n) is not None]
    if len(names) > 1:
        raise UsageError(f"--{' and --'.join(names)} exclude each other: pass only one of them")
    if options.verify and not options.undertrained:
        raise UsageError("--verify is about under-trained tokens: add --undertrained")
    if options.compare and len(options.models) != 2:
        raise UsageError(f"--compare needs two models, not {len(options.models)}")
    files = {name: getattr(options, name) for name in ("csv", "html", "explore", "export")}
    check_outputs(options.overwrite, **files)
    if options.explore or options.export:
        from coupled_adam.embeddings.explorer import check_installed, metadata_file

        export_to = None if options.export is None else str(options.export)
        check_installed(options.explore is not None, export_to)
        if export_to is not None and export_to.endswith(".tsv"):
            beside = Path(metadata_file(export_to))
            check_outputs(options.overwrite, export=beside)
