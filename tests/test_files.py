"""Files and folders that are complete or absent, whenever a process is killed."""

import errno
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from coupled_adam import files
from coupled_adam.errors import UsageError

# A process without threads, which forks one child for each file operation to be killed at, or for
# each line of this package's at which Ctrl-C is pressed.
ENDED = """
import os, shutil, signal, sys
from pathlib import Path
from coupled_adam import files

what, how, place = *sys.argv[1:3], Path(sys.argv[3])
target = place / "target"

def make():
    if what == "file":
        files.write_atomically(target, "new")
    else:
        with files.new_folder(target, is_own) as folder:
            (folder / "sub").mkdir()
            (folder / "a").write_text("new")
            (folder / "sub" / "b").write_text("new")

def is_own(name):
    return name in ("a", "sub/b")

def content():
    if what == "file":
        return target.read_text()
    contents = {(target / name).read_text() for name in ("a", "sub/b")}
    assert len(contents) == 1, "half of a folder"
    return contents.pop()

def ended_at(number):
    left = number
    def operation(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    def interrupt(frame, event, _):
        nonlocal left
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return interrupt
    process = os.fork()
    if process == 0:
        if how == "killed":
            sys.addaudithook(operation)
        else:
            of_files = lambda frame, *_: frame.f_code.co_filename == files.__file__
            sys.settrace(lambda *event: interrupt if of_files(*event) else None)
        try:
            make()
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    return os.waitpid(process, 0)[1] != 0

make()
number, contents_seen = 0, set()
while True:
    number += 1
    if what == "file":
        target.write_text("old")
    else:
        (target / "a").write_text("old")
        (target / "sub" / "b").write_text("old")
        (target / "foreign").write_text("kept")
    has_ended = ended_at(number)
    if what == "file":
        content()
    if how == "interrupted":
        names = {path.name for path in place.iterdir()}
        assert names <= {"target", ".target.coupled-adam-old"}, (number, names)
    files.clear_leftovers(place, is_own)
    contents_seen.add(content())
    assert [path.name for path in place.iterdir()] == ["target"], number
    if what != "file":
        assert {path.name for path in target.iterdir()} == {"a", "sub", "foreign"}, number
    if not has_ended:
        break
assert contents_seen == {"old", "new"}, contents_seen
assert number > 4
print(what == "file" or (target / "foreign").read_text() == "kept")
"""


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_ended_at_every_operation(tmp_path, what, how):
    """The old content or the new one, whole, and no leftovers, once they have been cleared.

    After Ctrl-C at most the old folder is left beside the new one.
    """
    command = [sys.executable, "-c", ENDED, what, how, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "True\n", result.stderr


def test_a_replaced_folder_that_cannot_be_removed(tmp_path, monkeypatch):
    """The new one is there, with a warning; the old one goes later, without what is others'."""
    with files.new_folder(tmp_path / "x") as folder:
        (folder / "file").write_text("old")
    monkeypatch.setattr(files, "_dissolve", Mock(side_effect=PermissionError(errno.EACCES, "No")))
    with (
        pytest.warns(UserWarning, match=r"\.x\.coupled-adam-old could not be removed \(No\)"),
        files.new_folder(tmp_path / "x") as folder,
    ):
        (folder / "file").write_text("new")
    assert (tmp_path / "x" / "file").read_text() == "new"
    monkeypatch.undo()
    (tmp_path / ".x.coupled-adam-old" / "of another").write_text("")
    files.clear_leftovers(tmp_path)
    assert (tmp_path / ".x.coupled-adam-old").exists()
    files.clear_leftovers(tmp_path, lambda name: name == "file")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"file", "of another"}


def test_only_leftovers_of_the_dead_are_cleared(tmp_path):
    """Neither what others call similarly, nor what a process is working on."""
    of_others = [
        tmp_path / name for name in ("a.tmp", ".coupled-adam-1.tmp", ".x.123.old", "b.tmp")
    ]
    for path in of_others[:-1]:
        path.write_text("")
    of_others[-1].mkdir()
    linked = files.temporary_path(tmp_path / "x")
    linked.symlink_to(of_others[-1])
    dead = files.temporary_path(tmp_path / "x")
    dead.mkdir()
    (dead / "half").write_text("")
    with files.new_folder(tmp_path / "alive") as alive:
        (alive / "file").write_text("")
        files.clear_leftovers(tmp_path)
        assert {*tmp_path.iterdir()} == {*of_others, linked, alive}
    assert (tmp_path / "alive" / "file").exists()


@pytest.mark.parametrize("read", [files.read_text, files.file_digest])
def test_pipes_are_not_waited_for(tmp_path, read):
    pipe = files.temporary_path(tmp_path / "x")
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe or a device, and should be a file"):
        read(pipe)
    files.clear_leftovers(tmp_path)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


def test_what_fails_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()

    def fail():
        with files.new_folder(tmp_path / "folder") as folder:
            (folder / "file").write_text("")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


def test_on_the_disk_before_it_has_its_name(tmp_path, disk):
    """Files, then their folders, then the name, then the folder that holds the name."""
    files.write_atomically(tmp_path / "file", "content")
    assert disk.check(tmp_path) == 1
    with files.new_folder(tmp_path / "new") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("content")
    assert disk.check(tmp_path) == 2
    with files.new_folder(tmp_path / "new", lambda _: True) as folder:
        (folder / "file").write_text("content")
    files.make_folder(tmp_path / "x" / "y")
    assert disk.check(tmp_path) == 3


def test_an_error_of_the_disk_is_one(tmp_path, monkeypatch):
    """What is not on the disk gets no name; but some file systems cannot sync folders."""
    sync = os.fsync
    fails = errno.EIO

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(fails, os.strerror(fails))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"), files.new_folder(tmp_path / "new"):
        pass
    assert not [*tmp_path.iterdir()]
    fails = errno.EINVAL
    with files.new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "new").is_dir()


def test_a_folder_has_one_writer(tmp_path):
    with files.sole_writer(tmp_path):
        with pytest.raises(UsageError, match="is in use by another process"):
            files.sole_writer(tmp_path).__enter__()
        (tmp_path / ".lock").unlink()  # by its holder, with the folder


def test_a_lock_is_no_symbolic_link(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        files.sole_writer(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EACCES, PermissionError), (errno.EIO, OSError)]
)
def test_a_lock_that_cannot_be_had(number, raised, tmp_path, monkeypatch):
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(files.fcntl, "flock", Mock(side_effect=error))
    with pytest.raises(raised, match=r"\.lock"):
        files.sole_writer(tmp_path).__enter__()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(files.fcntl, "flock", Mock(side_effect=error))
    with (
        pytest.warns(UserWarning, match="a file system without locks"),
        files.sole_writer(tmp_path),
    ):
        pass
