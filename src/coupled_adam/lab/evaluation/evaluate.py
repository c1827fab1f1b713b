"""Test loss, embedding measures, word similarity and accuracy of a run or a language model."""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coupled_adam.embeddings import (
    WordSimilaritySet,
    analyze,
    single_tokens,
    unigram_counts,
    word_similarity,
)
from coupled_adam.embeddings.measures import MEASURES
from coupled_adam.errors import UsageError, prefixed_usage_error
from coupled_adam.fields import require
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.batches import held_out_batches
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.evaluation.downstream import Downstream
from coupled_adam.lab.evaluation.load_model import (
    block_length,
    check_model,
    load_model,
    load_trained,
)
from coupled_adam.lab.models import output_embeddings, parameters, require_causal
from coupled_adam.lab.run import Run, read_evaluation
from coupled_adam.lab.training.loss import sequence_losses
from coupled_adam.outputs import sole_writer
from coupled_adam.runs import EVALUATION, MODEL
from coupled_adam.text.token_files import Tokens
from coupled_adam.text.tokenizers import load_tokenizer, text_tokens

_TOKENS = 8192  # tokens per forward pass, so that the logits [tokens, V] fit into memory
_NOT_ASKED_FOR = {"word_similarity": None, "lm_eval": None}

Sets = Mapping[str, WordSimilaritySet]


def evaluate_run(
    run: Run,
    corpus: Corpus | Callable[[], Corpus],
    *,
    batches: int | None = None,
    sets: Sets | None = None,
    downstream: Downstream | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Complete the evaluation of a finished run, and return the content of its ``evaluation.json``.

    Each part is written to the file as soon as it is done. Parts that the file already contains are
    kept, unless they are evaluated again; so are those that another process adds meanwhile.

    - ``test_loss``: in nats per token, over ``test_tokens`` predicted tokens in ``test_batches``
    - ``parameters``: N
    - ``embeddings``, ``input_embeddings``: :meth:`EmbeddingReport.to_dict`; null for tied inputs
    - ``word_similarity``, ``lm_eval``: what :class:`Downstream` and the sets give, or null

    Args:
        corpus: the run's corpus, or a function that prepares it if there is no test loss yet.
        batches: the number of batches, of the recipe's size and from the start of the test split,
            for the test loss; None uses the recipe's ``test_batches`` or else the whole split.
        sets, downstream: if given, evaluated, even if they were before.
    """
    recipe, folder = run.recipe, run.folder
    require(
        (folder / MODEL).exists(),
        f"{folder} has no model: its training has not finished; continue it with --resume",
    )
    # 1. What is there, and what is missing
    done = read_evaluation(folder)
    batches = recipe.training.test_batches if batches is None else batches
    has_loss = "test_loss" in done and done.get("test_batches") == batches
    # A file that is older than a measure is completed.
    measured = {*(done.get("embeddings") or {}), *done}
    has_measures = {"parameters", *MEASURES} <= measured
    if has_loss and has_measures and sets is None and downstream is None:
        return done  # without loading the model, or preparing the corpus
    # 2. What is missing; each is written at once, as the next may take hours
    model, variant = load_trained(run, device)
    if not has_loss:
        tokens = (corpus() if callable(corpus) else corpus).tokens("test")
        sequences = None if batches is None else batches * recipe.training.batch_size
        length, losses = recipe.training.sequence_length, variant.sequence_losses
        loss = held_out_loss(model, tokens, length, sequences, losses)
        _record(folder, {**loss, "test_batches": batches})
    if not has_measures:
        # Of a new model: the one that was loaded does not know which biases were frozen.
        number = parameters(recipe, variant.build_model)
        _record(folder, {"parameters": number, **measures(model, run.counts())})
    # 3. What is asked for
    tokenizer = functools.partial(load_tokenizer, folder / MODEL)
    for scores in _scores(model, tokenizer, sets, downstream):
        _record(folder, scores)
    return read_evaluation(folder)


def _record(folder: Path, results: dict[str, Any]) -> None:
    """Add results to a run's ``evaluation.json``, in which another process may write meanwhile."""
    # Read again under the lock, so that what the other has added is kept.
    with sole_writer(folder, wait=60):
        content = {**_NOT_ASKED_FOR, **read_evaluation(folder), **results}
        write_atomically(folder / EVALUATION, json.dumps(content, indent=2, allow_nan=False))


def evaluate_model(
    source: Path | str,
    *,
    revision: str | None = None,
    text: Path | None = None,
    batches: int | None = None,
    sets: Sets | None = None,
    downstream: Downstream | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Evaluate a causal language model in Hugging Face format, without writing any files.

    The parts are those of :func:`evaluate_run`; what was not requested is None. Raises UsageError
    if there is no such model, tokenizer or text, or they do not fit together.

    Args:
        text: a file or folder, for the test loss and the unigram counts. Each document (or passage
            of plain text) is preceded by the token that begins a text.
        batches: the number of batches of 8 blocks, from the start of the text; None is the whole.
    """
    # 1. What is given, before the weights are loaded
    check_model(source)
    require(
        batches is None or text is not None,
        "--batches applies to the test loss: name a text with --text",
    )
    tokenizer = functools.cache(lambda: load_tokenizer(source, revision))
    # Only what reads text needs one: embeddings can be measured in a model without a tokenizer.
    if text is not None or sets is not None or downstream is not None:
        tokenizer()  # before the model, whose weights take longer
    # 2. The model, and each part of its evaluation
    model = load_model(source, device, revision)
    require_causal(model, source)
    result: dict[str, Any] = {
        **dict.fromkeys(("test_loss", "test_tokens", "test_batches")),
        "parameters": model.num_parameters(),
        **_NOT_ASKED_FOR,
    }
    counts = None
    if text is not None:
        tokens = _tokens_of(text, tokenizer(), model)
        with prefixed_usage_error(f"{source}: its tokenizer does not fit its model: "):
            counts = unigram_counts(tokens, len(output_embeddings(model)))
        result |= {**_text_loss(model, tokens, batches), "test_batches": batches}
    result |= measures(model, counts)
    for scores in _scores(model, tokenizer, sets, downstream):
        result |= scores
    return result


def measures(model: PreTrainedModel, counts: NDArray[Any] | None) -> dict[str, Any]:
    """Measure the output embeddings and, if they are not tied, also the input embeddings.

    A variant may pad its matrices: rows past the length of ``counts`` [V] are no tokens of the
    text, and are left out. Raises UsageError if the embeddings are not finite or all zero, or the
    counts do not fit them.
    """
    output = output_embeddings(model).detach()  # [V, H]
    inputs: Any = model.get_input_embeddings().weight  # [V, H]
    # By memory, since a model may share it without saying so in its configuration.
    tied = inputs.data_ptr() == output.data_ptr()
    if counts is not None:
        output, inputs = output[: len(counts)], inputs[: len(counts)]
    with prefixed_usage_error(f"{model.name_or_path}: "):
        return {
            "embeddings": analyze(output, counts).to_dict(),
            "input_embeddings": None if tied else analyze(inputs.detach(), counts).to_dict(),
        }


def held_out_loss(
    model: PreTrainedModel,
    tokens: Tokens | NDArray[Any],
    length: int,
    sequences: int | None,
    losses: Callable[[PreTrainedModel, Tensor], Tensor] = sequence_losses,
) -> dict[str, Any]:
    """``test_loss``, the mean cross-entropy of all complete blocks or of the first ``sequences``.

    And ``test_tokens``, the number of predicted tokens. Raises UsageError if the loss is not
    finite.

    Args:
        tokens: the ids of the text, [tokens].
        losses: the loss of each sequence of a batch, as in a :class:`Variant`.
    """
    if sequences is not None:
        tokens = tokens[: sequences * length + 1]  # and the target of the last one
    total, predicted = 0.0, 0
    options: dict[str, Any] = {"unit": "", "unit_scale": True, "leave": False, "delay": 1}
    size = (len(tokens) - 1) // length * length
    with torch.inference_mode(), tqdm(desc="test loss", total=size, disable=None, **options) as bar:
        for blocks in held_out_batches(tokens, max(1, _TOKENS // length), length):
            size = blocks[:, 1:].numel()
            bar.update(size)
            # Blocks are of one length, but the last batch may have fewer of them.
            total += losses(model, blocks.to(model.device)).mean().item() * size
            predicted += size
    require(math.isfinite(total), f"{model.name_or_path}: the test loss is not finite")
    return {"test_loss": total / predicted, "test_tokens": predicted}


def loss_on_text(folder: Path, text: Path, batches: int | None, device: str) -> float | None:
    """The mean cross-entropy of a causal language model on a text; None if it is not finite.

    The arguments and errors are those of :func:`evaluate_model`.
    """
    model = load_model(folder, device)
    tokens = _tokens_of(text, load_tokenizer(folder), model)
    try:
        loss: float = _text_loss(model, tokens, batches)["test_loss"]
    except UsageError:  # it is not finite
        return None
    return loss


def _tokens_of(
    text: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> NDArray[Any]:
    """The tokens of a text; UsageError if they do not fill a block of the model."""
    with prefixed_usage_error("--text ", UsageError):
        tokens = text_tokens(text, tokenizer, model.config.to_dict())
    needed = block_length(model) + 1
    require(
        len(tokens) >= needed,
        f"--text {text} is too short: it has {len(tokens)} tokens, and a block takes {needed}",
    )
    return tokens


def _text_loss(model: PreTrainedModel, tokens: NDArray[Any], batches: int | None) -> dict[str, Any]:
    """The loss on the ids [tokens] of a text, in blocks as long as the model allows."""
    sequences = None if batches is None else batches * 8
    return held_out_loss(model, tokens, block_length(model), sequences)


def _scores(
    model: PreTrainedModel,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    sets: Sets | None,
    downstream: Downstream | None,
) -> Iterator[dict[str, Any]]:
    """Word similarity and accuracy, each if it is asked for; only they need the tokenizer."""
    if sets is not None:
        with prefixed_usage_error(f"{model.name_or_path}: "):
            report = word_similarity(output_embeddings(model), sets, single_tokens(tokenizer()))
        yield {"word_similarity": report.to_dict()}
    if downstream is not None:
        batch_size = max(1, _TOKENS // block_length(model))
        yield {"lm_eval": downstream.evaluate(model, tokenizer(), batch_size)}
