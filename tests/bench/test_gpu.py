"""``make gpu``, as far as it goes without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import speed_table

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/gpu.py"
ABSENT = (
    *("backports.zstd", "datasets", "hypothesis", "jsonargparse", "lightning", "matplotlib"),
    *("platformdirs", "plotly", "pydantic", "rich", "scipy", "transformers", "yaml"),
)
BARE = f"""
import importlib.metadata, runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
sys.argv = sys.argv[1:]
sys.path[0] = "benchmarks"  # as Python itself does for a script
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path / "gpu.json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr == "benchmarks/gpu.py needs a GPU, and torch finds none here\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_cpu_can_do(tmp_path):
    """All of it, on a small model, from the source tree of a machine that has little but torch."""
    target = tmp_path / "cpu.json"
    options = ["--device", "cpu", "--shapes", "64x16", "--seconds", "0.01", "--steps", "6"]
    model = ["--layers", "1", "--length", "8", "--batch-size", "1"]
    result = subprocess.run(
        [sys.executable, "-c", BARE, SCRIPT, target, *options, *model],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(target.read_text())
    assert {name: len(content[name]) for name in ("results", "model", "tests", "training")} == {
        "results": 2 * 2 * 4,  # two dtypes, clipped or not, four optimizers
        "model": 2,
        "tests": 1,
        "training": 2,
    }
    assert content["tests"][0]["returncode"] == 0
    assert "64 × 16" in speed_table.tables({"cpu.json": content})
    assert "LEAN" in result.stdout
    assert "expected at most 0.96" in result.stdout


@pytest.mark.slow
def test_what_was_measured_is_written_when_time_is_over(tmp_path):
    target = tmp_path / "cpu.json"
    options = ["--device", "cpu", "--shapes", "64x16", "--seconds", "0.01", "--minutes", "0"]
    model = ["--layers", "1", "--length", "8", "--batch-size", "1", "--tests", "0.1"]
    result = subprocess.run(
        [sys.executable, SCRIPT, target, *options, *model],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert result.returncode == 1
    assert "took more than 0 s" in result.stdout
    content = json.loads(target.read_text())
    assert len(content["results"]) == 1
    assert content["tests"][0]["summary"] == ["timed out"]
