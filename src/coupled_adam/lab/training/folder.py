"""How a run claims its folder, and what it writes there; its layout is in coupled_adam.runs."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from transformers import PreTrainedModel

from coupled_adam import files
from coupled_adam.errors import TrainingError, one_line
from coupled_adam.fields import require
from coupled_adam.lab.data.corpus import Corpus
from coupled_adam.lab.run import Run, read_evaluation, read_log, read_run
from coupled_adam.lab.training.distributed import world_size
from coupled_adam.lab.training.environment import environment
from coupled_adam.outputs import claimed
from coupled_adam.runs import CONFIG, COUNTS, ENVIRONMENT, METRICS, MODEL
from coupled_adam.text.tokenizers import load_tokenizer


def claim(run: Run, corpus: Corpus, locks: contextlib.ExitStack) -> None:
    """Create the run's folder, or check that it is this run's, and lock it until ``locks`` closes.

    Raises UsageError if the folder holds another run, a run on another text, or other files and no
    run; or is in use by another process.
    """
    folder = run.folder
    locks.enter_context(claimed(folder, lambda: check_folder(run)))
    # 1. A new run: what it depends on
    if not (folder / CONFIG).exists():
        facts = {**environment(), "corpus": corpus.facts, "processes": world_size()}
        files.write_atomically(folder / ENVIRONMENT, json.dumps(facts, indent=2))
        save_array(folder / COUNTS, corpus.unigram_counts())
        # This comes last: it makes a run of the folder.
        files.write_atomically(folder / CONFIG, yaml.safe_dump(run.config, sort_keys=False))
        return
    # 2. A run that is resumed: whether the text is the same. The fingerprint is that of the text;
    # the counts tell tokens of another tokenizer.
    started = run.environment.get("corpus", {})
    same_text = all(started.get(key) == corpus.facts[key] for key in ("fingerprint", "tokens"))
    require(
        same_text and np.array_equal(run.counts(), corpus.unigram_counts()),
        f"{folder} was begun with another text than {corpus.facts['source']} contains now: "
        "restore the old text to continue, or choose another --out",
    )


def check_folder(run: Run) -> None:
    """Raise UsageError if the run's folder holds anything but this run, or a part of it."""
    folder = run.folder
    if (folder / CONFIG).exists():
        require(
            read_run(folder).config == run.config,
            f"{folder} holds another run, see its config.yaml: choose another --out",
        )
        # A file that is missing or damaged is named before the training, not after it.
        for name in (ENVIRONMENT, COUNTS):
            require(
                (folder / name).is_file(),
                f"{folder} has no {name}, which says with which text it began: restore this file",
            )
        _ = run.environment, read_evaluation(folder), read_log(folder / METRICS)
    for entry in sorted(folder.iterdir() if folder.exists() else []):
        # config.yaml comes last: a killed process may have left what comes before.
        require(
            entry.name in (ENVIRONMENT, COUNTS)
            or entry.name.startswith(".")
            or (folder / CONFIG).exists(),
            f"{folder} holds {entry.name} but no config.yaml, so it is no run: restore "
            "that file, or choose another --out",
        )
        require(
            not entry.is_symlink() or entry.name == MODEL,
            f"{folder} holds a link, {entry.name}, through which the run would write elsewhere: "
            "move what it leads to into the folder",
        )


def record_resumption(run: Run, step: int) -> None:
    """Record in ``environment.json`` where, and with what, the run resumes."""
    now = {**environment(), "processes": world_size(), "step": step}
    recorded = {**run.environment, "resumed": [*run.environment.get("resumed", []), now]}
    files.write_atomically(run.folder / ENVIRONMENT, json.dumps(recorded, indent=2))


def save_model(
    model: PreTrainedModel, state_dict: dict[str, Any], corpus: Corpus, folder: Path
) -> None:
    """Save a model and the tokenizer of its corpus; the folder appears once both are complete.

    ``state_dict`` has the weights, gathered from all processes. Raises TrainingError or OSError if
    it cannot be written.
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
    """Save an array of any shape as .npy, completely or not at all."""
    # Through memory, as np.save would write into the file itself.
    content = io.BytesIO()
    np.save(content, values)
    files.write_atomically(path, content.getvalue())
