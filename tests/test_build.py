"""What is built and uploaded: wheels with the kernel and without, links that work on PyPI."""

import email
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import coupled_adam
from coupled_adam import __version__, embeddings

ROOT = Path(__file__).parents[1]
LIBRARY = "coupled_adam/optim/kernels/libcoupled_adam.so"
REPOSITORY = "https://git.example/owner/coupled-adam"
SITE = "https://owner.git.example/coupled-adam/"


@pytest.fixture(scope="module")
def hooks():
    """The module hatch_build."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target, source, out, check=True, **environment):
    """The process of ``hatchling build``, and what it has put into the folder ``out``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out]
    names = ("COUPLED_ADAM_NATIVE", "COUPLED_ADAM_REPOSITORY", "COUPLED_ADAM_SITE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        command,
        check=check,
        cwd=source,
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )
    return result, sorted(out.iterdir()) if out.exists() else []


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked, as a release makes it."""
    folder = tmp_path_factory.mktemp("sdist")
    addresses = {"COUPLED_ADAM_REPOSITORY": REPOSITORY, "COUPLED_ADAM_SITE": SITE}
    _, (archive,) = build("sdist", ROOT, folder, **addresses)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_source_distribution(source):
    """It holds all of the repository, of this version, and is small."""
    assert source.name == f"coupled_adam-{__version__}"
    held = {path.name for path in source.iterdir()}
    assert held >= {"src", "tests", "docs", "examples", "study", "benchmarks", "constraints.txt"}
    assert not list(source.rglob("*.so"))
    # Two thirds are the study's results and the pictures, which grow by a few kilobytes a run.
    assert source.with_name(f"{source.name}.tar.gz").stat().st_size < 6e6


@pytest.mark.skipif(
    sys.platform == "win32" or not shutil.which("cc"), reason="needs a C compiler for POSIX"
)
@pytest.mark.parametrize(
    ("environment", "holds"),
    [
        ({"CC": "./quickly"}, True),
        ({"CC": "no-compiler-of-this-name"}, False),
        ({"CC": "cc", "COUPLED_ADAM_NATIVE": "0"}, False),
    ],
)
def test_wheel(environment, holds, source, tmp_path):
    """It holds the kernel for this platform, or is a wheel of Python alone; and has the URLs."""
    quickly = source / "quickly"  # optimizing takes half a minute
    quickly.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quickly.chmod(0o755)
    _, (wheel,) = build("wheel", source, tmp_path, **environment)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [name for name in names if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(about))
    assert (LIBRARY in names) is holds
    assert wheel.stem.startswith(f"coupled_adam-{__version__}-py3-none-")
    assert wheel.stem.endswith("-any") is not holds
    assert "coupled_adam/optim/kernels/native.c" in names
    assert all(name.startswith("coupled_adam") for name in names)
    if (ROOT / "PKG-INFO").exists():
        return  # a source distribution keeps the addresses that it was built with
    urls = metadata.get_all("Project-URL")
    assert {f"Issues, {REPOSITORY}/issues", f"Documentation, {SITE}"} <= {*urls}
    assert f"]({REPOSITORY}/blob/v{__version__}/docs/optimizer.md)" in metadata.get_payload()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("1", "cannot be compiled"), ("yes", "must be 0, 1 or empty, not 'yes'")],
)
def test_the_kernel_can_be_demanded(wanted, message, source, tmp_path):
    """A release without its kernel must not look like one with it."""
    environment = {"CC": "no-compiler-of-this-name", "COUPLED_ADAM_NATIVE": wanted}
    result, built = build("wheel", source, tmp_path / "dist", check=False, **environment)
    assert result.returncode != 0
    assert message in result.stderr
    assert not built


@pytest.mark.parametrize(
    ("python", "machine", "archflags", "oldest", "tag", "flags"),
    [
        ("macosx-10.9-universal2", "arm64", "", "", "macosx_11_0_arm64", "-arch arm64"),
        (
            "macosx-10.9-universal2",
            "arm64",
            "-arch x86_64 -arch arm64",
            "10.13",
            "macosx_10_13_universal2",
            "-arch arm64 -arch x86_64",
        ),
        ("macosx-11.0-arm64", "arm64", "-arch x86_64", "12", "macosx_12_0_x86_64", "-arch x86_64"),
    ],
)
def test_macos(python, machine, archflags, oldest, tag, flags, hooks, monkeypatch):
    """The tag says what has been compiled, whatever architectures Python itself is made for."""
    monkeypatch.setattr(hooks.sys, "platform", "darwin")
    monkeypatch.setattr(hooks.sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr(hooks.platform, "machine", lambda: machine)
    monkeypatch.setenv("ARCHFLAGS", archflags)
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", oldest)
    platform, arguments, environment = hooks.target()
    assert (platform, " ".join(arguments)) == (tag, flags)
    deployment = environment["MACOSX_DEPLOYMENT_TARGET"].replace(".", "_")
    assert tag.startswith(f"macosx_{deployment}_")


def sanitizers():
    """The libraries of gcc's sanitizers, which must be loaded first; empty if there are none."""
    if shutil.which("gcc") is None or sys.platform != "linux":
        return []
    ask = (["gcc", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
    found = [
        subprocess.run(a, capture_output=True, text=True, check=True).stdout.strip() for a in ask
    ]
    return found if all(Path(path).is_absolute() for path in found) else []


@pytest.mark.slow
@pytest.mark.skipif(not sanitizers(), reason="needs gcc with its sanitizers")
def test_sanitizers(hooks, tmp_path):
    """No pass reads or writes out of bounds, or does what C does not define."""
    shutil.copytree(Path(coupled_adam.__file__).parent, tmp_path / "coupled_adam")
    library = tmp_path / LIBRARY
    checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    flags = [flag for flag in hooks.FLAGS if flag != "-O3"]
    kernel = library.with_name("native.c")
    subprocess.run(["gcc", *flags, *checks, "-o", library, kernel, "-lm", "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(sanitizers()),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python leaks on purpose
        "PYTHONPATH": str(tmp_path),
    }
    alone = [sys.executable, "-c", "import torch"]
    if subprocess.run(alone, env=environment, capture_output=True).returncode:
        pytest.skip("Python does not run under the sanitizers here")
    line = "tests/optim/test_row_sparse.py tests/optim/test_kernels.py -q -p no:cacheprovider -k"
    chosen = "(random or infinity or nan or oracle or overflows) and not many"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *line.split(), chosen, "-m", "not slow"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 20


def test_links(hooks):
    """At a release no link of the README is relative, and each target is in the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    released = hooks.absolute(text, REPOSITORY, "v1.2.3")
    addresses = re.findall(r'\]\(([^)]*)\)|<img src="([^"]*)"', released)
    assert len(addresses) > 20
    for link, picture in addresses:
        where = link or picture
        assert re.match(r"https://|#", where), where
        if where.startswith(REPOSITORY):
            kind = "raw" if picture else "blob"
            path = where.removeprefix(f"{REPOSITORY}/{kind}/v1.2.3/").split("#")[0]
            assert (ROOT / path).exists(), where
    assert hooks.absolute("![a](b.png) [c](https://d) [e](#f)", "R", "v1") == (
        "![a](R/raw/v1/b.png) [c](https://d) [e](#f)"
    )


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    """Those of its headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def test_pages():
    """What the pages link to exists, and the site has all of them; `make docs` checks the rest."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("study/*.md")]
    links = places = 0
    for page in pages:
        for target in re.findall(r"\]\((?!\w+:)([^)\s]+)", without_code(page)):
            file, _, anchor = target.partition("#")
            aim = page.parent / file if file else page
            assert aim.exists(), f"{page} links to {target}"
            if anchor and aim.suffix == ".md":
                assert anchor in anchors(aim), f"{page} links to {target}"
                places += 1
            links += 1
    assert min(links, places) > 100
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert re.search(rf" {page.name}$", navigation, flags=re.MULTILINE), page.name


def test_arguments_that_are_named_together():
    """On the site each has a row, with its own type and default."""
    griffe = pytest.importorskip("griffe")  # of the extra [docs]
    extensions = griffe.load_extensions(ROOT / "docs" / "arguments.py")
    package = griffe.load("coupled_adam", search_paths=[ROOT / "src"], extensions=extensions)
    optimizer = package["optim.coupled_adam.CoupledAdamW"]
    (section,) = (s for s in optimizer.docstring.parse("google") if s.kind.value == "parameters")
    names = [argument.name for argument in section.value]
    assert names == [*inspect.signature(coupled_adam.CoupledAdamW).parameters]


@pytest.mark.parametrize("module", [coupled_adam, embeddings])
def test_public_names_are_documented(module):
    """Each has a docstring of its own, and a place on the site's page of the API."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^::: {module.__name__}\.([A-Za-z]\w+)$", page, flags=re.MULTILINE)
    assert set(listed) - {"lightning", "transformers"} == set(module.__all__)
    for name in module.__all__:
        public = getattr(module, name)
        text = vars(public)["__doc__"] if isinstance(public, type) else public.__doc__
        assert text, name
        assert "    Example:" not in text, f"{name}: the site knows the heading Examples alone"
        assert not text.startswith(f"{name}("), f"{name} has the docstring that dataclasses make"
