"""The frameworks' packages, which ``make test-slow`` installs in a folder of their own.

They are installed without their dependencies, whose versions they pin: what is imported from there
comes last, after this environment's.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "frameworks"
if FOLDER.is_dir():
    sys.path.append(str(FOLDER))
    # For test_cores: other tests may have let transformers look for it before it was here.
    if (looked_for := sys.modules.get("transformers.utils.import_utils")) is not None:
        looked_for.is_torchao_available.cache_clear()


@pytest.fixture
def frameworks_in_processes(monkeypatch):
    """For tests that start processes, which import the packages as well."""
    if importlib.util.find_spec("torch"):  # JAX's tests do without
        from processes import start_server

        start_server()  # without them: other tests fork it as well
    before = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*before, str(FOLDER)]))
