"""Print texts that trained models write, side by side.

For a comparison these are the models of all its arms, with the same seed. They continue the same
prompt with the same random numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.cli.options import Count, ModelOptions, NotNegative, WholeNumber, argument, option
from coupled_adam.cli.terminal import console
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

_NARROWEST = 24  # characters of a column; with less, texts are printed one below the other


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of ``coupled-adam sample``."""

    models: list[str] = argument(
        "the folder of a comparison, a run or a model, or a model's id on the hub", metavar="RUN"
    )
    prompt: str = option("the beginning of the text (default: a new document)", "")
    tokens: Count = option("how many to write at most", 100)
    temperature: NotNegative = option(
        "lower is less random; 0 takes the most probable token every time", 0.8
    )
    seed: WholeNumber = option("of the random numbers", 1)


def run(options: Options) -> None:
    """Write the texts and print them."""
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
