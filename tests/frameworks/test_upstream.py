"""The patches for other projects: our own lines, which work in the released packages."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(ROOT.glob("docs/upstream/*.patch"))


def test_patches_hold_our_lines_alone():
    """No line of the projects, neither around ours nor removed."""
    assert len(PATCHES) == 3
    for patch in PATCHES:
        text = patch.read_text(encoding="utf-8")
        of_ours = r"\+|diff --git |new file mode |--- |@@ -\d+,0 \+|\Z"
        assert not re.search(rf"^(?!{of_ours})", text, flags=re.MULTILINE)
        assert not re.search(r"^@@.*@@.", text, flags=re.MULTILINE)
        added = len(re.findall(r"^\+(?!\+\+ )", text, flags=re.MULTILINE))
        hunks = re.findall(r"^@@ -\d+,0 \+\d+(?:,(\d+))? @@$", text, flags=re.MULTILINE)
        assert added == sum(int(lines or 1) for lines in hunks)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize(
    ("package", "version", "parts", "tests"),
    [
        ("transformers", "5.23.0", ["src/*", "tests/*"], "tests/trainer"),
        ("optax", "0.2.8", ["optax/contrib/_coupled_adam*"], "optax/contrib/_coupled_adam_test.py"),
        ("torchtitan", "0.3.0", ["torchtitan/experiments/coupled_adam/*"], None),
    ],
)
def test_patched_package(package, version, parts, tests, tmp_path):
    """The tests of a patch pass in a copy of the package with its files, and what it adds to them.

    Of optax and torchtitan the patches are for later commits, so only the new files are taken.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or importlib.metadata.version(package) != version:
        pytest.skip(f"needs {package} {version}")
    patch = ROOT / "docs" / "upstream" / f"{package}.patch"
    source = tmp_path / ("src" if package == "transformers" else "")
    copy, installed = source / package, Path(spec.origin).parent
    shutil.copytree(installed, copy, copy_function=os.symlink)
    for name in re.findall(r"^--- a/(.*)$", patch.read_text(encoding="utf-8"), flags=re.MULTILINE):
        path = tmp_path / name
        if path.is_symlink():  # git refuses to write through a link
            target = path.resolve()
            path.unlink()
            shutil.copy(target, path)
    git = ["git", "apply", "--unidiff-zero", *(f"--include={part}" for part in parts), patch]
    subprocess.run(git, cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, tests or parts[0].replace("*", "tests")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
