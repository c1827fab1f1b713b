"""Readers of files that come from elsewhere, given damaged and made-up ones.

Each reads, or raises its documented error with the name of the file in one line: no other
exception, no endless loop, no memory for what a file only promises.

``make test`` tries some of each kind, ``make test-slow`` ten times as many.
``COUPLED_ADAM_FUZZ_EXAMPLES=20000 pytest tests/test_fuzz.py -k documents`` tries for long, and
``--hypothesis-seed=N`` tries others.
"""

import ast
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import coupled_adam
from coupled_adam.embeddings import load_embeddings, read_word_similarity
from coupled_adam.errors import UsageError
from coupled_adam.lab.data.source import open_source
from coupled_adam.lab.sections import Data
from coupled_adam.text.documents import documents
from coupled_adam.text.token_files import Tokens

EXAMPLES = 0.5 * settings.default.max_examples
EXAMPLES = float(os.environ.get("COUPLED_ADAM_FUZZ_EXAMPLES", EXAMPLES))
HEADROOM = 2**31  # bytes of memory that a reader may take, besides what the process has
SECONDS = 60  # for one input

pytestmark = pytest.mark.fuzz


def fuzz(*strategies):
    """As given; the folder of a test is used by all of its examples, one after the other."""
    return lambda test: settings(
        max_examples=max(1, round(EXAMPLES)),
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        database=None,
    )(given(*strategies)(test))


class Hang(BaseException):
    """That no reader catches."""


def hang(*_):
    raise Hang


@contextlib.contextmanager
def reading(path, *errors):
    """Reading succeeds, or raises one of these errors, whose message names the path."""
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch's own, of what it finds in a file.
            warnings.filterwarnings("ignore", module="torch")
            yield
        event("read")
    except errors as error:
        event("refused")
        message = str(error)
        assert str(path) in message, message
        assert "\n" not in message.strip(), message
    finally:
        signal.alarm(0)


@pytest.fixture(autouse=True)
def memory():
    """No more address space than the process has, and some."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


NUMBERS = [
    number.to_bytes(size, order, signed=number < 0)
    for size in (1, 2, 4, 8)
    for order in ("little", "big")
    for number in (0, 1, -1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size) - 1, 2 ** (4 * size))
]


@st.composite
def mutated(draw, whole):
    """A copy of bytes with a few of them changed, removed, added, repeated, or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 16))
        match draw(st.sampled_from(["bytes", "number", "remove", "insert", "repeat", "cut"])):
            case "bytes":
                content[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "number":
                number = draw(st.sampled_from(NUMBERS))
                content[at : at + len(number)] = number
            case "remove":
                del content[at : at + length]
            case "insert":
                content[at:at] = draw(st.binary(max_size=16))
            case "repeat":
                content[at:at] = content[max(at - length, 0) : at] * draw(st.integers(1, 50))
            case "cut":
                del content[at:]
    return bytes(content)


def token_bytes(header, tail):
    return np.array(header, "<i8").astype("<i4").tobytes() + tail


TOKEN_FILES = st.binary(max_size=64) | st.builds(
    token_bytes,
    st.tuples(
        st.sampled_from([20240520, 20240801, 20240522, 0]) | st.integers(-(2**31), 2**31 - 1),
        st.sampled_from([1, 7]) | st.integers(-3, 9),
        st.integers(-1, 40) | st.sampled_from([2**31 - 1, -(2**31)]),
    ),
    st.integers(0, 80).map(lambda n: bytes(1000 + n)) | st.binary(max_size=40),
)


@fuzz(
    TOKEN_FILES,
    TOKEN_FILES,
    st.sampled_from([None, "uint16", "uint32", "int64"]),
    st.none() | st.integers(1, 50),
)
def test_token_files(folder, train, valid, dtype, limit):
    place = folder / "tokens"
    place.mkdir(exist_ok=True)
    (place / "train.bin").write_bytes(train)
    (place / "val.bin").write_bytes(valid)
    with reading(place, UsageError):
        data = Data(tokens=str(place), token_dtype=dtype, max_tokens=limit)
        for split, files in open_source(data, 300).files.items():
            tokens = Tokens(files, place)
            assert len(tokens[:]) == len(tokens) <= len(train if split == "train" else valid) // 2


LINES = {  # one of each published format
    "MEN_dataset_lemma_form_full": "moon-n night-n 41.000000\n",
    "rw.txt": "unsaid\ttold\t4.25" + 10 * "\t4" + "\n",
    "SimLex-999.txt": "near\tclose\tA\t8.5\t2.1\t2.2\t1\t3.0\t1\t0.5\r\n",
    "wordsim_similarity_goldstandard.txt": "Paris\tLondon\t7.30\n",
    "wordsim_relatedness_goldstandard.txt": "boat\tsea\t8.00\n",
}


@fuzz(
    st.sampled_from(sorted(LINES)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(
                st.just(LINES[name].encode()) | mutated(LINES[name].encode()) | st.binary(),
                max_size=4,
            ).map(b"".join),
        )
    )
)
def test_word_similarity_files(folder, case):
    name, content = case
    place = folder / "words"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / name).write_bytes(content)
    with reading(place / name, ValueError):
        (found,) = read_word_similarity(place).values()
        assert len(found.pairs) == len(found.ratings) > 0
        assert np.isfinite(found.ratings).all()
        assert all(first and second for first, second in found.pairs)


WEIGHTS = {"wte.weight": torch.randn(6, 4), "bias": torch.ones(4)}
STORED = save(WEIGHTS)


def load(path):
    for entry in load_embeddings(path):
        matrix = entry.matrix
        assert matrix.ndim == 2
        assert matrix.is_floating_point()
        assert matrix.numel() * matrix.element_size() <= size_of(Path(path))
        matrix.double().sum()  # all of it is there


def size_of(path):
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in paths if file.is_file())


@fuzz(mutated(STORED) | st.binary())
def test_safetensors(folder, content):
    path = folder / "one.safetensors"
    path.write_bytes(content)
    with reading(path, ValueError):
        load(path)


def npy(matrix):
    file = io.BytesIO()
    np.save(file, matrix)
    return file.getvalue()


@fuzz(mutated(npy(np.ones((5, 3), np.float32))) | st.binary())
def test_arrays(folder, content):
    path = folder / "one.npy"
    path.write_bytes(content)
    with reading(path, ValueError):
        load(path)


def archive(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def with_pickle(pickled):
    """A whole archive around a pickle that is not."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ARCHIVES[0])) as source, zipfile.ZipFile(target, "w") as new:
        for name in source.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


CONTENT = {"model": WEIGHTS, "optimizer": {"state": {0: WEIGHTS["bias"]}}, "step": 3}
ARCHIVES = [
    archive(CONTENT),
    archive(CONTENT, _use_new_zipfile_serialization=False),
]
with zipfile.ZipFile(io.BytesIO(ARCHIVES[0])) as whole:
    PICKLE = whole.read(next(name for name in whole.namelist() if name.endswith("data.pkl")))


@fuzz(st.one_of(*map(mutated, ARCHIVES), mutated(PICKLE).map(with_pickle), st.binary()))
def test_checkpoints(folder, content):
    path = folder / "one.pt"
    path.write_bytes(content)
    with reading(path, ValueError):
        load(path)


ROWS = "".join(json.dumps({"text": f"row {i}", "id": i}) + "\n" for i in range(5)).encode()


@fuzz(
    st.one_of(
        st.tuples(st.just("a.txt"), st.binary()),
        st.tuples(st.just("a.jsonl"), mutated(ROWS)),
        st.tuples(st.just("a.json"), mutated(b'[{"text": "a"}, {"text": "b", "c": 1}]')),
        st.tuples(st.just("a.csv"), mutated(b'id,text\n1,"a, b"\n2,c\n')),
        st.tuples(st.just("a.txt.gz"), mutated(gzip.compress(ROWS, mtime=0))),
    )
)
def test_documents(folder, case):
    name, content = case
    path = folder / name
    path.write_bytes(content)
    with reading(path, UsageError):
        found = [*documents(path)]
        assert found
        assert all(document.strip() for document in found)


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
