"""What is ready to be proposed to optax passes optax's own tests of contributed optimizers."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

pytest.importorskip("optax")

pytestmark = pytest.mark.slow

UPSTREAM = Path(__file__).parents[2] / "upstream" / "optax"
NAMES = ("coupled_adam", "lean")


def module(name, path, source=None):
    """A module of a file, under the name that it has in optax; of another source if given."""
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    if source is None:
        spec.loader.exec_module(made)
    else:
        exec(compile(source, str(path), "exec"), made.__dict__)
    return made


def run_all():
    """Optax's common tests with our two optimizers in the place of its own, then those of ours."""
    from absl import flags
    from optax import contrib

    ours = module("optax.contrib._lean", UPSTREAM / "_lean.py")
    contrib._lean = ours
    for name in NAMES:
        setattr(contrib, name, getattr(ours, name))
    path = Path(contrib.__file__).with_name("_common_test.py")
    source = path.read_text()
    entries = "".join(
        f"    {{'opt_name': '{name}', 'opt_kwargs': {{'learning_rate': 1e-2}}}},\n"
        for name in NAMES
    )
    # Its list of optimizers, and those of wrappers, which would be tested without us.
    start, end = (
        source.index("    {'opt_name': 'acprop'"),
        source.index("]\nfor optimizer in _MAIN"),
    )
    source = source[:start] + entries + source[end:]
    for list_name in (r"_MAIN_OPTIMIZERS_UNDER_TEST \+=", "_BASE_OPTIMIZERS ="):
        source = re.sub(
            rf"{list_name} \[.*?\n\]\n", "_BASE_OPTIMIZERS = []\n", source, count=1, flags=re.S
        )
    common = module("upstream_common_test", path, source)
    own = module("upstream_lean_test", UPSTREAM / "_lean_test.py")
    flags.FLAGS.mark_as_parsed()
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    suite = unittest.TestSuite([load(common.ContribTest), load(own.LeanTest)])
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    assert result.wasSuccessful()
    assert result.testsRun > 40
    assert not result.skipped


def test_optax(frameworks_in_processes, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]


if __name__ == "__main__":
    run_all()
