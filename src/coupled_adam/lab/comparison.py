"""A comparison: every arm of a recipe with every seed, in one folder.

The folder holds ``comparison.yaml`` (the recipe), a run folder for each arm and seed, and
``report/``.
"""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from coupled_adam.errors import UsageError
from coupled_adam.files import (
    LOCK,
    clear_leftovers,
    is_temporary,
    make_folder,
    remove_empty,
    sole_writer,
    write_atomically,
)
from coupled_adam.lab.data.corpus import BY_CONTENT, Corpus, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.recipe import Recipe, parse_recipe
from coupled_adam.lab.reporting.report import report
from coupled_adam.lab.training.config import Execution, TrainingRun
from coupled_adam.lab.training.distributed import (
    all_gather,
    flat,
    on_every_rank,
    on_rank_zero,
    process_group,
    rank,
    world_size,
)
from coupled_adam.lab.training.run import train

_FILE = "comparison.yaml"


def stored_recipe(out: Path) -> Recipe | None:
    """The recipe of a comparison folder; None if it is not one."""
    try:
        text = (out / _FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_recipe(text, str(out / _FILE))


def compare(
    recipe: Recipe, out: Path, *, execution: Execution, cache: Path, resume: bool = False
) -> Table | None:
    """Train and evaluate all runs into ``out``, and write its report.

    Several processes (started by torchrun or srun) train each run together; rank 0 evaluates it.

    Args:
        cache: the folder of prepared corpora.
        resume: continue in a folder that holds the same comparison, with the same arms and seeds
            or more of them; finished runs are kept, an interrupted run continues from its last
            checkpoint.

    Returns:
        The table for the terminal, on rank 0; None on the others.

    Raises:
        UsageError: if the folder is in use or not writable, or the text or the device cannot be
            used. An existing folder is left unchanged.
        TrainingError, PreemptedError, OSError, KeyboardInterrupt: as in :func:`train`.
    """
    settings = {"command": "compare", **_settings(recipe, out, execution, resume)}
    with contextlib.ExitStack() as held:
        with process_group(execution.device, settings):
            content, made = on_rank_zero(lambda: _claim(recipe, out, resume, held))
            try:
                corpus = _same_corpus(recipe, cache)
            except UsageError:
                if rank() == 0 and made:
                    (out / LOCK).unlink()
                    remove_empty(made)
                raise
            on_rank_zero(lambda: write_atomically(out / _FILE, content))
            runs = [
                TrainingRun(recipe, arm, seed, out / f"{arm}-seed-{seed}")
                for seed in recipe.seeds
                for arm in recipe.arms
            ]
            for run in runs:
                train(run, corpus, execution)
                if world_size() == 1:
                    evaluate_run(run.folder, corpus, device=execution.device)
            own_rank = rank()
        if own_rank > 0:
            return None
        for run in runs:
            evaluate_run(run.folder, corpus, device=execution.device)
        return report([out], out / "report")


def train_and_evaluate(
    run: TrainingRun, *, execution: Execution, cache: Path, resume: bool = False
) -> None:
    """Train and evaluate a single run, as one job on a cluster; otherwise as :func:`compare`."""
    with process_group(execution.device, run_settings(run, execution, resume)):
        if not resume:
            on_rank_zero(lambda: _check_new(run.folder))
        corpus = _same_corpus(run.recipe, cache)
        train(run, corpus, execution)
        own_rank = rank()
    if own_rank == 0:
        evaluate_run(run.folder, corpus, device=execution.device)


def run_settings(run: TrainingRun, execution: Execution, resume: bool) -> dict[str, Any]:
    """What must be the same in all processes that train a single run."""
    settings = _settings(run.recipe, run.folder, execution, resume)
    return {"command": "train", "arm": run.arm, "seed": run.seed, **settings}


def _settings(recipe: Recipe, out: Path, execution: Execution, resume: bool) -> dict[str, Any]:
    """What must be the same in all processes; of the text's place only its content must be."""
    content = recipe.to_dict()
    content["data"] = {k: v for k, v in content["data"].items() if k not in BY_CONTENT}
    options = dataclasses.asdict(execution)
    return {"out": str(out.absolute()), "resume": resume, **options, **content}


def _same_corpus(recipe: Recipe, cache: Path) -> Corpus:
    """Prepare the corpus on all ranks.

    Raises:
        UsageError: on every rank, if one of them cannot, or if they have different texts.
    """
    corpus = on_every_rank(lambda: prepare_corpus(recipe, cache))
    first, *others = all_gather((corpus.facts["source"], corpus.identity))
    for number, (source, identity) in enumerate(others, 1):
        if identity != first[1]:
            raise UsageError(
                f"the processes of this run have different texts: {first[0]} in process 0, "
                f"{source} in process {number}. Start all of them with the same text"
            )
    return corpus


def _is_used(folder: Path) -> bool:
    """Whether the folder holds more than the lock of a process killed before it wrote anything."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name != LOCK and not is_temporary(path) for path in folder.iterdir())


def _check_new(folder: Path) -> None:
    if _is_used(folder):
        raise UsageError(
            f"--out {folder} exists: continue it with --resume, or choose another folder"
        )


def _claim(
    recipe: Recipe, out: Path, resume: bool, held: contextlib.ExitStack
) -> tuple[str, list[Path]]:
    """Create the folder, or check that it can be continued; hold it as its only writer.

    Returns:
        The new content of ``comparison.yaml``, and the folders that were created, the innermost
        first.
    """
    found = stored_recipe(out) if resume else None
    if found is not None:
        _check_same(found, recipe, out)
        recipe = dataclasses.replace(
            recipe,
            arms={**found.arms, **recipe.arms},
            seeds=sorted({*found.seeds, *recipe.seeds}),
        )
    elif resume and _is_used(out):
        raise UsageError(f"--out {out} holds no comparison to resume: choose another folder")
    else:
        _check_new(out)
    try:
        made = make_folder(out)
        held.enter_context(sole_writer(out))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"--out {out} cannot be written ({reason}): choose another folder"
        ) from None
    clear_leftovers(out)
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False), made


def _check_same(found: Recipe, recipe: Recipe, out: Path) -> None:
    """Raise UsageError unless the runs that both recipes have are the same."""
    theirs, ours = flat(found.to_dict()), flat(recipe.to_dict())
    shared = {f"arms.{arm}" for arm in found.arms if arm in recipe.arms}
    different = [
        f"{key}={theirs.get(key)!r} there, {ours.get(key)!r} here"
        for key in {**theirs, **ours}
        if theirs.get(key) != ours.get(key)
        and key != "seeds"
        and (not key.startswith("arms.") or key.rpartition(".")[0] in shared)
    ]
    if different:
        raise UsageError(
            f"--out {out} holds another comparison ({', '.join(different)}): leave "
            "those options out to continue it, or choose another folder"
        )
