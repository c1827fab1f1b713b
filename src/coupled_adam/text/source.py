"""Which text is read, and how: the section ``data`` of a recipe."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the text comes from: one of text, hub and tokens; by default Python's documentation.

    text: a file or folder: .txt, .md, .rst; .jsonl, .json; .parquet; also compressed. ``separator``
        lies between the documents of plain text; null cuts it into passages.
    hub: id of a data set on the Hugging Face hub, or a folder in its format.
    tokens: a folder of token files as nanoGPT and llm.c write them.
    tokenizer: id or folder of a tokenizer; null trains a byte-level BPE on the training text.
    held_out: the share of the documents for validation, and as much for the test, unless
        ``valid_split`` and ``test_split`` name the data set's own.
    max_tokens: how many training tokens are taken at most.
    max_held_out_tokens: how many tokens of each held-out split are taken at most.
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
    held_out: float = 0.05
    max_tokens: int | None = None
    max_held_out_tokens: int | None = None
