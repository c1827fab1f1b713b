"""What users bring is opened in one room, which waits for nothing and builds nothing too large."""

import ast
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import coupled_adam
import token_models
from coupled_adam import cli, inputs
from coupled_adam.errors import UsageError

SOURCE = Path(coupled_adam.__file__).parent
# Files of Python, of this package and of the system, which users do not bring.
OWN = {"references.py", "python_documentation.py", "environment.py", "recipe.py", "terminal.py"}


def reading_calls(path):
    """The calls of a module that open a file for reading, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        name = name if name == "os.open" else name.rpartition(".")[2]  # which locks
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        writes = any(isinstance(mode, str) and re.match("[wa]b?$", mode) for mode in modes)
        if name in ("read_text", "read_bytes", "safe_open") or (name == "open" and not writes):
            yield ast.unparse(node)


def test_files_have_one_opener():
    """Whoever opens a file asks whether it is a regular one; and texts are read by its room."""
    rooms = [path for path in SOURCE.rglob("*.py") if "integrations" not in path.parts]
    for path in rooms:
        if path.name not in OWN and path != SOURCE / "inputs.py":
            for call in reading_calls(path):
                assert "regular(" in call or call.startswith("read_text("), f"{path}: {call}"


@pytest.fixture
def kinds(tmp_path):
    """A file of each kind that has no end, or is no whole file of numbers."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**28 + 1)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", "it is a pipe or a device"),
        ("zero", "it is a pipe or a device"),
        ("large", "it has 268,435,457 bytes, and may have"),
    ],
)
def test_texts_have_an_end(name, message, kinds):
    with pytest.raises(OSError, match=message):
        inputs.read_text(kinds / name)
    with pytest.raises(UsageError, match=rf"{name} cannot be read \(.*{message}"):
        inputs.read_own(kinds / name, str)


def test_arrays_are_numbers(tmp_path):
    """Mapped, and whole: no archive, no pickle, none that is longer than its file."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(6))
    whole = path.read_bytes()
    assert inputs.read_array(path).tolist() == [0, 1, 2, 3, 4, 5]
    np.save(path, np.array([{}, "x"], object))
    pickled = path.read_bytes()
    np.save(path, np.array(["x"]))
    texts = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", whole)
    huge = whole.replace(b"(6,), ", b"(6" + 5 * b"0" + b",), ")
    for content in (pickled, texts, path.read_bytes(), whole[:-1], whole[:40], b"", huge):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a \.npy file of numbers"):
            inputs.read_array(path)


def test_a_model_fits_into_memory():
    """While it is built, before its parameters have memory."""
    config = GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=60, n_positions=8)
    with inputs.bounded_model(), torch.device("meta"):
        GPT2LMHeadModel(config)
    shape = r"takes .* GB or more, .*weight has the shape \[1000000"
    with pytest.raises(ValueError, match=shape), inputs.bounded_model(), torch.device("meta"):
        nn.Linear(10**6, 10**9)
    with inputs.bounded_model(in_memory=False), torch.device("meta"):
        nn.Linear(10**6, 10**9)  # as of a model that many machines share
    nn.Linear(3, 3)  # outside of the block nothing is counted


def test_a_tokenizer_that_panics_is_one_line(tmp_path, capsys):
    """Rust's PanicException is no Exception: the regular expression goes back too often."""
    model = token_models.gpt2(0, vocab_size=60)
    model.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a" * 5000 + "b " + "ab " * 3000)
    line = ["analyze", tmp_path / "model", "--tokenizer", tmp_path / "tokenizer.json"]
    assert cli.main([*map(str, line), "--text", str(tmp_path / "text.txt")]) == 2
    assert "error: a tokenizer cannot process the text: " in capsys.readouterr().err
