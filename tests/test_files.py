"""Files and folders are complete or absent, and locks end with their process."""

import sys
from unittest.mock import Mock

import pytest

from coupled_adam import files
from coupled_adam.errors import UsageError
from processes import Process


def fill(folder, content):
    (folder / "sub").mkdir()
    for name in ("a", "sub/b"):
        (folder / name).write_text(content)


def test_what_fails_leaves_the_old(tmp_path):
    """Neither half of what is new, nor anything beside it."""
    with files.new_folder(tmp_path / "folder") as folder:
        fill(folder, "old")
    files.write_atomically(tmp_path / "file", "old")

    def fail():
        with files.new_folder(tmp_path / "folder") as folder:
            fill(folder, "new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(tmp_path / "file", "\ud83d")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}
    assert (tmp_path / "folder" / "sub" / "b").read_text() == "old"
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for content in ("old", "new"):
        with files.new_folder(tmp_path / "x") as folder:
            fill(folder, content)
            if content == "old":
                (folder / "more").write_text("")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"a", "sub"}
    with (
        pytest.raises(OSError, match="not empty"),
        files.new_folder(tmp_path / "x", replace=False) as folder,
    ):
        fill(folder, "another")
    assert (tmp_path / "x" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        files.write_atomically(tmp_path / "file", "content")
    assert caught.value.filename == str(tmp_path / "file")
    assert not [*tmp_path.iterdir()]


HOLD = """
import sys, time
from pathlib import Path
from coupled_adam import files
with files.sole_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


def test_a_folder_has_one_writer(tmp_path):
    """Until its process ends, however it does."""
    process = Process([sys.executable, "-c", HOLD, str(tmp_path)])
    process.until("locked")
    with pytest.raises(UsageError, match="is in use by another process"):
        files.sole_writer(tmp_path).__enter__()
    process.kill()
    process.wait()
    for _ in range(2):
        with files.sole_writer(tmp_path):
            pass
