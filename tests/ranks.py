"""A test file that is also the program of each rank, run by torchrun."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_ranks(ranks, program, names, *arguments):
    """Every rank ends well, and has said ``<name: passed>`` of each case."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},  # to this file
    )
    assert result.returncode == 0, result.stderr
    for name in names:
        assert result.stdout.count(f"<{name}: passed>") == ranks
