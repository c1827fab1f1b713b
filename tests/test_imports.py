"""The rooms of the package: imports go downwards only, and nobody imports more than he needs."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import coupled_adam

# Each room may import those above it in this list, and itself; "" is the public names.
ROOMS = [
    "errors",
    "fields",
    "inputs",
    "files",
    "outputs",
    "runs",
    "optim.lean",  # without torch, as are the next three
    "optim.warn",
    "optim.model_matrix",
    "optim.embedding_search",
    "optim.named_parameters",
    "optim.find_embeddings",
    "optim",
    "",
    "text",
    "rendering",
    "embeddings",
    "lab",  # recipe, arms, models
    "lab.data",
    "lab.training",
    "lab.evaluation",
    "lab.reporting",
    "lab.comparison",
    "cli",
    "__main__",
    "optax",
    "integrations",
]
STRANGERS = {
    "optim": {"errors", "fields", "files", "inputs", "outputs", "runs"},
    "embeddings": {"optim", ""},
    "text": {"optim", ""},
    "optax": set(ROOMS) - {"optax", "optim.lean", "optim.model_matrix", "optim.embedding_search"},
}


def room(module):
    """The room of a module, by its name within the package."""
    return max((r for r in ROOMS if f"{module}.".startswith(f"{r}.") or not r), key=len)


def imports(path):
    """The modules of this package that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "coupled_adam":
                yield module


def test_imports_go_downwards():
    source = Path(coupled_adam.__file__).parent
    imported = 0
    for path in source.rglob("*.py"):
        mine = room(".".join(path.relative_to(source).with_suffix("").parts))
        for module in imports(path):
            imported += 1
            other = room(module)
            if path == source / "__init__.py":  # the public names, when they are asked for
                assert other.startswith("optim")
                continue
            assert ROOMS.index(other) <= ROOMS.index(mine), f"{path} imports {module}"
            assert other not in STRANGERS.get(mine, ()), f"{path} imports {module}"
    assert imported > 100


LARGE = ("torch", "jax", "transformers", "lightning", "matplotlib", "datasets", "scipy")


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--help"], set()),
        (["compare", "--help"], set()),
        (["recipes"], set()),
        (["analyze", "matrix.npy"], {"torch", "scipy"}),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments, needed, tmp_path):
    np.save(tmp_path / "matrix.npy", np.random.default_rng(0).normal(size=(30, 4)))
    script = f"""
import sys
from coupled_adam.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
assert not code, code
loaded = {{name for name in {LARGE} if name in sys.modules}}
assert loaded == {needed!r}, loaded
"""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > 5


def without(condition, arguments, folder):
    """The process of the command where packages whose name meets a condition are not there."""
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package {condition}:
            raise ModuleNotFoundError(f"No module named {{package!r}}", name=name)
sys.meta_path.insert(0, Absent())
from coupled_adam.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "analyze and repair need the extra [analyze]"),
        (["analyze", "matrix.npy"], 2, "pip install '.[analyze]'"),
        (["repair", "--help"], 2, "pip install '.[analyze]'"),
        (["compare"], 2, "pip install '.[lab]'"),
        (["recipes"], 2, "pip install '.[lab]'"),
    ],
)
def test_without_extras_a_command_names_its_own(arguments, code, said, tmp_path):
    """Where nothing is installed but the package, whose command is there all the same."""
    result = without("not in sys.stdlib_module_names | {'coupled_adam'}", arguments, tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == (code == 2)


def test_analyze_needs_none_of_the_laboratory_s_packages(tmp_path):
    """Nor have its page, tables and questions any use for them: the extra [analyze] is enough."""
    matrix = np.random.default_rng(0).normal(size=(60, 4))
    np.save(tmp_path / "matrix.npy", matrix)
    np.save(tmp_path / "counts.npy", np.arange(60))
    laboratory = {"lightning", "datasets", "plotly", "tensorboard", "pyarrow", "pandas"}
    options = ["--counts", "counts.npy", "--html", "page.html", "--undertrained", "--all"]
    options += ["--neighbours", "#3"]
    result = without(f"in {laboratory}", ["analyze", "matrix.npy", *options], tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "page.html").exists()
