"""``benchmarks/gpu.py``, as far as it goes without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import speed_table

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "numpy", "triton")
OF_TORCH = ("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy")
SMALL = ["--device", "cpu", "--shapes", "64x16", "--seconds", "0.01", "--steps", "6"]
SMALL += ["--layers", "1", "--length", "8", "--batch-size", "1"]


@pytest.fixture
def gpu(tmp_path):
    """The script, from the source tree of a machine that has torch, numpy and Triton only."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in (*NEEDED, *OF_TORCH, "torchgen", "typing_extensions"):
        if (spec := importlib.util.find_spec(name)) is not None:
            place = Path(spec.origin)
            place = place.parent if place.name == "__init__.py" else place
            (packages / place.name).symlink_to(place)

    def run(*options):
        return subprocess.run(
            [sys.executable, "-S", "benchmarks/gpu.py", tmp_path / "gpu.json", *options],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(packages)])},
            timeout=600,
        )

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(gpu, tmp_path):
    result = gpu()
    assert result.returncode == 2, result.stderr
    assert result.stderr == "benchmarks/gpu.py needs a GPU, and torch finds none here\n"
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
def test_what_a_cpu_can_do(gpu, tmp_path):
    """All of it, on a small model."""
    result = gpu(*SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: len(content[name]) for name in ("results", "model", "training")} == {
        "results": 2 * 2 * 4,  # two dtypes, clipped or not, four optimizers
        "model": 2,
        "training": 2,
    }
    assert len(content["checks"]) > 20
    assert all(check["passed"] for check in content["checks"])
    assert "64 × 16" in speed_table.tables({"gpu.json": content})
    assert "expected at most 0.96" in result.stdout
