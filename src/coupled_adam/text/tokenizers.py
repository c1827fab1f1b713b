"""Tokenizers in Hugging Face format, and texts as their token ids."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.errors import UsageError, one_line, printable
from coupled_adam.inputs import check_model_folder, regular
from coupled_adam.text.documents import batched, documents
from coupled_adam.text.hub import hub_error, reach_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1_000_000  # characters per call of the tokenizer, which has its own threads


def load_tokenizer(name: Path | str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, from its folder or the hub, without running its code.

    The name may also be that of a ``tokenizer.json``. Raises UsageError if there is none, or it
    cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds

    is_here = Path(name).exists()
    if not is_here:
        reach_hub()
    tokenizer: PreTrainedTokenizerBase
    check_model_folder(Path(name))
    try:
        if Path(name).is_file():
            cls: Any = PreTrainedTokenizerFast  # which has no types
            tokenizer = cls(tokenizer_file=str(regular(Path(name))))
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision or "main", local_files_only=is_here, trust_remote_code=False
            )
        # That nothing stands for what it does not know shows only here: a hieroglyph.
        tokenizer.encode("a \N{EGYPTIAN HIEROGLYPH A001}")
        # Without their files, transformers makes some tokenizers of special tokens and a space.
        if len(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}) < 2:
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers and tokenizers raise many types
        reason = f"{type(error).__name__}: {one_line(error)}" if is_here else hub_error(error)
        raise UsageError(f"{name} has no tokenizer that can be read ({reason})") from None
    return tokenizer


def document_start(
    tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any] | None = None
) -> list[int]:
    """The ids that a document begins with, as whoever trained the model has it; it may have none.

    A model whose configuration names one token as BOS and as EOS, as those of our runs do, has it
    between documents. Otherwise it is what the tokenizer puts before a text and, if that is
    nothing, :func:`end_of_text_id`.
    """
    begin, end = (config.get(f"{name}_token_id") if config else None for name in ("bos", "eos"))
    if isinstance(begin, int) and begin == end:
        return [begin]
    bare, whole = (
        tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"]
        for special in (False, True)
    )
    before = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    otherwise = end_of_text_id(tokenizer)
    return list(whole[:before]) or ([] if otherwise is None else [otherwise])


def end_of_text_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token between documents in our runs: EOS or, without one, BOS."""
    end_of_text: int | None = tokenizer.eos_token_id
    return tokenizer.bos_token_id if end_of_text is None else end_of_text


_MOST_UNKNOWN = 0.1  # of the characters, without a warning
_CHECKED = 100_000  # characters


def check_known(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, source: object) -> None:
    """Warn if a tokenizer does not know more than a tenth of the characters of the first texts.

    They vanish, or become its unknown token. UsageError if it knows none.
    """
    characters, unknown = 0, collections.Counter[str]()
    for text in texts:
        text = text[:_CHECKED]
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=tokenizer.is_fast,
            split_special_tokens=True,  # as the laboratory does, whose setting of it stays
            verbose=False,
        )
        # A slow tokenizer does not say where its tokens are: one that it knows stands for all.
        places = encoded.get("offset_mapping", [(0, len(text))] * len(encoded["input_ids"]))
        tokens = zip(encoded["input_ids"], places)
        known = {i for token, at in tokens if token != tokenizer.unk_token_id for i in range(*at)}
        letters = [(i, character) for i, character in enumerate(text) if not character.isspace()]
        characters += len(letters)
        unknown.update(character for i, character in letters if i not in known)
        if characters >= _CHECKED:
            break
    if (lost := unknown.total()) <= _MOST_UNKNOWN * characters:
        return
    such = ", ".join(repr(character) for character, _ in unknown.most_common(3))
    problem = printable(
        f"{source}: the tokenizer knows {1 - lost / characters:.0%} of the characters of the first "
        f"documents, and loses the others, such as {such}"
    )
    if lost == characters:
        raise UsageError(problem)
    warnings.warn(problem, stacklevel=3)


def text_tokens(
    text: Path, tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any] | None = None
) -> NDArray[np.int32]:
    """The token ids of all documents of a text, [tokens]; as :func:`token_pieces`, at once."""
    return np.concatenate([*token_pieces(text, tokenizer, config)])


def token_pieces(
    text: Path, tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any] | None = None
) -> Iterator[NDArray[np.int32]]:
    """Yield the token ids of a text, those of some documents at a time, [tokens].

    Each document is preceded by :func:`document_start`, which takes the model's configuration.
    Raises UsageError if the text cannot be read, or is empty, or the tokenizer knows nothing of it.
    """
    from tqdm import tqdm

    start = document_start(tokenizer, config)
    with tqdm(desc="tokens", unit="", unit_scale=True, disable=None, leave=False) as bar:
        for number, batch in enumerate(batched(documents(text), _BATCH, len)):
            if number == 0:
                check_known(batch, tokenizer, text)
            encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            piece = np.concatenate([np.array([*start, *ids], np.int32) for ids in encoded])
            bar.update(len(piece))
            yield piece
