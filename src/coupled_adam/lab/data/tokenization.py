"""From documents to token ids: a tokenizer, the splits, and the files of ids."""

import contextlib
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coupled_adam.errors import UsageError, prefixed_usage_error
from coupled_adam.fields import require
from coupled_adam.lab.data.source import Source, content_digest
from coupled_adam.lab.sections import Data
from coupled_adam.text.documents import batched
from coupled_adam.text.token_files import TokenFile
from coupled_adam.text.tokenizers import check_known, end_of_text_id, load_tokenizer

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "valid", "test")
_BATCH = 2_000_000  # characters per call of the tokenizer, which has its own threads
_BPE_CHARACTERS = 10**9  # the most that a BPE is trained on


def corpus_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load a tokenizer with ids below ``vocab_size`` from the hub or a folder.

    Raises UsageError if there is no such tokenizer, it has too many tokens, or it has no
    end-of-text token.
    """
    with prefixed_usage_error("data.tokenizer=", UsageError):
        tokenizer = load_tokenizer(name)
        # Ids may have gaps, so the largest id counts, not only the number of tokens.
        size = max(len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values()))
        require(
            size <= vocab_size,
            f"{name} has {size} tokens: set model.vocab_size={vocab_size} to as many or more",
        )
        require(
            end_of_text_id(tokenizer) is not None,
            f"{name} has neither eos_token nor bos_token: set one in its tokenizer_config.json",
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE."""
    # All 256 bytes are tokens from the start, so that no text is unknown to it.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bar = tqdm(texts, "text for the BPE", unit=" documents", disable=None)
    tokenizer.train_from_iterator(bar, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT
    )


def held_out(documents: Iterable[str], share: float) -> Iterator[tuple[str, str]]:
    """Yield (split, document) for each document; valid and test get ``share`` each.

    The split is a function of the text: a document keeps it when others are added, or come first.
    """
    for document in documents:
        start = hashlib.sha256(document.encode()).digest()[:8]
        place = int.from_bytes(start, "big") / 2**64
        yield "valid" if place < share else "test" if place < 2 * share else "train", document


def write_tokens(
    source: Source,
    data: Data,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    folder: Path,
) -> tuple[PreTrainedTokenizerBase, dict[str, list[TokenFile]], dict[str, int | None]]:
    """Write the token ids of each split, with an end-of-text token before each document.

    Without a tokenizer, a byte-level BPE is trained on the first training documents.

    Returns:
        The tokenizer, and the files and the number of documents of each split.
    """
    # Held-out documents come out of the training split, unless the source has a split of them.
    documents: dict[str, Iterator[tuple[str, str]]] = {
        split: zip(itertools.repeat(split), texts) for split, texts in source.documents.items()
    }
    documents["train"] = (
        ("train" if split in source.documents else split, text)
        for split, text in held_out(source.documents["train"], data.held_out)
    )
    if tokenizer is None:
        # They are kept until they are tokenized, since reading them again might mean a download.
        first = _enough_for_bpe(documents["train"], data)
        tokenizer = train_tokenizer((text for split, text in first if split == "train"), vocab_size)
        documents["train"] = itertools.chain(first, documents["train"])
    end_of_text, encode = end_of_text_id(tokenizer), _encoder(tokenizer)
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    limits = dict.fromkeys(SPLITS, data.max_held_out_tokens or sys.maxsize)
    limits["train"] = data.max_tokens or sys.maxsize
    tokens, counts = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context((folder / f"{s}.bin").open("wb")) for s in SPLITS}
        bar = stack.enter_context(tqdm(desc="tokens", unit="", unit_scale=True, disable=None))
        for own_split, assigned in documents.items():
            for batch in batched(assigned, _BATCH, lambda pair: len(pair[1])):
                # The documents of a split that is full are not even tokenized.
                needed = [(split, text) for split, text in batch if tokens[split] < limits[split]]
                if not any(tokens.values()):
                    check_known((text for _, text in needed), tokenizer, source.name)
                for (split, _), encoded in zip(needed, encode([text for _, text in needed])):
                    ids = np.array([end_of_text, *encoded], dtype)[: limits[split] - tokens[split]]
                    files[split].write(ids.tobytes())
                    tokens[split] += len(ids)
                    counts[split] += len(ids) > 0
                    bar.update(len(ids))
                if tokens[own_split] >= limits[own_split]:
                    break
    token_files = {s: [TokenFile(f"{s}.bin", dtype, 0, tokens[s])] for s in SPLITS}
    return tokenizer, token_files, {**counts}


def _enough_for_bpe(assigned: Iterator[tuple[str, str]], data: Data) -> list[tuple[str, str]]:
    """Take pairs (split, document) until they hold the training text that a BPE needs."""
    needed = 4 * data.max_tokens if data.max_tokens else _BPE_CHARACTERS  # a token has about 4
    needed = min(needed, _BPE_CHARACTERS)
    taken = []
    for split, text in assigned:
        taken.append((split, text))
        needed -= len(text) if split == "train" else 0
        if needed <= 0:
            break
    return taken


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Iterator[list[int]]]:
    """A function from texts to ids that treats special tokens within a text as plain text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    if not tokenizer.is_fast:
        return lambda texts: (tokenizer(text, **options)["input_ids"] for text in texts)
    rust = tokenizer.backend_tokenizer  # twice as fast as calling it through transformers
    rust.encode_special_tokens = True
    return lambda texts: (
        encoding.ids for encoding in rust.encode_batch_fast(texts, add_special_tokens=False)
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Save a tokenizer in Hugging Face format, and return the digest of its files.

    Raises OSError, whatever the library raises.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises a bare Exception if the disk is full
        raise OSError(str(error)) from error
    return content_digest(sorted(path for path in folder.rglob("*") if path.is_file()))
