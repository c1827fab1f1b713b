"""A recipe of seconds, and real text to train it on; what all tests share."""

import importlib.util
import os
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


def pytest_addoption(parser):
    parser.addoption(
        "--fill",
        action="store_true",
        help="write the study's numbers into the sentences of the pages that have others",
    )


def pytest_collection_modifyitems(items):
    """What takes minutes begins first: at the end all but one process would wait for it."""

    def minutes(item):
        return max((mark.kwargs.get("minutes", 0) for mark in item.iter_markers("slow")), default=0)

    items.sort(key=minutes, reverse=True)


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
