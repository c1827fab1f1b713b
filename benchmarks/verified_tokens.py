"""Ask a model to repeat tokens that were held out of its training text: precision and recall.

    python benchmarks/verified_tokens.py benchmarks/results/verified_tokens.json [RUNS]

As in ``undertrained_tokens.py``, fifty tokens are removed from the text of the ``tiny`` recipe, and
the true answer is the set of reachable tokens that never occur in what was trained on. A model of
this size does not learn to repeat from such a text, so as many tokens again are one to three tokens
that are repeated; a last model without them shows what is said of one that cannot repeat. The
script takes ten minutes on one core; runs that are in the folder RUNS are not trained again.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings.analysis import analyze_model
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.embeddings.undertrained import find_undertrained, verify_undertrained
from coupled_adam.embeddings.vocabulary import read_vocabulary
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.evaluation.load_model import block_length, load_model
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.environment import environment
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train
from coupled_adam.text.tokenizers import load_tokenizer

HELD_OUT = 50
SHARES = (0.02, 0.1)  # of the tokens that are asked for; most of the tenth were seen
RUNS = (
    *(("copies", arm, seed) for arm in ("adamw", "coupled_adam") for seed in (1, 2, 3)),
    ("text", "adamw", 1),
)


def main(target: Path, runs: Path | None = None) -> None:
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for data, arm, seed in RUNS:
            result = measure(runs or Path(temporary), data, arm, seed)
            results.append({"data": data, "arm": arm, "seed": seed, **result})
            print(results[-1], flush=True)
    content = {"environment": environment(), "results": results}
    write_atomically(target, json.dumps(content, indent=1))


def measure(folder: Path, data: str, arm: str, seed: int = 1) -> dict[str, Any]:
    """Train a model and verify its candidates; precision and recall of the verdict.

    Args:
        folder: where texts and runs go.
        data: ``"copies"`` or ``"text"``.
        arm: of the recipe.
    """
    recipe = load_recipe("tiny")
    whole = prepare_corpus(recipe, default_cache())
    assert whole.tokenizer_folder is not None
    vocabulary = read_vocabulary(load_tokenizer(whole.tokenizer_folder), recipe.model.vocab_size)
    ok = vocabulary.categories == "ok"
    rng = np.random.default_rng(0)
    # Of all frequencies: rare and frequent tokens must be found alike.
    often = np.flatnonzero(ok & (whole.unigram_counts() >= 20))
    held_out = rng.choice(often, HELD_OUT, replace=False)
    texts = folder / data
    texts.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        tokens = whole.tokens(split)[:]
        tokens = tokens[~np.isin(tokens, held_out)]
        if data == "copies":
            tokens = with_copies(tokens, recipe.training.sequence_length, rng)
        tokens.astype("<u2").tofile(texts / f"{split}.bin")
    tokenizer = str(whole.tokenizer_folder)
    changed = override(recipe, {"data.tokens": str(texts), "data.tokenizer": tokenizer})
    corpus = prepare_corpus(changed, folder / "cache")
    run = Run(changed, arm, seed, folder / f"{data}-{arm}-{seed}")
    if not (run.folder / "model").exists():
        train(run, corpus, Execution())
    unseen = (corpus.unigram_counts() == 0) & ok
    (analysis,) = analyze_model(str(run.folder), AnalysisInputs())
    model = load_model(run.folder / "model", "cpu")
    result: dict[str, Any] = {"never seen": int(unseen.sum())}
    for share in SHARES:
        report = find_undertrained(analysis, share=share)
        asked = verify_undertrained(report, model, block_length(model)).verification
        assert asked is not None
        verdicts = np.array(asked.verdicts())
        counts = {
            verdict: [len(rows), int(unseen[rows].sum())]
            for verdict in np.unique(verdicts).tolist()
            for rows in [asked.rows[verdicts == verdict]]
        }
        accused, right = counts.get("under-trained", [0, 0])
        result[f"{share:.0%}"] = {
            "candidates, of which never seen": [len(asked.rows), int(unseen[asked.rows].sum())],
            "verdicts, of which never seen": counts,
            "precision": right / accused if accused else None,
            "recall": right / int(unseen[asked.rows].sum()),
            "sentence": asked.sentence,
        }
    return result


def with_copies(
    tokens: NDArray[np.integer[Any]], length: int, rng: np.random.Generator
) -> NDArray[np.integer[Any]]:
    """Stretches of a text that alternate with one to three of its tokens, again and again."""
    seen = np.unique(tokens)  # rare ones as often as frequent ones
    stretches = []
    for start in range(0, len(tokens), length):
        piece = rng.choice(seen, rng.integers(1, 4))
        stretches += [tokens[start : start + length], np.resize(piece, length)]
    return np.concatenate(stretches)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
