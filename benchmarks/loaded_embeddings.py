"""Which matrices load_embeddings reads, of the classes of transformers that have a language model.

    python benchmarks/loaded_embeddings.py --out benchmarks/results/loaded_embeddings.json

Each class is built with its default configuration and two layers, without memory for its weights,
and saved by transformers itself. What is right is what its ``get_input_embeddings`` and
``get_output_embeddings`` return. The file has the real names and shapes; its numbers are zeros, but
for the first of each tensor, so that tensors differ.

An outcome is "right"; "more" (right, with further matrices beside); "role" (read, but called
otherwise); "named" (what is missing is named, with the reason); "refused" (an error that lists the
candidates); "silent" (not right, and nothing says so); or "no text" (the class has no table of
tokens, and an error says so).
"""

import argparse
import collections
import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from which_tables import build, class_names

from coupled_adam.embeddings import load_embeddings

TASKS = (
    "PRETRAINING CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ "
    "MULTIMODAL_LM"
)


class SparseFile:
    """Writes a safetensors file of names and shapes, which takes no room on the disk.

    Layers after the second and experts are left out, as they would fill the address space.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, tensors: dict[str, torch.Tensor], path: str, metadata: Any = None) -> None:
        self.tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.dim() < 3 and not re.search(r"\.([2-9]|\d\d+)\.", name)
        }
        header, starts, end = {}, [], 0
        for name, tensor in self.tensors.items():
            starts.append(end)
            end += 4 * tensor.numel()
            place = {"shape": [*tensor.shape], "data_offsets": [starts[-1], end]}
            header[name] = {"dtype": "F32", **place}
        text = json.dumps(header).encode()
        with Path(path).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            begin = file.tell()
            for number, start in enumerate(starts, 1):
                file.seek(begin + start)
                file.write(number.to_bytes(4, "little"))  # the first element, unlike any other's
            file.truncate(begin + end)


def wanted_of(model: Any, saved: dict[str, torch.Tensor]) -> dict[str, str]:
    """The matrices that transformers itself names: their names in the file, and their roles.

    A parameter that has several names in the model is tied, even if it is no output embedding by
    ``get_output_embeddings``.
    """
    wanted: dict[str, str] = {}
    for role in ("input", "output"):
        try:
            layer = getattr(model, f"get_{role}_embeddings")()
        except (NotImplementedError, AttributeError):
            continue
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            # What is computed anew for the file, such as a cast, has the model's name for it.
            known = {n for n, p in model.named_parameters(remove_duplicate=False) if p is weight}
            names = [name for name, tensor in saved.items() if tensor is weight]
            names = names or [name for name in saved if name in known]
            if not names:
                raise LookupError(f"the {role} embeddings are not saved as they are")
            wanted[names[0]] = "tied" if names[0] in wanted or is_shared(model, weight) else role
    return wanted


def is_shared(model: nn.Module, weight: torch.Tensor) -> bool:
    """Whether a matrix is that of a linear layer and of another one."""
    layers = [m for m in model.modules() if getattr(m, "weight", None) is weight]
    return len(layers) > 1 and any(isinstance(layer, nn.Linear) for layer in layers)


def outcome(wanted: dict[str, str], folder: Path) -> dict[str, Any]:
    """What load_embeddings does with the folder of a model."""
    try:
        entries = load_embeddings(folder)
    except ValueError as error:
        said = str(error).replace(str(folder), "FOLDER")
        if "unable to mmap" in said:  # the first two layers alone are too large
            raise
        kind = (
            "no text" if not wanted else "refused" if any(n in said for n in wanted) else "silent"
        )
        return {"outcome": kind, "wanted": wanted, "said": said}
    read = {entry.tensor: entry.role for entry in entries}
    missing = {name for name in wanted if name not in read}
    result = {"wanted": wanted, "read": read, "left out": entries[0].left_out}
    if missing:
        is_named = all(name in " ".join(entries[0].left_out) for name in missing)
        return {"outcome": "named" if is_named else "silent", **result}
    if any(read[name] != role for name, role in wanted.items()):
        return {"outcome": "role", **result}
    return {"outcome": "right" if len(read) == len(wanted) else "more", **result}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Build and save a class, and read it."""
    model_class, file = getattr(transformers, name), SparseFile()

    def save(model: Any) -> Any:
        model.tie_weights()
        # With the parameters themselves, which saving renames, and can be told apart by.
        tensors = model.state_dict(keep_vars=True)
        model.save_pretrained(folder, state_dict=tensors, max_shard_size="100TB")
        return model

    with mock.patch("transformers.modeling_utils.safe_save_file", file):
        try:
            model = save(build(model_class, lambda _, size: size))
        except Exception:  # some configurations fit their default number of layers alone
            with torch.device("meta"):
                model = save(model_class(model_class.config_class()))
    return outcome(wanted_of(model, file.tensors), folder)


def main() -> None:
    """Try all, and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--only",
        default="",
        help="classes whose names match this; the others stay as OUT has them",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: dict[str, dict[str, Any]] = {}
    not_built: dict[str, str] = {}
    if options.out and options.out.exists() and options.only:
        before = json.loads(options.out.read_text())
        results, not_built = before["results"], before["not built"]
    for name in class_names(TASKS):
        if not re.search(options.only, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for known in (results, not_built):
                known.pop(name, None)
            try:
                results[name] = measure(name, Path(folder))
            except Exception as error:  # for use with more settings, or further packages
                not_built[name] = f"{type(error).__name__}: {error}"[:200]
                continue
        print(name, results[name], flush=True)
    counts = collections.Counter(result["outcome"] for result in results.values())
    print(json.dumps({"all": counts.total(), **counts, "not built": len(not_built)}))
    if options.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        record = {"versions": versions, "counts": {"all": counts.total(), **counts}}
        record |= {"results": dict(sorted(results.items())), "not built": not_built}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
