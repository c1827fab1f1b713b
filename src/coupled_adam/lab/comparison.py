"""A comparison: every arm of a recipe with every seed, in one folder.

The folder holds ``comparison.yaml`` (the recipe), a run folder for each arm and seed, and
``report/``.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coupled_adam.errors import DivergedError
from coupled_adam.fields import require
from coupled_adam.files import write_atomically
from coupled_adam.lab.data.corpus import Corpus, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.models import check_architecture
from coupled_adam.lab.recipe import Recipe, differences, load_recipe
from coupled_adam.lab.reporting.report import Report, report
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.distributed import (
    check_agreement,
    on_every_rank,
    on_rank_zero,
    process_group,
    rank,
    world_size,
)
from coupled_adam.lab.training.environment import code_digest, versions
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.folder import check_folder
from coupled_adam.lab.training.train import train
from coupled_adam.outputs import check_unused, claimed
from coupled_adam.runs import COMPARISON, REPORT, run_name


def stored_recipe(out: Path) -> Recipe | None:
    """The recipe of a comparison folder; None if it is not one."""
    path = out / COMPARISON
    return load_recipe(str(path)) if path.is_file() else None


def extended(recipe: Recipe, out: Path) -> Recipe:
    """The recipe, with the arms and seeds of the comparison in ``out`` added, if there is one.

    Raises UsageError if the folder holds another comparison, or something else.
    """
    stored = stored_recipe(out)
    if stored is None:
        check_unused(out, "holds no comparison to resume")
        return recipe
    joined = recipe.joined(stored)
    # There may be more arms and seeds; all else, and the arms that both have, must be the same.
    there = dataclasses.replace(
        stored, seeds=joined.seeds, arms={**joined.arms, **stored.arms}
    ).to_dict()
    different = ", ".join(
        f"{key}={there!r} there, {here!r} here"
        for key, (there, here) in differences(there, joined.to_dict()).items()
    )
    require(
        not different, f"--out {out} holds another comparison ({different}): choose another folder"
    )
    return joined


def compare(
    recipe: Recipe,
    out: Path,
    *,
    execution: Execution,
    cache: Path,
    resume: bool = False,
    on_start: Callable[[], object] = lambda: None,
    on_report: Callable[[Report], object] = lambda _: None,
) -> Report | None:
    """Train and evaluate all runs into ``out``, and write its report, which rank 0 returns.

    Several processes (started by torchrun or srun) train each run together; rank 0 evaluates it.
    A run that diverges does not end the others: the report says that it is missing.

    Args:
        cache: the folder of prepared corpora.
        resume: continue in a folder that holds the same comparison, with the same arms and seeds
            or more of them; an interrupted run continues from its last checkpoint.
        on_start: called when the folder and the corpus are there, before the first run starts.
        on_report: called with the report, even if a run has diverged.

    Raises UsageError if the folder, the text or the device cannot be used, before a folder changes,
    and DivergedError if runs have diverged, once all others are finished and reported.
    """

    def check() -> Recipe:  # called once more when the folder is locked
        if resume:
            return extended(recipe, out)
        check_unused(out)
        return recipe

    check_architecture(recipe)
    finished: list[Run] = []
    diverged: list[DivergedError] = []
    with contextlib.ExitStack() as claims:
        # The group ends after the training: rank 0 evaluates alone, and nobody waits in it.
        with process_group(execution.device):
            check_agreement(functools.partial(_settings, recipe, out, execution))
            comparison = on_rank_zero(lambda: claims.enter_context(claimed(out, check)))
            corpus = _corpus(recipe, cache)
            text = yaml.safe_dump(comparison.to_dict(), sort_keys=False)
            on_rank_zero(lambda: write_atomically(out / COMPARISON, text))
            # Seed by seed: what an interrupted comparison has can be compared in pairs. The folder
            # may have more runs than this recipe.
            runs = [
                Run(recipe, arm, seed, out / run_name(arm, seed))
                for seed in recipe.seeds
                for arm in recipe.arms
            ]
            on_start()
            for run in runs:
                try:
                    train(run, corpus, execution)
                except DivergedError as error:  # on all processes alike
                    diverged.append(error)
                    continue
                finished.append(run)
                # At once if no other process has to wait for it; otherwise after the group.
                if world_size() == 1:
                    evaluate_run(run, corpus, device=execution.device)
            is_first = rank() == 0  # asked here, as the numbers of ranks end with the group
        if not is_first:
            return None
        # A run that has been evaluated above is not evaluated again.
        for run in finished:
            evaluate_run(run, corpus, device=execution.device)
        written = report([out], out / REPORT) if finished else None
        if written is not None:
            on_report(written)
        if diverged:
            raise diverged[0]
        return written


def train_and_evaluate(
    run: Run, *, execution: Execution, cache: Path, resume: bool = False
) -> None:
    """Train and evaluate a single run, as one job on a cluster; otherwise as :func:`compare`."""
    check_architecture(run.recipe)
    with process_group(execution.device):
        check_agreement(lambda: _settings(run.recipe, run.folder, execution, run))
        on_rank_zero(lambda: _check_claim(run, resume))
        corpus = _corpus(run.recipe, cache)
        train(run, corpus, execution)
        is_first = rank() == 0  # as above
    if is_first:
        evaluate_run(run, corpus, device=execution.device)


def _settings(
    recipe: Recipe, out: Path, execution: Execution, run: Run | None = None
) -> dict[str, Any]:
    """All that the processes of a comparison or a run must agree on, except the text."""
    chosen = {"out": str(out.absolute()), "arm": run and run.arm_name, "seed": run and run.seed}
    chosen |= {f.name: getattr(execution, f.name) for f in dataclasses.fields(Execution)}
    return {**recipe.to_dict(), **chosen, **versions(), "source": code_digest(recipe.variant)}


def _corpus(recipe: Recipe, cache: Path) -> Corpus:
    """The corpus, which each rank prepares: on several nodes each has a disk of its own."""
    corpus = on_every_rank(lambda: prepare_corpus(recipe, cache))[rank()]
    check_agreement(lambda: {"corpus": {**corpus.facts, "key": corpus.folder.name}})
    return corpus


def _check_claim(run: Run, resume: bool) -> None:
    """Claim the folder of a run for a moment, so that it is refused before the text is prepared."""
    check = functools.partial(check_folder, run)
    with claimed(run.folder, check if resume else lambda: check_unused(run.folder)):
        pass
