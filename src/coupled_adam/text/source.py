"""The section ``data`` of a recipe: which text to read, and how."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from coupled_adam.fields import Count, require


@dataclasses.dataclass(frozen=True)
class Data:
    """The source of the text: ``text``, ``hub`` or ``tokens``; by default Python's documentation.

    text: a file or folder of .txt, .md, .rst, .jsonl, .json, .csv, .tsv or .parquet files, which
        may be compressed.
    separator: the text between two documents in plain text files; null cuts files into passages.
    hub: the id of a data set on the Hugging Face hub, or a folder in its format.
    hub_config: the configuration of the data set, if it has several.
    hub_revision: the branch, tag or commit of the data set.
    train_split: the split of the data set that is trained on.
    valid_split: its split for validation; null takes a share of the documents, ``held_out``.
    test_split: its split for the test; null takes a share of the documents, ``held_out``.
    shuffle_seed: shuffle its documents with this seed; null leaves them in order.
    column: the column, or the key in .jsonl, .json and .parquet files, that holds the text.
    tokens: a folder of token files in the formats of nanoGPT and llm.c.
    token_dtype: the type of the ids in token files; null finds out.
    tokenizer: the id or folder of a tokenizer; null trains a byte-level BPE on the training text.
    held_out: the share of the documents for validation, and the same share for the test, unless
        ``valid_split`` and ``test_split`` name splits of the data set.
    max_tokens: the maximum number of training tokens.
    max_held_out_tokens: the maximum number of tokens in each held-out split.
    """

    text: str | None = None
    separator: str | None = None
    hub: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    train_split: str = "train"
    valid_split: str | None = None
    test_split: str | None = None
    shuffle_seed: int | None = None
    column: str = "text"
    tokens: str | None = None
    token_dtype: Literal["uint16", "uint32"] | None = None
    tokenizer: str | None = None
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    max_tokens: Count | None = None
    max_held_out_tokens: Count | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values that do not fit together."""
        sources = [name for name in ("text", "hub", "tokens") if getattr(self, name) is not None]
        require(
            len(sources) <= 1,
            f"data.{' and data.'.join(sources)} exclude each other: give only one",
        )
        require(
            self.separator != "", "data.separator='' separates nothing: give some text, or null"
        )
