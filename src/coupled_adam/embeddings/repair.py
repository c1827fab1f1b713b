"""Give rows that are dead or under-trained healthy values, in a copy of the model.

Rows that are zero or not finite make losses and gradients of the whole model large or NaN. New rows
are drawn around the mean of the healthy ones, where they take little probability from other tokens
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.loading import (
    INPUT_NAMES,
    OUTPUT_NAMES,
    EmbeddingMatrix,
    load_embeddings,
)
from coupled_adam.embeddings.undertrained import BY_ROLE, finite_rows, undertrained
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.errors import UsageError, one_line

Method = Literal["sample", "partner"]
_NEARLY_ZERO = 0.01  # of the median norm
_POSITIONS = "wpe.weight"  # GPT-2's positions, which are added to the input embeddings


@dataclasses.dataclass(frozen=True)
class RepairedRow:
    """A row that was changed: why and how, and its norm before (None if not finite) and after."""

    row: int
    token: str
    reason: Literal["not finite", "nearly zero", "under-trained"]
    method: Method
    norm_before: float | None
    norm_after: float


@dataclasses.dataclass(frozen=True)
class RepairedMatrix:
    """What was changed in one matrix.

    Attributes:
        tensors: the names of the tensors that hold it; several if they are tied.
        role: as in :class:`EmbeddingMatrix`.
        rows: the rows that were changed.
        mean_removed: ||mu|| of the mean that was subtracted from all rows; None if none was.
    """

    tensors: list[str]
    role: str
    rows: list[RepairedRow]
    mean_removed: float | None


def dead_rows(embeddings: geometry.Embeddings) -> dict[int, Literal["not finite", "nearly zero"]]:
    """The rows that are not finite, or have less than a hundredth of the median norm."""
    finite, norms = finite_rows(embeddings)
    if not finite.any():
        return dict.fromkeys(range(len(norms)), "not finite")
    small = finite & (norms <= _NEARLY_ZERO * np.median(norms[finite]))
    return {
        row: "nearly zero" if finite[row] else "not finite"
        for row in np.flatnonzero(small | ~finite).tolist()
    }


def healthy_rows(
    embeddings: Tensor,
    rows: NDArray[np.int64],
    healthy: NDArray[np.bool_],
    *,
    partner: Tensor | None = None,
    noise: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """New values for some rows of an embedding matrix.

    Args:
        embeddings: [V, H].
        rows: [n], the rows that need new values.
        healthy: [V] booleans; the rows on which these are modelled.
        partner: [V, H], the other matrix of the model. With it, a new row has the direction of the
            partner's row, and the mean norm of the healthy rows. Without it, it is drawn from the
            normal distribution that has the mean and the covariance of the healthy rows.
        noise: the factor on the standard deviation of that distribution; with 0, all new rows are
            the mean.
        seed: of the distribution.

    Returns:
        The new values [n, H], in the dtype of ``embeddings``, on its device.

    Raises:
        ValueError: if fewer than two rows are healthy.
    """
    if healthy.sum() < 2:
        raise ValueError("fewer than two rows are healthy: nothing to model new rows on")
    mean, norms = geometry.mean_and_norms(embeddings, healthy)
    if partner is not None:
        directions = geometry.as_float64(partner[rows])
        new = torch.nn.functional.normalize(directions, dim=1) * float(norms.mean())
    else:
        squares, basis = torch.linalg.eigh(geometry.gram(embeddings, mean, healthy) / len(norms))
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(len(rows), len(mean), generator=generator, dtype=torch.float64)
        scale = noise * squares.clamp(min=0).sqrt()
        new = mean + draws.to(mean.device) * scale @ basis.T
    return new.to(embeddings.device, embeddings.dtype)


@dataclasses.dataclass(frozen=True)
class Repair:
    """What to repair, and how.

    Attributes:
        undertrained: whether to change under-trained tokens as well: those that cannot be told from
            unused rows; see :class:`Undertrained`.
        method: ``"sample"`` draws new rows like the healthy ones; ``"partner"`` takes the direction
            of the same row in the other matrix of an untied model, where that row is healthy.
        recenter: whether to subtract the mean from the output embeddings, which shifts all logits
            of a position alike and leaves the softmax as it is.
        seed: of the new rows.
    """

    undertrained: bool = False
    method: Method = "sample"
    recenter: bool = False
    seed: int = 0


def model_folder(model: str) -> Path:
    """The folder of a model: itself, a run's, or that of a model on the hub, which is downloaded.

    Raises:
        UsageError: if there is no such model.
    """
    folder = Path(model)
    if (folder / "config.yaml").exists() and not (folder / "config.json").exists():
        folder = folder / "model"
        if not folder.exists():
            raise UsageError(f"{model} is a run that has no model yet: let it finish first")
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        if not (folder / "config.json").exists():
            raise UsageError(f"{model} is not a model in Hugging Face format: no config.json in it")
        return folder
    import huggingface_hub

    wanted = ("*.json", "*.safetensors", "*.model", "*.txt")
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(wanted)))
    except Exception as error:  # huggingface_hub and its HTTP client raise many types
        raise UsageError(
            f"{model}: no such folder here, and the hub did not return such a model "
            f"({type(error).__name__}: {one_line(error, 300)})"
        ) from None


def repair_model(
    folder: Path, out: Path, repair: Repair, vocabulary: Callable[[int], Vocabulary]
) -> list[RepairedMatrix]:
    """Write a copy of a model in which the embeddings that need it are repaired.

    All other files are copied as they are, and all other tensors keep their bits. Files of
    optimizers are copied, too, and do not know of the change. The row of the model's padding token
    may be zero.

    Args:
        folder: a model in Hugging Face format, as safetensors, sharded or not.
        out: the folder to write, which must not exist.
        repair: what to repair.
        vocabulary: a function that returns what V rows stand for.

    Returns:
        What was changed, one entry for each matrix.

    Raises:
        UsageError: if there is no such model, ``out`` exists, or the repair is not possible.
    """
    if out.exists():
        raise UsageError(f"--out {out} exists: the repaired model is written to a new folder")
    if not out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.parent}: create it first")
    try:
        entries = load_embeddings(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from None
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise UsageError(f"{folder} has no safetensors: save the model as safetensors first")
    _check(repair, folder, entries[-1].role, config)

    reports, changed, shift = [], {}, None
    for entry in entries:
        partner = None
        if repair.method == "partner":
            (partner,) = (other.matrix for other in entries if other is not entry)
        matrix = entry.matrix.clone()
        try:
            rows = _repair_rows(entry, matrix, partner, repair, vocabulary(len(matrix)), config)
        except ValueError as error:
            raise UsageError(f"{folder}: {error}") from None
        mean_norm = None
        if repair.recenter and entry.role != "input":
            mean = geometry.mean_and_norms(matrix)[0]
            mean_norm = float(mean.norm())
            _subtract(matrix, mean)
            shift = mean if entry.role == "tied" else None
        reports.append(RepairedMatrix([entry.tensor], entry.role, rows, mean_norm))
        if rows or mean_norm is not None:
            changed[entry.tensor] = (entry.matrix, matrix)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(
            folder,
            temporary,
            ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")],
        )
        for shard in shards:
            replaced = _write_shard(shard, temporary / shard.name, changed, shift)
            for report in reports:
                same = [name for name, of in replaced.items() if of == report.tensors[0]]
                report.tensors.extend(name for name in same if name not in report.tensors)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return reports


def _check(repair: Repair, folder: Path, role: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError if the model does not allow what is asked for."""
    if repair.method == "partner" and role != "output":
        raise UsageError(
            f"--method partner needs input and output embeddings: those of {folder} "
            "are tied, or one of them is missing"
        )
    if not repair.recenter:
        return
    if role == "input":
        raise UsageError(f"--recenter: {folder} has no output embeddings")
    text = config.get("text_config") or config
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_softcap"):
        if text.get(name):
            raise UsageError(
                f"--recenter would change the function of {folder}: its logits are capped ({name})"
            )
    if role == "tied" and config.get("model_type") != "gpt2":
        raise UsageError(
            f"--recenter would change the function of {folder}: its embeddings are tied, and it "
            "has no learned positions like GPT-2's to take up the mean on the input side"
        )


def _repair_rows(
    entry: EmbeddingMatrix,
    matrix: Tensor,
    partner: Tensor | None,
    repair: Repair,
    vocabulary: Vocabulary,
    config: Mapping[str, Any],
) -> list[RepairedRow]:
    """Change the rows of a matrix in place that need it."""
    reasons: dict[int, Literal["not finite", "nearly zero", "under-trained"]] = {
        **dead_rows(matrix)
    }
    _, norms = finite_rows(matrix)
    healthy = np.ones(len(matrix), np.bool_)
    healthy[list(reasons)] = False
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and 0 <= padding < len(matrix):
        healthy[padding] = False
        if reasons.get(padding) == "nearly zero":  # by design: torch.nn.Embedding's padding_idx
            del reasons[padding]
    healthy &= vocabulary.categories != "none"
    if repair.undertrained:
        found = undertrained(
            matrix,
            vocabulary.unused,
            among=vocabulary.categories == "ok",
            order_by=BY_ROLE.get(entry.role) if vocabulary.unused.any() else None,
        )
        if found.limit is None:
            raise ValueError(
                "--undertrained needs at least three rows that are known to be unused, such as "
                "rows without a token, and that resemble each other; there are none"
            )
        for row in found.alike.tolist():
            reasons.setdefault(row, "under-trained")
        healthy[found.alike] = False
        healthy &= ~found.unused
    rows = np.array(sorted(reasons), dtype=np.int64)
    if not len(rows):
        return []
    directed = np.zeros(len(rows), np.bool_)
    if partner is not None:
        directed = ~np.isin(rows, list(dead_rows(partner)))
    new = torch.empty(len(rows), matrix.shape[1], dtype=matrix.dtype)
    for chosen, other in ((directed, partner), (~directed, None)):
        if chosen.any():
            new[torch.from_numpy(chosen)] = healthy_rows(
                matrix, rows[chosen], healthy, partner=other, seed=repair.seed
            )
    matrix[torch.from_numpy(rows)] = new
    return [
        RepairedRow(
            row,
            vocabulary.name(row),
            reasons[row],
            "partner" if directed[index] else "sample",
            None if math.isnan(norms[row]) else float(norms[row]),
            float(new[index].double().norm()),
        )
        for index, row in enumerate(rows.tolist())
    ]


def _subtract(matrix: Tensor, mean: Tensor) -> None:
    """Subtract the mean from all rows in place, in float64 before rounding."""
    start = 0
    for block in geometry.blocks(matrix):
        matrix[start : start + len(block)] = (block - mean).to(matrix.dtype)
        start += len(block)


def _write_shard(
    source: Path,
    target: Path,
    changed: Mapping[str, tuple[Tensor, Tensor]],
    shift: Tensor | None,
) -> dict[str, str]:
    """Write a file of weights anew; return the tensors that were replaced, and by which.

    A tensor with the same bits as a changed one, and the name of an embedding, is tied to it.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    replaced = {}
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        known = any(name.endswith(ending) for ending in (*INPUT_NAMES, *OUTPUT_NAMES))
        for of, (before, after) in changed.items():
            if name == of or (known and _same_bits(tensor, before)):
                tensors[name], replaced[name] = after, of
                break
        if shift is not None and name.endswith(_POSITIONS):
            tensors[name] = (tensor.double() + shift).to(tensor.dtype)
    if replaced or shift is not None:
        # Tied tensors are written one by one: safetensors refuses those that share memory.
        save_file({n: t.clone().contiguous() for n, t in tensors.items()}, target, metadata)
    else:
        shutil.copyfile(source, target)
    return replaced


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices are equal, NaN included."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )
