"""Readers of files that come from elsewhere, given damaged and made-up ones.

Each reads, or raises its documented error with the name of the file in one line: no other
exception, no endless loop, no memory for what a file only promises, no file elsewhere.

``make test`` tries some of each kind, ``make test-slow`` ten times as many.
``COUPLED_ADAM_FUZZ_EXAMPLES=20000 pytest tests/test_fuzz.py -k recipes`` tries for long, and
``--hypothesis-seed=N`` tries others.
"""

import ast
import contextlib
import copy
import gzip
import io
import json
import os
import re
import shutil
import signal
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save, save_file

import coupled_adam
from coupled_adam.embeddings import load_embeddings, read_word_similarity
from coupled_adam.embeddings.analysis import Source, analyze_model
from coupled_adam.embeddings.analysis_tables import analyses_csv, analyses_json
from coupled_adam.embeddings.similarity import _FORMATS
from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.recipe import (
    load_recipe,
    override,
    parse_recipe,
    recipe_names,
)
from coupled_adam.lab.reporting.reading import read_runs
from coupled_adam.lab.reporting.report import report
from coupled_adam.lab.safe_yaml import read_yaml
from coupled_adam.text.documents import open_documents
from coupled_adam.text.source import Data
from coupled_adam.text.token_files import Tokens, find_token_files
from lab.test_reporting import make_run

EXAMPLES = 0.5 * settings.default.max_examples
EXAMPLES = float(os.environ.get("COUPLED_ADAM_FUZZ_EXAMPLES", EXAMPLES))
HEADROOM = 2**31  # bytes of memory that a reader may take, besides what the process has
SECONDS = 60  # for one input
SECRET = "secret-of-another"  # a folder that no reader is given
SMALL = load_recipe("tiny")

pytestmark = pytest.mark.fuzz


def fuzz(*strategies, share=1.0):
    """As given; the folder of a test is used by all of its examples, one after the other."""
    return lambda test: settings(
        max_examples=max(1, round(EXAMPLES * share)),
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        database=None,
    )(given(*strategies)(test))


class Hang(BaseException):
    """That no reader catches."""


opened: list[str] = []
sys.addaudithook(lambda what, args: opened.append(str(args[0])) if what == "open" else None)


def hang(*_):
    raise Hang


@contextlib.contextmanager
def reading(path, *errors):
    """Reading succeeds, or raises one of these errors, whose message names the path."""
    opened.clear()
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
    assert not [name for name in opened if SECRET in name]


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
    """A folder to read from, beside one that holds a secret of each kind."""
    base = tmp_path_factory.mktemp("fuzz")
    secret = base / SECRET
    secret.mkdir()
    save_file({"wte.weight": torch.ones(3, 2)}, secret / "model.safetensors")
    (base / "read").mkdir()
    return base / "read"


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([255, 2**16, 2**31, 2**32, 2**40, 2**63, -(2**63), 2**64, 10**30, 10**400]),
    st.floats(),
    st.sampled_from(["", "\0", "\ud800", "a\nb", "\x1b[31m", "[/x]", "[bold]", "$\\frac{", "=1+1"]),
    st.sampled_from([f"../{SECRET}/model.safetensors", f"/tmp/{SECRET}", "/dev/zero", "..", "."]),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [None], [1.5, "a"], {"a": {}}, {"class_path": "os.system"}]),
)


@st.composite
def changed(draw, value):
    """A copy of nested lists and dicts in which a few places hold something odd, or nothing."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        place, key = None, None
        inner = value
        while isinstance(inner, dict | list) and inner:
            place = inner
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if draw(st.integers(0, 3)) == 0:
                break
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if place is None or action == "replace":
            odd = copy.deepcopy(draw(ODD))
            if place is None:
                return odd
            place[key] = odd
        elif action == "remove":
            del place[key]
        elif isinstance(place, dict):
            place[draw(st.text(max_size=5) | st.sampled_from(sorted(place)))] = copy.deepcopy(
                draw(ODD)
            )
        else:
            place.append(copy.deepcopy(draw(ODD)))
    return value


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


def as_json(value):
    return json.dumps(value).encode()


def mixed(value):
    """The JSON of a value, changed in its structure or in its text."""
    return changed(value).map(as_json) | mutated(as_json(value))


def check_recipe(recipe):
    """It says what it is, and all that becomes a folder is a name."""
    assert recipe.steps >= 1
    assert recipe.warmup_steps >= 0
    assert parse_recipe(yaml.safe_dump(recipe.to_dict()), "again") == recipe
    for name in (recipe.name, *recipe.arms):
        assert Path(name).name == name
        assert len(os.fsencode(f"{name}-seed-{max(recipe.seeds)}")) < 256
    for arm in recipe.arms:
        assert recipe.arm(arm).label.isprintable()


TEXTS = [yaml.safe_dump(load_recipe(name).to_dict()) for name in ("tiny", "tiny-sgd")]
RECIPES = st.one_of(
    st.text(),
    st.text(alphabet="[]{}&*!|>-?:,'\"#%@ \nabc<01.~"),
    *(mutated(text.encode()).map(lambda b: b.decode(errors="replace")) for text in TEXTS),
    *(changed(yaml.safe_load(t)).map(lambda v: yaml.safe_dump(v, sort_keys=False)) for t in TEXTS),
)


@fuzz(RECIPES)
def test_recipes(text):
    with reading("the source", UsageError):
        check_recipe(parse_recipe(text, "the source"))


@fuzz(RECIPES | st.binary(), share=0.5)
def test_recipe_files(folder, content):
    path = folder / "recipe.yaml"
    data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    path.write_bytes(b"extends: tiny\n" + data)
    with reading(path, UsageError):
        check_recipe(load_recipe(str(path)))


def keys(value, prefix=""):
    for key, inner in value.items():
        yield prefix + key
        if isinstance(inner, dict):
            yield from keys(inner, f"{prefix}{key}.")


KEYS = st.sampled_from(list(keys(SMALL.to_dict()))) | st.text(max_size=5)


@fuzz(
    st.tuples(
        st.lists(KEYS, min_size=1, max_size=2).map(".".join),
        ODD.map(lambda v: yaml.safe_dump(v).removesuffix("...\n")) | st.text(max_size=20),
    )
)
def test_overrides(pair):
    key, text = pair
    with reading("", UsageError):
        check_recipe(override(SMALL, {key: read_yaml(text, key)}))


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
    st.sampled_from([None, "uint16", "uint32"]),
    st.none() | st.integers(1, 50),
)
def test_token_files(folder, train, valid, dtype, limit):
    place = folder / "tokens"
    place.mkdir(exist_ok=True)
    (place / "train.bin").write_bytes(train)
    (place / "val.bin").write_bytes(valid)
    with reading(place, UsageError):
        data = Data(tokens=str(place), token_dtype=dtype, max_tokens=limit)
        for split, files in find_token_files(data, 300).items():
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
        (highest,) = (f.highest for f in _FORMATS.values() if f.file == name)
        assert len(found.pairs) == len(found.ratings) > 0
        assert all(0 <= rating <= highest for rating in found.ratings)
        assert all(first and second for first, second in found.pairs)


WEIGHTS = {"wte.weight": torch.randn(6, 4), "bias": torch.ones(4)}
STORED = save(WEIGHTS)
ENTRY = {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}


def safetensors_of(header):
    text = header if isinstance(header, bytes) else as_json(header)
    return len(text).to_bytes(8, "little") + text + bytes(96)


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


@fuzz(
    mutated(STORED)
    | st.binary()
    | st.one_of(
        mixed({"wte.weight": ENTRY, "__metadata__": {"format": "pt"}}),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F4", "F8_E4M3", "F8_E8M0", "BF16", "I64", "C64", "U8"]),
                "shape": st.lists(st.integers(-1, 10) | st.just(2**40), max_size=4),
                "data_offsets": st.tuples(st.integers(-1, 96), st.integers(0, 97)),
            }
        ).map(lambda entry: {"wte.weight": entry}),
    ).map(safetensors_of)
)
def test_safetensors(folder, content):
    path = folder / "one.safetensors"
    path.write_bytes(content)
    with reading(path, ValueError):
        load(path)


def npy_of(descr, shape, order):
    """A header that says so, whatever that is, and some zeros."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape!r}}}"
    padded = header.encode(errors="replace").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\0" + len(padded).to_bytes(2, "little") + padded + bytes(60)


def npy(matrix):
    file = io.BytesIO()
    np.save(file, matrix)
    return file.getvalue()


@fuzz(
    mutated(npy(np.ones((5, 3), np.float32)))
    | st.binary()
    | st.builds(
        npy_of,
        st.sampled_from(["<f4", ">f2", "|O", "<c8", "<f16", "<U9", [("a", "<f4", (9, 9))]])
        | st.text(max_size=4),
        st.tuples(st.integers(-2, 5) | st.just(2**40), st.integers(-2, 5) | st.just(2**62)) | ODD,
        st.booleans(),
    )
)
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


@pytest.fixture(scope="module")
def distributed(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(WEIGHTS, checkpoint_id=folder / "dcp")
    return {path.name: path.read_bytes() for path in (folder / "dcp").iterdir()}


@fuzz(st.data())
def test_distributed_checkpoints(folder, distributed, data):
    name = data.draw(st.sampled_from(sorted(distributed)))
    for file, content in distributed.items():
        (folder / "dcp" / file).write_bytes(content)
    (folder / "dcp" / name).write_bytes(data.draw(mutated(distributed[name])))
    with reading(folder / "dcp", ValueError):
        load(folder / "dcp")


CONFIG = {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True, "vocab_size": 6}
INDEX = {"metadata": {}, "weight_map": {"wte.weight": "a.safetensors", "bias": "a.safetensors"}}


@fuzz(mixed(CONFIG), st.just(as_json(INDEX)) | mixed(INDEX), st.booleans())
def test_model_folders(folder, config, index, whole):
    place = folder / "model"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "config.json").write_bytes(config)
    if not whole:
        (place / "model.safetensors.index.json").write_bytes(index)
    (place / ("model" if whole else "a")).with_suffix(".safetensors").write_bytes(STORED)
    with reading(place, UsageError):
        analyses = analyze_model(str(place), Source())
        json.loads(analyses_json(analyses))
        assert not any(
            line.startswith(("=", "+", "@")) for line in analyses_csv(analyses).split(",")
        )


@pytest.fixture(scope="module")
def runs(folder):
    """A comparison of seconds, and the content of its files."""
    small = override(SMALL, {"model.vocab_size": 300, "model.n_embd": 8, "model.n_layer": 1})
    for arm, loss in (("adamw", 3.0), ("coupled_adam", 2.5)):
        make_run(folder / "runs", small, arm, 1, loss)
    paths = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in sorted(paths)}


@st.composite
def damaged(draw, files):
    """A file of the first run, and what it is to hold."""
    run = next(iter(files)).parent
    names = ("config.yaml", "evaluation.json", "metrics.jsonl", "environment.json")
    name = draw(st.sampled_from(names) | st.sampled_from(sorted(map(str, files))))
    path = run / name
    whole = files[path]
    content = mutated(whole)
    if path.suffix in (".json", ".yaml"):
        content |= changed(yaml.safe_load(whole)).map(as_json)
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in whole.splitlines()]
        content |= changed(lines).map(
            lambda v: b"\n".join(map(as_json, v if isinstance(v, list) else [v]))
        )
    elif path.suffix == ".npy":
        numbers = st.lists(st.floats() | st.integers(-5, 2**62), min_size=1, max_size=4)
        content |= numbers.map(lambda v: npy(np.resize(np.array(v), 300)))
    return path, draw(content)


@contextlib.contextmanager
def holding(files, path, content):
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(files[path])


@fuzz(st.data(), share=0.2)
def test_run_folders(folder, runs, data):
    path, content = data.draw(damaged(runs))
    with holding(runs, path, content), reading(folder / "runs", UsageError):
        finished, left_out = read_runs([folder / "runs"])
        assert len(finished) + len(left_out) in (1, 2)
        for run in finished:
            assert run.parameters >= 0
            assert run.label
            for array in (run.embeddings(), run.probabilities(), *run.second_moments().values()):
                assert np.isfinite(array).all()


@pytest.mark.pixels
@fuzz(st.data(), share=0.005)
def test_reports(folder, runs, data):
    """Of all that can be read: the whole report can be made."""
    path, content = data.draw(damaged(runs))
    out = folder / "report"
    with holding(runs, path, content), reading(folder / "runs", UsageError):
        table = report([folder / "runs"], out)
        Console(file=io.StringIO()).print(table)
        page = (out / "index.html").read_text()
        assert "<script" not in page
        json.loads((out / "results.json").read_text())
    assert {p.name for p in folder.parent.iterdir()} == {"read", SECRET}


@fuzz(st.data(), share=0.1)
def test_evaluations(folder, runs, data):
    path = next(path for path in runs if path.name == "evaluation.json")
    whole = {**json.loads(runs[path]), "test_batches": None}
    content = data.draw(mixed(whole))

    def corpus():
        raise UsageError(f"{path}: the test loss is gone")

    with holding(runs, path, content), reading(path.parent, UsageError):
        assert "test_loss" in evaluate_run(path.parent, corpus)


ROWS = "".join(json.dumps({"text": f"row {i}", "id": i}) + "\n" for i in range(5)).encode()


@fuzz(
    st.one_of(
        st.tuples(st.just("a.txt"), st.binary()),
        st.tuples(st.just("a.jsonl"), mutated(ROWS)),
        st.tuples(st.just("a.json"), mixed([{"text": "a"}, {"text": "b", "c": 1}])),
        st.tuples(st.just("a.txt.gz"), mutated(gzip.compress(ROWS, mtime=0))),
    )
)
def test_documents(folder, case):
    name, content = case
    path = folder / name
    path.write_bytes(content)
    with reading(path, UsageError):
        documents = list(open_documents(Data(text=str(path))).readers["train"]())
        assert documents
        assert all(document.strip() for document in documents)


def test_nothing_in_the_source_executes_data():
    """No unpickling, evaluating, or loading of code, but by the classes that are named here."""
    forbidden = {"pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load"}
    forbidden |= {"eval", "exec", "os.system", "torch.jit.load"}
    allowed_bases = {"pickle._Unpickler", "yaml.SafeLoader"}
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


def test_recipes_of_the_package_pass_their_own_checks():
    for name in recipe_names():
        check_recipe(load_recipe(name))
