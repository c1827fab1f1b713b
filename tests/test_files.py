"""Files and folders are complete or absent, and locks end with their process."""

import errno
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from coupled_adam import files, inputs, outputs
from coupled_adam.errors import UsageError
from processes import Process


def test_what_fails_leaves_the_old(tmp_path):
    """Neither half of what is new, nor anything beside it."""
    files.write_atomically(tmp_path / "file", "old")

    def fail():
        with files.new_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(tmp_path / "file", "\ud83d")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127, "[a]*?"])
def test_any_name(name, tmp_path):
    for content in ("old", "new"):
        files.write_atomically(tmp_path / name, content)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_replaces_nothing(tmp_path):
    """And an error after it has its name does not remove it."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").touch()
    with pytest.raises(OSError, match="not empty") as caught, files.new_folder(tmp_path / "x"):
        pass
    assert caught.value.filename == str(tmp_path / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "mine"]

    def interrupted(path, target):
        os.rename(path, target)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.replace", interrupted)
        with pytest.raises(KeyboardInterrupt), files.new_folder(tmp_path / "y") as folder:
            (folder / "a").touch()
    assert (tmp_path / "y" / "a").exists()


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        files.write_atomically(tmp_path / "file", "content")
    assert caught.value.filename == str(tmp_path / "file")
    assert not [*tmp_path.iterdir()]


BEGIN = """
import sys, time
from pathlib import Path
from coupled_adam import files, outputs
folder = Path(sys.argv[1])
with files.new_file(folder / "file"), files.new_folder(folder / "folder"):
    with outputs.sole_writer(folder / "locked"):
        print("begun", flush=True)
        time.sleep(100)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that has begun to write a file and a folder, and has the lock of another."""
    (tmp_path / "locked").mkdir()
    process = Process([sys.executable, "-c", BEGIN, str(tmp_path)])
    process.until("begun")
    return process


def test_what_a_killed_process_has_left_is_removed(writer, tmp_path):
    """By the next that writes the same; not what a process is still writing, nor a user's file."""
    mine = [tmp_path / ".file-1234abcd", tmp_path / ".folder-x"]
    for path in mine:
        path.touch()

    def write():
        files.write_atomically(tmp_path / "file", "content")
        with files.new_folder(tmp_path / "folder"):
            pass
        return {path for path in tmp_path.glob(".*") if path not in mine}

    unfinished = write()
    assert {path.name.rpartition("-")[0] for path in unfinished} == {
        ".file-unfinished",
        ".folder-unfinished",
    }
    writer.kill()
    writer.wait()
    assert not write()
    assert all(path.exists() for path in mine)


def test_a_folder_has_one_writer(writer, tmp_path):
    """Until its process ends, however it does."""
    with pytest.raises(UsageError, match="is in use by another process"):
        outputs.sole_writer(tmp_path / "locked").__enter__()
    writer.kill()
    writer.wait()
    for _ in range(2):
        with outputs.sole_writer(tmp_path / "locked"):
            pass


def test_a_claim_that_fails_leaves_nothing(tmp_path):
    """What is refused is left without a lock; so is a place where nothing was written."""
    check = Mock(side_effect=UsageError("it is another's"))
    with pytest.raises(UsageError, match="another's"):
        outputs.claimed(tmp_path, check).__enter__()
    assert not [*tmp_path.iterdir()]

    def fail():
        folder = tmp_path / "a" / "b"
        with outputs.claimed(folder, lambda: outputs.check_unused(folder)):
            assert (folder / ".lock").exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not [*tmp_path.iterdir()]


def test_a_claim_asks_again(tmp_path):
    """What another process has written in the meantime is not overwritten."""

    def check():
        outputs.check_unused(tmp_path / "x")
        if not (tmp_path / "x").exists():
            (tmp_path / "x").mkdir()
            (tmp_path / "x" / "theirs").touch()

    with pytest.raises(UsageError, match="x exists: continue it with --resume, or choose another"):
        outputs.claimed(tmp_path / "x", check).__enter__()
    assert (tmp_path / "x" / "theirs").exists()


def test_a_disk_that_is_full_for_numbers(tmp_path):
    """NumPy's error has no number, which would be all that is said of it."""

    def write():
        with files.new_file(tmp_path / "x.npy"):
            raise OSError("600 requested and 0 written")

    with pytest.raises(OSError, match="600 requested and 0 written") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [b"\xff", b"{"], ids=["no UTF-8", "half"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{path} is damaged \(.+\): restore it, or move it away"):
        inputs.read_own(path, lambda text: text.index("}"))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "read",
    [files.regular, files.checksum, inputs.read_text, lambda path: inputs.read_own(path, str)],
)
def test_what_has_no_end_is_not_opened(read, kind, tmp_path):
    """Whoever reads it would wait for ever, or fill the memory."""
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises((OSError, UsageError), match="it is a pipe or a device"):
        read(path)


PLACES = {
    "a recipe": (["recipes", "{folder}/x.yaml"], "x.yaml"),
    "a recipe that is extended": (["recipes", "{folder}/own.yaml"], "x.yaml"),
    "a configuration": (["analyze", "{folder}"], "config.json"),
    "weights": (["analyze", "{folder}"], "model.safetensors"),
    "an array": (["analyze", "{folder}/x.npy"], "x.npy"),
    "tokens": (["analyze", "{folder}/model.npy", "--tokens", "{folder}/x.bin"], "x.bin"),
    "counts": (["analyze", "{folder}/model.npy", "--counts", "{folder}/counts.npy"], "counts.npy"),
}


@pytest.mark.parametrize("place", PLACES)
def test_pipes_in_the_place_of_files(place, tmp_path):
    arguments, name = PLACES[place]
    (tmp_path / "own.yaml").write_text("extends: x.yaml\n")
    np.save(tmp_path / "model.npy", np.ones((8, 4), np.float32))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    command = [word.format(folder=tmp_path) for word in arguments]
    process = Process([sys.executable, "-m", "coupled_adam", *command])
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "pipe or a device" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x", "b/y"], ["x", "y"]),
        (["a/x", "b/x", "b/y"], ["a/x", "b/x", "y"]),
        (["1/a/x", "2/a/x", "2/b/x"], ["1/a/x", "2/a/x", "b/x"]),
        (["a/x", "x", "./a/x"], ["a/x", "here/x", "a/x"]),
        (["."], ["here"]),
    ],
)
def test_the_shortest_names_that_tell_paths_apart(paths, names, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert files.shortest_names(paths) == names
