"""Tokenizers in Hugging Face format, and texts as their token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.errors import UsageError, one_line
from coupled_adam.inputs import check_counts, check_files_in, read_text, regular
from coupled_adam.text.documents import batched, documents
from coupled_adam.text.hub import hub_error, reach_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1_000_000  # characters per call of the tokenizer, which has its own threads


def load_tokenizer(name: Path | str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, from its folder or the hub, without running its code.

    The name may also be that of a ``tokenizer.json``.

    Raises:
        UsageError: if there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds

    is_here = Path(name).exists()
    if not is_here:
        reach_hub()
    tokenizer: PreTrainedTokenizerBase
    check_files_in(Path(name))
    try:
        if Path(name).is_file():
            cls: Any = PreTrainedTokenizerFast  # which has no types
            tokenizer = cls(tokenizer_file=str(regular(Path(name))))
        else:
            config = Path(name) / "config.json"
            if config.exists():  # which it reads as well
                check_counts(json.loads(read_text(config)))
            tokenizer = AutoTokenizer.from_pretrained(
                name,
                revision=revision or "main",
                local_files_only=is_here,
                trust_remote_code=False,
            )
        if tokenizer.is_fast:
            _check_growth(tokenizer)
        # That nothing stands for what it does not know shows only here: a hieroglyph.
        tokenizer.encode("a \N{EGYPTIAN HIEROGLYPH A001}")
        # Without their files, transformers makes some tokenizers of special tokens and a space.
        if len(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}) < 2:
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers and tokenizers raise many types
        reason = f"{type(error).__name__}: {one_line(error)}" if is_here else hub_error(error)
        raise UsageError(f"{name} has no tokenizer that can be read ({reason})") from None
    return tokenizer


_MOST_GROWTH = 1000


def _check_growth(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer whose replacements may make a text so long that it aborts.

    Each of many steps may double it.
    """
    for name in ("normalizer", "decoder"):
        steps = getattr(tokenizer.backend_tokenizer, name)
        growth = 1.0 if steps is None else _growth(json.loads(steps.__getstate__()))
        if growth > _MOST_GROWTH:
            raise ValueError(f"its {name} may make a text {growth:.2g} times longer")


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer the replacements of a normalizer or a decoder may make a text."""
    inner = [*step.get("normalizers", ()), *step.get("decoders", ())]
    if step.get("type") == "Replace":
        pattern = step["pattern"]
        # A regular expression may match nothing, between any two characters.
        replaced, kept = (len(pattern["String"]), 0) if "String" in pattern else (1, 1)
        return max(1.0, kept + len(step["content"]) / max(replaced, 1))
    return math.prod(map(_growth, inner))


def document_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a document begins with where models are trained: BOS or, where there is none, EOS.

    Nothing if the tokenizer has neither.
    """
    starts = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return [start for start in starts if start is not None][:1]


def text_tokens(text: Path, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int32]:
    """The token ids of all documents of a text, [tokens]; as :func:`token_pieces`, at once."""
    return np.concatenate([*token_pieces(text, tokenizer)])


def token_pieces(text: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int32]]:
    """Yield the token ids of a text, those of some documents at a time, [tokens].

    Each document is preceded by :func:`document_start`.

    Raises:
        UsageError: the text cannot be read, or is empty.
    """
    from tqdm import tqdm

    start = document_start(tokenizer)
    with tqdm(desc="tokens", unit="", unit_scale=True, disable=None, leave=False) as bar:
        for batch in batched(documents(text), _BATCH, len):
            encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            piece = np.concatenate([np.array([*start, *ids], np.int32) for ids in encoded])
            bar.update(len(piece))
            yield piece
