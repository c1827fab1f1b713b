"""From text to token files: nothing lost, nothing in two splits, nothing half-written."""

import dataclasses
import gzip
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from coupled_adam.lab import UsageError
from coupled_adam.lab.corpus import passages, prepare_corpus, python_documentation
from coupled_adam.lab.recipe import load_recipe


@pytest.fixture
def recipe(small_recipe, text_file):
    recipe = load_recipe(str(small_recipe))
    return with_text(recipe, text_file)


def with_text(recipe, path):
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, text=str(path)))


@given(st.text(alphabet="ab \n\r\té", max_size=400), st.integers(1, 50))
def test_passages_keep_the_text(text, length):
    """All but white space at the cuts is kept, in order, and no passage is empty or too long."""
    parts = list(passages(text, length))
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(part and len(part) <= 8 * length for part in parts)


def test_passages_are_cut_at_blank_lines():
    paragraph = "word " * 30 + "\n"
    parts = list(passages((paragraph * 3 + "\n") * 10, 1000))
    assert len(parts) == 4
    assert all(part.endswith("word") for part in parts)


def test_token_files(recipe, text_file, tmp_path):
    """The splits, decoded, are the text: every passage once, each after an end-of-text token."""
    corpus = prepare_corpus(recipe, tmp_path / "corpus")
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
    assert tokenizer.eos_token == "<|endoftext|>"
    decoded = []
    for split in ("train", "valid", "test"):
        ids = corpus.tokens(split)
        assert ids.dtype == np.uint16
        assert len(ids) == corpus.facts["tokens"][split]
        parts = tokenizer.decode(ids.tolist()).split("<|endoftext|>")[1:]
        assert len(parts) == corpus.facts["passages"][split] > 0
        decoded += parts
    assert sorted(decoded) == sorted(passages(text_file.read_text()))
    counts = corpus.unigram_counts()
    assert counts.shape == (300,)
    assert counts.sum() == corpus.facts["tokens"]["train"]


def test_splits_do_not_depend_on_the_rest_of_the_text(recipe, text_file, tmp_path):
    """A passage stays in its split when the text grows: what was held out stays held out."""
    one = prepare_corpus(recipe, tmp_path / "one")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("Some more text.\n" * 3000)
    text_file.rename(folder / "b.txt")
    two = prepare_corpus(with_text(recipe, folder), tmp_path / "two")

    def held_out(corpus):
        tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
        text = tokenizer.decode(corpus.tokens("test").tolist())
        return set(text.split("<|endoftext|>")[1:])

    assert held_out(one) <= held_out(two)


def test_reuse_and_change(recipe, text_file, tmp_path):
    """The same text finds the folder as it is; another is refused, and nothing is overwritten."""
    corpus = prepare_corpus(recipe, tmp_path / "corpus")
    before = (tmp_path / "corpus" / "train.bin").stat().st_mtime_ns
    assert prepare_corpus(recipe, tmp_path / "corpus").facts == corpus.facts
    text_file.write_text(text_file.read_text() + "One more line.")
    with pytest.raises(UsageError, match=r"made from another text or recipe \(sha256 differ\)"):
        prepare_corpus(recipe, tmp_path / "corpus")
    assert (tmp_path / "corpus" / "train.bin").stat().st_mtime_ns == before


def test_leftovers_of_a_killed_run_are_replaced(recipe, tmp_path):
    leftover = tmp_path / "corpus.tmp" / "train.bin"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    prepare_corpus(recipe, tmp_path / "corpus")
    assert not leftover.parent.exists()


@pytest.mark.parametrize(("suffix", "opener"), [(".txt.gz", gzip.open), (".txt.xz", lzma.open)])
def test_compressed_text(recipe, text_file, tmp_path, suffix, opener):
    packed = tmp_path / f"packed{suffix}"
    with opener(packed, "wb") as file:
        file.write(text_file.read_bytes())
    plain = prepare_corpus(recipe, tmp_path / "plain")
    other = prepare_corpus(with_text(recipe, packed), tmp_path / "other")
    assert other.facts["sha256"] == plain.facts["sha256"]


def test_python_documentation():
    """Real text, megabytes of it, the same each time."""
    text = list(python_documentation())
    assert sum(map(len, text)) > 1_500_000
    assert any("The “if” statement" in part or 'The "if" statement' in part for part in text)
    assert text == list(python_documentation())


def test_unreadable_text(recipe, tmp_path):
    cases = {
        "missing.txt": (None, "No such file"),
        "empty.txt": (b"", "there is no text in it"),
        "blank.txt": (b" \n\n \t\n", "there is no text in it"),
        "latin1.txt": (b"caf\xe9 " * 100, "not UTF-8 text .byte 3."),
        "broken.txt.gz": (b"no gzip", "broken.txt.gz"),
        "broken.txt.xz": (b"no xz", "broken.txt.xz"),
        "cut.txt.gz": (gzip.compress(b"text " * 9999)[:40], "cut.txt.gz"),
        "short.txt": (b"Too short.\n\n" * 5, "the text is too short: its train split has"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=message):
            prepare_corpus(with_text(recipe, tmp_path / name), tmp_path / "corpus")
        assert not (tmp_path / "corpus").exists()
        assert not (tmp_path / "corpus.tmp").exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(UsageError, match=r"no file in it ends in \.txt"):
        prepare_corpus(with_text(recipe, tmp_path / "folder"), tmp_path / "corpus")
