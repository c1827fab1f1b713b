"""Give rows that are dead or under-trained healthy values, in a copy of the model.

Rows that are zero or not finite make losses and gradients of the whole model large or NaN. New rows
are drawn around the mean of the healthy ones, where they take little probability from other tokens
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings import geometry
from coupled_adam.embeddings.loading import EmbeddingMatrix, is_embedding, load_embeddings
from coupled_adam.embeddings.undertrained import PASSES, finite_rows, undertrained_tokens
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.embeddings.weights import check_inside
from coupled_adam.errors import UsageError, refused
from coupled_adam.files import new_folder, write_atomically
from coupled_adam.runs import MODEL, inner_runs, is_run
from coupled_adam.text.hub import download_model, hub_error, is_hub_id

Method = Literal["sample", "partner"]
Reason = Literal["not finite", "nearly zero", "under-trained"]
_NEARLY_ZERO = 0.01  # of the median norm
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.md")
_POSITIONS = "wpe.weight"  # GPT-2's positions, which are added to the input embeddings


@dataclasses.dataclass(frozen=True)
class Repair:
    """What to repair, and how.

    The method ``"partner"`` takes the direction of the same row in the other matrix of an untied
    model, where that row is healthy. To recenter shifts all logits of a position alike, which
    leaves the softmax as it is.
    """

    undertrained: bool = False  # also tokens that cannot be told from unused rows
    method: Method = "sample"  # how new rows are made: drawn like the healthy ones
    recenter: bool = False  # subtract the mean from the output embeddings
    seed: int = 0  # of the new rows


@dataclasses.dataclass(frozen=True)
class RepairedRow:
    """A row that was changed: why and how, and its norm before (None if not finite) and after."""

    row: int
    token: str
    reason: Reason
    method: Method
    norm_before: float | None
    norm_after: float


@dataclasses.dataclass(frozen=True)
class RepairedMatrix:
    """What was changed in one matrix."""

    tensors: list[str]  # the names of the tensors that hold it; several if they are tied
    role: str  # as in EmbeddingMatrix
    rows: list[RepairedRow]
    mean_removed: float | None  # ||mu|| of the mean that was subtracted from all rows, if any


def dead_rows(
    embeddings: geometry.Embeddings, on_rows: geometry.OnRows = None
) -> dict[int, Reason]:
    """The rows that are not finite, or have less than a hundredth of the median norm."""
    finite, norms = finite_rows(embeddings, on_rows)
    limit = _NEARLY_ZERO * np.median(norms[finite]) if finite.any() else 0.0
    # The norm of a row that is not finite is NaN, and above no limit.
    dead = np.flatnonzero(~(norms > limit)).tolist()
    return {row: "nearly zero" if finite[row] else "not finite" for row in dead}


def healthy_rows(
    embeddings: Tensor,
    rows: NDArray[np.int64],
    healthy: geometry.Mask,
    *,
    partner: Tensor | None = None,
    seed: int = 0,
    on_rows: geometry.OnRows = None,
) -> Tensor:
    """New values [n, H] for some rows [n] of an embedding matrix [V, H], in its dtype.

    Args:
        healthy: [V] booleans; the rows on which these are modelled.
        partner: [V, H], the other matrix of the model. With it, a new row has the direction of the
            partner's row, and the mean norm of the healthy rows. Without it, it is drawn from the
            normal distribution that has the mean and the covariance of the healthy rows.
        seed: of the distribution.

    Raises ValueError if fewer than two rows are healthy.
    """
    if healthy.sum() < 2:
        raise ValueError("fewer than two rows are healthy: nothing to model new rows on")
    mean, norms = geometry.mean_and_norms(embeddings, healthy, on_rows)
    if partner is not None:
        directions = geometry.as_float64(partner[rows])
        new = torch.nn.functional.normalize(directions, dim=1) * float(norms.mean())
    else:
        covariance = geometry.gram(embeddings, mean, healthy, on_rows) / len(norms)
        squares, basis = torch.linalg.eigh(covariance)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(len(rows), len(mean), generator=generator, dtype=torch.float64)
        new = mean + draws.to(mean.device) * squares.clamp(min=0).sqrt() @ basis.T
    return new.to(embeddings.device, embeddings.dtype)


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

    All other regular files in the folder are copied as they are, and all other tensors keep their
    bits. Links that lead out of the folder, pipes and the like are left out, with a warning. Files
    of optimizers are copied, too, and do not know of the change. The row of the model's padding
    token may be zero.

    Args:
        source: a folder with a model in Hugging Face format, as safetensors, sharded or not; or a
            ``.npy`` or ``.safetensors`` file with a matrix.
        out: the folder or the file to write, which must not exist.
        vocabulary: a function that returns what V rows stand for.

    Raises:
        UsageError: if there is no such model, ``out`` exists, or the repair is not possible.
    """
    from safetensors.torch import save, save_file

    is_file = source.is_file()
    _check_out(source, out)
    with refused("", (ValueError, OSError)):
        entries = load_embeddings(source)
        config = {} if is_file else json.loads((source / "config.json").read_text("utf-8"))
    if is_file and len(entries) > 1:
        raise UsageError(f"{source} has input and output embeddings: name the model's folder")
    shards = [] if is_file else _shards(source)
    _check(repair, source, entries[-1].role, config)

    passes = 4 + PASSES * repair.undertrained  # norms, mean and covariance, mean of what it becomes
    on_rows = geometry.rows_done(progress, passes * sum(len(entry.matrix) for entry in entries))
    reports, changes, shift = [], {}, None
    for entry in entries:
        partner = None
        if repair.method == "partner":
            (partner,) = (side.matrix for side in entries if side is not entry)
        with refused(f"{source}: "):
            tokens = vocabulary(len(entry.matrix))
            rows, matrix = _repaired(entry, partner, repair, tokens, config, on_rows)
        mean = None
        if repair.recenter and entry.role != "input":
            mean = geometry.mean_and_norms(matrix, on_rows=on_rows)[0]
            for chunk in geometry.row_slices(*matrix.shape):
                matrix[chunk] = (matrix[chunk].double() - mean).to(matrix.dtype)
            shift = mean if entry.role == "tied" else None
        mean_norm = None if mean is None else float(mean.norm())
        reports.append(RepairedMatrix([entry.tensor], entry.role, rows, mean_norm))
        if rows or mean is not None:
            changes[entry.tensor] = entry.matrix, matrix

    if source.suffix == ".npy" and is_file:
        array = io.BytesIO()
        np.save(array, matrix.numpy())
        write_atomically(out, array.getvalue())
    elif is_file:
        write_atomically(out, save(*_changed_tensors(source, changes, None)[:2]))
    else:
        with _explained(source, out), new_folder(out, replace=False) as temporary:
            _copy_all_but(shards, source, temporary)
            for shard in shards:
                tensors, metadata, replaced = _changed_tensors(shard, changes, shift)
                save_file(tensors, temporary / shard.name, metadata)
                # Other files may hold the same matrix under another name, which changes as well.
                for report in reports:
                    same = {name for name, twin in replaced.items() if twin == report.tensors[0]}
                    report.tensors.extend(sorted(same - {*report.tensors}))
    return reports


def _check_out(source: Path, out: Path) -> None:
    """Raise UsageError unless the copy can become ``out``."""
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists: the repaired model is written to a new folder")
    if source.is_file() and not out.suffix == source.suffix in (".npy", ".safetensors"):
        raise UsageError(
            f"{source} and --out {out} must both end in .npy or both in .safetensors: a single "
            "matrix is written as it was read"
        )
    # The copy would otherwise copy itself.
    if source.resolve() in out.resolve().parents:
        raise UsageError(f"--out {out} is inside of the model's folder: choose one beside it")
    if not out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.parent}: create it first")


def _shards(folder: Path) -> list[Path]:
    """The safetensors of a model, all of which are there and its own."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise UsageError(f"{folder} has no safetensors: save the model as safetensors first")
    for shard in shards:
        if not _is_file_of(folder, shard):
            raise UsageError(f"{shard} is no file of the model's folder: copy it there")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        if missing := sorted(named - {shard.name for shard in shards}):
            raise UsageError(
                f"{folder} lacks {missing[0]}, which its index names: download it first"
            )
    return shards


def _check(repair: Repair, source: Path, role: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError if the model does not allow what is asked for."""
    if repair.method == "partner" and role != "output":
        raise UsageError(
            f"--method partner needs input and output embeddings: those of {source} "
            "are tied, or one of them is missing"
        )
    if not repair.recenter:
        return
    if role == "input":
        raise UsageError(f"--recenter: {source} has no output embeddings")
    # Capped logits are not shifted alike, and models with images have the text's values in a part.
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_softcap"):
        if text.get(name):
            raise UsageError(
                f"--recenter would change the function of {source}: its logits are capped ({name})"
            )
    if role == "tied" and config.get("model_type") != "gpt2":
        raise UsageError(
            f"--recenter would change the function of {source}: its embeddings are tied, and it "
            "has no learned positions like GPT-2's to take up the mean on the input side"
        )


def _repaired(
    entry: EmbeddingMatrix,
    partner: Tensor | None,
    repair: Repair,
    vocabulary: Vocabulary,
    config: Mapping[str, Any],
    on_rows: Callable[[int], object],
) -> tuple[list[RepairedRow], Tensor]:
    """The rows of a matrix that need new values, and a copy of the matrix with them."""
    matrix = entry.matrix
    reasons = dead_rows(matrix, on_rows)
    # Rows that belong to no token were hardly trained, and are no model for others.
    healthy = vocabulary.categories != "none"
    healthy[list(reasons)] = False
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and 0 <= padding < len(matrix):
        healthy[padding] = False
        if reasons.get(padding) == "nearly zero":  # by design: torch.nn.Embedding's padding_idx
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
    rows = np.array(sorted(reasons), dtype=np.int64)
    # A row that is dead in the partner as well has no direction there, and is drawn.
    directed = np.zeros(len(rows), np.bool_)
    if partner is not None:
        directed = ~np.isin(rows, list(dead_rows(partner)))
    repaired = matrix.clone()
    for chosen, side in ((directed, partner), (~directed, None)):
        if chosen.any():
            repaired[rows[chosen]] = healthy_rows(
                matrix, rows[chosen], healthy, partner=side, seed=repair.seed, on_rows=on_rows
            )
    before, after = (geometry.as_float64(m[rows]).norm(dim=1).tolist() for m in (matrix, repaired))
    changed = [
        RepairedRow(
            row,
            vocabulary.name(row),
            reasons[row],
            "partner" if directed[index] else "sample",
            before[index] if np.isfinite(before[index]) else None,
            after[index],
        )
        for index, row in enumerate(rows.tolist())
    ]
    return changed, repaired


@contextlib.contextmanager
def _explained(source: Path, out: Path) -> Iterator[None]:
    """Refuse what others have put at ``out`` meanwhile; make an OSError of safetensors' own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # its text alone says which
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(out)) from error
    except OSError:
        _check_out(source, out)
        raise


def _copy_all_but(weights: Collection[Path], folder: Path, copy: Path) -> None:
    """Copy the regular files of a model's folder into an empty one, and warn of all else."""
    left_out = []
    for path in sorted(folder.rglob("*")):
        target = copy / path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            target.mkdir()
        elif not _is_file_of(folder, path):
            left_out.append(str(path))
        elif path not in weights:
            shutil.copy2(path, target)
    if left_out:
        names = ", ".join(left_out)
        warnings.warn(f"not files of {folder}, and so not copied: {names}", stacklevel=3)


def _is_file_of(folder: Path, path: Path) -> bool:
    """Whether a path is a regular file, and no link to a private file or a device elsewhere."""
    try:
        check_inside(folder, str(path.relative_to(folder)))
    except (ValueError, RuntimeError, OSError):  # of a link to elsewhere, or to itself
        return False
    return path.is_file()


def _changed_tensors(
    file: Path, changes: Mapping[str, tuple[Tensor, Tensor]], shift: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, str] | None, dict[str, str]]:
    """The tensors of a file, its metadata, and by which change (before, after) each was replaced.

    A tensor with the same bits as the one before, and the name of an embedding, is tied to it.
    """
    from safetensors import safe_open

    replaced = {}
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    for name, tensor in tensors.items():
        # What is taken from each tied input embedding, each position gives back.
        if shift is not None and name.endswith(_POSITIONS):
            tensors[name] = (tensor.double() + shift).to(tensor.dtype)
        for twin, (before, _) in changes.items():
            if name == twin or (is_embedding(name) and _same_bits(tensor, before)):
                replaced[name] = twin
    # Each is a copy of its own, as safetensors refuses tensors that share memory.
    tensors |= {name: changes[twin][1].clone() for name, twin in replaced.items()}
    return tensors, metadata, replaced


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are equal, NaN included."""
    bits = (x.contiguous().view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)
