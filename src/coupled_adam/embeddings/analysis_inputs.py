"""What an analysis needs beside the folder of a model; the command line has an option for each."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalysisInputs:
    """Which rows are measured, and where to find what the folder of the model does not contain.

    tensor: the name of the embeddings in the file.
    tokenizer: a tokenizer's folder, or its id on the hub (default: the model's own).
    counts: a .npy file with a unigram count for each token.
    text: count the tokens of this file, or of this folder's files.
    tokens: count these token files.
    token_dtype: the type of the ids in them (default: found out).
    exclude: leave out padding (rows that belong to no token of the tokenizer), or unseen tokens
        (with a count of zero).
    """

    tensor: str | None = None
    tokenizer: str | None = None
    counts: Path | None = None
    text: Path | None = None
    tokens: list[Path] | None = None
    token_dtype: Literal["uint16", "uint32", "int64"] | None = None
    exclude: list[Literal["padding", "unseen"]] | None = None
