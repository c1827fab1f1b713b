"""What users bring is opened in one room, which waits for nothing."""

import ast
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

import coupled_adam
from coupled_adam import inputs

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
