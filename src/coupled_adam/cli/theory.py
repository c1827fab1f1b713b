"""Measure the paper's argument on a trained model.

Over the vocabulary, the gradient of the output embeddings sums to zero, and so do the updates of
SGD and of Coupled Adam, but not those of AdamW.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.cli.options import (
    Device,
    add_cache,
    add_device,
    add_json,
    cache_folder,
    check_files,
    device,
    optional_path,
    positive_int,
    write_file,
)
from coupled_adam.cli.terminal import print_table, quiet_libraries


@dataclass(frozen=True)
class Options:
    """The arguments of ``coupled-adam theory``."""

    model: str
    text: str | None
    batches: int
    batch_size: int
    json: bool
    html: str | None
    cache: str | None
    device: Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("model", help="the folder of a run, or of a causal language model")
    parser.add_argument("--text", help="text for a model: a file, or a folder of text files")
    parser.add_argument("--batches", type=positive_int, default=50, help="gradients to take")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="sequences in a batch")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page with the table and a picture")
    add_cache(parser)
    add_device(parser)


def run(options: Options) -> None:
    """Measure the sums, and print or write them."""
    from coupled_adam.lab.evaluation.theory import measure_folder
    from coupled_adam.lab.reporting.theory import theory_page, theory_table

    check_files([options.text], html=options.html)
    target = device(options.device)
    quiet_libraries()
    folder = Path(options.model)
    measured = measure_folder(
        folder,
        text=optional_path(options.text),
        batches=options.batches,
        batch_size=options.batch_size,
        cache=cache_folder(options.cache),
        device=target,
    )
    try:
        if options.html is not None:
            write_file("--html", options.html, theory_page(measured, folder.name))
    finally:
        if options.json:
            print(json.dumps(measured.to_dict(), indent=2, allow_nan=False))
        else:
            print_table(theory_table(measured, folder.name))
