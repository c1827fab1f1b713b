"""Measure the token embeddings of any model.

Shows the measures of one or several models side by side, for the embeddings as they are, with their
mean removed, and with their mean and their top principal directions removed. On request, names the
tokens that were hardly trained, neighbours and hubs, and what changed from one model to another.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coupled_adam.cli.options import (
    Device,
    add_device,
    add_json,
    check_files,
    device,
    optional_path,
    positive_int,
    whole_number,
    write_file,
)
from coupled_adam.cli.terminal import print_table, progress_bar, quiet_libraries
from coupled_adam.errors import UsageError


@dataclass(frozen=True)
class Options:
    """The arguments."""

    models: list[str]
    tensor: str | None
    revision: str | None
    counts: str | None
    text: str | None
    tokens: list[str] | None
    tokenizer: str | None
    word_similarity: str | None
    exclude: list[Literal["padding", "unseen", "dead"]]
    top: int | None
    undertrained: bool
    neighbours: list[str] | None
    compare: bool
    show: int
    json: bool
    csv: str | None
    html: str | None
    explore: str | None
    parquet: str | None
    layout: Literal["pca", "umap"] | None
    device: Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a folder in Hugging Face format, a model's id on the hub, a run, a checkpoint, or a "
        ".safetensors or .npy file",
    )
    parser.add_argument("--tensor", help="the name of the embeddings in the file")
    parser.add_argument("--revision", help="the branch, tag or commit, for models on the hub")
    parser.add_argument("--counts", help="a .npy file with a unigram count for each token")
    parser.add_argument("--text", help="count the tokens of this file, or of this folder's files")
    parser.add_argument("--tokens", nargs="+", metavar="FILE", help="count these token files")
    parser.add_argument(
        "--tokenizer", help="a tokenizer's folder, or its id on the hub (default: the model's own)"
    )
    parser.add_argument(
        "--word-similarity",
        metavar="DIR",
        help="a folder with word-similarity sets as published; 'download' downloads and keeps them",
    )
    parser.add_argument(
        "--exclude",
        choices=("padding", "unseen", "dead"),
        nargs="+",
        default=[],
        help="leave out padding (rows that belong to no token of the tokenizer), unseen tokens "
        "(with a count of zero), or dead rows (zero or not finite)",
    )
    parser.add_argument(
        "--top",
        type=whole_number,
        metavar="N",
        help="how many top principal directions to remove (default: H / 100, rounded up)",
    )
    parser.add_argument(
        "--undertrained", action="store_true", help="name the tokens that were hardly trained"
    )
    parser.add_argument(
        "--neighbours",
        nargs="*",
        metavar="TOKEN",
        help="the nearest neighbours of these tokens (texts, or ids as '#42'; default: of the most "
        "frequent ones), and the hubs",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first MODEL to the second",
    )
    parser.add_argument(
        "--show",
        type=positive_int,
        default=20,
        metavar="N",
        help="how many tokens a table in the terminal names; --json has all",
    )
    add_json(parser)
    parser.add_argument("--csv", metavar="FILE", help="write all numbers as a table")
    parser.add_argument("--html", metavar="FILE", help="write a page with the table and pictures")
    parser.add_argument(
        "--explore", metavar="FILE", help="write a page with a map of the tokens to explore"
    )
    parser.add_argument(
        "--parquet", metavar="FILE", help="write the map of all tokens as a Parquet file"
    )
    parser.add_argument(
        "--layout",
        choices=("pca", "umap"),
        help="the layout of the map (default: pca); umap needs the package umap-learn",
    )
    add_device(parser)


def run(options: Options) -> None:
    """Analyze the models, and print or write the reports."""
    from coupled_adam.embeddings import analysis, tables, tokens

    counted = {"counts": options.counts, "text": options.text, "tokens": options.tokens}
    given = [name for name, value in counted.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} exclude each other: pass only one of them")
    if options.revision is not None:
        here = [model for model in options.models if Path(model).exists()]
        if here:
            raise UsageError(f"--revision is for models on the hub, and {here[0]} is a path here")
    if options.compare and len(options.models) != 2:
        raise UsageError(f"--compare needs two models, not {len(options.models)}")
    check_files(
        [*options.models, options.counts, options.text, *(options.tokens or ())],
        csv=options.csv,
        html=options.html,
        explore=options.explore,
        parquet=options.parquet,
    )
    layout = options.layout or "pca"
    if options.explore or options.parquet:
        from coupled_adam.embeddings.maps import check_installed

        check_installed(layout, as_parquet=options.parquet is not None)
    elif options.layout is not None:
        raise UsageError("--layout is that of the map: add --explore or --parquet")
    target = device(options.device)
    quiet_libraries()
    sets = None
    if options.word_similarity is not None:
        sets = analysis.word_similarity_sets(options.word_similarity)
    source = analysis.Source(
        tensor=options.tensor,
        revision=options.revision,
        tokenizer=options.tokenizer,
        counts=optional_path(options.counts),
        text=optional_path(options.text),
        tokens=[Path(path) for path in options.tokens or ()],
    )
    by_model = [
        analysis.analyze_model(
            model,
            source,
            sets=sets,
            exclude=options.exclude,
            directions=options.top,
            tokens=options.neighbours or (),
            device=target,
        )
        for model in options.models
    ]
    analyses = [entry for found in by_model for entry in found]
    undertrained, neighbours, comparisons = [], [], []
    if options.undertrained or options.explore or options.parquet:
        for entry in analyses:
            with progress_bar(f"under-trained tokens, {entry.label}") as progress:
                undertrained.append(tokens.find_undertrained(entry, progress=progress))
    if options.neighbours is not None:
        for entry in analyses:
            with progress_bar(f"neighbours, {entry.label}") as progress:
                neighbours.append(tokens.find_neighbours(entry, options.neighbours, progress))
    if options.compare:
        with progress_bar("what changed") as progress:
            comparisons = tokens.compare_analyses(by_model[0], by_model[1], progress)
    files: dict[str, tuple[str, str | bytes]] = {}
    if options.csv is not None:
        files["--csv"] = options.csv, tables.analyses_csv(analyses)
    if options.html is not None:
        from coupled_adam.embeddings.page import analyses_page

        files["--html"] = options.html, analyses_page(analyses)
    if options.parquet is not None:
        from coupled_adam.embeddings.maps import parquet, token_maps

        files["--parquet"] = options.parquet, parquet(token_maps(undertrained, layout))
    if options.explore is not None:
        from coupled_adam.embeddings.explorer import explorer_page

        with progress_bar("neighbours for the map") as progress:
            page = explorer_page(undertrained, comparisons, layout, progress)
        files["--explore"] = options.explore, page
    try:
        for option, (name, content) in files.items():
            write_file(option, name, content)
    finally:  # the numbers are shown even if a file cannot be written after all
        listed = undertrained if options.undertrained else []
        if options.json:
            print(tables.analyses_json(analyses, listed, neighbours, comparisons))
        else:
            shown = [tables.analyses_table(analyses)]
            shown += [named.table(options.show) for named in listed]
            shown += [table for near in neighbours for table in near.tables()]
            shown += [t for changes in comparisons for t in changes.tables(options.show)]
            for table in shown:
                print_table(table)
