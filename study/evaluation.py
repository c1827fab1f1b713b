"""The evaluation of the study's finished runs: the laboratory's, and what only the study asks."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from coupled_adam.embeddings import single_tokens, subtract_mean, word_similarity
from coupled_adam.embeddings.measures import LOGGED, numbers
from coupled_adam.lab.data.batches import held_out_batches
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.evaluation.evaluate import Sets, measures
from coupled_adam.lab.evaluation.load_model import load_trained
from coupled_adam.lab.models import count_parameters, output_embeddings
from coupled_adam.lab.reporting.statistics import fit_proportional
from coupled_adam.lab.run import Run
from coupled_adam.runs import MODEL
from coupled_adam.text.tokenizers import load_tokenizer

from .documents import document_losses, frequency_bands

Extra = Callable[[PreTrainedModel, Tensor], dict[str, float]]
"""A function from a model and blocks of held-out text, [batch, length + 1], to more results."""


def evaluate(
    run: Run,
    corpus: Corpus,
    sets: Sets,
    extra: Extra | None = None,
    device: str = "cpu",
    held_out: Iterable[Path] = (),
) -> dict[str, Any]:
    """Evaluate the trained model of a run, with the losses of its variant.

    Held-out text goes through it in batches of the training's size, with which the masks of a
    masked language model vary; the laboratory's ``evaluate_run`` takes larger ones.

    Returns:
        ``parameters``, ``valid_loss``, ``test_loss``, the output embeddings' measures that are
        logged and, with the prefix ``input_``, of untied input embeddings, ``band_norms``, the mean
        norms of the output embeddings of each of the ``frequency_bands``, ``word_similarity`` and
        ``word_similarity_centered``, ``second_moment`` if the run used AdamW, and
        ``initial_mean_norm`` and ``curve`` from the log; with ``held_out``, files of documents,
        also ``documents``: their ``document_losses``.
    """
    recipe, training, folder = run.recipe, run.recipe.training, run.folder
    size, length = training.batch_size, training.sequence_length
    model, variant = load_trained(run, "cpu")
    output = output_embeddings(model).detach()
    # The mask of a masked language model is no token of the corpus.
    counts = np.pad(corpus.unigram_counts(), (0, len(output) - recipe.model.vocab_size))
    words = output[: recipe.model.vocab_size]
    token_ids = single_tokens(load_tokenizer(folder / MODEL))
    bands = frequency_bands(counts)
    norms = np.bincount(bands, output.norm(dim=1)) / np.bincount(bands)
    curve = ("step", "valid_loss", "mean_norm", "mean_norm_ratio")
    matrices = measures(model, counts)
    model.to(device)  # type: ignore[arg-type]  # the matrices above stay where they are

    def held_out_loss(split: str, limit: int | None) -> float:
        """The mean over the sequences of that many batches, or of all."""
        batches = held_out_batches(corpus.tokens(split), size, length)
        with torch.inference_mode():
            losses = [
                variant.sequence_losses(model, blocks.to(device))
                for blocks in itertools.islice(batches, limit)
            ]
        return torch.cat(losses).double().mean().item()

    results = {
        "parameters": count_parameters(model),
        "initial_mean_norm": run.metrics[0]["mean_norm"],
        "valid_loss": held_out_loss("valid", training.evaluation_batches),
        "test_loss": held_out_loss("test", training.test_batches),
        **numbers(LOGGED, matrices["embeddings"]),
        "band_norms": norms.tolist(),
        "word_similarity": _similarity(words, sets, token_ids),
        "word_similarity_centered": _similarity(subtract_mean(words), sets, token_ids),
        "curve": [
            {key: line[key] for key in curve} for line in run.metrics if "valid_loss" in line
        ],
    }
    if matrices["input_embeddings"] is not None:
        input_numbers = numbers(LOGGED, matrices["input_embeddings"])
        results |= {f"input_{key}": value for key, value in input_numbers.items()}
    if held_out:
        assert corpus.tokenizer_folder is not None
        results["documents"] = document_losses(
            model, held_out, corpus.tokenizer_folder, counts, length
        )
    if fits := second_moment_fits(run):
        results["second_moment"] = fits
    if extra is not None:
        blocks = next(held_out_batches(corpus.tokens("valid"), 4 * size, length))
        results |= extra(model, blocks.to(device))
    return results


def _similarity(matrix: Tensor, sets: Sets, token_ids: Any) -> dict[str, Any]:
    scores = word_similarity(matrix, sets, token_ids).sets
    return {name: {"r": score.r, "pairs": score.pairs} for name, score in scores.items()}


def second_moment_fits(run: Run) -> list[dict[str, float]]:
    """Fit AdamW's second moments at each evaluation that saved them, in order."""
    return [
        {"tokens": tokens, **second_moment_fit(run.probabilities(), moment)}
        for tokens, moment in run.second_moments().items()
    ]


def second_moment_fit(probability: NDArray[Any], moment: NDArray[Any]) -> dict[str, float]:
    """Fit E[v] = A p, and also a power law with a free exponent of p, to the tokens that occur.

    The exponent is fitted to the means of twenty groups of tokens with similar frequency. The
    moments of single tokens scatter, in particular those of rare tokens, and a fit to their
    logarithms would be biased, since the mean of logarithms lies below the logarithm of the mean.
    """
    order = probability.argsort()[(probability == 0).sum() :]
    p, v = probability[order], moment[order].astype(float)
    a, r_squared = fit_proportional(p, v)
    means = [[group.mean() for group in np.array_split(values, 20)] for values in (p, v)]
    log_p, log_v = np.log(means)
    exponent, _ = np.polyfit(log_p, log_v, 1)
    return {"A": a, "r_squared": r_squared, "exponent": float(exponent)}
