"""A comparison: every arm of a recipe with every seed, in one folder.

The folder holds ``comparison.yaml`` (recipe and seeds), ``corpus/``, a run folder for each arm and
seed, and ``report/``.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from coupled_adam.lab import UsageError
from coupled_adam.lab.corpus import prepare_corpus
from coupled_adam.lab.evaluation import evaluate
from coupled_adam.lab.recipe import Recipe, parse_recipe
from coupled_adam.lab.training import train, write_atomically

_FILE = "comparison.yaml"


def stored(out: Path) -> tuple[Recipe, list[int]] | None:
    """Recipe and seeds of a comparison folder; None for what is not one."""
    try:
        content = yaml.safe_load((out / _FILE).read_text(encoding="utf-8"))
    except OSError:
        return None
    return parse_recipe(yaml.safe_dump(content["recipe"]), str(out / _FILE)), content["seeds"]


def compare(
    recipe: Recipe, seeds: list[int], out: Path, *, device: str = "auto", resume: bool = False
) -> None:
    """Train and evaluate all runs into ``out``.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"mps"``.
        resume: go on in a folder that holds the same comparison; finished runs are kept, the run
            that was cut off continues from its last checkpoint.

    Raises:
        UsageError: the folder is in use or cannot be written, the text or the device cannot be
            used. A folder that was there before is unchanged.
    """
    torch_device = _device(device)
    made = _claim(recipe, seeds, out, resume)
    try:
        corpus = prepare_corpus(recipe, out / "corpus")
    except UsageError:
        if not resume:
            (out / _FILE).unlink()
        if made is not None:
            shutil.rmtree(made)
        raise
    for seed in seeds:
        for arm in recipe.arms:
            run = out / f"{arm}-seed-{seed}"
            train(recipe, arm, seed, corpus, run, torch_device.type)
            evaluate(run, corpus, recipe.training, torch_device)


def _claim(recipe: Recipe, seeds: list[int], out: Path, resume: bool) -> Path | None:
    """Make the folder, or see that it may be continued; return the topmost folder made, if any."""
    found = stored(out) if resume else None
    if found is not None:
        if found[0] != recipe:
            raise UsageError(
                f"--out {out} holds another comparison ({_difference(found[0], recipe)}): leave "
                "those options out to continue it, or choose another folder"
            )
        seeds = sorted({*found[1], *seeds})
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        if resume:
            raise UsageError(f"--out {out} holds no comparison to resume: choose another folder")
        raise UsageError(f"--out {out} exists: continue it with --resume, or choose another folder")
    missing = [path for path in (*reversed(out.parents), out) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        content = {"seeds": seeds, "recipe": recipe.to_dict()}
        write_atomically(out / _FILE, yaml.safe_dump(content, sort_keys=False))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"--out {out} cannot be written ({reason}): choose another folder"
        ) from None
    return missing[0] if missing else None


def _difference(one: Recipe, other: Recipe) -> str:
    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in values.items():
            nested = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
            result.update(nested if nested is not None else {f"{prefix}{key}": value})
        return result

    theirs, ours = flat(one.to_dict()), flat(other.to_dict())
    return ", ".join(
        f"{key}={value!r} there, {ours.get(key)!r} here"
        for key, value in theirs.items()
        if ours.get(key) != value
    )


def _device(name: str) -> torch.device:
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(device for device, usable in available.items() if usable)
    if not available[name]:
        usable = [device for device, is_usable in available.items() if is_usable]
        raise UsageError(f"--device {name} is not available here; of use are: {', '.join(usable)}")
    return torch.device(name)
