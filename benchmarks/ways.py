"""How long the ways through the package are: calls of its own functions, and where they lie.

    python benchmarks/ways.py             # also: make ways

Whoever changes a room sees here what it did to the ways through it. CONTRIBUTING.md has the numbers
and their ceilings. A call counts once for each time that a function of the package begins; what
imports execute, comprehensions and the functions of dataclasses do not count.
"""

import collections
import contextlib
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["TQDM_DISABLE"] = "1"
import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import coupled_adam
from coupled_adam import CoupledAdamW

PACKAGE = str(Path(coupled_adam.__file__).parent)
TEXT = "\n\n".join(f"{i} queens read what {i} kings wrote to a page." for i in range(300))
SMALL = {
    "data.separator": "\n\n",
    "model.vocab_size": 300,
    "model.n_layer": 1,
    "training.steps": 2,
    "training.evaluate_every": 1,
    "training.warmup": 1,
    "training.evaluation_batches": 1,
    "training.test_batches": 1,
}


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """The calls in a block; ``"way"`` is (calls, functions, files, changes of file) at its end."""
    functions: collections.Counter[tuple[str, str]] = collections.Counter()
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_own = code.co_filename.startswith(PACKAGE) and code.co_filename.endswith(".py")
        # No further calls are the bodies of classes, comprehensions, and generators that go on.
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_name[0] != "<"
        if event == "call" and is_own and is_function and frame.f_lasti <= 4:
            functions[code.co_filename, code.co_qualname] += 1
            if not files or files[-1] != code.co_filename:
                files.append(code.co_filename)

    result: dict[str, Any] = {}
    sys.setprofile(note)
    try:
        yield result
    finally:
        sys.setprofile(None)
    calls, changes = functions.total(), max(0, len(files) - 1)
    result["way"] = calls, len(functions), len({*files}), changes
    result["most"] = [f"{name} {n}" for (_, name), n in functions.most_common(5)]


def small_model() -> GPT2LMHeadModel:
    """A GPT-2 of two layers with a tied head."""
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = None  # the usual ones are beyond the vocabulary
    return GPT2LMHeadModel(config)


def build() -> None:
    """The constructor, with the model's search for embeddings."""
    CoupledAdamW(MODEL, lr=1e-3, embeddings="lean", steps=100)


def step_of(**options: Any) -> Callable[[], None]:
    """A step of one matrix, which is not the first."""
    matrix = nn.Parameter(torch.ones(300, 16))
    matrix.grad = torch.ones(300, 16)
    optimizer = CoupledAdamW([{"params": [matrix], "coupled": True, **options}], lr=1e-3)
    optimizer.step()
    return lambda: optimizer.step()


def command(*arguments: object) -> Callable[[], None]:
    """A command line, without what it prints."""
    from coupled_adam.cli import main

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            main([*map(str, arguments)])

    return run


def first_batch(text: Path, cache: Path) -> Callable[[], None]:
    """From a text to the first batch, with a tokenizer that is trained on it."""
    from coupled_adam.lab.data.batches import Batches
    from coupled_adam.lab.data.corpus import prepare_corpus
    from coupled_adam.lab.recipe import load_recipe, override

    recipe = override(load_recipe("tiny"), {**SMALL, "data.text": str(text)})

    def run() -> None:
        corpus = prepare_corpus(recipe, cache)
        next(iter(Batches(corpus.tokens("train"), recipe, 1)))

    return run


def configuration() -> None:
    """From an option of the command line to the configuration of transformers."""
    from coupled_adam.lab.models import model_config
    from coupled_adam.lab.recipe import load_recipe, override

    model_config(override(load_recipe("tiny"), {"model.n_layer": 2}))


def ways(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each way, prepared so that nothing but the way itself is counted."""
    yield "`CoupledAdamW(model)`", build
    yield "a step of Coupled Adam", step_of()
    yield "a step of LEAN", step_of(row_exponent=0.75, zero_sum=True, betas=(0.0, 0.99))
    yield "`--model.n_layer 2` to the configuration", configuration
    text = folder / "text.txt"
    text.write_text(TEXT)
    yield "`--text` to the first batch", first_batch(text, folder / "cache")
    runs = folder / "runs"
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    command("compare", "--recipe", "tiny", "--text", text, "--out", runs, *options)()
    model = folder / "model"
    MODEL.save_pretrained(model)
    np.save(folder / "counts.npy", np.arange(300))
    page = ["--html", folder / "page.html", "--counts", folder / "counts.npy"]
    yield "a model's folder to the page", command("analyze", model, *page)
    yield "a run's folder to the report", command("report", runs, "--out", folder / "report")


def main() -> None:
    """Print a row for each way."""
    details = "--most" in sys.argv
    print(
        "| way | calls | functions | files | changes of file |\n| --- | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways(Path(folder)):
            with counted() as result:
                way()
            print(f"| {name} | " + " | ".join(f"{n:,}" for n in result["way"]) + " |", flush=True)
            if details:
                print("   ", ", ".join(result["most"]))


MODEL = small_model()

if __name__ == "__main__":
    main()
