"""Run the study, or some of its questions.

    python -m study.run --text english/train.txt.xz --word-similarity word-similarity/ QUESTION ...

Results go to ``results/``, a file for each question; a run that has a result is skipped, one that
was interrupted is resumed. Several runs go at the same time, with one thread each.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import json
import multiprocessing
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from coupled_adam.embeddings.analysis import word_similarity_sets
from coupled_adam.errors import DivergedError
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import Corpus, default_cache, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import Sets
from coupled_adam.lab.recipe import Recipe, load_recipe, override
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.environment import environment
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train

from .evaluation import Extra, evaluate
from .questions import QUESTIONS, Entry

HERE = Path(__file__).parent
ON_CPU = Execution(logger=[])


@dataclasses.dataclass(frozen=True)
class Paths:
    """Where the text, the word-similarity sets, run folders and held-out documents are."""

    text: str
    word_similarity: Path
    out: Path
    held_out: tuple[Path, ...] = ()


@functools.cache
def base_recipe() -> Recipe:
    """What all recipes of the study extend, read once."""
    return load_recipe(str(HERE / "english.yaml"))


def recipe_of(entry: Entry, text: str | None = None) -> Recipe:
    """Create the complete recipe of an entry's runs."""
    values: dict[str, Any] = {**entry.overrides, "arms": {entry.arm["optimizer"]: dict(entry.arm)}}
    if entry.variant is not None:
        values["variant"] = f"{__package__}.{entry.variant}"
    if text is not None:
        values["data.text"] = text
    return override(base_recipe(), values)


def run(question: str, name: str, seed: int, paths: Paths, execution: Execution) -> dict[str, Any]:
    """Train and evaluate one run in one of the laboratory's run folders.

    Returns:
        The run's results and environment. If a loss or gradient was not finite, ``diverged_at``,
        the step at which this happened, replaces the results.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    entry = QUESTIONS[question][name]
    recipe = recipe_of(entry, paths.text)
    (arm,) = recipe.arms
    folder = paths.out / question / f"{name}-seed-{seed}"
    made_by = machine()  # with the commit of now, which may be another one afterwards
    result = train_and_evaluate(
        Run(recipe, arm, seed, folder),
        prepare_corpus(recipe, default_cache()),
        word_similarity_sets(paths.word_similarity),
        entry.extra,
        execution,
        paths.held_out,
    )
    if "diverged_at" not in result:
        result["seconds"] = time.perf_counter() - began
    return {"tokens": recipe.tokens, **result, "environment": made_by}


def train_and_evaluate(
    run: Run,
    corpus: Corpus,
    sets: Sets,
    extra: Extra | None = None,
    execution: Execution = ON_CPU,
    held_out: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """The results of a run, or the step at which it diverged."""
    try:
        train(run, corpus, execution)
    except DivergedError as error:
        return {"diverged_at": error.step}
    return evaluate(run, corpus, sets, extra, execution.device, held_out)


def machine() -> dict[str, Any]:
    """What is recorded of software and hardware; the command line would name folders."""
    recorded = {key: value for key, value in environment().items() if key != "command"}
    # The runs before this one may have changed results of this checkout, which are no code.
    if (commit := recorded["git_commit"]) and commit.endswith("-dirty"):
        code = (":/", ":(exclude)results")
        changed = ("git", "-C", str(HERE), "diff", "--quiet", "HEAD", "--", *code)
        if not subprocess.run(changed).returncode:
            recorded["git_commit"] = commit.removesuffix("-dirty")
    return recorded


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The content of a file of results; empty if there is none yet."""
    content: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return content


def results(question: str, folder: Path = HERE / "results") -> dict[str, dict[str, Any]]:
    """Read a question's results by run name and then, in ``seeds``, by seed; empty without any."""
    return read_results(folder / f"{question}.json")


def has_result(path: Path, name: str, seed: int) -> bool:
    """Whether a file of results has that of a run."""
    return str(seed) in read_results(path).get(name, {}).get("seeds", {})


def add_result(path: Path, name: str, seed: int, result: dict[str, Any], **of_all: Any) -> None:
    """Add a run to a file of results; ``of_all`` is what all runs of the name have in common."""
    content = read_results(path)  # another process may have added to it
    content.setdefault(name, {**of_all, "seeds": {}})["seeds"][str(seed)] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(path, content)


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with lists of numbers, such as the losses of documents, on a line each."""
    lines = re.sub(
        r"\[[^][{}]*\]",
        lambda numbers: " ".join(numbers[0].split()),
        json.dumps(content, indent=1),
    )
    write_atomically(path, lines)


def parse_seeds(text: str) -> list[int]:
    """The seeds of "1,2"; a list with spaces would take the questions behind it, too."""
    return [int(seed) for seed in text.split(",")]


def main() -> None:
    """Run everything that does not have a result yet."""
    parser = argparse.ArgumentParser(prog="python -m study.run", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--text", required=True, help="documents, with blank lines between")
    parser.add_argument("--word-similarity", required=True, type=Path, help="folder of the sets")
    parser.add_argument(
        "--held-out",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="documents, as in TEXT; once for each file",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="for run folders")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="the runs whose names match, as in 'a=0.5 *'"
    )
    parser.add_argument("--seeds", type=parse_seeds, default=[1, 2, 3], metavar="1,2,...")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="the models, with torch.compile")
    options = parser.parse_args()
    unknown = {*options.questions} - {*QUESTIONS}
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(QUESTIONS)}")
    held_out = tuple(options.held_out)
    paths = Paths(options.text, options.word_similarity, options.out, held_out)
    execution = dataclasses.replace(ON_CPU, device=options.device, compile=options.compile)
    jobs = [
        (question, name, seed)
        for question in options.questions or QUESTIONS
        for seed in options.seeds
        for name in fnmatch.filter(QUESTIONS[question], options.only)
        if not has_result(options.results / f"{question}.json", name, seed)
    ]
    prepared = {recipe_of(QUESTIONS[q][n]).model.vocab_size: (q, n) for q, n, _ in jobs}
    for question, name in prepared.values():  # each corpus once, with all threads
        prepare_corpus(recipe_of(QUESTIONS[question][name], options.text), default_cache())
    os.environ["OMP_NUM_THREADS"] = "1"
    with concurrent.futures.ProcessPoolExecutor(
        options.processes, multiprocessing.get_context("spawn")
    ) as pool:
        waiting = {pool.submit(run, *job, paths, execution): job for job in jobs}
        for done in concurrent.futures.as_completed(waiting):
            question, name, seed = waiting[done]
            error = done.exception()
            if error is not None:
                print(f"{question}: {name}, seed {seed}: {error!r}", flush=True)
                continue
            result = done.result()
            recipe = recipe_of(QUESTIONS[question][name], Path(options.text).name).to_dict()
            path = options.results / f"{question}.json"
            add_result(path, name, seed, result, recipe=recipe)
            loss = result.get("test_loss", float("nan"))
            print(f"{question}: {name}, seed {seed}: {loss:.4f}", flush=True)
    if any(done.exception() for done in waiting):
        raise SystemExit("some runs failed, see above")


if __name__ == "__main__":
    main()
