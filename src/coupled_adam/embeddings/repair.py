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
from torch import Tensor, nn

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.loading import EmbeddingMatrix, Role, load_embeddings
from coupled_adam.embeddings.undertrained import PASSES, undertrained_tokens
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.embeddings.weights import open_file
from coupled_adam.errors import UsageError, one_line, refused
from coupled_adam.files import new_folder, write_atomically
from coupled_adam.runs import MODEL, inner_runs, is_run
from coupled_adam.text.hub import download_model, hub_error, is_hub_id

Reason = Literal["not finite", "nearly zero", "under-trained"]
_NEARLY_ZERO = 0.01  # of the median norm
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.md")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


@dataclasses.dataclass(frozen=True)
class Repair:
    """What to repair.

    To recenter shifts all logits of a position alike, which leaves the softmax as it is.
    """

    undertrained: bool = False  # also tokens that cannot be told from unused rows
    recenter: bool = False  # subtract the mean from the output embeddings
    seed: int = 0  # of the new rows


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
    if path.is_file() or not names or not _is_known(names):
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
    for part in (config, text if isinstance(text, Mapping) else {}):
        for cap in ("final_logit_softcapping", "logits_soft_cap", "output_softcap"):
            if part.get(cap):
                return f"--recenter would change its function: its logits are capped ({cap})"
    if role == "tied" and config.get("model_type") != "gpt2":
        return (
            "--recenter would change its function: its embeddings are tied, and it has no learned "
            "positions like GPT-2's to take up the mean on the input side"
        )
    return ""


def _is_known(architectures: object) -> bool:
    """Whether transformers has the class of a model."""
    import transformers  # takes seconds

    name = architectures[0] if isinstance(architectures, list) else None
    return isinstance(name, str) and hasattr(transformers, name)


def dead_rows(embeddings: Tensor, on_rows: geometry.OnRows = None) -> dict[int, Reason]:
    """The rows of a matrix [V, H] that are not finite, or have less than 1 % of the median norm."""
    finite, norms = geometry.finite_rows(embeddings, on_rows)
    limit = _NEARLY_ZERO * float(np.median(norms[finite])) if finite.any() else 0.0
    # The norm of a row that is not finite is NaN, and above no limit.
    dead = np.flatnonzero(~(norms > limit)).tolist()
    return {row: "nearly zero" if finite[row] else "not finite" for row in dead}


def healthy_rows(
    embeddings: Tensor,
    count: int,
    healthy: geometry.Mask,
    *,
    seed: int = 0,
    on_rows: geometry.OnRows = None,
) -> Tensor:
    """New rows [count, H] for an embedding matrix [V, H], in its dtype.

    They are drawn from the normal distribution that has the mean and the covariance of the healthy
    rows, [V] booleans. Raises ValueError if fewer than two are healthy.
    """
    if healthy.sum() < 2:
        raise ValueError("fewer than two rows are healthy: nothing to model new rows on")
    mean, norms = geometry.mean_and_norms(embeddings, healthy, on_rows)
    covariance = geometry.gram(embeddings, mean, healthy, on_rows) / len(norms)
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
    repair: Repair,
    vocabulary: Callable[[int], Vocabulary],
    progress: geometry.Progress | None = None,
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

    Raises:
        UsageError: if there is no such model, ``out`` exists, or the repair is not possible.
    """
    is_file = source.is_file()
    _check_out(source, out)
    if is_file:
        if problem := why_not(str(source), {}, "embeddings", repair.recenter):
            raise UsageError(f"{source}: {problem}")
        with refused("", (ValueError, OSError)):
            matrix = open_file(source).read("").clone()
        entries = [EmbeddingMatrix(matrix, "embeddings", "")]
    else:
        model = _load(source, repair.recenter)
        entries = _matrices(model)
        if repair.recenter:
            problem = why_not(str(source), model.config.to_dict(), entries[-1].role, recenter=True)
            if problem:
                raise UsageError(f"{source}: {problem}")
    passes = 4 + PASSES * repair.undertrained  # norms, mean and covariance, mean of what it becomes
    on_rows = geometry.rows_done(progress, passes * sum(len(entry.matrix) for entry in entries))
    reports = []
    for entry in entries:
        with refused(f"{source}: "):
            rows = _repair_rows(entry, repair, vocabulary(len(entry.matrix)), on_rows)
        removed = None
        if repair.recenter and entry.role != "input":
            removed = _recenter(entry, model, on_rows)
        reports.append(RepairedMatrix(entry.role, rows, removed))
    if is_file:
        array = io.BytesIO()
        np.save(array, entries[0].matrix.numpy())
        write_atomically(out, array.getvalue())
    else:
        with new_folder(out, replace=False) as temporary:
            model.save_pretrained(temporary)
            _copy_the_rest(source, temporary)
    return reports


def _check_out(source: Path, out: Path) -> None:
    """Raise UsageError unless the copy can become ``out``."""
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists: the repaired model is written to a new folder")
    if source.is_file() and source.suffix == ".npy" and out.suffix != ".npy":
        raise UsageError(f"--out {out} must end in .npy, as {source} does")
    if not out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.parent}: create it first")


def _load(folder: Path, recenter: bool) -> Any:
    """The model in a folder, with all of its tensors."""
    import transformers

    with refused(f"{folder}: ", (ValueError, OSError)):
        config, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    if problem := why_not(str(folder), config, "tied" if recenter else "", recenter=False):
        raise UsageError(f"{folder}: {problem}")
    with refused("", (ValueError, OSError)):  # a configuration may name another than the stored one
        dtype = load_embeddings(folder)[0].matrix.dtype
    cls = getattr(transformers, config["architectures"][0])
    try:
        model, loading = cls.from_pretrained(
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
    layers = {role: layer for role, layer in sides if isinstance(layer, nn.Module)}
    weights: dict[Role, Any] = {role: layer.weight for role, layer in layers.items()}
    if len(weights) == 2 and weights["input"] is weights["output"]:
        weights = {"tied": weights["input"]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    config = model.config.to_dict()
    return [EmbeddingMatrix(w.detach(), role, names[w], config) for role, w in weights.items()]


def _repair_rows(
    entry: EmbeddingMatrix,
    repair: Repair,
    vocabulary: Vocabulary,
    on_rows: Callable[[int], object],
) -> list[RepairedRow]:
    """Give the rows of a matrix that need it new values, in place."""
    matrix = entry.matrix
    reasons = dead_rows(matrix, on_rows)
    # Rows that belong to no token were hardly trained, and are no model for others.
    healthy = vocabulary.categories != "none"
    healthy[list(reasons)] = False
    if (padding := padding_row(entry)) is not None:
        healthy[padding] = False
        if reasons.get(padding) == "nearly zero":
            del reasons[padding]
    if repair.undertrained:
        untrained = undertrained_tokens(entry, vocabulary, on_rows=on_rows)
        if untrained.limit is None:
            raise ValueError(
                "--undertrained needs at least three rows that are known to be unused, such as "
                "rows without a token, and that resemble each other; there are none"
            )
        for row in untrained.alike.tolist():
            reasons.setdefault(row, "under-trained")
        healthy[untrained.alike] = False
        healthy &= ~untrained.unused
    rows = sorted(reasons)
    if not rows:
        return []
    before = geometry.as_float64(matrix[rows]).norm(dim=1).tolist()
    matrix[rows] = healthy_rows(matrix, len(rows), healthy, seed=repair.seed, on_rows=on_rows)
    after = geometry.as_float64(matrix[rows]).norm(dim=1).tolist()
    return [
        RepairedRow(row, vocabulary.name(row), reasons[row], old if np.isfinite(old) else None, new)
        for row, old, new in zip(rows, before, after)
    ]


def padding_row(entry: EmbeddingMatrix) -> int | None:
    """The row of the model's padding token, which may be zero by design; None if there is none."""
    row = entry.config.get("pad_token_id")
    return row if isinstance(row, int) and 0 <= row < len(entry.matrix) else None


def _recenter(entry: EmbeddingMatrix, model: Any, on_rows: Callable[[int], object]) -> float:
    """Subtract the mean in place, and return its norm."""
    matrix = entry.matrix
    mean = geometry.mean_and_norms(matrix, on_rows=on_rows)[0]
    # What is taken from each tied input embedding, each of GPT-2's positions gives back.
    changed = [(matrix, -mean)]
    if entry.role == "tied":
        changed.append((model.get_submodule("transformer.wpe").weight.detach(), mean))
    for rows, shift in changed:
        for chunk in geometry.row_slices(*rows.shape):
            rows[chunk] = (rows[chunk].double() + shift).to(rows.dtype)
    return float(mean.norm())


def _copy_the_rest(folder: Path, copy: Path) -> None:
    """Copy the tokenizer and what else lies beside the weights, but not what is there already."""
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            target = copy / path.name
            if not target.exists():
                shutil.copy2(path, target)
