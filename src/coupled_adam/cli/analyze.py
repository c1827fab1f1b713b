"""Measure the token embeddings of any model.

Shows the measures of one or several models side by side, for the embeddings as they are, with their
mean removed, and with their mean and their top principal directions removed.
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
    whole_number,
    write_file,
)
from coupled_adam.cli.terminal import print_table, quiet_libraries
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
    exclude: list[Literal["padding", "unseen"]]
    top: int | None
    json: bool
    csv: str | None
    html: str | None
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
        choices=("padding", "unseen"),
        nargs="+",
        default=[],
        help="leave out padding (rows that belong to no token of the tokenizer), or unseen tokens "
        "(with a count of zero)",
    )
    parser.add_argument(
        "--top",
        type=whole_number,
        metavar="N",
        help="how many top principal directions to remove (default: H / 100, rounded up)",
    )
    add_json(parser)
    parser.add_argument("--csv", metavar="FILE", help="write all numbers as a table")
    parser.add_argument("--html", metavar="FILE", help="write a page with the table and pictures")
    add_device(parser)


def run(options: Options) -> None:
    """Analyze the models, and print or write the reports."""
    from coupled_adam.embeddings import analysis, tables

    counted = {"counts": options.counts, "text": options.text, "tokens": options.tokens}
    given = [name for name, value in counted.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} exclude each other: pass only one of them")
    if options.revision is not None:
        here = [model for model in options.models if Path(model).exists()]
        if here:
            raise UsageError(f"--revision is for models on the hub, and {here[0]} is a path here")
    check_files(csv=options.csv, html=options.html)
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
    analyses = [
        found
        for model in options.models
        for found in analysis.analyze_model(
            model,
            source,
            sets=sets,
            exclude=options.exclude,
            directions=options.top,
            device=target,
        )
    ]
    try:
        if options.csv is not None:
            write_file("--csv", options.csv, tables.analyses_csv(analyses))
        if options.html is not None:
            from coupled_adam.embeddings.page import analyses_page

            write_file("--html", options.html, analyses_page(analyses))
    finally:  # the numbers are shown even if a file cannot be written after all
        if options.json:
            print(tables.analyses_json(analyses))
        else:
            print_table(tables.analyses_table(analyses))
