"""Files that come from elsewhere, damaged at random: each is read, or refused in one line.

``make test-slow`` tries ten times as many as ``make test``, and ``--hypothesis-seed=N`` others.
"""

import ast
import gzip
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import coupled_adam
from coupled_adam.embeddings import load_embeddings, read_word_similarity
from coupled_adam.errors import UsageError
from coupled_adam.text.documents import documents

WEIGHTS = {"wte.weight": torch.randn(6, 4), "bias": torch.ones(4)}


def written(write, content, **options):
    file = io.BytesIO()
    write(*content(file), **options)
    return file.getvalue()


def load(path):
    for entry in load_embeddings(path):
        assert entry.matrix.ndim == 2
        assert entry.matrix.numel() * entry.matrix.element_size() <= path.stat().st_size
        entry.matrix.double().sum()  # all of it is there


def load_words(path):
    (found,) = read_word_similarity(path).values()
    assert len(found.pairs) == len(found.ratings) > 0
    assert np.isfinite(found.ratings).all()


def load_documents(path):
    found = [*documents(path)]
    assert found
    assert all(document.strip() for document in found)


ROWS = b"".join(b'{"text": "row %d", "id": 1}\n' % i for i in range(5))
FILES = {
    "a.safetensors": (save(WEIGHTS), load, ValueError),
    "a.npy": (written(np.save, lambda file: (file, np.ones((5, 3)))), load, ValueError),
    "a.pt": (written(torch.save, lambda file: ({"model": WEIGHTS}, file)), load, ValueError),
    "legacy.pt": (
        written(
            torch.save,
            lambda file: (WEIGHTS, file),
            _use_new_zipfile_serialization=False,
        ),
        load,
        ValueError,
    ),
    "SimLex-999.txt": (
        b"near\tclose\tA\t8.5\t2.1\t2.2\t1\t3.0\t1\t0.5\r\n",
        load_words,
        (ValueError, OSError),  # the latter for a file of another format
    ),
    "a.txt": (b"a line\n\nand another\n", load_documents, UsageError),
    "a.jsonl": (ROWS, load_documents, UsageError),
    "a.csv": (b'id,text\n1,"a, b"\n2,c\n', load_documents, UsageError),
    "a.txt.gz": (gzip.compress(ROWS, mtime=0), load_documents, UsageError),
}


@st.composite
def damaged(draw, whole):
    """A copy of bytes with a few of them changed, removed, added, repeated, or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 16))
        match draw(st.sampled_from(["change", "number", "remove", "insert", "repeat", "cut"])):
            case "change":
                content[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "number":  # as of a length that is promised
                number = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
                content[at : at + 8] = number.to_bytes(8, draw(st.sampled_from(["little", "big"])))
            case "remove":
                del content[at : at + length]
            case "insert":
                content[at:at] = draw(st.binary(max_size=16))
            case "repeat":
                content[at:at] = content[max(at - length, 0) : at] * draw(st.integers(1, 50))
            case "cut":
                del content[at:]
    return bytes(content)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(data=st.data())
def test_damaged_files(name, data, tmp_path_factory):
    """No other error, and nothing but numbers that are in the file."""
    whole, read, error = FILES[name]
    path = tmp_path_factory.getbasetemp() / "fuzz" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data.draw(damaged(whole) | st.binary()))
    message = str(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)
    except error as refused:
        message = str(refused).strip()
    assert str(path) in message
    assert "\n" not in message


def test_nothing_in_the_source_executes_data():
    """No unpickling, evaluating, or loading of code, but by the classes that are named here."""
    forbidden = {"pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load"}
    forbidden |= {"eval", "exec", "os.system", "torch.jit.load"}
    allowed_bases = {"yaml.SafeLoader"}
    source = Path(coupled_adam.__file__).parent
    calls = 0
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                risky = re.compile("ickler|Loader|Constructor")
                assert {base for base in bases if risky.search(base)} <= allowed_bases
            if not isinstance(node, ast.Call):
                continue
            calls += 1
            name = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert name not in forbidden, where
            assert given.get("allow_pickle", "False") == "False", where
            if name.endswith("from_pretrained"):
                assert given.get("trust_remote_code") == "False", where
            assert given.get("shell", "False") == "False", where
            if name == "torch.load":
                assert given.get("weights_only") == "True", where
            if name == "yaml.load":
                assert ast.unparse(node.args[1]) == "_Loader", where
            if name.endswith("from_pretrained") and "AutoTokenizer" not in name:
                assert given.get("use_safetensors") == "True", where
    assert calls > 1000
