"""Give rows that are dead healthy values, in a copy of the model.

Rows that are zero or not finite make losses and gradients of the whole model large or NaN. New rows
are drawn around the mean of the healthy ones, where they take little probability from other tokens
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

import contextlib
import dataclasses
import io
import json
import re
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.loading import (
    EmbeddingMatrix,
    config_parts,
    is_equal,
    load_embeddings,
    model_embeddings,
)
from coupled_adam.errors import UsageError, one_line, own_command, prefixed_usage_error
from coupled_adam.files import new_folder, resolved, write_atomically
from coupled_adam.inputs import check_model_folder, read_text
from coupled_adam.outputs import check_outputs
from coupled_adam.runs import MODEL, is_run, model_source
from coupled_adam.text.hub import download_model, hub_error, is_hub_id

Reason = Literal["not finite", "nearly zero"]
_NEARLY_ZERO = 0.01  # of the median norm
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.md")
# The weights that the copy has instead of the original's, and the same in other formats, which
# would be those of the model as it was.
_REPLACED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_WEIGHTS = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot"),
    *(".gguf", ".onnx", ".onnx_data", ".tflite", ".mlmodel", ".nemo"),
)
# Options, of several architectures, by which logits are squashed.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_softcap")


@dataclasses.dataclass(frozen=True)
class RepairedMatrix:
    """What was changed in one matrix."""

    role: str  # as in EmbeddingMatrix
    tensor: str  # its name; empty if the file holds nothing else
    rows: dict[int, Reason]  # the rows that were replaced, and why
    mean_removed: float | None  # its norm; None if the matrix was not recentered


def can_repair(source: Path, config: Mapping[str, Any]) -> bool:
    """Whether transformers can load and save a model with this config.json, or it is a matrix."""
    if source.is_file():
        return source.suffix == ".npy"
    import transformers  # takes seconds

    names = config.get("architectures")
    is_known = isinstance(names, list) and bool(names) and hasattr(transformers, str(names[0]))
    places = "*.safetensors", f"{MODEL}/*.safetensors"
    is_safe = not source.is_dir() or any([*source.glob(place)] for place in places)  # else: the hub
    return is_known and is_safe and not config.get("quantization_config")


def can_recenter(config: Mapping[str, Any], role: str) -> bool:
    """Whether removing the mean from a matrix of this role leaves the predictions as they are.

    Capped logits are not shifted alike, and a tied matrix is the input as well.
    """
    capped = any(part.get(cap) for part in config_parts(config) for cap in _CAPS)
    return role == "output" and not capped


def repair_commands(
    model: str, revision: str | None, entry: EmbeddingMatrix, dead: Sequence[int]
) -> tuple[str, str]:
    """The commands that repair a model and recenter it; empty for one that would be refused.

    Args:
        dead: the rows of the matrix that would be replaced.
    """
    path, alive = Path(model), len(entry.matrix) - len(dead)
    # A run's model is not there before it has finished, and new rows need two to take after.
    is_there = not is_run(path) or (path / MODEL).exists()
    if not is_there or alive < 2 or not can_repair(path, entry.config):
        return "", ""
    command = f"{own_command()} repair {shlex.quote(model)}"
    if revision is not None:
        command += f" --revision {shlex.quote(revision)}"
    out = "--out NEW.npy" if path.suffix == ".npy" else "--out NEW"
    needs_repair = {*dead} - {padding_row(entry)}  # which may be zero
    return (
        f"{command} {out}" if needs_repair else "",
        f"{command} --recenter {out}" if can_recenter(entry.config, entry.role) else "",
    )


def dead_rows(embeddings: Tensor) -> dict[int, Reason]:
    """The rows of a matrix [V, H] that are not finite, or have less than 1 % of the median norm."""
    norms = geometry.norms_or_nan(embeddings)
    # The norm of a row that is not finite is NaN, and above no limit.
    dead = np.flatnonzero(~(norms > least_norm(norms))).tolist()
    return {row: "not finite" if np.isnan(norms[row]) else "nearly zero" for row in dead}


def least_norm(norms: geometry.Array) -> float:
    """The norm below which a row is nearly zero, given those of all rows [V]."""
    finite = norms[np.isfinite(norms)]
    return _NEARLY_ZERO * float(np.median(finite)) if len(finite) else 0.0


def healthy_rows(embeddings: Tensor, count: int, healthy: geometry.Mask) -> Tensor:
    """New rows [count, H] for an embedding matrix [V, H], in its dtype.

    They are drawn from the normal distribution that has the mean and the covariance of the healthy
    rows, [V] booleans. Raises ValueError if fewer than two are healthy.
    """
    if healthy.sum() < 2:
        raise ValueError("fewer than two rows are healthy: nothing to model new rows on")
    mean, norms = geometry.mean_and_norms(embeddings, healthy)
    covariance = geometry.gram(embeddings, mean, healthy) / len(norms)
    squares, basis = torch.linalg.eigh(covariance)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
    # [count, H]: independent along the principal axes, with their variances.
    new = mean + draws.to(mean.device) * squares.clamp(min=0).sqrt() @ basis.T
    rows: Tensor = new.to(embeddings.device, embeddings.dtype)
    return rows


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a model: itself, a run's, or that of a model on the hub, which is downloaded.

    A file is returned as it is. Raises UsageError if there is no such model.
    """
    folder = Path(model_source(model))
    if Path(model).exists() or not is_hub_id(model):
        if not folder.is_file() and not (folder / "config.json").exists():
            raise UsageError(
                f"{folder} is not a model in Hugging Face format: no config.json in it"
            )
        return folder
    try:
        folder = download_model(model, revision, _DOWNLOADED)
        if parts := [f"{part}/*" for part in _other_parts(folder)]:
            download_model(model, revision, parts)
        return folder
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise UsageError(
            f"{model}: there is no such folder here, nor a model on the hub that can be read "
            f"({hub_error(error)})"
        ) from None


def repair_model(
    source: Path, out: Path, recenter: bool = False, from_output: bool = False
) -> list[RepairedMatrix]:
    """Write a copy of a model in which the embeddings that need it are repaired.

    transformers loads the model and saves the copy; the tokenizer and all else beside the weights
    is copied. Every matrix that :func:`load_embeddings` reads of the model is repaired. The row of
    the model's padding token may be zero. Weights in other formats, which would be those of the
    model as it was, are left out with a warning that names them. Raises UsageError if there is no
    such model, ``out`` exists, or the repair is not possible.

    Args:
        source: a folder of safetensors that transformers knows, or a ``.npy`` file with a matrix.
        recenter: whether to subtract the mean from the output embeddings, which shifts all logits
            of a position alike.
        from_output: whether new rows of input embeddings have the directions of the same tokens'
            output embeddings, and the median norm of healthy rows, where those are healthy.
    """
    # 1. What cannot be done is refused
    check_outputs(out=out)
    if source.suffix == ".npy" and source.is_file() and out.suffix != ".npy":
        raise UsageError(f"--out {out} must end in .npy, as {source} does")
    model, entries = _load(source)
    moved = {e.role for e in entries if recenter and can_recenter(e.config, e.role)}
    if recenter and not moved:
        raise UsageError(
            f"{source}: --recenter would change its predictions: it is for output embeddings that "
            "are not tied, and whose logits are not capped"
        )
    heads = [entry.matrix for entry in entries if from_output and entry.role == "output"]
    shapes = [entry.matrix.shape for entry in entries if entry.role == "input"]
    if from_output and not any(head.shape in shapes for head in heads):
        raise UsageError(
            f"{source}: --from-output needs output embeddings that are not tied to those of the "
            "input, and have their shape"
        )
    # 2. The matrices are changed in the model's memory, and the source stays as it is
    reports = []
    for entry in entries:
        with prefixed_usage_error(f"{source}: "):
            rows = _repair_rows(entry, heads[0] if heads and entry.role == "input" else None)
        removed = _recenter(entry.matrix) if entry.role in moved else None
        reports.append(RepairedMatrix(entry.role, entry.tensor, rows, removed))
    # 3. The copy, which appears once it is complete
    out.parent.mkdir(parents=True, exist_ok=True)
    if model is None:
        array = io.BytesIO()
        np.save(array, entries[0].matrix.numpy())
        write_atomically(out, array.getvalue())
    else:
        with new_folder(out) as temporary:
            model.save_pretrained(temporary)
            _copy_rest(source, temporary)
    return reports


def _copy_rest(source: Path, out: Path) -> None:
    """Copy the tokenizer, and what else lies beside the weights and below, as it is."""
    root = resolved(source)
    parts, stale = _other_parts(source), []
    # The hub's cache has links to its blobs; elsewhere a link could bring in any file of this user,
    # which would be published with the repaired model.
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        place = out / inside
        is_hidden = any(name[0] == "." for name in inside.parts[:-1])
        if not path.is_file() or is_hidden or place.exists() or _REPLACED.fullmatch(str(inside)):
            continue
        if path.name.endswith(_WEIGHTS) and not parts & {*inside.parents}:
            stale.append(str(inside))
            continue
        if not resolved(path).is_relative_to(root) and resolved(path).parent != blobs:
            warnings.warn(f"{path} is a link out of the model's folder: not copied", stacklevel=3)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
    if stale:
        warnings.warn(
            f"not copied, as they may hold the weights as they were: {', '.join(stale)}",
            stacklevel=3,
        )


def _other_parts(source: Path) -> set[Path]:
    """The folders in a model's folder that hold other weights than the model's, such as 2_Dense.

    ``modules.json`` of sentence-transformers lists them; its first part may be the model itself.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        modules = json.loads(read_text(source / "modules.json"))
        return {Path(module["path"]) for module in modules} - {Path()}
    return set()


def _load(source: Path) -> tuple[Any, list[EmbeddingMatrix]]:
    """A model with all of its tensors, and its embeddings, which change with the matrices.

    None and the matrix, if the source is a file.
    """
    import transformers

    config: dict[str, Any] = {}
    if not source.is_file():
        with prefixed_usage_error(f"{source}: ", (ValueError, OSError)):
            config, _ = transformers.PreTrainedConfig.get_config_dict(source, local_files_only=True)
    if not can_repair(source, config):
        raise UsageError(
            f"{source} cannot be repaired: it must be the folder of a model that transformers "
            "loads from safetensors and that is not quantised, or a .npy file with a matrix"
        )
    with prefixed_usage_error("", ValueError):
        reported = load_embeddings(source)
    if source.is_file():
        return None, reported
    check_model_folder(source)
    try:
        model, loading = getattr(transformers, config["architectures"][0]).from_pretrained(
            source,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many types
        raise UsageError(f"{source} cannot be loaded ({one_line(error)})") from None
    # transformers only warns of these.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, loading[kind])):
            raise UsageError(
                f"{source}: transformers does not load all of it ({kind}: {keys[0]}), so a copy "
                "would not be the same model"
            )
    return model, [own for entry in reported for own in _parameters_of(model, entry, source)]


def _parameters_of(model: Any, entry: EmbeddingMatrix, source: Path) -> list[EmbeddingMatrix]:
    """The parameters of a model that hold a matrix of its files, with what the model knows of them.

    They are several if two that are not tied have the same numbers.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    head = model_embeddings(model).get("output")
    shape = entry.matrix.shape
    same = [p for p in names if p.shape == shape and is_equal(p.data, entry.matrix.to(p.dtype))]
    if not same:
        raise UsageError(
            f"{source}: its matrix {entry.tensor} is another one once transformers has loaded it, "
            "and cannot be repaired"
        )
    entries, config = [], model.config.to_dict()
    for parameter in same:
        role = entry.role
        # A head that has another name is an input as well, of the decoder for example.
        if parameter is head:
            role = "output" if len(names[parameter]) == 1 else "tied"
        elif role == "tied" and head is not None:
            role = "input"
        entries.append(EmbeddingMatrix(parameter.detach(), role, names[parameter][0], config))
    return entries


def _repair_rows(entry: EmbeddingMatrix, head: Tensor | None = None) -> dict[int, Reason]:
    """Give the rows of a matrix that are dead new values, in place; directions are the head's."""
    dead = dead_rows(entry.matrix)
    healthy = ~np.isin(np.arange(len(entry.matrix)), [*dead])
    padding = padding_row(entry)
    if padding is not None:
        healthy[padding] = False  # not trained as others are: no row is to take after it
        if dead.get(padding) == "nearly zero":
            del dead[padding]
    if dead:
        entry.matrix[[*dead]] = healthy_rows(entry.matrix, len(dead), healthy)
    if head is not None and head.shape == entry.matrix.shape:
        typical = float(np.median(geometry.norms_or_nan(entry.matrix)[healthy]))
        dead_in_head = dead_rows(head)
        usable = [row for row in dead if row not in dead_in_head]
        directions = nn.functional.normalize(head[usable].double())
        entry.matrix[usable] = (typical * directions).to(entry.matrix.dtype)
    return dead


def padding_row(entry: EmbeddingMatrix) -> int | None:
    """The row of the model's padding token, which may be zero by design; None if there is none."""
    rows = [part.get("pad_token_id") for part in config_parts(entry.config)]
    usable = (row for row in rows if isinstance(row, int) and 0 <= row < len(entry.matrix))
    return next(usable, None)


def _recenter(matrix: Tensor) -> float:
    """Subtract the mean from a matrix [V, H] in place, and return its norm."""
    mean = geometry.mean_and_norms(matrix)[0]
    for chunk in geometry.row_slices(*matrix.shape):  # no copy of it in float64
        matrix[chunk] = (matrix[chunk].double() - mean).to(matrix.dtype)
    return float(mean.norm())
