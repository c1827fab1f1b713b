"""Every block of code in the README and the documentation is run, or says why it is not.

A block that is not run has ``<!-- not run: a reason -->`` on the line above it. What a shell would
run is also parsed, whether it is run or not. Blocks of ``text`` are not code.
"""

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import token_models
from coupled_adam import cli
from coupled_adam.cli.parser import parsed
from coupled_adam.lab.recipe import load_values

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``reason`` says why it is not run."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(page):
    """All of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = r"^((?:<!-- not run: ([^\n]+) -->\n)?)```(\w+)\n(.*?)^```$"
    for fence in re.finditer(fenced, text, flags=re.MULTILINE | re.DOTALL):
        line = text[: fence.end(1)].count("\n") + 1
        yield Block(page, line, fence[3], fence[4], fence[2])


BLOCKS = [block for page in PAGES for block in blocks(page)]


def commands(block):
    """The commands of a shell's block, as lists of words without redirections and pipes."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("|", "&&")), len(words))
            yield words[:end]
            words = words[end + 1 :]


def our_arguments(command):
    """The arguments of ``coupled-adam`` in a command line, also behind torchrun; or None."""
    for i, word in enumerate(command):
        if word in ("coupled-adam", "coupled_adam", ".venv/bin/coupled-adam"):
            return command[i + 1 :]
    return None


def test_all_are_found():
    """All code is fenced; each fence has a language and is closed; reasons stand above fences."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        page_blocks = [block for block in BLOCKS if block.page == page]
        assert len(re.findall(r"^[ \t>]*(?:```|~~~)", text, flags=re.M)) == 2 * len(page_blocks), (
            page
        )
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"\n\n {4,}\S", outside), f"{page}: indented, so nothing runs it"
        reasons = re.findall(r"^\s*<!-- not run:", text, flags=re.MULTILINE)
        assert len(reasons) == sum(block.reason is not None for block in page_blocks), page
    assert {block.language for block in BLOCKS} == {"python", "bash", "yaml", "text"}
    assert len(BLOCKS) > 50


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_commands(block):
    """Our command takes the options and recipes; targets, modules, extras and paths are there."""
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(block):
        ours = our_arguments(command)
        if ours is not None:
            options = parsed(cli.load_command(ours[0]), ours[1:])
            if getattr(options, "recipe", None):
                recipe = options.recipe_of(load_values(options.recipe))
                assert getattr(options, "arm", None) in (None, *recipe.arms)
        elif command[0] == "make":
            assert f"\n{command[1]}:" in makefile
        elif command[:2] == ["python", "-m"]:
            assert command[2] == "build" or importlib.util.find_spec(command[2])
        else:
            assert block.reason, f"{block}: nothing checks {command}"


def test_promises_link_to_their_tests():
    """Each line of the page's lists has one or several, and all are in the files that are named."""
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    promises = [line for line in page.splitlines() if line.startswith("- ")]
    assert promises
    assert all("](../tests/" in line for line in promises)
    for file, name in re.findall(r"\]\(\.\./(tests/[\w/]+\.py)#(\w+)\)", page):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}: no {name}"


WORDS = " ".join(["a king and a queen eat bread", "the list of their tokens, and the rows"] * 9)

# Models for Python and for the commands.


def gpt2(**options):
    small = {"n_positions": 32, "n_embd": 8, "vocab_size": 50304}
    return token_models.gpt2(**{**small, **options})


def save_model(folder, seed=0):
    torch.manual_seed(seed)
    words = token_models.byte_level([WORDS])
    words.save_pretrained(folder)
    gpt2(vocab_size=len(words)).save_pretrained(folder)


PYTHON = [block for block in BLOCKS if block.language == "python" and block.reason is None]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore:in the first step only")  # of a batch of a few tokens
@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[pytest.mark.slow] * ("jax" in b.page), id=str(b)) for b in PYTHON],
)
def test_python(block, tmp_path, monkeypatch):
    """Each block runs as typed: alone, after the first of its page, which makes the model."""
    if "jax" in block.page:
        pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    names = {"model": gpt2()} if block.page == "README.md" else {}
    first = next(b for b in PYTHON if b.page == block.page)
    for each in dict.fromkeys((first, block)):
        if "my-model" in each.text:  # the reader's
            save_model("my-model")
        program = "\n" * each.line + each.text  # so that a traceback names the page's line
        exec(compile(program, ROOT / each.page, "exec"), names)


# Commands that are quick enough, on models and runs of seconds.


@pytest.mark.slow(minutes=2)
@pytest.mark.pixels
def test_commands_run(small_recipe, text_file, tmp_path, monkeypatch, capsys):
    """Each command that the pages do not mark, in the order of the pages, writes what it names."""
    monkeypatch.chdir(tmp_path)
    for seed, folder in enumerate(
        ("my-model", "other-model", "checkpoint-1000", "checkpoint-2000")
    ):
        save_model(folder, seed)
    shutil.copytree("my-model", "MODEL")
    for name in ("corpus.txt", "validation.txt", "sample-of-the-training-text.txt"):
        Path(name).write_text(f"{WORDS}\n\n" * 100)
    compare = ["compare", "--recipe", small_recipe, "--text", text_file, "--out", "runs/tiny"]
    assert cli.main([*map(str, compare), "--logger"]) == 0
    shutil.copytree("runs/tiny/coupled_adam-seed-1", "RUN")
    for name in ("124M-5B", "124M-10B", "350M-10B", "124M-20B-sgd"):
        shutil.copytree("runs/tiny", f"runs/{name}")
    Path("tasks").mkdir()
    (task,) = (b.text for b in BLOCKS if (b.page, b.language) == ("docs/laboratory.md", "yaml"))
    Path("tasks/capitals.yaml").write_text(task)
    example = yaml.safe_load(re.search(r"# ({.*})", task)[1])
    Path("capitals.jsonl").write_text(f"{json.dumps(example)}\n" * 3)
    commands_run = 0
    for block in BLOCKS:
        if block.language == "bash" and block.reason is None:
            for command in commands(block):
                assert cli.main(our_arguments(command)) == 0, (
                    str(block),
                    command,
                    capsys.readouterr(),
                )
                commands_run += 1
    assert commands_run > 10
    for output in ("tokens.html", "tokens.parquet", "page.html", "repaired", "report/index.html"):
        assert Path(output).exists(), output
