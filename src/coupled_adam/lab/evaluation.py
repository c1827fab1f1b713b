"""A finished run -> ``evaluation.json``: test loss and the measures of its embeddings."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from coupled_adam.embeddings import analyze
from coupled_adam.lab.corpus import Corpus
from coupled_adam.lab.recipe import Training
from coupled_adam.lab.training import held_out_batches, next_token_loss, write_atomically


def evaluate(folder: Path, corpus: Corpus, training: Training, device: torch.device) -> None:
    """Evaluate the model of a run folder, unless it has been evaluated; write ``evaluation.json``.

    ``test_loss`` is in nats per token, over all whole blocks of the test split.
    """
    path = folder / "evaluation.json"
    if path.exists():
        return
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    model.to(device)  # type: ignore[arg-type]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for (blocks,) in held_out_batches(corpus.tokens("test"), training):
            predicted = blocks[:, 1:].numel()
            total += next_token_loss(model, blocks.to(device)).item() * predicted
            tokens += predicted
    report = analyze(model.lm_head.weight, corpus.unigram_counts())
    result: dict[str, Any] = {
        "test_loss": total / tokens,
        "test_tokens": tokens,
        "parameters": model.num_parameters(),
        "embeddings": report.to_dict(),
    }
    write_atomically(path, json.dumps(result, indent=2))
