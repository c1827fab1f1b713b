"""A comparison: every arm of a recipe with every seed, in one folder.

The folder holds ``comparison.yaml`` (the recipe), a run folder for each arm and seed, and
``report/``.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coupled_adam.errors import UsageError
from coupled_adam.files import sole_writer, write_atomically
from coupled_adam.lab.data.corpus import Corpus, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.recipe import Recipe, parse_recipe
from coupled_adam.lab.reporting.report import Report, report
from coupled_adam.lab.training.config import Execution, TrainingRun
from coupled_adam.lab.training.distributed import on_rank_zero, process_group, rank, world_size
from coupled_adam.lab.training.progress import Progress
from coupled_adam.lab.training.run import train

_FILE = "comparison.yaml"


def stored_recipe(out: Path) -> Recipe | None:
    """The recipe of a comparison folder; None if it is not one."""
    try:
        text = (out / _FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_recipe(text, str(out / _FILE))


def runs_to_sample(name: str) -> list[str]:
    """The finished runs of a comparison with one seed, a run for each arm; or ``name`` itself.

    The seed is the first one for which most arms have finished.

    Raises:
        UsageError: it is the folder of a comparison, and none of its runs has finished.
    """
    recipe = stored_recipe(Path(name))
    if recipe is None:
        return [name]
    folders = [[Path(name) / f"{arm}-seed-{seed}" for arm in recipe.arms] for seed in recipe.seeds]
    finished = [[str(run) for run in runs if (run / "model").exists()] for runs in folders]
    most = max(finished, key=len)
    if not most:
        raise UsageError(f"{name}: none of its runs has finished; continue it with --resume")
    return most


def compare(
    recipe: Recipe,
    out: Path,
    *,
    execution: Execution,
    cache: Path,
    resume: bool = False,
    on_start: Callable[[], object] = lambda: None,
) -> Report | None:
    """Train and evaluate all runs into ``out``, and write its report.

    Several processes (started by torchrun or srun) train each run together; rank 0 evaluates it.

    Args:
        cache: the folder of prepared corpora.
        resume: continue in a folder that holds the same comparison, with the same arms and seeds
            or more of them; finished runs are kept, an interrupted run continues from its last
            checkpoint.
        on_start: called when the folder and the corpus are there, before the first run starts.

    Returns:
        The report, on rank 0; None on the others.

    Raises:
        UsageError: if the folder is in use or not writable, or the text or the device cannot be
            used. An existing folder is left unchanged.
        TrainingError, PreemptedError, OSError, KeyboardInterrupt: as in :func:`train`.
    """
    with contextlib.ExitStack() as held:
        with process_group(execution.device):
            corpus = claim_and_prepare(
                out / _FILE, lambda: _content(recipe, out, resume), recipe, cache, held
            )
            runs = [
                TrainingRun(recipe, arm, seed, out / f"{arm}-seed-{seed}")
                for seed in recipe.seeds
                for arm in recipe.arms
            ]
            on_start()
            with Progress(runs) as progress:
                for run in runs:
                    train(run, corpus, execution, progress)
                    if world_size() == 1:
                        progress.say("testing")
                        evaluate_run(run.folder, corpus, device=execution.device)
                progress.say("done")
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
    with process_group(execution.device):
        if not resume:
            on_rank_zero(lambda: check_new(run.folder))
        corpus = prepare_corpus(run.recipe, cache)
        train(run, corpus, execution)
        own_rank = rank()
    if own_rank == 0:
        evaluate_run(run.folder, corpus, device=execution.device)


def claim_and_prepare(
    file: Path,
    content: Callable[[], str],
    recipe: Recipe,
    cache: Path,
    held: contextlib.ExitStack,
) -> Corpus:
    """Claim the folder of a comparison or a sweep, and prepare the corpus of its recipe.

    Args:
        file: the file that describes what the folder holds. If the corpus cannot be prepared, a new
            file and new folders are removed again.
        content: returns the content of the file, or raises UsageError if the folder must not be
            used; called on rank 0 only, before anything is written.
        held: the folder is locked until it closes.

    Raises:
        UsageError: if the folder is in use or not writable, or the text cannot be used.
    """
    is_new = not file.exists()
    made = on_rank_zero(lambda: _claim(file, content(), held))
    try:
        return prepare_corpus(recipe, cache)
    except UsageError:
        held.close()
        if rank() == 0 and is_new:
            file.unlink()
        if rank() == 0 and made is not None:
            shutil.rmtree(made)
        raise


def check_new(folder: Path) -> None:
    """Raise UsageError if a folder that must be new is used."""
    if is_used(folder):
        raise UsageError(
            f"--out {folder} exists: continue it with --resume, or choose another folder"
        )


def is_used(folder: Path) -> bool:
    """Whether the folder holds more than the lock of a process killed before it wrote anything."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name != ".lock" for path in folder.iterdir())


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, str]:
    """By dotted key: the values that differ between two nested dicts, as a message says it."""
    there, here = _flatten(theirs), _flatten(ours)
    return {
        key: f"{key}={there.get(key)!r} there, {here.get(key)!r} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key)
    }


def _content(recipe: Recipe, out: Path, resume: bool) -> str:
    """The content of ``comparison.yaml``; raises UsageError if the folder holds something else."""
    found = stored_recipe(out) if resume else None
    if found is not None:
        _check_same(found, recipe, out)
        recipe = dataclasses.replace(
            recipe,
            arms={**found.arms, **recipe.arms},
            seeds=sorted({*found.seeds, *recipe.seeds}),
        )
    elif resume and is_used(out):
        raise UsageError(f"--out {out} holds no comparison to resume: choose another folder")
    else:
        check_new(out)
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False)


def _claim(file: Path, content: str, held: contextlib.ExitStack) -> Path | None:
    """Create the folder of a file, hold it as its only writer, and write the file.

    Returns:
        The topmost folder that was created, if any.
    """
    out = file.parent
    missing = [path for path in (*reversed(out.parents), out) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(sole_writer(out))
        write_atomically(file, content)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"--out {out} cannot be written ({reason}): choose another folder"
        ) from None
    return missing[0] if missing else None


def _check_same(found: Recipe, recipe: Recipe, out: Path) -> None:
    """Raise UsageError unless the runs that both recipes have are the same."""
    shared = {f"arms.{arm}" for arm in found.arms if arm in recipe.arms}
    different = [
        text
        for key, text in differences(found.to_dict(), recipe.to_dict()).items()
        if key != "seeds" and (not key.startswith("arms.") or key.rpartition(".")[0] in shared)
    ]
    if different:
        raise UsageError(
            f"--out {out} holds another comparison ({', '.join(different)}): leave "
            "those options out to continue it, or choose another folder"
        )


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        nested = _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        result.update(nested if nested is not None else {f"{prefix}{key}": value})
    return result
