"""Measure the token embeddings of any model.

Shows the measures of one or several models side by side, for the embeddings as they are, with their
mean removed, and with their mean and their top principal directions removed. On request, names the
tokens that were hardly trained, neighbours, and what changed from one model to another.

example: coupled-adam analyze gpt2 --undertrained --html page.html
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.cli.options import MeasuringOptions
from coupled_adam.cli.terminal import show, working
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count
from coupled_adam.files import shortest_names
from coupled_adam.outputs import check_outputs, write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coupled_adam.embeddings.analysis import Analysis, Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(AnalysisInputs, MeasuringOptions):
    """The options of ``coupled-adam analyze``.

    models: a folder in Hugging Face format, a model's id on the hub, a run, a checkpoint, or a
        .safetensors or .npy file.
    all: show all measures, also with the mean removed, and without the top directions.
    explain: say what the measures mean, and for which use.
    undertrained: name the tokens that were hardly trained.
    verify: ask the model to repeat each of them (needs [lab]).
    neighbours: the nearest neighbours of these tokens (texts, or ids as '#42').
    duplicates: name the rows that are nearly equal to another one.
    compare: show what changed from the first MODEL to the second.
    show: how many tokens a table in the terminal lists; --json has all.
    html: write a page with the table and pictures.
    explore: write a page with a map of the tokens to explore.
    export: write all that is known about each token as Parquet, for embedding-atlas.
    """

    models: list[str] = dataclasses.field(metadata={"metavar": "MODEL"})
    all: bool = False
    explain: bool = False
    undertrained: bool = False
    verify: bool = False
    neighbours: list[str] | None = None
    duplicates: bool = False
    compare: bool = False
    show: Count = 20
    html: Path | None = None
    explore: Path | None = None
    export: Path | None = None


def run(options: Options) -> None:
    """Analyze the models, and print or write the reports."""
    from coupled_adam.embeddings import analysis, analysis_tables
    from coupled_adam.embeddings.changes import compare_analyses
    from coupled_adam.embeddings.diagnosis import NO_VERDICT
    from coupled_adam.embeddings.undertrained import UndertrainedReport

    # What cannot be done is refused before the matrices are measured, which may take minutes.
    _check(options)
    device = options.usable_device()
    place = options.word_similarity
    sets = None if place is None else analysis.word_similarity_sets(place)
    folders = _folders_to_ask(options) if options.verify else {}
    by_model = [
        analysis.analyze_model(
            model,
            options,
            name=name,
            revision=options.revision,
            sets=sets,
            tokens=options.neighbours or (),
            device=device,
            status=working,
        )
        for model, name in zip(options.models, shortest_names(options.models))
    ]
    # A model whose matrices are not tied has an analysis for each of the two.
    analyses = [entry for entries in by_model for entry in entries]
    answers = _answers(options, analyses, folders, device)
    changes = []
    if options.compare:
        with working("what changed"):
            changes = compare_analyses(*by_model)
    # Pages are made before anything is printed, so that an error leaves no partial result.
    mapped = [answer for answer in answers if isinstance(answer, UndertrainedReport)]
    if not options.undertrained:  # they only color a map
        answers = [answer for answer in answers if not isinstance(answer, UndertrainedReport)]
    contents: list[tuple[Path, str | bytes]] = []
    if options.html is not None:
        from coupled_adam.embeddings.analysis_page import analyses_page

        contents.append((options.html, analyses_page(analyses, answers)))
    if options.export is not None or options.explore is not None:
        from coupled_adam.embeddings.explorer import explorer_page, export

        with working("neighbours for the map"):
            if options.export is not None:
                contents.append((options.export, export(mapped, changes)))
            if options.explore is not None:
                contents.append((options.explore, explorer_page(mapped, changes)))
    written = []
    try:
        for path, content in contents:
            write_file(path, content)
            written.append(path)
    finally:  # the numbers are shown even if a file cannot be written after all
        if options.json:
            print(analysis_tables.analyses_json(analyses, answers, changes))
        else:
            for entry in analyses:
                said = [s for answer in answers if answer.analysis is entry for s in answer.said]
                sentences = entry.diagnosis if options.explain else entry.diagnosis[:1]
                show(f"{entry.label}: {' '.join([*sentences, *said])}")
            if options.explain:
                show(NO_VERDICT)
            show(analysis_tables.analyses_table(analyses, options.all))
            if options.all:
                show(analysis_tables.references_table())
            for answer in [*answers, *changes]:
                show(answer.shown(options.show))
            for path in written:
                show(f"written: {path}")


def _answers(
    options: Options, analyses: Sequence[Analysis], folders: Mapping[str, Path], device: str
) -> list[Answer]:
    """What is asked about the tokens of each matrix; a map is colored by the under-trained ones."""
    from coupled_adam.embeddings.neighbours import find_duplicates, find_neighbours
    from coupled_adam.embeddings.undertrained import find_undertrained, verify_undertrained

    @functools.lru_cache(maxsize=1)  # a model is loaded once, for both of its matrices
    def loaded(name: str) -> tuple[PreTrainedModel, int]:
        from coupled_adam.lab.evaluation.load_model import block_length, load_model
        from coupled_adam.lab.models import require_causal

        model = load_model(folders[name], device)
        require_causal(model, name)
        return model, block_length(model)

    def undertrained(entry: Analysis) -> Answer:
        report = find_undertrained(entry)
        return verify_undertrained(report, *loaded(entry.model)) if options.verify else report

    questions: dict[str, Callable[[Analysis], Answer]] = {}
    if options.undertrained or options.explore or options.export:
        questions["under-trained tokens"] = undertrained
    if options.neighbours:
        questions["neighbours"] = lambda entry: find_neighbours(entry, options.neighbours or ())
    if options.duplicates:
        questions["duplicates"] = find_duplicates
    answers = []
    # Matrix by matrix, so that the tables of one stand together.
    for entry in analyses:
        for title, answer in questions.items():
            with working(f"{title}, {entry.label}"):
                answers.append(answer(entry))
    return answers


def _folders_to_ask(options: Options) -> dict[str, Path]:
    """The folder of each model; UsageError if one cannot be prompted."""
    from coupled_adam.embeddings.analysis import find_tokenizer
    from coupled_adam.embeddings.repair import model_folder

    folders = {}
    # Before the measures, as a model or a tokenizer may be missing, or has to be downloaded.
    for model in options.models:
        if Path(model).is_file():
            raise UsageError(
                f"--verify asks a model, and {model} is a file with a matrix: name the folder of "
                "its model, or leave out --verify"
            )
        folders[model] = model_folder(model, options.revision)
        if options.tokenizer is None:
            find_tokenizer(model, None, options.revision, needed=True)
    return folders


def _check(options: Options) -> None:
    """Raise UsageError for options that exclude each other, or lack another one."""
    names = [n for n in ("counts", "text", "tokens") if getattr(options, n) is not None]
    if len(names) > 1:
        raise UsageError(f"--{' and --'.join(names)} exclude each other: pass only one of them")
    if options.token_dtype is not None and options.tokens is None:
        raise UsageError(
            f"--token-dtype {options.token_dtype} applies to token files: add --tokens"
        )
    if options.verify and not options.undertrained:
        raise UsageError("--verify checks under-trained tokens: add --undertrained")
    if options.compare and len(options.models) != 2:
        raise UsageError(f"--compare needs two models, not {len(options.models)}")
    check_outputs(
        options.overwrite, html=options.html, explore=options.explore, export=options.export
    )
    if options.explore or options.export:
        from coupled_adam.embeddings.explorer import check_installed

        check_installed(options.explore is not None, options.export)
