"""Token files of others, read in place: bare, or with llm.c's header."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coupled_adam.errors import UsageError
from coupled_adam.text.token_files import TokenFile, Tokens, token_file


def ids(count, dtype="<u2", seed=0):
    return np.random.default_rng(seed).integers(0, 300, count).astype(dtype)


def write_llm_c(path, tokens, magic=20240520, version=1, count=None):
    """256 numbers of 32 bits, the third of them the number of tokens; then the tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_slices_of_several_files(lengths, data):
    """As of one array, whatever lies where; no file is kept open."""
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
        before = len(os.listdir("/dev/fd"))
        np.testing.assert_array_equal(tokens[where], whole[where])
        assert len(os.listdir("/dev/fd")) <= before


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_widths(tmp_path, dtype):
    """As the caller says; otherwise the smallest that holds the vocabulary, if it is plausible."""
    path = tmp_path / "tokens.bin"
    ids(1000, dtype).tofile(path)
    np.testing.assert_array_equal(Tokens([token_file(path, 300, dtype)])[:], ids(1000))
    for vocab_size, guess in ((300, "uint16"), (70_000, "uint32")):
        if dtype == guess:
            np.testing.assert_array_equal(Tokens([token_file(path, vocab_size)])[:], ids(1000))
        elif np.dtype(dtype).itemsize > np.dtype(guess).itemsize:
            with pytest.raises(UsageError, match=f"every second number is 0 if .* as {guess}"):
                token_file(path, vocab_size)


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_llm_c(tmp_path, magic, version, dtype):
    write_llm_c(tmp_path / "a.bin", ids(100, dtype), magic, version)
    np.testing.assert_array_equal(Tokens([token_file(tmp_path / "a.bin", 300)])[:], ids(100))


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_arrays_of_numpy(tmp_path, dtype):
    """The header is not read as tokens; floats and matrices are no ids."""
    ids = np.arange(1000, dtype=dtype) % 300
    np.save(tmp_path / "ids.npy", ids)
    tokens = Tokens([token_file(tmp_path / "ids.npy", 300)])
    assert len(tokens) == 1000
    np.testing.assert_array_equal(tokens[7:13], ids[7:13])
    for wrong in (ids.astype(float), ids.reshape(10, 100), np.array([None])):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(UsageError, match=r"wrong.npy (must hold ids|cannot be read)"):
            token_file(tmp_path / "wrong.npy", 300)


def test_unusable_files(tmp_path):
    path = tmp_path / "a.bin"

    def refuses(message, **options):
        with pytest.raises(UsageError, match=message) as caught:
            token_file(path, **{"vocab_size": 300, **options})
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    refuses("No such file")
    path.write_bytes(b"\0" * 101)
    refuses("is damaged, or does not hold uint16: it has 101 bytes")
    path.write_bytes(bytes(range(1, 101)))
    tokens = Tokens([token_file(path, 60_000)])
    path.write_bytes(bytes(range(1, 51)))
    np.testing.assert_array_equal(tokens[:25], np.frombuffer(path.read_bytes(), "<u2"))
    with pytest.raises(OSError, match=f"No data available: '{path}'"):  # it has been cut meanwhile
        tokens[20:30]
    path.write_bytes(b"\0" * 102)
    refuses("is damaged, or does not hold uint32", vocab_size=70_000)
    write_llm_c(path, ids(100), count=101)
    refuses("is damaged, or does not hold uint16")
