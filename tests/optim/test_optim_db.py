"""torch's own optimizer tests: its public records with ours in the place of Adam and AdamW."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("optim_db_cases.py")


@pytest.mark.slow
def test_optim_db():
    """In a process of its own, whose settings torch's records may change."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(CASES)],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[2],
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 800
    assert "skipped" not in result.stdout
