"""Give rows that are dead or under-trained healthy values, in a copy of the model.

Rows that are zero or not finite make losses and gradients of the whole model large or NaN. New rows
are drawn around the mean of the healthy ones, where they take little probability from other tokens
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

import dataclasses
import io
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.loading import EmbeddingMatrix, Role, load_embeddings
from coupled_adam.embeddings.undertrained import undertrained_tokens
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.errors import UsageError, one_line, refused
from coupled_adam.files import new_folder, write_atomically
from coupled_adam.runs import MODEL, inner_runs, is_run
from coupled_adam.text.hub import download_model, hub_error, is_hub_id

Reason = Literal["not finite", "nearly zero", "under-trained"]
_NEARLY_ZERO = 0.01  # of the median norm
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.md")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_softcap")


@dataclasses.dataclass(frozen=True)
class RepairedRow:
    """A row that was changed: why, and its norm before (None if not finite) and after."""

    row: int
    token: str
    reason: Reason
    norm_before: float | None
    norm_after: float


@dataclasses.dataclass(frozen=True)
class RepairedMatrix:
    """What was changed in one matrix."""

    role: str  # as in EmbeddingMatrix
    rows: list[RepairedRow]
    mean_removed: float | None  # its norm; None if the matrix was not recentered


def why_not(source: str, config: Mapping[str, Any], role: str, recenter: bool = False) -> str:
    """Why a model or a file cannot be repaired, or recentered; empty if it can.

    The configuration is the model's, and the role as in :class:`EmbeddingMatrix`.
    """
    path = Path(source)
    if path.suffix == ".npy" and path.is_file():
        return "--recenter needs a model with output embeddings" if recenter else ""
    names = config.get("architectures")
    if path.is_file() or not (names and isinstance(names, list) and _is_known(names[0])):
        return "only folders of models that transformers loads, and .npy files, can be repaired"
    if path.is_dir() and not [*path.glob("*.safetensors"), *path.glob(f"{MODEL}/*.safetensors")]:
        return "it has no safetensors: save the model as safetensors first"
    if config.get("quantization_config"):
        return "it is quantised: repair the model that it was made of"
    if not recenter:
        return ""
    if role not in ("output", "tied"):
        return "--recenter needs output embeddings, and it has none"
    # Capped logits are not shifted alike, and models with images have the text's values in a part.
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    if caps := [cap for part in parts for cap in _CAPS if part.get(cap)]:
        return f"--recenter would change its function: its logits are capped ({caps[0]})"
    if role == "tied" and config.get("model_type") != "gpt2":
        return (
            "--recenter would change its function: its embeddings are tied, and it has no learned "
            "positions like GPT-2's to take up the mean on the input side"
        )
    return ""


def _is_known(architecture: object) -> bool:
    """Whether transformers has the class of a model."""
    import transformers  # takes seconds

    return isinstance(architecture, str) and hasattr(transformers, architecture)


def dead_rows(embeddings: Tensor) -> dict[int, Reason]:
    """The rows of a matrix [V, H] that are not finite, or have less than 1 % of the median norm."""
    finite, norms = geometry.finite_rows(embeddings)
    limit = _NEARLY_ZERO * float(np.median(norms[finite])) if finite.any() else 0.0
    # The norm of a row that is not finite is NaN, and above no limit.
    dead = np.flatnonzero(~(norms > limit)).tolist()
    return {row: "nearly zero" if finite[row] else "not finite" for row in dead}


def healthy_rows(embeddings: Tensor, count: int, healthy: geometry.Mask, seed: int = 0) -> Tensor:
    """New rows [count, H] for an embedding matrix [V, H], in its dtype.

    They are drawn from the normal distribution that has the mean and the covariance of the healthy
    rows, [V] booleans. Raises ValueError if fewer than two are healthy.
    """
    if healthy.sum() < 2:
        raise ValueError("fewer than two rows are healthy: nothing to model new rows on")
    mean, norms = geometry.mean_and_norms(embeddings, healthy)
    covariance = geometry.gram(embeddings, mean, healthy) / len(norms)
    squares, basis = torch.linalg.eigh(covariance)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
    new = mean + draws.to(mean.device) * squares.clamp(min=0).sqrt() @ basis.T
    rows: Tensor = new.to(embeddings.device, embeddings.dtype)
    return rows


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a model: itself, a run's, or that of a model on the hub, which is downloaded.

    A file is returned as it is. Raises UsageError if there is no such model.
    """
    folder = Path(model)
    if folder.is_file():
        return folder
    if is_run(folder):
        folder = folder / MODEL
        if not folder.exists():
            raise UsageError(f"{model} is a run that has no model yet: let it finish first")
    if folder.exists() or not is_hub_id(model):
        if runs := inner_runs(folder):
            raise UsageError(f"{model} is not a model, but holds runs: name one, such as {runs[0]}")
        if not (folder / "config.json").exists():
            raise UsageError(f"{model} is not a model in Hugging Face format: no config.json in it")
        return folder
    try:
        return download_model(model, revision, _DOWNLOADED)
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise UsageError(
            f"{model}: there is no such folder here, nor a model on the hub that can be read "
            f"({hub_error(error)})"
        ) from None


def repair_model(
    source: Path,
    out: Path,
    vocabulary: Callable[[int], Vocabulary],
    *,
    undertrained: bool = False,
    recenter: bool = False,
    seed: int = 0,
) -> list[RepairedMatrix]:
    """Write a copy of a model in which the embeddings that need it are repaired.

    transformers loads the model in the dtype of its embeddings, and saves the copy; the
    tokenizer and all else beside the weights is copied. The row of the model's padding token may be
    zero.

    Args:
        source: a folder with a model that transformers knows, as safetensors, or a ``.npy`` file
            with a matrix.
        out: the folder or the file to write, which must not exist.
        vocabulary: a function that returns what V rows stand for.
        undertrained: whether to repair also tokens that cannot be told from unused rows.
        recenter: whether to subtract the mean from the output embeddings. This shifts all logits of
            a position alike, which leaves the softmax as it is.
        seed: of the new rows.

    Raises:
        UsageError: if there is no such model, ``out`` exists, or the repair is not possible.
    """
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists: the repaired model is written to a new folder")
    if source.suffix == ".npy" != out.suffix and source.is_file():
        raise UsageError(f"--out {out} must end in .npy, as {source} does")
    model = None if source.is_file() else _load(source)
    entries = [] if model is None else _matrices(model)
    config, role = (entries[-1].config, entries[-1].role) if entries else ({}, "embeddings")
    if problem := why_not(str(source), config, role, recenter):
        raise UsageError(f"{source}: {problem}")
    if model is None:
        with refused("", (ValueError, OSError)):
            entries = load_embeddings(source)
    reports = []
    for entry in entries:
        with refused(f"{source}: "):
            rows = _repair_rows(entry, vocabulary(len(entry.matrix)), undertrained, seed)
        is_moved = recenter and entry.role != "input"
        reports.append(
            RepairedMatrix(entry.role, rows, _recenter(entry, model) if is_moved else None)
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    if model is None:
        array = io.BytesIO()
        np.save(array, entries[0].matrix.numpy())
        write_atomically(out, array.getvalue())
    else:
        with new_folder(out, replace=False) as temporary:
            model.save_pretrained(temporary)
            # The tokenizer, and what else lies beside the weights.
            for path in source.iterdir():
                is_new = path.is_file() and not (temporary / path.name).exists()
                if is_new and not path.name.endswith(_WEIGHTS):
                    shutil.copy2(path, temporary / path.name)
    return reports


def _load(folder: Path) -> Any:
    """The model in a folder, with all of its tensors."""
    import transformers

    with refused(f"{folder}: ", (ValueError, OSError)):
        config, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    if problem := why_not(str(folder), config, ""):
        raise UsageError(f"{folder}: {problem}")
    with refused("", (ValueError, OSError)):  # a configuration may name another than the stored one
        dtype = load_embeddings(folder)[0].matrix.dtype
    try:
        model, loading = getattr(transformers, config["architectures"][0]).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many types
        raise UsageError(f"{folder} cannot be loaded ({one_line(error)})") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, loading[kind])):
            raise UsageError(
                f"{folder}: transformers does not load all of it ({kind}: {keys[0]}), so a copy "
                "would not be the same model"
            )
    return model


def _matrices(model: Any) -> list[EmbeddingMatrix]:
    """The embeddings of a model, which change with the matrices."""
    sides: list[tuple[Role, Any]] = [
        ("input", model.get_input_embeddings()),
        ("output", model.get_output_embeddings()),
    ]
    weights = {role: layer.weight for role, layer in sides if layer is not None}
    if len(weights) == 2 and weights["input"] is weights["output"]:
        weights = {"tied": weights["input"]}
    config = model.config.to_dict()
    return [EmbeddingMatrix(w.detach(), role, "", config) for role, w in weights.items()]


def _repair_rows(
    entry: EmbeddingMatrix, vocabulary: Vocabulary, undertrained: bool, seed: int
) -> list[RepairedRow]:
    """Give the rows of a matrix that need it new values, in place."""
    matrix = entry.matrix
    reasons = dead_rows(matrix)
    # Rows that belong to no token were hardly trained, and are no model for others.
    healthy = vocabulary.categories != "none"
    healthy[list(reasons)] = False
    if (padding := padding_row(entry)) is not None:
        healthy[padding] = False
        if reasons.get(padding) == "nearly zero":
            del reasons[padding]
    if undertrained:
        indicated = undertrained_tokens(entry, vocabulary)
        if indicated.limit is None:
            raise ValueError(
                "--undertrained needs at least three rows that are known to be unused, such as "
                "rows without a token, and that resemble each other; there are none"
            )
        for row in indicated.alike.tolist():
            reasons.setdefault(row, "under-trained")
        healthy[indicated.alike] = False
        healthy &= ~indicated.unused
    rows = sorted(reasons)
    if not rows:
        return []
    before = geometry.as_float64(matrix[rows]).norm(dim=1).tolist()
    matrix[rows] = healthy_rows(matrix, len(rows), healthy, seed)
    after = geometry.as_float64(matrix[rows]).norm(dim=1).tolist()
    return [
        RepairedRow(row, vocabulary.name(row), reasons[row], old if np.isfinite(old) else None, new)
        for row, old, new in zip(rows, before, after)
    ]


def padding_row(entry: EmbeddingMatrix) -> int | None:
    """The row of the model's padding token, which may be zero by design; None if there is none."""
    row = entry.config.get("pad_token_id")
    return row if isinstance(row, int) and 0 <= row < len(entry.matrix) else None


def _recenter(entry: EmbeddingMatrix, model: Any) -> float:
    """Subtract the mean in place, and return its norm."""
    matrix = entry.matrix
    mean = geometry.mean_and_norms(matrix)[0]
    # What is taken from each tied input embedding, each of GPT-2's positions gives back.
    changed = [(matrix, -mean)]
    if entry.role == "tied":
        changed.append((model.get_submodule("transformer.wpe").weight.detach(), mean))
    for rows, shift in changed:
        for chunk in geometry.row_slices(*rows.shape):
            rows[chunk] = (rows[chunk].double() + shift).to(rows.dtype)
    return float(mean.norm())
