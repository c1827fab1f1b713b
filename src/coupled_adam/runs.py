"""The folders of runs: which file is where, and how it is read.

A run is a folder, a comparison is a folder of runs, and nothing else carries state::

    comparison.yaml            the recipe of all runs
    ARM-seed-SEED/             a run
        config.yaml            the recipe, the arm and the seed: all that a run depends on
        environment.json       the software and the hardware
        metrics.jsonl          the log, a JSON object in each line
        unigram_counts.npy     how often each token occurs in the training text
        second_moments/        step-N.npy: AdamW's at each evaluation, a number for each token
        checkpoints/           step-N, the last two
        model/                 in Hugging Face format, when the training is finished
        evaluation.json        the results
    report/                    made of the runs, at any time
"""

import re
from pathlib import Path

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
COUNTS = "unigram_counts.npy"
SECOND_MOMENTS = "second_moments"
CHECKPOINTS = "checkpoints"
MODEL = "model"
EVALUATION = "evaluation.json"
COMPARISON = "comparison.yaml"
REPORT = "report"


def run_name(arm: str, seed: int) -> str:
    """The name of a run's folder within its comparison."""
    return f"{arm}-seed-{seed}"


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder, finished or not; a model's folder has a ``config.json``."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def model_source(name: str) -> str:
    """Where a model is: in the folder of a run, or in what is named, which may be on the hub."""
    return str(Path(name) / MODEL) if is_run(Path(name)) else name


def inner_runs(folder: Path) -> list[Path]:
    """The runs in a folder, which is that of a comparison if there are any."""
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def step_name(step: int) -> str:
    """The name of what belongs to a step, without a suffix."""
    return f"step-{step}"


def parse_step(path: Path, suffix: str = "") -> int | None:
    """The N of the name ``step-N`` with a suffix; None for any other, such as ``step-9.old``."""
    name = re.fullmatch(rf"step-(\d+){re.escape(suffix)}", path.name, re.ASCII)
    return int(name[1]) if name else None


def by_step(folder: Path, suffix: str = "") -> dict[int, Path]:
    """The files or folders ``step-N`` with a suffix, by N, in ascending order."""
    # By number: as a text, step-10 would come before step-9.
    steps = {parse_step(path, suffix): path for path in folder.glob(f"step-*{suffix}")}
    return {step: steps[step] for step in sorted(step for step in steps if step is not None)}
