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
from undertrained_tokens import train_without

from coupled_adam.embeddings.analysis import analyze_model
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.embeddings.undertrained import find_undertrained, verify_undertrained
from coupled_adam.files import write_atomically
from coupled_adam.lab.evaluation.load_model import block_length, load_model
from coupled_adam.lab.recipe import load_recipe
from coupled_adam.lab.training.environment import environment

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
    rewrite = {"rewrite": with_copies} if data == "copies" else {}
    run, _, _, unseen = train_without(folder, data, arm, seed, {}, **rewrite)
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


def with_copies(tokens: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Stretches of a text that alternate with one to three of its tokens, again and again."""
    length = load_recipe("tiny").training.sequence_length
    seen = np.unique(tokens)  # rare ones as often as frequent ones
    stretches = []
    for start in range(0, len(tokens), length):
        piece = rng.choice(seen, rng.integers(1, 4))
        stretches += [tokens[start : start + length], np.resize(piece, length)]
    return np.concatenate(stretches)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
