"""Token files of others, read in place: bare, with llm.c's header, several for a split."""

import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coupled_adam.errors import UsageError
from coupled_adam.text.source import Data
from coupled_adam.text.token_files import TokenFile, Tokens, find_token_files, token_file


def ids(count, dtype="<u2", seed=0):
    return np.random.default_rng(seed).integers(0, 300, count).astype(dtype)


def write_llm_c(path, tokens, magic=20240520, version=1, count=None):
    """256 numbers of 32 bits, the third of them the number of tokens; then the tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())


def found(data, vocab_size=300):
    files = find_token_files(data, vocab_size)
    return {split: Tokens(parts) for split, parts in files.items()}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_slices_of_several_files(lengths, data):
    """As of one array, whatever lies where."""
    whole = np.arange(sum(lengths), dtype="<u2")
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, ids in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
            ids.tofile(Path(folder, str(number)))
            files.append(TokenFile(str(number), "<u2", 0, len(ids)))
        tokens = Tokens(files, Path(folder))
        assert len(tokens) == len(whole)
        bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
        where = slice(data.draw(bound), data.draw(bound))
        np.testing.assert_array_equal(tokens[where], whole[where])


def test_more_files_than_a_process_may_have_open(tmp_path):
    """As of a corpus of 100B tokens: they are read in any order, and few stay open."""
    files = []
    for number in range(200):
        np.array([number, number + 1], "<u2").tofile(tmp_path / f"train-{number:03}.bin")
        files.append(token_file(tmp_path / f"train-{number:03}.bin", 300))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, hard))
    try:
        tokens = Tokens(files)
        expected = np.array([[number, number + 1] for number in range(200)]).ravel()
        np.testing.assert_array_equal(tokens[:], expected)
        for place in np.random.default_rng(0).integers(0, 399, 500).tolist():
            np.testing.assert_array_equal(tokens[place : place + 2], expected[place : place + 2])
        assert len(os.listdir("/dev/fd")) - before <= 66
        del tokens
        assert len(os.listdir("/dev/fd")) <= before + 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_is_truncated_while_it_is_in_use(tmp_path):
    """An error that names it; a memory map would kill the process with SIGBUS."""
    path = tmp_path / "train.bin"
    ids(5000, "<u2").tofile(path)
    tokens = Tokens([token_file(path, 300)])
    assert len(tokens[4000:]) == 1000
    with path.open("r+b") as file:
        file.truncate(100)
    assert len(tokens[:50]) == 50
    with pytest.raises(UsageError, match=r"train\.bin was truncated while it was in use"):
        tokens[4000:4010]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_nano_gpt(tmp_path, dtype):
    """Bare files; the second half of the validation tokens is the test split."""
    train, valid = ids(5000, dtype), ids(1001, dtype, seed=1)
    train.tofile(tmp_path / "train.bin")
    valid.tofile(tmp_path / "val.bin")
    name = {"<u2": "uint16", "<u4": "uint32"}[dtype]
    splits = found(Data(tokens=str(tmp_path), token_dtype=name))
    np.testing.assert_array_equal(splits["train"][:], train)
    np.testing.assert_array_equal(splits["valid"][:], valid[:500])
    np.testing.assert_array_equal(splits["test"][:], valid[500:])
    # Without a word from the user, the smallest type that holds the vocabulary.
    guessed = found(Data(tokens=str(tmp_path)), 300 if dtype == "<u2" else 70_000)
    np.testing.assert_array_equal(guessed["train"][:], train)


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_llm_c(tmp_path, magic, version, dtype):
    """Several files for a split, in the order of their names; test files of their own."""
    parts = [ids(100 + i, dtype, seed=i) for i in range(3)]
    for i in (2, 0, 1):
        write_llm_c(tmp_path / f"fineweb_train_{i:06}.bin", parts[i], magic, version)
    write_llm_c(tmp_path / "fineweb_val_000000.bin", parts[1], magic, version)
    write_llm_c(tmp_path / "fineweb_test_000000.bin", parts[2], magic, version)
    splits = found(Data(tokens=str(tmp_path)))
    np.testing.assert_array_equal(splits["train"][:], np.concatenate(parts))
    np.testing.assert_array_equal(splits["train"][90:310], np.concatenate(parts)[90:310])
    np.testing.assert_array_equal(splits["valid"][:], parts[1])
    np.testing.assert_array_equal(splits["test"][:], parts[2])


def test_limits(tmp_path):
    """No more tokens than asked for, over several files."""
    parts = [ids(100, seed=i) for i in range(3)]
    for i, part in enumerate(parts):
        part.tofile(tmp_path / f"train{i}.bin")
    ids(500).tofile(tmp_path / "val.bin")
    splits = found(Data(tokens=str(tmp_path), max_tokens=150, max_held_out_tokens=40))
    np.testing.assert_array_equal(splits["train"][:], np.concatenate(parts)[:150])
    np.testing.assert_array_equal(splits["valid"][:], ids(500)[:40])
    np.testing.assert_array_equal(splits["test"][:], ids(500)[250:290])


def test_unusable_files(tmp_path):
    data = Data(tokens=str(tmp_path))

    def refuses(message, data=data, vocab_size=300):
        with pytest.raises(UsageError, match=message) as caught:
            find_token_files(data, vocab_size)
        assert "\n" not in str(caught.value)

    refuses("no such folder", Data(tokens=str(tmp_path / "missing")))
    refuses(r"no file \*train\*.bin in it")
    ids(100).tofile(tmp_path / "train.bin")
    refuses(r"no file \*val\*.bin in it")
    (tmp_path / "val.bin").write_bytes(b"\0" * 101)
    refuses("val.bin is damaged: 101 bytes of uint16")
    (tmp_path / "val.bin").write_bytes(b"\0" * 102)
    refuses("val.bin is damaged: 102 bytes of uint32", vocab_size=70_000)
    write_llm_c(tmp_path / "val.bin", ids(100), count=101)
    refuses("damaged: 200 bytes of uint16, where its header says 101 tokens")
    refuses("leave it out", Data(tokens=str(tmp_path), token_dtype="uint32"))
    write_llm_c(tmp_path / "val.bin", ids(100), magic=20240522)  # its evaluation files
    refuses("has the header 20240522, version 1; of llm.c's files those with 20240520, version 1")
    (tmp_path / "val.bin").unlink()
    os.mkfifo(tmp_path / "val.bin")  # nobody writes into it: reading would wait forever
    refuses("val.bin: not a file")
