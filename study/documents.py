"""The loss on each document of a held-out file, and on tokens of each band of frequency."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from coupled_adam.text.documents import documents
from coupled_adam.text.tokenizers import load_tokenizer

TOKENS = 512
"""What counts of a document: its first tokens, so that a book weighs no more than an article."""


@functools.cache
def document_blocks(file: Path, tokenizer: Path, length: int) -> tuple[Tensor, Tensor]:
    """The first :data:`TOKENS` tokens of each document, as complete blocks.

    Each document is preceded by the end-of-text token, as in training. A document of less than one
    block is left out.

    Args:
        file: documents with a blank line between.
        tokenizer: its folder.
        length: the length of a sequence.

    Returns:
        Blocks of token ids, [blocks, length + 1], and the number of each one's document, [blocks].
    """
    loaded = load_tokenizer(tokenizer)
    encoded = loaded([*documents(file, "\n\n")], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    blocks, numbers = [], []
    for number, ids in enumerate(encoded):
        ids = [loaded.eos_token_id, *ids][: TOKENS + 1]
        for start in range(0, len(ids) - length, length):
            blocks.append(ids[start : start + length + 1])
            numbers.append(number)
    kept = np.unique(numbers, return_inverse=True)[1]
    return torch.tensor(blocks), torch.from_numpy(kept)


def frequency_bands(counts: NDArray[Any]) -> NDArray[np.int64]:
    """The band of each token, [V]: 0 for the 16 most frequent, then 1 for 16 more, 2 for 32 ...

    Args:
        counts: how often each token occurs in the training text, [V].
    """
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.ceil(np.log2(np.maximum((ranks + 1) / 16, 1))).astype(np.int64)


@torch.inference_mode()
def document_losses(
    model: PreTrainedModel,
    files: Iterable[Path],
    tokenizer: Path,
    counts: NDArray[Any],
    length: int,
) -> dict[str, Any]:
    """Evaluate a causal language model on the documents of held-out files.

    Args:
        counts: how often each token occurs in the training text, [V].
        length: the length of the sequences that the model was trained on.

    Returns:
        For each file, by its name up to the first dot: ``loss``, the mean of ``losses``; ``losses``
        of the documents; ``band_losses``, the mean losses of the tokens of each of the
        :func:`frequency_bands`, and ``band_tokens``, their numbers.
    """
    bands = torch.from_numpy(frequency_bands(counts))
    evaluated = {}
    for file in files:
        blocks, documents = document_blocks(file, tokenizer, length)
        losses = torch.cat([_token_losses(model, batch) for batch in blocks.split(16)]).cpu()
        by_document = _means(losses.mean(1), documents)
        by_band = _means(losses.flatten(), bands[blocks[:, 1:]].flatten(), int(bands.max()) + 1)
        band_tokens = bands[blocks[:, 1:]].flatten().bincount(minlength=len(by_band))
        evaluated[file.name.split(".")[0]] = {
            "loss": by_document.mean().item(),
            "losses": [round(loss, 5) for loss in by_document.tolist()],
            "band_losses": [round(loss, 5) for loss in by_band.tolist()],
            "band_tokens": band_tokens.tolist(),
        }
    return evaluated


def _token_losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    blocks = blocks.to(model.device)
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits.flatten(0, 1).float()
    targets = blocks[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="none").view(len(blocks), -1)


def _means(values: Tensor, groups: Tensor, number: int = 0) -> Tensor:
    """The mean value of each group, in float64; 0 of an empty one."""
    sums = groups.bincount(values.double(), minlength=number)
    return sums / groups.bincount(minlength=number).clamp(min=1)
