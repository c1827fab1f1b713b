"""Tokenizers in Hugging Face format, and texts as their token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coupled_adam.errors import UsageError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder, or of a model on the hub; none of its code is run.

    Raises:
        UsageError: there is none.
    """
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, local_files_only=Path(name).exists(), trust_remote_code=False
        )
    except Exception as error:  # in the libraries' own classes
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"{name} has no tokenizer that can be read ({reason})") from None
    # Without files, transformers makes some tokenizers from the model's type, with no vocabulary.
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:
        raise UsageError(f"{name} has no tokenizer that can be read (its vocabulary is empty)")
    return tokenizer


def text_tokens(text: Path, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    """The token ids of all documents of a text, each after the token that begins a text.

    Args:
        text: a file or folder, as ``data.text`` of a recipe.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    from coupled_adam.text.documents import open_documents
    from coupled_adam.text.source import Data

    first = tokenizer.bos_token_id
    if first is None:
        first = tokenizer.eos_token_id
    begin = [] if first is None else [first]
    parts = []
    for document in open_documents(Data(text=str(text))).readers["train"]():
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.array([*begin, *ids], np.int64))
    return np.concatenate(parts)
