"""The evaluation of the study's finished runs."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from coupled_adam.embeddings import analyze, single_tokens, subtract_mean, word_similarity
from coupled_adam.embeddings.measures import LOGGED
from coupled_adam.lab.data.batches import held_out_batches
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.evaluation.evaluate import Sets
from coupled_adam.lab.models import count_parameters, output_embeddings
from coupled_adam.lab.reporting.plots import fit_proportional
from coupled_adam.lab.training.config import TrainingRun
from coupled_adam.text.tokenizers import load_tokenizer

from .documents import document_losses, frequency_bands

Extra = Callable[[PreTrainedModel, Tensor], dict[str, float]]
"""A function from a model and blocks of held-out text, [batch, length + 1], to more results."""


def evaluate(
    run: TrainingRun,
    corpus: Corpus,
    sets: Sets,
    extra: Extra | None = None,
    device: str = "cpu",
    held_out: Iterable[Path] = (),
) -> dict[str, Any]:
    """Evaluate the trained model of a run, with the losses of its variant.

    The laboratory's ``evaluate_run`` only supports causal language models.

    Returns:
        ``parameters``, ``valid_loss``, ``test_loss``, the output embeddings' measures that are
        logged and, with the prefix ``input_``, of untied input embeddings, ``band_norms``, the mean
        norms of the output embeddings of each of the ``frequency_bands``, ``word_similarity`` and
        ``word_similarity_centered``, ``second_moment`` if the run used AdamW, and
        ``initial_mean_norm`` and ``curve`` from the log; with ``held_out``, files of documents,
        also ``documents``: their ``document_losses``.
    """
    recipe, folder = run.recipe, run.folder
    model = load_model(run)
    output = output_embeddings(model).detach()
    inputs = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    counts = np.pad(corpus.unigram_counts(), (0, len(output) - recipe.model.vocab_size))
    model.to(device)  # type: ignore[arg-type]  # the matrices above stay where they are
    token_ids = single_tokens(load_tokenizer(folder / "model"))
    words = output[: recipe.model.vocab_size]
    bands = frequency_bands(counts)
    norms = np.bincount(bands, output.norm(dim=1)) / np.bincount(bands)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = ("step", "valid_loss", "mean_norm", "mean_norm_ratio")
    found = {
        "parameters": count_parameters(model),
        "initial_mean_norm": log[0]["mean_norm"],
        "valid_loss": held_out_loss(model, run, corpus, "valid"),
        "test_loss": held_out_loss(model, run, corpus, "test"),
        **_measures(output, counts),
        "band_norms": norms.tolist(),
        "word_similarity": _similarity(words, sets, token_ids),
        "word_similarity_centered": _similarity(subtract_mean(words), sets, token_ids),
        "curve": [{key: line[key] for key in curve} for line in log if "valid_loss" in line],
    }
    if inputs.data_ptr() != output.data_ptr():
        found |= {f"input_{name}": value for name, value in _measures(inputs, counts).items()}
    if held_out:
        assert corpus.tokenizer_folder is not None
        length = recipe.training.sequence_length
        found["documents"] = document_losses(
            model, held_out, corpus.tokenizer_folder, counts, length
        )
    fits = second_moment_fits(run, counts)
    if fits:
        found["second_moment"] = fits
    if extra is not None:
        size, length = 4 * recipe.training.batch_size, recipe.training.sequence_length
        blocks = next(held_out_batches(corpus.tokens("valid"), size, length))
        found |= extra(model, blocks.to(device))
    return found


def load_model(run: TrainingRun) -> PreTrainedModel:
    """Load the trained model of a run, whose class is that which the run's variant builds."""
    with torch.device("meta"):
        cls = type(run.variant.build_model(run.recipe))
    model: PreTrainedModel = cls.from_pretrained(run.folder / "model", local_files_only=True)
    return model.eval()  # type: ignore[no-untyped-call, no-any-return]


def held_out_loss(model: PreTrainedModel, run: TrainingRun, corpus: Corpus, split: str) -> float:
    """The mean loss on the first batches of a split; the recipe gives their number."""
    options = run.recipe.training
    limit = options.evaluation_batches if split == "valid" else options.test_batches
    batches = held_out_batches(corpus.tokens(split), options.batch_size, options.sequence_length)
    with torch.inference_mode():
        losses = [
            run.variant.sequence_losses(model, blocks.to(model.device))
            for blocks in itertools.islice(batches, limit)
        ]
    return torch.cat(losses).double().mean().item()


def _measures(matrix: Tensor, counts: NDArray[Any]) -> dict[str, Any]:
    report = analyze(matrix, counts)
    return {key: measure.of(report) for key, measure in LOGGED.items()}


def _similarity(matrix: Tensor, sets: Sets, token_ids: Any) -> dict[str, Any]:
    scores = word_similarity(matrix, sets, token_ids).sets
    return {name: {"r": score.r, "pairs": score.pairs} for name, score in scores.items()}


def second_moment_fits(run: TrainingRun, counts: NDArray[Any]) -> list[dict[str, float]]:
    """Fit AdamW's second moments at each evaluation that saved them, in order."""
    saved = (run.folder / "second_moments").glob("step-*.npy")
    moments = {int(path.stem.removeprefix("step-")): np.load(path) for path in saved}
    probability = counts / counts.sum()
    return [
        {
            "tokens": step * run.recipe.tokens_per_step,
            **second_moment_fit(probability, moments[step]),
        }
        for step in sorted(moments)
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
    groups = [[part.mean() for part in np.array_split(values, 20)] for values in (p, v)]
    exponent, _ = np.polyfit(np.log(groups[0]), np.log(groups[1]), 1)
    return {"A": a, "r_squared": r_squared, "exponent": float(exponent)}
