"""Finetune a small trained model with 64 new tokens: AdamW, Coupled Adam and LEAN.

    python benchmarks/new_tokens.py benchmarks/results/new_tokens.json

A GPT-2 of two layers, tied and untied, is trained with AdamW on the docstrings of Python's standard
library, and finetuned on the topics of the language reference. Of the words, quotes and line breaks
there that the tokenizer cuts into pieces the 64 most frequent become tokens; their rows begin at
the mean of the others. The old rows are trained as well, or frozen by a hook that masks the
gradient. Each optimizer's rate of the embeddings is the best on validation passages, with the first
seed; seeds choose the batches.

One more question is an untied model from scratch, whose input rows have had no gradient until their
token occurs. What is in the target already is not run again.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coupled_adam import LEAN, CoupledAdamW, param_groups
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import Corpus, default_cache, prepare_corpus
from coupled_adam.lab.data.tokenization import held_out
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training.environment import environment
from coupled_adam.text.documents import passages
from coupled_adam.text.python_documentation import python_documentation
from coupled_adam.text.tokenizers import load_tokenizer

NEW = 64
SEEDS = (1, 2, 3)
BETAS = (0.9, 0.95)
# What each optimizer does with the embeddings. Their rate, which is part of LEAN, is searched for.
ADAMW: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, betas 0.9, 0.999": {"betas": (0.9, 0.999)},
    "AdamW, betas 0, 0.999": {"betas": (0.0, 0.999)},
}
COUPLED: dict[str, dict[str, Any]] = {
    "Coupled Adam": {},
    "LEAN": LEAN,
    "LEAN, betas 0.9, 0.999": {**LEAN, "betas": (0.9, 0.999)},
}
LENGTH = 64
BASE = {"lr": 1e-2, "steps": 400, "batch_size": 16, "warmup": 60}
FINETUNING = {"lr": 2e-3, "steps": 80, "batch_size": 4, "warmup": 8}
SCRATCH = {"lr": 1e-2, "steps": 150, "batch_size": 16, "warmup": 30}
FACTORS = (0.25, 1.0, 4.0, 16.0)  # of the embeddings' rate; 64 and more if 16 is the best


def optimizer_of(model: nn.Module, name: str, lr: float, factor: float) -> torch.optim.Optimizer:
    if name in ADAMW:
        groups = param_groups(model, {"lr": factor * lr, **ADAMW[name]})
        return torch.optim.AdamW(groups, lr=lr, betas=BETAS, weight_decay=0.1)
    embeddings = {**COUPLED[name], "lr_factor": factor}
    return CoupledAdamW(model, embeddings=embeddings, lr=lr, betas=BETAS, weight_decay=0.1)


def fit(
    model: nn.Module,
    tokens: Tensor,
    name: str,
    seed: int,
    factor: float,
    *,
    lr: float,
    steps: int,
    batch_size: int,
    warmup: int,
) -> None:
    """Train with warmup and linear decay to 0 on sequences from places that the seed chooses."""
    optimizer = optimizer_of(model, name, lr, factor)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warmup, (steps - t) / (steps - warmup))
    )
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (batch_size, 1), generator=random)
        batch = tokens[starts + torch.arange(LENGTH + 1)]
        losses(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of each token but the first of each sequence, one after the other."""
    logits = model(batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")


def evaluate(model: nn.Module, tokens: Tensor, sequences: int, first_new: int) -> dict[str, float]:
    """The mean loss on sequences that are spread evenly, of all tokens and of the new ones."""
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, sequences).long()[:, None]
    batches = tokens[starts + torch.arange(LENGTH + 1)].split(16)
    with torch.no_grad():
        each = torch.cat([losses(model, batch) for batch in batches])
    is_new = torch.cat([batch[:, 1:].flatten() for batch in batches]) >= first_new
    result = {"loss": each.mean().item()}
    if is_new.any():
        result |= {"loss_of_new": each[is_new].mean().item(), "new": int(is_new.sum())}
    return result


class Texts:
    """The corpus of docstrings, and the topics of the language reference with new tokens."""

    def __init__(self, folder: Path) -> None:
        from pydoc_data.topics import topics

        reference = [
            passage
            for _, topic in sorted(topics.items())
            for passage in passages(topic.splitlines(keepends=True))
        ]
        docstrings = [text for text in python_documentation() if text not in {*reference}]
        lines = (json.dumps({"text": text}) for text in docstrings if text.strip())
        (folder / "docstrings.jsonl").write_text("\n".join(lines))
        self.recipe = override(load_recipe("tiny"), {"data.text": str(folder)})
        corpus = prepare_corpus(self.recipe, default_cache())
        self.docstrings = {s: self._tensor(corpus.tokens(s)[:]) for s in ("train", "valid")}
        self._tokenizer = self._rust_tokenizer(corpus)
        self._pieces: dict[str, list[int]] = {}
        by_split: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
        for split, text in held_out(filter(str.strip, reference), 0.1):
            by_split[split].append(text)
        words = Counter(word for text in by_split["train"] for word in self._words(text))
        cut = [w for w, _ in words.most_common() if w[1:].isalpha() and len(self._encode(w)) > 1]
        self.new = cut[:NEW]
        self._pieces |= {word: [self.vocab_size + i] for i, word in enumerate(self.new)}
        self.reference = {s: self._tensor(self._ids(texts)) for s, texts in by_split.items()}

    @property
    def vocab_size(self) -> int:
        return self.recipe.model.vocab_size

    def facts(self) -> dict[str, Any]:
        train = self.reference["train"]
        seen = FINETUNING["steps"] * FINETUNING["batch_size"] * LENGTH
        return {
            "docstrings": {split: len(ids) for split, ids in self.docstrings.items()},
            "reference": {split: len(ids) for split, ids in self.reference.items()},
            "new": [word.replace("Ġ", " ") for word in self.new],
            "share_of_new": float((train >= self.vocab_size).float().mean()),
            "tokens_seen_in_finetuning": seen,
            "distinct_in_reference": len(train.unique()),
        }

    @staticmethod
    def _tensor(ids: Iterable[int]) -> Tensor:
        return torch.from_numpy(np.fromiter(ids, np.int64))

    @staticmethod
    def _rust_tokenizer(corpus: Corpus) -> Any:
        assert corpus.tokenizer_folder is not None
        return load_tokenizer(corpus.tokenizer_folder).backend_tokenizer  # type: ignore[attr-defined]

    def _words(self, text: str) -> Iterator[str]:
        """What the BPE never merges across, in its own alphabet: a word with its space is Ġword."""
        return (word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text))

    def _encode(self, word: str) -> list[int]:
        if word not in self._pieces:
            tokens = self._tokenizer.model.tokenize(word)
            self._pieces[word] = [token.id for token in tokens]
        return self._pieces[word]

    def _ids(self, texts: Iterable[str]) -> Iterator[int]:
        end_of_text = self._tokenizer.token_to_id("<|endoftext|>")
        for text in texts:
            yield end_of_text
            for word in self._words(text):
                yield from self._encode(word)


def with_new_rows(texts: Texts, recipe: Any, base: dict[str, Tensor], frozen: bool) -> Any:
    """The trained model with NEW more rows; if ``frozen``, only these ever have a gradient."""
    model = build_model(recipe)
    model.load_state_dict(base)
    model.resize_token_embeddings(texts.vocab_size + NEW, mean_resizing=False)
    for matrix in embeddings(model):
        matrix.data[texts.vocab_size :] = matrix.data[: texts.vocab_size].mean(0)
        if frozen:
            is_new = torch.arange(len(matrix))[:, None] >= texts.vocab_size
            matrix.register_hook(lambda grad, is_new=is_new: grad * is_new)
    return model


def embeddings(model: Any) -> list[Tensor]:
    both = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return [*dict.fromkeys(both)]  # once if they are tied


def finetuned(
    texts: Texts,
    recipe: Any,
    base: dict[str, Tensor],
    optimizer: str | None,
    frozen: bool,
    factor: float,
    seed: int,
) -> dict[str, Any]:
    """What a model does that is finetuned with an optimizer; None leaves it as it is."""
    model = with_new_rows(texts, recipe, base, frozen)
    if optimizer is not None:
        fit(model, texts.reference["train"], optimizer, seed, factor, **FINETUNING)
    first_new = texts.vocab_size
    norms = [matrix.detach().norm(dim=1) for matrix in embeddings(model)]
    return {
        "valid": evaluate(model, texts.reference["valid"], 48, first_new),
        "test": evaluate(model, texts.reference["test"], 96, first_new),
        "docstrings": evaluate(model, texts.docstrings["valid"], 48, first_new),
        "norm_of_new": [(n[first_new:].mean() / n[:first_new].mean()).item() for n in norms],
    }


def finetune(texts: Texts, run: Callable[..., dict[str, Any]]) -> None:
    """All settings, at the best rate of each."""
    for tied in (True, False):
        recipe = override(texts.recipe, {"model.tied": tied})
        torch.manual_seed(0)
        base = build_model(recipe)
        fit(base, texts.docstrings["train"], "AdamW", 0, 1.0, **BASE)
        weights = {name: value.clone() for name, value in base.state_dict().items()}
        measure = partial(finetuned, texts, recipe, weights)
        key = {"question": "finetuning", "tied": tied}
        run({**key, "optimizer": None}, partial(measure, None, False, 0.0, 0))
        for frozen, optimizer in product((False, True), ADAMW | COUPLED):
            setting = {**key, "frozen": frozen, "optimizer": optimizer}
            with_best_rate(run, setting, partial(measure, optimizer, frozen))


def with_best_rate(
    run: Callable[..., dict[str, Any]],
    setting: dict[str, Any],
    measure: Callable[[float, int], dict[str, Any]],
) -> None:
    """Run all seeds at the rate that is best with the first and not the highest one tried."""

    def at(factor: float, seed: int) -> dict[str, Any]:
        return run({**setting, "factor": factor, "seed": seed}, partial(measure, factor, seed))

    tried = {factor: at(factor, SEEDS[0])["valid"]["loss"] for factor in FACTORS}
    while (best := min(tried, key=tried.__getitem__)) == max(tried):
        tried[4 * best] = at(4 * best, SEEDS[0])["valid"]["loss"]
    for seed in SEEDS[1:]:
        at(best, seed)


def from_scratch(texts: Texts, run: Callable[..., dict[str, Any]]) -> None:
    recipe = override(texts.recipe, {"model.tied": False})

    def measure(optimizer: str, factor: float, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = build_model(recipe)
        fit(model, texts.docstrings["train"], optimizer, seed, factor, **SCRATCH)
        return {"valid": evaluate(model, texts.docstrings["valid"], 192, texts.vocab_size)}

    for optimizer in ADAMW | COUPLED:
        setting = {"question": "from scratch", "optimizer": optimizer}
        with_best_rate(run, setting, partial(measure, optimizer))


def main(target: Path) -> None:
    torch.set_num_threads(1)
    content = json.loads(target.read_text()) if target.exists() else {"results": []}

    def run(key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a run, from the target if it is there."""
        for entry in content["results"]:
            if key.items() <= entry.items():
                return dict(entry)
        entry = {**key, **measure()}
        print(entry, flush=True)
        content["results"].append(entry)
        write_atomically(target, json.dumps(content, indent=1))
        return entry

    with tempfile.TemporaryDirectory() as name:
        texts = Texts(Path(name))
    settings = {"base": BASE, "finetuning": FINETUNING, "from scratch": SCRATCH, "length": LENGTH}
    content |= {"environment": environment(), "settings": settings, "texts": texts.facts()}
    finetune(texts, run)
    from_scratch(texts, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
