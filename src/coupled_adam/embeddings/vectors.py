"""Files of vectors and their vocabulary: word2vec, GloVe, fastText and GGUF."""

import importlib
import importlib.util
import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coupled_adam.embeddings.weights import Weights, readable
from coupled_adam.errors import printable

Vectors = NDArray[np.float32]


def open_vectors(path: Path) -> Weights:
    """Open a file according to its suffix; the vectors of a text are read at once, in float32."""
    if path.suffix == ".gguf":
        return _open_gguf(path)
    words, matrix = _read_binary(path) if path.suffix == ".bin" else _read_text(path)
    tensor = torch.from_numpy(matrix)
    return Weights(str(path), {"": matrix.shape}, lambda _: tensor, words=words)


def _read_text(path: Path) -> tuple[list[str], Vectors]:
    """A line for each row: a word and its numbers.

    word2vec and fastText begin with a line that has V and H, and GloVe does not.
    """
    promised = columns = None
    words: list[str] = []
    rows: list[Vectors] = []
    # Only \n ends a line: words may contain every other character that could.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\r\n ")
            fields = line.split(" ")
            if number == 1 and len(fields) == 2 and all(field.isdecimal() for field in fields):
                promised, columns = int(fields[0]), int(fields[1])
                continue
            columns = columns or len(fields) - 1
            word, *fields = line.rsplit(" ", columns)  # from the right: GloVe's words have spaces
            try:
                row = np.array(fields, dtype=np.float32)
            except ValueError:
                row = None
            if row is None or not len(row) == columns > 0:
                raise ValueError(
                    f"{path}, line {number}: expected a word and {columns or 'its'} numbers, not "
                    f"{line[:60]!r}"
                )
            words.append(word)
            rows.append(row)
    if not rows or promised not in (None, len(rows)):
        instead = "" if promised is None else f" instead of the {promised} that its first line says"
        raise ValueError(f"{path} has {len(rows)} vectors{instead}")
    return words, np.stack(rows)


def _read_binary(path: Path) -> tuple[list[str], Vectors]:
    """word2vec's own format: V and H, then a word, a space and H float32 numbers for each row."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        head = content[:64].split(b"\n")[0]
        if not head.replace(b" ", b"").isdigit():
            raise ValueError(
                f"{path} is fastText's own format, with subwords: take its .vec, or convert it "
                "with gensim: load_facebook_vectors(FILE).save_word2vec_format('vectors.vec')"
            )
        rows, columns = map(int, head.split())
        if rows * columns * 4 > len(content) or not rows * columns:
            raise ValueError(f"{path} is too short for the {rows} x {columns} vectors it promises")
        matrix, words, start = np.empty((rows, columns), np.float32), [], len(head) + 1
        for row in range(rows):
            end = content.find(b" ", start)
            numbers = content[end + 1 : end + 1 + 4 * columns]
            if end < 0 or len(numbers) < 4 * columns:
                raise ValueError(f"{path} ends within row {row} of {rows}")
            matrix[row] = np.frombuffer(numbers, "<f4")
            words.append(content[start:end].lstrip(b"\n").decode(errors="replace"))
            start = end + 1 + 4 * columns
    return words, matrix


def _open_gguf(path: Path) -> Weights:
    """The tensors of a model for llama.cpp; what is quantised is expanded to float32."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path} needs a package: pip install gguf")
    gguf: Any = importlib.import_module("gguf")
    with readable(f"{path}: not a whole GGUF file"):
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        fields = {name: field.contents() for name, field in reader.fields.items() if name in _ASKED}

    def read(name: str) -> torch.Tensor:
        kind = tensors[name].tensor_type
        if kind.name not in ("F32", "F16", "F64", "BF16"):
            text = f"{path}: {name} is quantised ({kind.name}), measured as llama.cpp expands it"
            warnings.warn(printable(text), stacklevel=2)
        with readable(f"{path}: {name} cannot be read"):
            return torch.from_numpy(np.array(gguf.dequantize(tensors[name].data, kind)))

    # Their dimensions are in the opposite order.
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    # Without a head of its own, a model that writes text uses its input embeddings.
    writes = "bert" not in str(fields.get("general.architecture"))
    config = {"architectures": ["CausalLM"] if writes else []}
    return Weights(str(path), shapes, read, config, fields.get("tokenizer.ggml.tokens"))


_ASKED = ("general.architecture", "tokenizer.ggml.tokens")
