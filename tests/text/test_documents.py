"""Whatever the format, the same documents; whatever is wrong, one line that says so."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
import zipfile

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from coupled_adam.errors import UsageError
from coupled_adam.text.documents import open_documents, python_documentation
from coupled_adam.text.formats import _json_rows, passages, separated
from coupled_adam.text.source import Data

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


@pytest.fixture
def texts(text_file):
    """Twenty paragraphs of the language reference."""
    paragraphs = map(str.strip, text_file.read_text().split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph][:20]


def read(data, split="train"):
    return list(open_documents(data).readers[split]())


def json_lines(texts, column="text"):
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))


def delimited(texts, delimiter):
    """With quotes, delimiters and line breaks inside of the texts."""
    table = io.StringIO()
    csv.writer(table, delimiter=delimiter).writerows(
        [("id", "text"), *((i, text) for i, text in enumerate(texts))]
    )
    return table.getvalue().encode()


@given(st.text(alphabet="ab \n\r\té", max_size=400), st.integers(1, 50))
def test_passages_keep_the_text(text, length):
    """All but white space at the cuts is kept, in order, and no passage is too long."""
    pieces = list(passages(text.splitlines(keepends=True), length))
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(len(passage) <= 8 * length for passage in pieces)


def test_passages_are_cut_at_blank_lines():
    paragraph = "word " * 30 + "\n"
    lines = ((paragraph * 3 + "\n") * 10).splitlines(keepends=True)
    pieces = [passage for passage in passages(lines, 1000) if passage]
    assert len(pieces) == 4
    assert all(passage.endswith("word") for passage in pieces)


@given(st.lists(st.text(alphabet="a|-", max_size=5)), st.sampled_from(["|", "||", "|-|"]))
def test_separators_across_chunks(chunks, separator):
    """However the stream comes in, it is split as the whole text is."""
    assert list(separated(chunks, separator)) == "".join(chunks).split(separator)


def test_every_format_gives_the_same_documents(texts, tmp_path):
    plain = "\n\n".join(texts).encode()
    lines = json_lines(texts).encode()
    files = {
        "a.txt": plain,
        "a.md": plain,
        "windows.txt": b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"),
        "a.jsonl": lines,
        "lines.json": lines,
        "array.json": json.dumps([{"text": text} for text in texts], indent=1).encode(),
        "line.json": b"\n " + json.dumps([{"text": text} for text in texts]).encode(),
        "a.csv": delimited(texts, ","),
        "a.tsv": delimited(texts, "\t"),
        "a.csv.gz": gzip.compress(delimited(texts, ",")),
        **{f"a.txt{ending}": pack(plain) for ending, pack in COMPRESSIONS.items()},
        **{f"a.jsonl{ending}": pack(lines) for ending, pack in COMPRESSIONS.items()},
        # Several frames one after the other, as parallel compressors write them.
        "frames.jsonl.zst": zstd.compress(lines[:1000]) + zstd.compress(lines[1000:]),
        "frames.txt.gz": gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        data = Data(text=str(tmp_path / name), separator="\n\n")
        assert read(data) == texts, name
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": texts, "id": range(20)}), path, row_group_size=7)
    assert read(Data(text=str(path))) == texts


def test_another_column(texts, tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(texts, "content"))
    assert read(Data(text=str(tmp_path / "a.jsonl"), column="content")) == texts


def test_rows_without_text_are_left_out(tmp_path):
    """Null and blank texts; half a surrogate pair, which UTF-8 cannot hold, is replaced."""
    rows = [r'{"text": null}', r'{"text": " \n"}', "", r'{"text": "odd \ud83d end"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read(Data(text=str(tmp_path / "a.jsonl"))) == ["odd ? end"]


def test_folders(texts, tmp_path):
    """All files of one kind, in order, in subfolders too; nothing that is hidden."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "b.txt").write_text("second")
    (folder / "deep" / "c.rst").write_text("third")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    assert read(Data(text=str(folder))) == ["first", "second", "third"]
    (folder / "d.jsonl").write_text(json_lines(texts))
    with pytest.raises(UsageError, match=r"holds plain text and tables \(.jsonl, .rst, .txt\)"):
        open_documents(Data(text=str(folder)))


def test_a_long_line(tmp_path):
    """Text without line breaks is cut, and no character is lost."""
    text = "word " * 500_000
    (tmp_path / "a.txt").write_text(text)
    pieces = read(Data(text=str(tmp_path / "a.txt")))
    assert len(pieces) > 100
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_fingerprint_is_of_the_content(texts, tmp_path):
    first, second = tmp_path / "1" / "a.txt", tmp_path / "2" / "a.txt"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text("\n\n".join(texts))

    def fingerprint(path):
        return open_documents(Data(text=str(path))).fingerprint

    assert fingerprint(first) == fingerprint(second)
    second.write_text("\n\n".join(texts).replace("the", "eth"))
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.slow
def test_python_documentation():
    """Real text, megabytes of it, the same each time."""
    text = read(Data())
    assert sum(map(len, text)) > 1_500_000
    assert any(
        "The “if” statement" in passage or 'The "if" statement' in passage for passage in text
    )
    assert text == [passage for passage in python_documentation() if passage]


def archive(opened):
    """A text in an archive, which may be shorter than its header."""
    packed = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("Some text.\n" * 1000)
        text.flush()
        if opened is tarfile.open:
            with tarfile.open(fileobj=packed, mode="w") as target:
                target.add(text.name)
        else:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
                target.write(text.name)
    return packed.getvalue()


def unreadable(tmp_path):
    packed = {ending: pack(os.urandom(5000)) for ending, pack in COMPRESSIONS.items()}
    files = {
        "missing.txt": (None, "No such file"),
        "empty.txt": (b"", "there is no text in it"),
        "blank.txt": (b" \n\n \t\n", "there is no text in it"),
        "null.jsonl": (b'{"text": null}\n', "there is no text in it"),
        "latin1.txt": (b"caf\xe9 " * 100, "not UTF-8 text .byte 0xe9 in b'caf"),
        "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "broken.jsonl, line 2: not JSON"),
        "broken.json": (b'[{"text": "a"}, {"text": ]', "broken.json: not JSON"),
        "deep.jsonl": (b"[" * 10**5, "deep.jsonl: not JSON"),
        "deep2.jsonl": (b'{"a": ' + b"[" * 10**5, "deep2.jsonl, line 1: not JSON"),
        "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", "digits.jsonl, line 1: not JSON"),
        "words.jsonl": (b'"just words"\n', "row 1: not a JSON object, but 'just words'"),
        "number.jsonl": (b'{"text": 17}\n', "row 1: column 'text' is not text, but '17'"),
        "near.jsonl": (
            b'{"texts": "a", "id": 1}\n',
            "has no column 'text', but id, texts: a recipe .* with data.column=texts",
        ),
        "far.jsonl": (b'{"body": "a"}\n', "has no column 'text', but body: .* data.column=NAME"),
        "far.csv": (b"id,body\n1,a\n", "has no column 'text', but body, id: .* data.column=NAME"),
        "broken.csv": (
            b'id,text\n1,"a\n2,b\n',
            "after line 1: not a table .unexpected end of data",
        ),
        "archive.zip": (archive(zipfile.ZipFile), "not UTF-8 text .*unpack it if it is an archive"),
        "not.zip": (b"\xff no archive", "not UTF-8 text"),
        "archive.tar": (archive(tarfile.open), "NUL characters.*unpack it if it is an archive"),
        "archive.tar.gz": (gzip.compress(archive(tarfile.open)), "NUL characters"),
        "broken.parquet": (b"PAR1 but no more", "broken.parquet: "),
        **{f"broken.txt{ending}": (b"not packed", "broken.txt") for ending in packed},
        **{f"cut.txt{ending}": (content[:2500], "cut.txt") for ending, content in packed.items()},
    }
    for name, (content, message) in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        yield name, message
    parquet.write_table(pa.table({"content": ["a"]}), tmp_path / "other.parquet")
    yield "other.parquet", "has no column 'text', but content: .* data.column=NAME"


def test_unreadable_files(tmp_path):
    for name, message in unreadable(tmp_path):
        with pytest.raises(UsageError, match=rf"^data\.text=.*{message}") as caught:
            read(Data(text=str(tmp_path / name)))
        assert "\n" not in str(caught.value), name
        assert name in str(caught.value)


@pytest.mark.parametrize("kind", ["line", "array", "separator", "parquet", "hub"])
def test_a_document_that_is_too_long(kind, tmp_path, hub_folder, monkeypatch):
    """Is refused before it is read whole; the limit can be raised, as the message says."""
    monkeypatch.setenv("COUPLED_ADAM_MAX_DOCUMENT", "1000")
    long, path = "word " * 400, tmp_path / "a.jsonl.gz"
    if kind == "line":
        path.write_bytes(gzip.compress(json_lines(["short", long]).encode()))
    elif kind == "array":
        path = tmp_path / "a.json"
        path.write_text(json.dumps([{"text": "short"}, {"text": long}]))
    elif kind == "separator":
        path = tmp_path / "a.txt"
        path.write_text(f"short|{long}|short")
    else:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"text": ["short", long]}), path)
    data = Data(text=str(path), separator="|")
    if kind == "hub":
        shutil.copy(path, hub_folder / "data" / "train-0.parquet")
        data = Data(hub=str(hub_folder))
    reader = open_documents(data).readers["train"]()
    assert next(reader) == "short"
    with pytest.raises(
        UsageError, match=r"more than 1000 characters.*COUPLED_ADAM_MAX_DOCUMENT to a higher"
    ):
        next(reader)
    monkeypatch.setenv("COUPLED_ADAM_MAX_DOCUMENT", "2000")
    assert len(read(data)[1]) in (1999, 2000)
    monkeypatch.setenv("COUPLED_ADAM_MAX_DOCUMENT", "many")
    with pytest.raises(UsageError, match="COUPLED_ADAM_MAX_DOCUMENT='many' must be a whole number"):
        read(data)


@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_archives_that_expand_far(name, ending, tmp_path, monkeypatch):
    """A line, an array, a cell or blanks of 32 MB in a few kB: no more is held than a document."""
    size = 2**25
    content = {
        "a.txt": (b" " * 9999 + b"\n") * (size // 10_000),
        "a.jsonl": b'{"text": "' + b"a" * size,
        "a.json": b"[" + b" " * size,
        "a.csv": b'id,text\n1,"' + b"a" * size,
    }
    path = tmp_path / (name + ending)
    path.write_bytes(COMPRESSIONS[ending](content[name]))
    monkeypatch.setenv("COUPLED_ADAM_MAX_DOCUMENT", "10000")
    message = "no text in it|more than 10000 char|array of more than 1000000 char|larger than field"
    tracemalloc.start()
    with pytest.raises(UsageError, match=message):
        read(Data(text=str(path)))
    assert tracemalloc.get_traced_memory()[1] < size / 2
    tracemalloc.stop()


def test_a_table_that_expands_far(tmp_path):
    """A few kB that hold the same long text a thousand times, which pyarrow holds once."""
    path = tmp_path / "a.parquet"
    repeated = pa.array(["a" * 2**20]).dictionary_encode().take(pa.array([0] * 1000))
    parquet.write_table(pa.table({"text": repeated}), path, compression="zstd")
    before = pa.total_allocated_bytes()
    documents = open_documents(Data(text=str(path))).readers["train"]()
    assert next(documents) == "a" * 2**20
    assert pa.total_allocated_bytes() - before < 2**27
    assert sum(1 for _ in documents) == 999


@given(
    st.lists(st.fixed_dictionaries({"text": st.text(max_size=30)}), max_size=5),
    st.sampled_from([None, 1]),
    st.sampled_from(["", " \n", "]", ", 1]", "{}", "\n[]"]),
)
def test_arrays_are_read_as_json_reads_them(rows, indent, tail):
    """Whatever follows."""
    text = " \n " + json.dumps(rows, indent=indent) + tail
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(UsageError, match="not JSON"):
            list(_json_rows(io.StringIO(text), "a.json"))
    else:
        assert list(_json_rows(io.StringIO(text), "a.json")) == expected


def test_a_device_has_no_end():
    with pytest.raises(UsageError, match=r"data\.text=/dev/zero: not a file or folder"):
        open_documents(Data(text="/dev/zero"))


@pytest.mark.parametrize("name", ["simplecache::memory", "a*[b]?.txt", "~", "file::x.txt"])
def test_names_are_of_files_here(name, tmp_path):
    """Not of places that fsspec would look for elsewhere, nor patterns."""
    (tmp_path / name).write_text("some text")
    assert read(Data(text=str(tmp_path / name))) == ["some text"]


@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_cut_archives_are_noticed(ending, tmp_path):
    """Even where the part that is there is text: half a corpus is no corpus."""
    content = COMPRESSIONS[ending](os.urandom(200_000).hex().encode())
    (tmp_path / f"a.txt{ending}").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"a\.txt"):
        read(Data(text=str(tmp_path / f"a.txt{ending}")))


@pytest.fixture
def hub_folder(texts, tmp_path):
    """A data set as a clone of a hub's repository has it: a README beside the data."""
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for split, documents in (("train", texts), ("validation", texts[:2]), ("test", texts[2:4])):
        parquet.write_table(pa.table({"text": documents}), folder / "data" / f"{split}-0.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(
            f"  - {{split: {split}, path: data/{split}-*}}\n"
            for split in ("train", "validation", "test")
        )
        + "---\nA data set.\n"
    )
    return folder


def test_hub_folder(hub_folder, texts, monkeypatch):
    # The library waits five seconds for its threads after each shuffled reading.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    data = Data(hub=str(hub_folder), valid_split="validation")
    documents = open_documents(data)
    assert list(documents.readers) == ["train", "valid"]
    assert read(data) == texts
    assert read(data, "valid") == texts[:2]
    shuffled = [read(Data(hub=str(hub_folder), shuffle_seed=seed)) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == sorted(shuffled[2]) == sorted(texts)
    parquet.write_table(pa.table({"text": texts[5:]}), hub_folder / "data" / "train-0.parquet")
    assert open_documents(data).fingerprint != documents.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "trian"}, 'Unknown split "trian"|Bad split: trian'),
        ({"column": "txt"}, "train row 1 has no column 'txt', but text"),
        ({"hub_config": "other"}, "other"),
    ],
    ids=str,
)
def test_hub_errors(options, message, hub_folder):
    with pytest.raises(UsageError, match=message) as caught:
        read(Data(hub=str(hub_folder), **options))
    assert "\n" not in str(caught.value)


READ = """
import sys
from coupled_adam.errors import UsageError
from coupled_adam.text.documents import open_documents
from coupled_adam.text.source import Data
try:
    documents = open_documents(Data(hub=sys.argv[1]))
    print(documents.fingerprint, len(list(documents.readers["train"]())))
except UsageError as error:
    print("UsageError", error)
"""


def run(code, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_hub_out_of_reach(tmp_path):
    said = run(READ, "nobody/nothing", HF_HUB_OFFLINE=1, HF_HOME=tmp_path)
    assert said.startswith("UsageError data.hub=nobody/nothing cannot be read (")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_commit_is_remembered_without_the_hub(tmp_path):
    """As the hub's own cache notes it: a corpus in the cache is found offline by its commit."""
    for dataset, commit in (("one", "1" * 40), ("two", "2" * 40)):
        cache = tmp_path / "hub" / f"datasets--me--{dataset}"
        for folder in ("refs", f"snapshots/{commit}"):
            (cache / folder).mkdir(parents=True)
        (cache / "refs" / "main").write_text(commit)
    code = READ.replace(', len(list(documents.readers["train"]()))', "")
    prints = [run(code, name, HF_HUB_OFFLINE=1, HF_HOME=tmp_path) for name in ("me/one", "me/two")]
    assert all("UsageError" not in fingerprint for fingerprint in prints)
    assert prints[0] != prints[1]
    shutil.rmtree(tmp_path / "hub" / "datasets--me--two" / "refs")
    assert "UsageError" in run(code, "me/two", HF_HUB_OFFLINE=1, HF_HOME=tmp_path)
