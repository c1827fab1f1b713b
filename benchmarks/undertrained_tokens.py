"""Find tokens that were held out of the training text: precision and recall of both indicators.

    python benchmarks/undertrained_tokens.py benchmarks/results/undertrained_tokens.json [RUNS]

Fifty tokens that the ``tiny`` recipe's text contains are removed from it, while the tokenizer keeps
them, and models are trained on the rest. The true answer is the set of reachable tokens that never
occur in what was trained on: the fifty, and those that occur only as a part of longer tokens. The
script takes ten minutes on one core; runs that are in the folder RUNS are not trained again.

The committed results have three more indicators, of which none is clearly better where these two
are used. They were in the library at the commit that the results name.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings import load_embeddings
from coupled_adam.embeddings.undertrained import undertrained
from coupled_adam.embeddings.vocabulary import Vocabulary, read_vocabulary
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.environment import environment
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train
from coupled_adam.text.tokenizers import load_tokenizer

HELD_OUT = 50
RUNS = (("tied", "adamw", 1), ("tied", "coupled_adam", 1), ("untied", "adamw", 1))


class Trained(NamedTuple):
    """A run, its vocabulary, the tokens that its text lacks, and which rows [V] it never saw."""

    run: Run
    vocabulary: Vocabulary
    held_out: NDArray[np.int64]
    unseen: NDArray[np.bool_]


def train_without(
    folder: Path,
    label: str,
    arm: str,
    seed: int,
    overrides: dict[str, Any],
    rewrite: Callable[..., NDArray[Any]] = lambda tokens, rng: tokens,
) -> Trained:
    """Train on the text of the recipe without :data:`HELD_OUT` tokens.

    Args:
        folder: where texts and runs go.
        label: the name of the text and of the model.
        rewrite: makes the text of what is left; it is given a random generator.
    """
    recipe, rng = load_recipe("tiny"), np.random.default_rng(0)
    whole = prepare_corpus(recipe, default_cache())
    assert whole.tokenizer_folder is not None
    vocabulary = read_vocabulary(load_tokenizer(whole.tokenizer_folder), recipe.model.vocab_size)
    ok = vocabulary.categories == "ok"
    # Of all frequencies: rare and frequent tokens must be found alike.
    often = np.flatnonzero(ok & (whole.unigram_counts() >= 20))
    held_out = rng.choice(often, HELD_OUT, replace=False)
    texts = folder / label
    texts.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        tokens = whole.tokens(split)[:]
        kept = rewrite(tokens[~np.isin(tokens, held_out)], rng)
        kept.astype("<u2").tofile(texts / f"{split}.bin")
    data = {"data.tokens": str(texts), "data.tokenizer": str(whole.tokenizer_folder)}
    changed = override(recipe, data | overrides)
    corpus = prepare_corpus(changed, folder / "cache")
    run = Run(changed, arm, seed, folder / f"{label}-{arm}-{seed}")
    if not (run.folder / "model").exists():
        train(run, corpus, Execution())
    return Trained(run, vocabulary, np.sort(held_out), (corpus.unigram_counts() == 0) & ok)


def main(target: Path, runs: Path | None = None) -> None:
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for label, arm, seed in RUNS:
            overrides = {"model.tied": label == "tied", "training.steps": 300}
            trained = train_without(runs or Path(temporary), label, arm, seed, overrides)
            for entry in scores(trained):
                results.append({"model": label, "arm": arm, "seed": seed, **entry})
                print(results[-1], flush=True)
    names = [trained.vocabulary.name(row) for row in trained.held_out]
    content = {"environment": environment(), "held_out": names, "results": results}
    write_atomically(target, json.dumps(content, indent=1))


def scores(trained: Trained) -> Iterator[dict[str, Any]]:
    """Precision and recall for each matrix of a run and each indicator."""
    run, vocabulary, held_out, unseen = trained
    ok = vocabulary.categories == "ok"
    for entry in load_embeddings(run.folder):
        for role, indicator in (("input", "norm"), ("output", "cosine_centered")):
            suspects = undertrained(entry.matrix, vocabulary.unused, ok, role=role)
            row = {"matrix": entry.role, "indicator": indicator, "never seen": int(unseen.sum())}
            for name, chosen in (("2 %", suspects.candidates), ("limit", suspects.alike)):
                right = int(unseen[chosen].sum())
                row |= {
                    f"{name}, chosen": len(chosen),
                    f"{name}, precision": right / len(chosen) if len(chosen) else None,
                    f"{name}, recall": right / int(unseen.sum()),
                    f"{name}, held out": int(np.isin(chosen, held_out).sum()),
                }
            ordered = np.argsort(suspects.indicators[indicator][ok])
            truth = unseen[ok][ordered]
            at = np.cumsum(truth) / np.arange(1, len(truth) + 1)
            yield {**row, "average precision": float(at[truth].mean())}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
