"""How a run claims its folder, and what it writes there; its layout is in coupled_adam.runs."""

import contextlib
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from transformers import PreTrainedModel

from coupled_adam import files
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import TrainingError, UsageError, one_line
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.safe_yaml import read_yaml
from coupled_adam.lab.training.config import TrainingRun
from coupled_adam.lab.training.distributed import world_size
from coupled_adam.lab.training.environment import changes, environment
from coupled_adam.lab.training.schemas import Recorded, read_json
from coupled_adam.runs import CHECKPOINTS, CONFIG, COUNTS, ENVIRONMENT, SECOND_MOMENTS
from coupled_adam.text.tokenizers import load_tokenizer

_BEFORE_CONFIG = {files.LOCK, ENVIRONMENT, COUNTS}


def claim(run: TrainingRun, corpus: Corpus, locks: contextlib.ExitStack) -> None:
    """Create the run's folder, or check that it belongs to this run, and lock it.

    Args:
        locks: the folder is unlocked when this closes.

    Raises:
        UsageError: if the folder holds another run, a run on another text, or files of others and
            no run; is in use by another process; or has symbolic links in the place of its folders.
    """
    folder, config = run.folder, run.config
    if folder.is_dir() and not os.path.lexists(folder / CONFIG):
        for path in sorted(folder.iterdir()):
            if path.name not in _BEFORE_CONFIG and not files.is_temporary(path):
                raise UsageError(
                    f"{folder} holds {path.name} but no run, whose config.yaml would be there: "
                    "restore that file, or choose another --out"
                )
    files.make_folder(folder)
    locks.enter_context(files.sole_writer(folder))
    files.clear_leftovers(folder)
    for inner in (folder / CHECKPOINTS, folder / SECOND_MOMENTS):
        if inner.is_symlink():
            raise UsageError(
                f"{inner} is a symbolic link, where this run creates and removes files: "
                "replace it by the folder itself, or let --out lead elsewhere"
            )
        if inner.is_dir():
            files.clear_leftovers(inner)
        elif inner.exists():
            raise UsageError(f"{inner} is no folder: move it away, or choose another --out")
    path = folder / CONFIG
    if path.exists():
        if read_yaml(files.read_text(path, "replace"), str(path)) != config:
            raise UsageError(
                f"{folder} holds another run, see its config.yaml: choose another --out"
            )
        _check_text(folder, corpus)
        return
    # config.yaml makes the folder a run, and comes last: whoever finds it finds the others as well.
    facts = {**environment(), "corpus": corpus.facts, "processes": world_size()}
    files.write_atomically(folder / ENVIRONMENT, json.dumps(facts, indent=2))
    save_array(folder / COUNTS, corpus.unigram_counts())
    files.write_atomically(path, yaml.safe_dump(config, sort_keys=False))


def _check_text(folder: Path, corpus: Corpus) -> None:
    """Raise UsageError unless the run was started with this text, and these tokens of it."""
    started = _recorded(folder)["corpus"]
    try:
        counts = read_array(folder / COUNTS)
    except ValueError as error:
        raise UsageError(f"{error}: remove {folder} to begin the run again") from None
    # The fingerprint is that of the text; the counts tell tokens of another tokenizer.
    now = corpus.facts["fingerprint"], corpus.facts["tokens"]
    if (started.get("fingerprint"), started.get("tokens")) != now or not np.array_equal(
        counts, corpus.unigram_counts()
    ):
        raise UsageError(
            f"{folder} was begun with another text than {corpus.facts['source']} contains now: "
            "restore the old text to continue, or choose another --out"
        )


def record_resumption(folder: Path, step: int) -> None:
    """Record in ``environment.json`` where the run resumes; warn if its environment has changed."""
    recorded = _recorded(folder)
    resumed = recorded.get("resumed", [])
    now = {**environment(), "processes": world_size(), "step": step}
    content = {**recorded, "resumed": [*resumed, now]}
    files.write_atomically(folder / ENVIRONMENT, json.dumps(content, indent=2))
    # Compared with the last time, of which there may have been several.
    different = changes([recorded, *resumed][-1], now)
    if different:
        warnings.warn(
            f"{folder} continues at step {step} in another environment, which may change its "
            f"numbers: {', '.join(different)}",
            stacklevel=2,
        )


def _recorded(folder: Path) -> Recorded:
    path = folder / ENVIRONMENT
    try:
        return read_json(path, Recorded)
    except (ValueError, FileNotFoundError, IsADirectoryError):
        raise UsageError(f"{path} is damaged: remove {folder} to begin the run again") from None


def save_model(
    model: PreTrainedModel, state_dict: dict[str, Any], corpus: Corpus, folder: Path
) -> None:
    """Save a model and the tokenizer of its corpus; the folder appears once both are complete.

    ``state_dict`` has the weights, gathered from all processes.

    Raises:
        TrainingError, OSError: it cannot be written.
    """
    # A gathered state dict contains a tied matrix twice; only one of the names is a parameter's.
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    weights = {name: value for name, value in state_dict.items() if name in names}
    with files.new_folder(folder) as temporary:
        try:
            model.save_pretrained(temporary, state_dict=weights)
            if corpus.tokenizer_folder is not None:
                load_tokenizer(corpus.tokenizer_folder).save_pretrained(temporary)
        except OSError:
            raise
        except Exception as error:  # of safetensors or tokenizers, if the disk is full
            raise TrainingError(
                f"{folder} cannot be written ({one_line(error)}); what was finished is kept, "
                "continue with --resume"
            ) from error


def save_array(path: Path, values: NDArray[Any]) -> None:
    """Save an array as .npy, completely or not at all."""
    content = io.BytesIO()
    np.save(content, values)
    files.write_atomically(path, content.getvalue())
