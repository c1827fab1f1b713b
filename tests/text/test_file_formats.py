"""What a file is shows in its first bytes: what libraries write is neither text nor ids."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import struct
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import feather, ipc, parquet
from safetensors.torch import save_file

from coupled_adam.errors import UsageError
from coupled_adam.text.documents import documents
from coupled_adam.text.token_files import token_file

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = b"A text of several words.\n" * 99
IDS = (np.arange(2000) * 31 % 50_257).astype("<u2")
TABLE = pa.table({"text": ["a", "b"]})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 200\n".format("ab" * 32)


def add_to_tar(path):
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


def add_to_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", TEXT)


def image(kind):
    return lambda path: Image.new("RGB", (8, 8)).save(path, kind)


def save_database(path):
    connection = sqlite3.connect(path)
    connection.execute("create table texts (text)")
    connection.commit()
    connection.close()


def save_stream(path):
    with path.open("wb") as file, ipc.new_stream(file, TABLE.schema) as stream:
        stream.write_table(TABLE)


def save_npz(path):
    with path.open("wb") as file:
        np.savez(file, a=IDS)


def llm_c(magic, version):
    return struct.pack("<256i", magic, version, len(IDS), *[0] * 253) + IDS.tobytes()


def contents(content):
    return lambda path: path.write_bytes(content)


# How each is written, and what is said of it.
FILES = {
    "pointer": (contents(POINTER.encode()), "a pointer of Git LFS.*: git lfs pull"),
    "gzip": (contents(gzip.compress(TEXT)), "compressed by gzip: unpack it"),
    "bzip2": (contents(bz2.compress(TEXT)), "compressed by bzip2"),
    "xz": (contents(lzma.compress(TEXT)), "compressed by xz"),
    "zstd": (contents(zstd.compress(TEXT)), "compressed by zstd"),
    "zip": (add_to_zip, "a zip archive: unpack it"),
    "tar": (add_to_tar, "a tar archive: unpack it"),
    "npz": (save_npz, "a .npz of NumPy"),
    "torch": (lambda path: torch.save({"a": torch.zeros(9)}, path), "a zip archive"),
    "torch before 1.6": (
        lambda path: torch.save(torch.zeros(9), path, _use_new_zipfile_serialization=False),
        "a pickle",
    ),
    "pickle": (contents(pickle.dumps(TEXT)), "a pickle"),
    "safetensors": (lambda path: save_file({"a": torch.zeros(9)}, path), "a safetensors file"),
    "Arrow": (
        lambda path: feather.write_feather(TABLE, path),
        "an Arrow file: write it",
    ),
    "Arrow stream": (save_stream, "an Arrow file"),
    "SQLite": (save_database, "an SQLite database"),
    **{kind: (image(kind), "an image") for kind in ("PNG", "JPEG", "GIF", "WEBP")},
    "PDF": (image("PDF"), "a PDF: save its text"),
    "GGUF": (contents(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)), "a GGUF file"),
    "HDF5": (contents(b"\x89HDF\r\n\x1a\n" + bytes(88)), "an HDF5 file"),
    "Lit-LLaMA": (
        contents(b"LITPKDS" + struct.pack("<QBQ", 1, 8, 2000) + IDS.tobytes()),
        "packed tokens of Lit-LLaMA: write the ids that follow",
    ),
    "Megatron": (contents(b"MMIDIDX\0\0" + bytes(99)), "an index of Megatron-LM: name the .bin"),
    "HellaSwag of llm.c": (contents(llm_c(20240522, 1)), "a file of llm.c"),
    "a model of llm.c": (contents(llm_c(20240326, 3)), "a file of llm.c"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_format_is_named_by_both_readers(name, tmp_path):
    """Whatever the file's name says; what is packed into a text's compression is seen, too."""
    write, said = FILES[name]
    path = tmp_path / "train.bin"
    write(path)
    with pytest.raises(UsageError, match=rf"train\.bin is {said}"):
        token_file(path, 50_257)
    for other in ("corpus.txt", "corpus", "corpus.jsonl"):
        (tmp_path / other).write_bytes(path.read_bytes())
        with pytest.raises(UsageError, match=rf"{other}: it is {said}"):
            list(documents(tmp_path / other))
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"corpus\.txt\.gz: it is {said}"):
        list(documents(tmp_path / "corpus.txt.gz"))


ARRAY = json.dumps([{"text": "a"}, {"text": "b"}], indent=1)
JSON = {
    "lines": '{"text": "a b c"}\n{"text": "d"}\n',
    "array": ARRAY,
    "object": json.dumps({"cells": [{"source": ["a"]}]}, indent=1),
    "array of texts": json.dumps(["the first text", "the second text"], indent=1),
}


@pytest.mark.parametrize("name", JSON)
def test_json_is_no_plain_text(name, tmp_path):
    """On one line or on several; the name may say that it is meant as text."""
    content = JSON[name].encode()
    for file in ("corpus", "part-00000", "corpus.ipynb", "a.jl", "a.jsonl.bak", "a.jsonlines.gz"):
        (tmp_path / file).write_bytes(gzip.compress(content) if "gz" in file else content)
        for separator in (None, "e"):
            with pytest.raises(UsageError, match=rf"{file}: it begins with JSON: rename it to end"):
                list(documents(tmp_path / file, separator))
    (tmp_path / "a.txt").write_text(JSON[name])
    assert list(documents(tmp_path / "a.txt"))
    (tmp_path / "a.json").write_text(JSON[name])
    if name != "lines":
        with pytest.raises(UsageError, match=r"line 1 is not .* Each row must be an object in"):
            list(documents(tmp_path / "a.json"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a"])
def test_utf16_is_named(encoding, name, tmp_path):
    (tmp_path / name).write_bytes(("text\n" + "some words\n" * 99).encode(encoding))
    with pytest.raises(UsageError, match=f"{name}: it is UTF-16: iconv"):
        list(documents(tmp_path / name))


@pytest.mark.parametrize(
    "text", [TEXT.decode(), ARRAY * 9, "Мороз и солнце, день чудесный. " * 9, "1,2,3\r\n" * 20]
)
def test_text_is_no_ids(text, tmp_path):
    (tmp_path / "train.bin").write_text(text + " " * (len(text.encode()) % 2))
    with pytest.raises(UsageError, match=r"train\.bin is text, and not token ids"):
        token_file(tmp_path / "train.bin", 50_257)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab_size", [300, 32_000, 50_257, 65_536])
def test_ids_are_ids(vocab_size, seed, tmp_path):
    """Of uniform draws, and of a few that are frequent, none looks like anything else."""
    draws = np.random.default_rng(seed)
    for ids in (draws.integers(0, vocab_size, 500), draws.zipf(1.3, 500) % vocab_size):
        ids.astype("<u2").tofile(tmp_path / "train.bin")
        assert token_file(tmp_path / "train.bin", vocab_size).length == 500


@pytest.mark.parametrize("name", ["a.parquet", "part-00000", "0f3c"])
def test_parquet_by_any_name(name, tmp_path):
    parquet.write_table(TABLE, tmp_path / name)
    assert list(documents(tmp_path / name)) == ["a", "b"]
    (tmp_path / "text.parquet").write_bytes(TEXT)
    with pytest.raises(UsageError, match=r"text\.parquet: it is no Parquet file"):
        list(documents(tmp_path / "text.parquet"))
