"""``make gpu``, as far as it goes without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import speed_table

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, "benchmarks/gpu.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(tmp_path):
    command = [*SCRIPT, tmp_path / "gpu.json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr == "benchmarks/gpu.py needs a GPU, and torch finds none here\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_cpu_can_do(tmp_path):
    """Every part, on a small matrix; and the page's table can be made from what it writes."""
    target = tmp_path / "cpu.json"
    options = ["--device", "cpu", "--shapes", "64x16", "--seconds", "0.01"]
    training = ["--recipe", "tiny", "--steps", "2", "--batch-size", "1"]
    command = [*SCRIPT, target, *options, *training]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(target.read_text())
    assert content["tests"]["returncode"] == 0
    assert {len(content[name]) for name in ("passes", "results")} == {2, 8}
    assert all(one[name] > 0 for one in content["passes"] for name in ("sums", "update", "copy"))
    assert "64 × 16" in speed_table.tables({"cpu.json": content})
    assert "expected at most 0.90" in result.stdout
    assert "tiny: " in result.stdout
