"""Measure the paper's argument on a trained model.

Over the vocabulary, the gradient of the output embeddings sums to zero, and so do the updates of
SGD and of Coupled Adam, but not those of AdamW.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.cli.options import (
    CacheOption,
    Count,
    DeviceOption,
    JsonOption,
    argument,
    cache_folder,
    check_files,
    device,
    option,
    optional_path,
    write_file,
)
from coupled_adam.cli.terminal import print_table, quiet_libraries
from coupled_adam.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, CacheOption, DeviceOption):
    """The options of ``coupled-adam theory``."""

    model: str = argument("the folder of a run, or of a causal language model")
    text: str | None = option("text for a model: a file, or a folder of text files")
    batches: Count = option("gradients to take", 50)
    batch_size: Count = option("sequences in a batch", 8)
    html: str | None = option("write a page with the table and a picture", metavar="FILE")


def run(options: Options) -> None:
    """Measure the sums, and print or write them."""
    from coupled_adam.lab.evaluation.theory import measure_folder
    from coupled_adam.lab.reporting.theory import theory_page, theory_table

    check_files([options.text], html=options.html)
    target = device(options.device)
    quiet_libraries()
    folder = Path(options.model)
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}: name a run or a model")
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
