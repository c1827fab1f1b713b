"""A recipe of seconds, and real text to train it on; what all tests share."""

import importlib.util
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import HealthCheck, settings

# For this process, before torch is loaded, and for those that tests start: several share the cores,
# where threads that wait for each other busily would keep each other from running.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

# Nothing is asserted of how long something takes, on whatever machine. `make test-slow` chooses the
# wide profile with --hypothesis-profile.
for profile, examples in (("quick", 100), ("wide", 1000)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def corpus_cache(tmp_path_factory):
    """Corpora are prepared once for all tests, and not in the user's cache."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUPLED_ADAM_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True)
def blank_pictures(request, monkeypatch):
    """Pictures are composed, but saved without their pixels, which take most of a report's time.

    The mark ``pixels`` is for tests that need them.
    """
    there = importlib.util.find_spec("matplotlib")  # the optimizer's tests run without it
    if there and not request.node.get_closest_marker("pixels"):
        monkeypatch.setattr(
            "matplotlib.figure.Figure.savefig", lambda _, file, **__: file.write(BLANK)
        )


BLANK = (  # a PNG of one pixel
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\0\0\0\0:~\x9bU\0\0\0\nIDATx\x9cc`\0\0\0\2\0\1"
    b"H\xaf\xa4q\0\0\0\0IEND\xaeB`\x82coupled-adam"
)


class Disk:
    """Records what a process does to make files last, in order."""

    def __init__(self):
        self.events = []
        self.records = False
        self.log = None  # of a run, which must be on the disk when a checkpoint has its name

    def record(self, event, arguments):
        if self.records and event == "os.rename":
            self.renamed(*arguments[:2])

    def renamed(self, source, target):
        """The target has its name; what it holds must be on the disk already."""
        source = Path(source)
        held = [source, *source.rglob("*")] if source.is_dir() else [source]
        if self.log is not None and Path(target).name.removeprefix("step-").isdigit():
            held += [self.log, self.log.parent]
        states = [(os.stat(path).st_ino, os.stat(path).st_mtime_ns) for path in held]
        self.events.append(("rename", Path(target), states))

    def synced(self, descriptor):
        state = os.fstat(descriptor)
        self.events.append(("sync", state.st_ino, state.st_mtime_ns))

    def check(self, folder):
        """Returns how many names were given in a folder, each after what it names was synced."""
        given = 0
        for number, (kind, *content) in enumerate(self.events):
            # What is put aside has been on the disk, and its name goes with the next one.
            aside = kind == "rename" and content[0].name.endswith(".coupled-adam-old")
            if kind == "rename" and content[0].is_relative_to(folder) and not aside:
                target, states = content
                before = {(*event[1:],) for event in self.events[:number] if event[0] == "sync"}
                assert set(states) <= before, f"{target} was not on the disk"
                after = []  # until the next name in that folder is given
                for event in self.events[number + 1 :]:
                    if event[0] == "rename" and event[1].parent == target.parent:
                        break
                    after.append(event[1])
                assert target.parent.stat().st_ino in after, f"the name {target} was not"
                given += 1
        return given


_disk = Disk()
sys.addaudithook(lambda *event: _disk.record(*event))


@pytest.fixture
def disk(monkeypatch):
    """What is synced and renamed in this test."""
    sync = os.fsync

    def fsync(descriptor):
        _disk.synced(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    _disk.events, _disk.records, _disk.log = [], True, None
    yield _disk
    _disk.records = False


SMALL = """
name: small
model: {architecture: gpt2, vocab_size: 300, n_layer: 1, n_head: 2, n_embd: 8}
data: {held_out: 0.1}
training:
  steps: 40
  batch_size: 4
  sequence_length: 16
  lr: 1.0e-2
  warmup: 4
  evaluate_every: 5
  evaluation_batches: 5
arms:
  adamw: {optimizer: adamw}
  coupled_adam: {optimizer: coupled_adam}
seeds: [1]
"""


@pytest.fixture
def small_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A chapter of the language reference, about 60 kB."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(sorted(topics.values(), key=len)[-3:]))
    return path
