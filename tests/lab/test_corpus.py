"""From text to token files: nothing lost, nothing in two splits, never half a corpus."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from coupled_adam.errors import UsageError
from coupled_adam.files import new_folder
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.data.tokenization import corpus_tokenizer, held_out
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.sections import Data
from coupled_adam.text.documents import passages
from laboratory import snapshot
from processes import Process

SPLITS = ("train", "valid", "test")


@pytest.fixture
def recipe(small_recipe, text_file):
    return override(load_recipe(str(small_recipe)), {"data.text": str(text_file)})


def with_text(recipe, path):
    return override(recipe, {"data.text": str(path)})


def decoded(corpus, split):
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
    return tokenizer.decode(corpus.tokens(split)[:].tolist()).split("<|endoftext|>")[1:]


def entries(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def held_out_split(text, share):
    return next(held_out([text], share))[0]


@given(st.lists(st.text(max_size=20)), st.floats(0.01, 0.49))
def test_splits_are_of_the_document_alone(texts, share):
    """Always the same split; a larger share never gives a held-out document back."""
    for text in texts:
        split = held_out_split(text, share)
        assert split in SPLITS
        assert split == held_out_split(text, share)
        if split == "valid":
            assert held_out_split(text, min(2 * share, 0.49)) == "valid"


def test_shares_of_the_splits():
    splits = [held_out_split(f"document {i}", 0.1) for i in range(20_000)]
    for split in ("valid", "test"):
        assert abs(splits.count(split) / 20_000 - 0.1) < 0.01  # more than four deviations


def test_token_files(recipe, text_file, tmp_path):
    """The splits, decoded, are the text: every passage once, each after an end-of-text token."""
    corpus = prepare_corpus(recipe, tmp_path)
    found = []
    for split in SPLITS:
        ids = corpus.tokens(split)
        assert ids[:].dtype == np.uint16
        assert len(ids) == corpus.facts["tokens"][split]
        parts = decoded(corpus, split)
        assert len(parts) == corpus.facts["documents"][split] > 0
        found += parts
    lines = text_file.read_text().splitlines(keepends=True)
    assert sorted(found) == sorted(filter(None, passages(lines)))
    np.testing.assert_array_equal(
        corpus.unigram_counts(), np.bincount(corpus.tokens("train")[:], minlength=300)
    )
    assert corpus.end_of_text == corpus.tokens("train")[:1][0]
    assert corpus.folder.parent == tmp_path


def test_packing_is_a_round_trip(recipe, tmp_path_factory):
    """Any documents come back as they were, with odd characters and what looks like a token."""
    folder = tmp_path_factory.mktemp("round-trip")
    real = [f"a document that always is there, number {i}" for i in range(40)]
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda text: not text.isspace() and "<|endoftext|>" not in text
    )

    @settings(max_examples=25)
    @given(st.lists(texts, max_size=5))
    def check(documents):
        documents = [*documents, *real, "about <|endoftext|> in text"]
        path = json_lines(folder / "a.jsonl", documents)
        corpus = prepare_corpus(with_text(recipe, path), folder / "cache")
        tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
        for split in SPLITS:
            ids = corpus.tokens(split)[:]
            starts = np.flatnonzero(ids == corpus.end_of_text)
            assert len(starts) == corpus.facts["documents"][split]
            found = [tokenizer.decode(part[1:]) for part in np.split(ids, starts)[1:]]
            assert found == [text for text in documents if held_out_split(text, 0.1) == split]
        shutil.rmtree(folder / "cache")

    check()


def test_own_splits_and_limits(recipe, tmp_path, monkeypatch):
    """A data set's own held-out splits; reading stops where there is enough."""
    monkeypatch.setattr("coupled_adam.lab.data.tokenization._BATCH", 1000)
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split in ("train", "validation"):
        texts = [f"{split} {i}: " + "some words " * 50 for i in range(300)]
        json_lines(folder / f"{split}-0.jsonl", texts)
    (folder / "train-1.jsonl").write_text('{"text": ')
    values = {
        "data.text": None,
        "data.hub": str(folder),
        "data.valid_split": "validation",
        "data.max_tokens": 20_000,
        "data.max_held_out_tokens": 500,
        "data.tokenizer": str(byte_tokenizer(tmp_path / "bytes")),
        "model.vocab_size": 400,
    }
    corpus = prepare_corpus(override(recipe, values), tmp_path / "cache")
    assert corpus.facts["tokens"] == {"train": 20_000, "valid": 500, "test": 500}
    text = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    for split, start in (("train", "train "), ("valid", "validation "), ("test", "train ")):
        assert text.decode(corpus.tokens(split)[1:100]).startswith(start)
    with pytest.raises(UsageError, match="cannot be read"):  # and where there is not, it goes on
        prepare_corpus(override(recipe, {**values, "data.max_tokens": None}), tmp_path / "cache")


def test_documents_are_read_once(recipe, tmp_path, monkeypatch):
    """For the BPE, which needs the first of them, and for the tokens: a data set is downloaded."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [f"document {i}: " + "some words " * 50 for i in range(100)]
    json_lines(folder / "train.jsonl", texts)
    builder, read = datasets.DatasetBuilder, []
    stream = builder.as_streaming_dataset
    monkeypatch.setattr(
        builder,
        "as_streaming_dataset",
        lambda self, split: read.append(split) or stream(self, split=split),
    )
    values = {"data.text": None, "data.hub": str(folder), "data.max_tokens": 1000}
    corpus = prepare_corpus(override(recipe, values), tmp_path / "cache")
    assert read == ["train"]
    assert decoded(corpus, "valid") == [t for t in texts if held_out_split(t, 0.1) == "valid"]


def test_cached_by_content(recipe, text_file, tmp_path):
    """The same content is made once, wherever it lies; what changes the tokens is another."""
    cache = tmp_path / "cache"
    corpus = prepare_corpus(recipe, cache)
    made = (corpus.folder / "train.bin").stat().st_mtime_ns
    copy = tmp_path / "copy" / text_file.name
    copy.parent.mkdir()
    shutil.copy(text_file, copy)
    same = prepare_corpus(override(with_text(recipe, copy), {"training.lr": 0.5}), cache)
    assert same.folder == corpus.folder
    assert same.facts["source"] == f"data.text={copy}"
    assert (corpus.folder / "train.bin").stat().st_mtime_ns == made
    for values in ({"model.vocab_size": 301}, {"data.held_out": 0.2}, {"data.separator": "\n\n"}):
        assert prepare_corpus(override(recipe, values), cache).folder != corpus.folder
    text_file.write_text(text_file.read_text() + "One more line.")
    changed = prepare_corpus(recipe, cache)
    assert changed.facts["fingerprint"] != corpus.facts["fingerprint"]
    assert len(entries(cache)) == 5


def test_default_cache(monkeypatch):
    monkeypatch.setenv("COUPLED_ADAM_CACHE", "/a/folder")
    assert str(default_cache()) == "/a/folder"
    monkeypatch.delenv("COUPLED_ADAM_CACHE")
    assert "coupled-adam" in default_cache().relative_to(Path.home()).parts


def test_a_cache_that_cannot_be_written_is_read(recipe, tmp_path):
    """Nothing is locked where nothing is made: others' caches and read-only disks are fine."""
    corpus = prepare_corpus(recipe, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with FileLock(tmp_path / f"{corpus.folder.name}.lock"):
        assert prepare_corpus(recipe, tmp_path).facts == corpus.facts
    assert sorted(tmp_path.rglob("*")) == before


PREPARE = """
import os, resource, signal, sys, time
from pathlib import Path
from coupled_adam.errors import UsageError
from coupled_adam.lab.data import corpus
from coupled_adam.lab.recipe import load_recipe, override
recipe = override(load_recipe(sys.argv[1]), {"data.text": sys.argv[2]})
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def announced(*arguments, count=corpus._count):
    print("making", flush=True)
    return count(*arguments)
def waited(*arguments, count=corpus._count):
    print("making", flush=True)
    while not Path(sys.argv[3]).with_name("go on").exists():
        time.sleep(0.01)
    return count(*arguments)
if sys.argv[4] in ("killed", "announced", "waited"):
    corpus._count = globals()[sys.argv[4]]
if sys.argv[4].isdigit():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
try:
    print(corpus.prepare_corpus(recipe, Path(sys.argv[3])).folder)
except UsageError as error:
    print("UsageError", error)
"""


@pytest.fixture
def process(small_recipe, text_file, tmp_path):
    def start(how):
        arguments = (small_recipe, text_file, tmp_path / "cache", how)
        return Process([sys.executable, "-c", PREPARE, *arguments])

    return start


def test_two_processes_at_once(process, recipe, tmp_path):
    """One makes the corpus, and the other, which comes while it does, waits and takes it."""
    first = process("waited")
    first.until("making")
    second = process("announced")
    (tmp_path / "go on").touch()
    said, _ = first.communicate(timeout=120)
    _, folder = said.split()
    said, _ = second.communicate(timeout=120)
    assert said.split() == [folder]
    assert [str(path) for path in entries(tmp_path / "cache")] == [folder]
    assert str(prepare_corpus(recipe, tmp_path / "cache").folder) == folder


def test_kill_in_the_middle(process, recipe, tmp_path):
    """What a killed process leaves is no corpus, and goes when that corpus is made."""
    cache = tmp_path / "cache"
    killed = process("killed")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = entries(cache)
    assert (leftover / "train.bin").stat().st_size > 0
    with new_folder(cache / "another") as made_now:
        corpus = prepare_corpus(recipe, cache)
        assert set(entries(cache)) == {corpus.folder, made_now}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "train.bin"),
        lambda folder: os.truncate(folder / "test.bin", 10),
        lambda folder: flip(folder / "unigram_counts.npy"),
        lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(),
        lambda folder: shutil.rmtree(folder / "tokenizer"),
        lambda folder: (folder / "corpus.json").unlink(),
        lambda folder: (folder / "corpus.json").write_text(""),
        lambda folder: (folder / "corpus.json").write_text("[]"),
        lambda folder: edit(folder / "corpus.json", ["tokens", "train"], 640),
        lambda folder: edit(folder / "corpus.json", ["dtype"], "<u4"),
        lambda folder: edit(folder / "corpus.json", ["checksums"], {}),
    ],
)
def test_a_damaged_corpus_is_made_again(damage, recipe, tmp_path):
    folder = prepare_corpus(recipe, tmp_path / "cache").folder
    before = snapshot(folder)
    damage(folder)
    assert prepare_corpus(recipe, tmp_path / "cache").folder == folder
    assert snapshot(folder) == before


def edit(path, keys, value):
    content = json.loads(path.read_text())
    *places, last = keys
    functools.reduce(dict.__getitem__, places, content)[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("function", ["read_text", "checksum"])
def test_a_corpus_that_cannot_be_read_now_is_kept(function, number, recipe, tmp_path, monkeypatch):
    """The system's error is raised; of a file that is not the corpus's nothing is said."""
    folder = prepare_corpus(recipe, tmp_path / "cache").folder
    (folder / ".DS_Store").touch()
    before = snapshot(folder)
    with monkeypatch.context() as patch:
        error = OSError(number, os.strerror(number), str(folder))
        patch.setattr(f"coupled_adam.lab.data.corpus.{function}", Mock(side_effect=error))
        with pytest.raises(OSError, match=os.strerror(number)):
            prepare_corpus(recipe, tmp_path / "cache")
    assert prepare_corpus(recipe, tmp_path / "cache").folder == folder
    assert snapshot(folder) == before


@pytest.mark.parametrize("error", [Exception("File too large (os error 27)"), OSError("none")])
def test_a_temporary_folder_that_takes_nothing(error, recipe, tmp_path, monkeypatch):
    """Where the files of a tokenizer go to be told apart."""
    tokenizer = word_tokenizer(tmp_path / "words", eos_token="<end>")
    fails = {"tokenizers": PreTrainedTokenizerFast, "none": tempfile}
    name = {"tokenizers": "save_pretrained", "none": "TemporaryDirectory"}
    kind = "none" if isinstance(error, OSError) else "tokenizers"
    monkeypatch.setattr(fails[kind], name[kind], Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"the temporary folder cannot be written \(.*TMPDIR"):
        prepare_corpus(override(recipe, {"data.tokenizer": str(tokenizer)}), tmp_path / "cache")


def test_a_new_key_gives_no_other_name(recipe, tmp_path):
    """A version that knows more settings finds the corpus that it has made before."""
    kind = dataclasses.make_dataclass("Newer", [("key", int, 1)], bases=(Data,), frozen=True)
    newer = [kind(**vars(recipe.data), key=key) for key in (1, 2)]
    first, *others = [
        prepare_corpus(dataclasses.replace(recipe, data=data), tmp_path / "cache").folder
        for data in (recipe.data, *newer)
    ]
    assert [other == first for other in others] == [True, False]


@pytest.mark.parametrize("room", [1_000, 2_000, 10_000, 30_000])
def test_full_disk(process, recipe, tmp_path, room):
    """Whichever file no longer fits, of the tokenizer or the tokens, nothing is left of them."""
    said, _ = process(str(room)).communicate(timeout=120)
    assert said.startswith(f"UsageError the corpus cannot be written to the cache {tmp_path}")
    assert "choose another folder with COUPLED_ADAM_CACHE" in said
    assert said.count("\n") == 1
    assert entries(tmp_path / "cache") == []
    prepare_corpus(recipe, tmp_path / "cache")


def test_short_text(recipe, tmp_path):
    """Found at every call, since the cache does not know the recipe's batches."""
    (tmp_path / "short.txt").write_text("Too short.\n\n" * 5)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"short.txt is too short: its .* split has"):
            prepare_corpus(with_text(recipe, tmp_path / "short.txt"), tmp_path / "cache")
    prepare_corpus(recipe, tmp_path / "cache")
    long = override(recipe, {"training.batch_size": 10_000})
    with pytest.raises(UsageError, match="its train split has"):
        prepare_corpus(long, tmp_path / "cache")


def byte_tokenizer(folder):
    """A tokenizer without Rust behind it, of 384 tokens."""
    ByT5Tokenizer().save_pretrained(folder)
    return folder


def word_tokenizer(folder, **special):
    """A tokenizer of 103 words in Hugging Face format."""
    words = ["<unk>", "<end>", "<start>", *(f"w{i}" for i in range(100))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", **special
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("special", "first"), [("eos_token", "<end>"), ("bos_token", "<start>")])
def test_a_tokenizer_of_ones_own(recipe, tmp_path, special, first):
    """Its ids, its end-of-text token before each document; the vocabulary padded to 300."""
    folder = word_tokenizer(tmp_path / "words", **{special: first})
    texts = [" ".join(f"w{(i + j) % 100}" for j in range(30)) for i in range(90)]
    recipe = with_text(recipe, json_lines(tmp_path / "a.jsonl", texts))
    recipe = override(recipe, {"data.tokenizer": str(folder)})
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    end = {"<end>": 1, "<start>": 2}[first]
    assert corpus.end_of_text == end
    expected = [
        [end, *(3 + int(word[1:]) for word in text.split())]
        for text in texts
        if held_out_split(text, 0.1) == "train"
    ]
    np.testing.assert_array_equal(corpus.tokens("train")[:], np.concatenate(expected))
    assert corpus.unigram_counts().shape == (300,)
    assert len(AutoTokenizer.from_pretrained(corpus.tokenizer_folder)) == 103
    # Found again by what is in it, not by where it is.
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    moved = override(recipe, {"data.tokenizer": str(other)})
    assert prepare_corpus(moved, tmp_path / "cache").folder == corpus.folder


def test_a_slow_tokenizer(recipe, tmp_path):
    """ByT5's: a token for each byte, behind the end of a text."""
    texts = [f"document {i} of some words" for i in range(200)]
    recipe = with_text(recipe, json_lines(tmp_path / "a.jsonl", texts))
    values = {"data.tokenizer": str(byte_tokenizer(tmp_path / "bytes")), "model.vocab_size": 384}
    corpus = prepare_corpus(override(recipe, values), tmp_path / "cache")
    train = [text.encode() for text in texts if held_out_split(text, 0.1) == "train"]
    expected = [token for text in train for token in (1, *(byte + 3 for byte in text))]
    assert corpus.tokens("train")[:].tolist() == expected


def test_unusable_tokenizers(tmp_path):
    folder = word_tokenizer(tmp_path / "words")
    with pytest.raises(UsageError, match=rf"^data.tokenizer={folder} has neither eos_token nor"):
        corpus_tokenizer(str(folder), 300)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=rf"^data.tokenizer={folder} has no tokenizer that can"):
        corpus_tokenizer(str(folder), 300)
    folder = word_tokenizer(tmp_path / "more", eos_token="<end>")
    corpus_tokenizer(str(folder), 103)
    with pytest.raises(UsageError, match=r"has 103 tokens: set model\.vocab_size=102 to as many"):
        corpus_tokenizer(str(folder), 102)


def test_existing_token_files(recipe, tmp_path):
    """They stay where they are; counts and checks are cached until they change."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, 300, 5000).astype("<u2")
    ids[:3000].tofile(folder / "train_1.bin")
    ids[3000:4000].tofile(folder / "train_2.bin")
    ids[4000:].tofile(folder / "val.bin")
    recipe = override(recipe, {"data.text": None, "data.tokens": str(folder)})
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    assert corpus.tokenizer_folder is None
    assert corpus.end_of_text is None
    assert corpus.facts["tokens"] == {"train": 4000, "valid": 500, "test": 500}
    np.testing.assert_array_equal(corpus.tokens("train")[:], ids[:4000])
    np.testing.assert_array_equal(corpus.unigram_counts(), np.bincount(ids[:4000], minlength=300))
    assert not list(corpus.folder.glob("*.bin"))
    assert prepare_corpus(recipe, tmp_path / "cache").folder == corpus.folder
    words = word_tokenizer(tmp_path / "words", eos_token="<end>")
    named = prepare_corpus(override(recipe, {"data.tokenizer": str(words)}), tmp_path / "cache")
    assert named.end_of_text == 1
    assert len(AutoTokenizer.from_pretrained(named.tokenizer_folder)) == 103

    with pytest.raises(UsageError, match=r"^data.tokens=.* is too short"):
        prepare_corpus(override(recipe, {"training.batch_size": 1000}), tmp_path / "cache")
    with pytest.raises(UsageError, match=r"=299 .* not fit .*train_1.bin .<u2.: token ids range"):
        prepare_corpus(override(recipe, {"model.vocab_size": 299}), tmp_path / "cache")
    ids[::-1][:3000].tofile(folder / "train_1.bin")
    changed = prepare_corpus(recipe, tmp_path / "cache")
    assert changed.facts["fingerprint"] != corpus.facts["fingerprint"]
    assert changed.facts["fingerprint"] != named.facts["fingerprint"] == corpus.facts["fingerprint"]
