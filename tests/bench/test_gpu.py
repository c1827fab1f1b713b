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
from benchmarks.gpu import IN_FLOAT32

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "numpy", "triton", "pytest")
OF_TORCH = (
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "setuptools",
    "_distutils_hack",
    "sympy",
)
OF_PYTEST = ("_pytest", "py", "iniconfig", "packaging", "pluggy", "pygments")
SMALL = ["--device", "cpu", "--shape", "64x16", "--seconds", "0.01"]
SMALL += ["--layers", "1", "--length", "8", "--batch-size", "1"]


@pytest.fixture
def gpu(tmp_path):
    """The script, on a machine that has torch, numpy, Triton and pytest, and no other package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in (*NEEDED, *OF_TORCH, *OF_PYTEST, "functorch", "torchgen", "typing_extensions"):
        if (spec := importlib.util.find_spec(name)) is not None:
            place = Path(spec.origin)
            place = place.parent if place.name == "__init__.py" else place
            (packages / place.name).symlink_to(place)

    def run(*options):
        return subprocess.run(
            [sys.executable, "-S", "benchmarks/gpu.py", "--out", tmp_path / "gpu.json", *options],
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
def test_a_part(gpu, tmp_path):
    """Each can be had by itself, and is written as the page's table reads it."""
    result = gpu(*SMALL, "--parts", "host")
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content.keys() == {"environment", "machine", "host"}
    names = [timed["optimizer"] for timed in content["host"]]
    assert names == ["LEAN", "Coupled Adam", "e - c g"]
    assert "| 256 × 64 |" in speed_table.gpu_tables({"gpu.json": content})


@pytest.mark.slow(minutes=2)
def test_what_a_cpu_can_do(gpu, tmp_path):
    """All of it, on a small model; and of what fails it says what failed."""
    result = gpu(*SMALL, "--workers", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [timed["optimizer"] for timed in content["steps"]] == list(IN_FLOAT32)
    assert [of["optimizer"] for of in content["training"]] == ["coupled", "lean"]
    outcomes = [test["outcome"] for test in content["tests"]]
    assert len(outcomes) > 10
    assert set(outcomes) == {"skipped"}  # they need a GPU
    assert f"{len(outcomes)} skipped" in result.stdout
