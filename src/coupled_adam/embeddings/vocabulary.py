"""The rows of an embedding matrix as tokens: how each is written, and of what kind it is."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings.geometry import Mask
from coupled_adam.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CATEGORIES = ("ok", "undecodable", "unreachable", "special", "byte", "none")
"""The kinds of rows: see :class:`Vocabulary`."""

# These bytes occur in no UTF-8 text (RFC 3629): they would begin overlong forms, or code points
# beyond U+10FFFF.
_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
_NEVER_USED = {
    "byte": {f"<0x{byte:02X}>" for byte in _NEVER_IN_UTF8},
    "undecodable": {chr(byte) for byte in _NEVER_IN_UTF8},  # as byte-level BPE writes them
}
_REPLACEMENT = "\ufffd"  # what stands for bytes that are no whole character
# In brackets of some kind, as no word of a text is.
_RESERVED = re.compile(r"(?=.+[>\]|<])[<\[|>].*(unused|notused|reserved).*", re.IGNORECASE)

# A token is reachable if it appears between at least one of these pairs. Some never begin a text:
# "##ing" of WordPiece, or "ing" of SentencePiece, which puts a space in front of a text. Others
# never end a word: "hyper" of CLIP, whose last pieces end in "</w>".
_CONTEXTS = (
    *((before, "") for before in ("", "a", "«", "\n", "1", "zq")),
    *(("", after) for after in ("zq", "a", "e", "n", "s", "1", "x", "«")),
    *(("a", after) for after in ("zq", "a", "x")),
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of V rows."""

    # What each token stands for in a text; the tokenizer's own spelling of tokens that cannot be
    # decoded; empty for rows without a token.
    texts: Sequence[str]
    # [V], one of CATEGORIES each. "ok": some text contains the token. "undecodable": it is not
    # whole UTF-8 text, such as the first half of a character. "unreachable": the tokenizer splits
    # the token's own text differently, so that it occurs in no text. "special": a control token.
    # "byte": a single byte, for characters without a token. "none": the row belongs to no token.
    categories: NDArray[np.str_]
    # [V], what was seen by no training, as far as can be known without its text: rows without a
    # token, bytes that UTF-8 never contains, and tokens that are called unused or reserved.
    unused: Mask
    # The rows of the tokenizer's own names, such as "##king".
    pieces: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    def name(self, row: int) -> str:
        """A row's text, escaped as Python would for a terminal; its id after # if it has none."""
        text = self.texts[row]
        return repr(text) if text else f"#{row}"

    def row(self, token: str) -> int:
        """The row of a token as a user writes it: the tokenizer's name for it; its text, with or
        without a space before it; or its id after #. Raises UsageError if there is none.
        """
        if re.fullmatch(r"#\d{1,15}", token) and int(token[1:]) < len(self):
            return int(token[1:])
        # In WordPiece "king" is the word, and the text of "##king". A byte of byte-level BPE has
        # the name of a letter, which is meant as a text.
        row = self.pieces.get(token)
        if row is not None and self.categories[row] in ("ok", "unreachable", "special"):
            return row
        for text in (token, f" {token}"):
            if text and text in self.rows:
                return self.rows[text]
        ids = f"its id, from '#0' to '#{len(self) - 1}'"
        if not any(self.texts):
            raise UsageError(
                f"{token[:50]!r} cannot be found without a tokenizer: pass one with "
                f"--tokenizer, or write {ids}"
            )
        raise UsageError(
            f"{token[:50]!r} is not a token of this model: write a token's text, or {ids}"
        )

    @functools.cached_property
    def rows(self) -> dict[str, int]:
        """The row of each text, the one that can be reached if several have the same."""
        order = np.argsort(self.categories == "ok", kind="stable").tolist()
        return {self.texts[row]: row for row in order}


def read_vocabulary(tokenizer: PreTrainedTokenizerBase | None, rows: int) -> Vocabulary:
    """Find out what V rows of an embedding matrix stand for; there may be more or fewer tokens.

    A token is reachable if it is what the tokenizer makes of its own text; this and the categories
    are those of Land & Bartolo (2024, arXiv 2405.05417), section 3.1. Here, a token also counts
    as reachable if it occurs in what the tokenizer makes of its text between other characters.
    """
    if tokenizer is None:  # all rows count as tokens that can be reached
        return Vocabulary([""] * rows, np.full(rows, "ok"), np.zeros(rows, np.bool_))
    pieces = {row: piece for piece, row in tokenizer.get_vocab().items()}
    ids = sorted(row for row in pieces if row < rows)
    decoded = _decode(tokenizer, ids)
    reachable = _reachable(tokenizer, ids, decoded)
    byte_of = _bytes(tokenizer, {row: pieces[row] for row, text in zip(ids, decoded) if not text})
    # Added tokens may be special without being one of those that have a name, such as EOS.
    special = {row for row, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {*tokenizer.all_special_ids}
    texts = [""] * rows
    categories = np.full(rows, "none", dtype=np.array(CATEGORIES).dtype)
    unused = np.ones(rows, np.bool_)
    for row, text in zip(ids, decoded):
        piece = pieces[row]
        if row in special:
            category = "special"
        elif row in byte_of:
            category, piece = "byte", f"<0x{byte_of[row]:02X}>"
        elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
            category = "byte"
        elif row in reachable:
            category = "ok"
        else:
            category = "undecodable" if _REPLACEMENT in text else "unreachable"
        categories[row] = category
        texts[row] = text if category in ("ok", "unreachable") and text else piece
        unused[row] = piece in _NEVER_USED.get(category, ()) or bool(_RESERVED.fullmatch(piece))
    return Vocabulary(texts, categories, unused, {pieces[row]: row for row in ids})


def _bytes(tokenizer: PreTrainedTokenizerBase, pieces: Mapping[int, str]) -> dict[int, int]:
    """The bytes that are tokens under a letter's name, as in ByT5: pieces that decode to nothing.

    ``pieces`` are those that do, by row.
    """
    bytes_ = {row: ord(p) for row, p in pieces.items() if len(p) == 1 and 0x80 <= ord(p) <= 0xFF}
    if not bytes_:
        return {}
    # Texts in which each byte of UTF-8 occurs: all second bytes, and all first ones.
    codes = (*range(0x80, 0x100), *range(0x100, 0xD800, 64), *range(0xE000, 0x110000, 64))
    encoded = {*tokenizer.encode("".join(map(chr, codes)), add_special_tokens=False)}
    occur = all(row in encoded or byte in _NEVER_IN_UTF8 for row, byte in bytes_.items())
    return bytes_ if occur else {}


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token after another one, where a space at its beginning is not lost."""

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    # The text of the two together is cut: a token alone may lose its space, or have none to lose.
    before = tokenizer.encode("a", add_special_tokens=False)
    prefix = text(before)
    texts = []
    for row in ids:
        both = text([*before, row])
        texts.append(both.removeprefix(prefix) if both.startswith(prefix) else text([row]))
    return texts


def _reachable(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: Sequence[str]
) -> set[int]:
    """The ids that the tokenizer returns for their own texts, alone or between other characters."""
    reachable: set[int] = set()
    left = {row: text for row, text in zip(ids, texts) if text}

    def find(before: str, after: str) -> None:
        inputs = [before + text + after for text in left.values()]
        encoded = tokenizer(inputs, add_special_tokens=False, verbose=False)["input_ids"]
        for (row, text), its_ids in zip([*left.items()], encoded):
            # A part of a character is decoded as U+FFFD, whose own bytes must not count as found.
            if row in its_ids and (_REPLACEMENT not in text or list(its_ids) == [row]):
                reachable.add(row)
                del left[row]

    for before, after in _CONTEXTS:
        if left:
            find(before, after)
    # Some have another text where something follows: "hyper" of subword-nmt's "hyper@@".
    follows = tokenizer.encode("zq", add_special_tokens=False)
    for row in left:
        text = str(tokenizer.decode([row, *follows], clean_up_tokenization_spaces=False))
        left[row] = text.removesuffix("zq")
    left = {row: text for row, text in left.items() if text and _REPLACEMENT not in text}
    for before, after in _CONTEXTS:
        if left and after:
            find(before, after)
    return reachable
