"""Whatever the format, the same documents; whatever is wrong, one line that says so."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from coupled_adam.errors import UsageError
from coupled_adam.text.documents import documents, passages, separated
from coupled_adam.text.python_documentation import python_documentation

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = {
    ".bz2": bz2.compress,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


@pytest.fixture
def texts(text_file):
    """Twenty paragraphs of the language reference."""
    paragraphs = map(str.strip, text_file.read_text().split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph][:20]


def json_lines(texts, column="text"):
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))


def csv_file(texts, delimiter=","):
    """With quotes, commas and line breaks inside of the texts."""
    table = io.StringIO()
    csv.writer(table, delimiter=delimiter).writerows([("id", "text"), *enumerate(texts)])
    return table.getvalue().encode()


@given(st.text(alphabet="ab \n\r\té", max_size=400), st.integers(1, 50))
def test_passages_keep_the_text(text, length):
    """All but white space at the cuts is kept, in order, and no passage is too long."""
    pieces = list(passages(text.splitlines(keepends=True), length))
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(len(passage) <= 8 * length for passage in pieces)


@given(st.lists(st.text(alphabet="a|-", max_size=5)), st.sampled_from(["|", "||", "|-|"]))
def test_separators_across_chunks(chunks, separator):
    """However the stream comes in, it is split as the whole text is."""
    assert list(separated(chunks, separator)) == "".join(chunks).split(separator)


@pytest.mark.parametrize("typed", ["\n\n", r"\n\n", "\r\n\r\n"])
def test_a_separator_as_a_shell_passes_it_on(typed, tmp_path):
    """With a backslash and an n, or with the ends of lines of the file, which are read as one."""
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n\r\nthree")
    assert [text for text in documents(tmp_path, typed) if text] == ["one", "two", "three"]


def test_a_separator_that_never_occurs(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    with pytest.raises(UsageError, match=r"the separator '<\|end\|>' never occurs in it"):
        list(documents(tmp_path, "<|end|>"))
    (tmp_path / "b.txt").write_text("one<|end|>two")  # one file of the folder is enough
    assert len(list(documents(tmp_path, "<|end|>"))) == 3


def test_what_only_begins_like_json_is_text(tmp_path):
    for text in ("{a line of text}\nand one more", "[1, 2]", "{"):
        (tmp_path / "a").write_text(text)
        assert list(documents(tmp_path / "a")) == [text]
    (tmp_path / "a.txt").write_text("{}\nwhere the name says so")
    assert len(list(documents(tmp_path / "a.txt"))) == 1


def test_a_long_document_is_not_searched_again_and_again():
    """Each chunk is looked at once: what is kept for the next is shorter than the separator."""
    kept = []

    class Chunk(str):
        __slots__ = ()

        def __radd__(self, end):
            kept.append(len(end))
            return end + str(self)

    chunks = ["ab" * 500] * 20
    assert list(separated(map(Chunk, chunks), "|-|")) == ["".join(chunks)]
    assert kept == [0] + [2] * 19


def test_every_format_gives_the_same_documents(texts, tmp_path):
    plain = "\n\n".join(texts).encode()
    lines = json_lines(texts).encode()
    files = {
        "a.txt": plain,
        "a.md": plain,
        "of any name": plain,
        "a*[b]?.txt": plain,
        "windows.txt": b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"),
        "a.jsonl": lines,
        "lines.json": lines,
        "a.csv": csv_file(texts),
        "a.ndjson": lines,
        "A.JSONL": lines,
        "A.CSV.GZ": gzip.compress(csv_file(texts)),
        "a.csv.gz": gzip.compress(csv_file(texts)),
        **{f"a.txt{ending}": pack(plain) for ending, pack in COMPRESSIONS.items()},
        **{f"a.jsonl{ending}": pack(lines) for ending, pack in COMPRESSIONS.items()},
        # Several frames one after the other, as parallel compressors write them.
        "frames.jsonl.zst": zstd.compress(lines[:1000]) + zstd.compress(lines[1000:]),
        "frames.txt.gz": gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert [*documents(tmp_path / name, "\n\n")] == texts, name
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": texts, "id": range(20)}), path, row_group_size=7)
    assert [*documents(path)] == texts


def test_another_column_and_rows_without_text(texts, tmp_path):
    """Null and blank texts are left out; half a surrogate pair is replaced."""
    path = tmp_path / "a.jsonl"
    odd = r"""{"content": "odd \ud83d end", "more": {"in": "some rows"}}"""
    path.write_text(json_lines([*texts, None, " \n"], "content") + "\n" + odd)
    assert [*documents(path, column="content")] == [*texts, "odd ? end"]


def test_folders(texts, tmp_path):
    """All files of one kind, in order, in subfolders too; nothing that is hidden."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "b.txt").write_text("second")
    (folder / "deep" / "c.md").write_text("third")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (folder / "README.md").write_text("about them")
    (folder / "C.TXT").write_text("upper case")
    (folder / "part-00000").write_text("without an ending")
    with pytest.warns(UserWarning, match="3 of 7 files are not read"):
        assert [*documents(folder)] == ["upper case", "first", "second", "third"]
    # Another place's texts, once each; and what is not there is no less a part of the text.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.txt").write_text("fourth")
    for name, target in {"linked": tmp_path / "elsewhere", "deep/circle": folder}.items():
        (folder / name).symlink_to(target)
    with pytest.warns(UserWarning, match="3 of 8 files are not read"):
        assert [*documents(folder)][-1] == "fourth"
    (folder / "absent.txt").symlink_to(tmp_path / "nowhere")
    with (
        pytest.warns(UserWarning, match="3 of 9 files"),
        pytest.raises(UsageError, match=r"absent\.txt: No such file"),
    ):
        [*documents(folder)]
    (folder / "absent.txt").unlink()
    (folder / "d.jsonl").write_text(json_lines(texts))
    with pytest.raises(UsageError, match=r"there are .jsonl, .md, .txt"):
        [*documents(folder)]


SENTENCES = {
    "An opening": '"An opening mark',
    "and a closing": 'and a closing one"',
    "words": '"Hello" he said',
    "two": '"Yes", she said, "no"',
    "taken off": '"He said ""yes"", and no"',
    "none": "It's 5\" wide",
    "empty": '""',
}


@pytest.mark.parametrize("place", ["first", "last", "middle"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotation_marks_in_a_tsv(place, end, tmp_path):
    """They are those of sentences, and neither join rows nor are lost."""
    columns = {"first": "text\tid", "last": "id\ttext", "middle": "a\ttext\tb"}[place]
    names = columns.split("\t")
    lines = ["\t".join(s if n == "text" else "0" for n in names) for s in SENTENCES.values()]
    (tmp_path / "a.tsv").write_bytes(end.join([columns, *lines, ""]).encode())
    expected = [*SENTENCES.values()]
    expected[4:] = ['He said "yes", and no', expected[5]]
    assert list(documents(tmp_path / "a.tsv")) == expected


@pytest.mark.parametrize("window", [24, 27, 31])
def test_zstd_with_a_long_window(window, tmp_path):
    """As --long writes; beyond 27 its own tool wants to be asked for it, and its library too."""
    options = {
        zstd.CompressionParameter.window_log: window,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    with zstd.open(tmp_path / "a.jsonl.zst", "wb", options=options) as file:
        file.write(json_lines(["one", "two"] * 500).encode())
    assert list(documents(tmp_path / "a.jsonl.zst")) == ["one", "two"] * 500


@pytest.mark.slow
def test_python_documentation():
    """Real text, megabytes of it, the same each time."""
    text = [*python_documentation()]
    assert sum(map(len, text)) > 1_500_000
    assert any(
        "The “if” statement" in passage or 'The "if" statement' in passage for passage in text
    )
    assert text == [*python_documentation()]


UNREADABLE = {
    "missing.txt": (None, "No such file"),
    "empty.txt": (b"", "there is no text in it"),
    "empty.jsonl": (b"", "there is no text in it"),
    "blank.txt": (b" \n\n \t\n", "there is no text in it"),
    "null.jsonl": (b'{"text": null}\n', "there is no text in it"),
    "latin1.txt": (b"caf\xe9 " * 100, "can't decode byte 0xe9"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON: Expecting value"),
    "array.json": (
        b'[{"text": "a"}, {"text": "b"}]',
        "line 1 is not a JSON object, .* Each row must be an object in a line of its own",
    ),
    "number.jsonl": (b'{"text": "a"}\n{"text": 17}\n', "'text' is not text in each row, but '17'"),
    "near.jsonl": (b'{"texts": "a", "id": 1}\n', "column='text' is not .*: did you mean texts?"),
    "twice.csv": (b"text,label,text\nhello,1,other\n", "names the column 'text' twice"),
    "far.csv": (b"id,body\n1,a\n", "column='text' is not among its columns: there are id, body"),
    "broken.csv": (b'id,text\n1,"a\n2,b\n', "line 3: unexpected end of data"),
    "quotes.csv": (b'id,text\n1,a\n2,"b" c\n', "line 3: ',' expected after"),
    "tab.tsv": (b'id\ttext\n1\t"a\tb"\n', "line 2 has not as many columns as the first"),
    "break.tsv": (b'id\ttext\n1\ta\n2\t"a\nb"\n', "line 4 has not as many columns as the first"),
    "long.csv": (b"id,text\n1,a\n2,b, and c\n", "line 3 has not as many columns as the first"),
    "short.csv": (b"id,text\n1,a\nb\n", "line 3 has not as many columns as the first"),
    "broken.parquet": (b"PAR1 but no more", "broken.parquet"),
    **dict.fromkeys(
        ("a.tar", "a.log", "a"),
        (b"a.txt\0 0000644\0 nearly text", "it is no text, but binary: byte 5 is 0"),
    ),
    "a.bin": (b"\x7fELF\x02\x01\1\0\0", "it is no text, but binary: byte 7 is 0"),
    **{f"broken.txt{ending}": (b"not packed", "broken.txt") for ending in COMPRESSIONS},
    # Half a corpus is no corpus, even where the part that is there is text.
    **{
        f"cut.txt{ending}": (pack(bytes(range(1, 100)).hex().encode() * 100)[:-10], "cut.txt")
        for ending, pack in COMPRESSIONS.items()
    },
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files(name, tmp_path, capfd):
    content, message = UNREADABLE[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        [*documents(path)]
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err


def test_a_long_line_takes_no_more_memory_than_its_pieces(tmp_path):
    """As a text without newlines is; it is cut where passages of one line are cut."""
    path = tmp_path / "text.txt"
    path.write_text("words " * 4_000_000)
    tracemalloc.start()
    lengths = [len(document) for document in documents(path)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
    assert lengths == [len(text) for text in passages(["words " * 4_000_000]) if text]
    # Of a long object the beginning is enough to know it.
    (tmp_path / "part-0").write_text(json.dumps({"text": "words " * 400_000}))
    with pytest.raises(UsageError, match="it begins with JSON"):
        next(documents(tmp_path / "part-0"))
