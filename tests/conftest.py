"""A recipe of seconds, and real text to train it on."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import HealthCheck, settings

# Nothing is asserted of how long something takes, on whatever machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file with the longest test first, or one of two processes would wait for the other."""
    items.sort(key=lambda item: item.path.name != "test_cli.py")


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
