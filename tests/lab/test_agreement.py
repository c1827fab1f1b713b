"""The processes of a run agree on all that it depends on, or none of them begins."""

import pytest

from laboratory import Laboratory
from processes import start_ranks

VARIANT = """
from coupled_adam.lab.training.variant import Variant

NONE = Variant(after_step=lambda model: {})
"""
# What is another in the last process: words of its command, or a file in its folder.
DIFFERENT = {
    "training.lr": ["--training.lr=1e-3"],
    "seed": ["--seed=2"],
    "arm": ["--arm=adamw"],
    "micro_batch_size": ["--micro-batch-size=1"],
    "corpus.fingerprint": "text.txt",
    "source": "my_variant.py",
}


@pytest.mark.parametrize(
    ("number", "key"),
    [*((2, key) for key in DIFFERENT), pytest.param(4, "seed", marks=pytest.mark.slow)],
)
def test_processes_that_differ(key, number, tmp_path, small_recipe, text_file):
    """All end with the same line, which names the key, and nothing is written."""
    for rank in ("first", "last"):
        (tmp_path / rank).mkdir()
        text = text_file.read_text()
        (tmp_path / rank / "text.txt").write_text(text)
        (tmp_path / rank / "my_variant.py").write_text(VARIANT.format("None"))
    content = {"text.txt": text.upper(), "my_variant.py": VARIANT.format("print()")}
    words, more = DIFFERENT[key], ["--arm=coupled_adam", "--variant=my_variant:NONE"]
    if isinstance(words, str):
        (tmp_path / "last" / words).write_text(content[words])
        words = []
    # Relative, so that each process reads what is in its own folder.
    small_recipe.write_text(small_recipe.read_text().replace("data: {", "data: {text: text.txt, "))
    lab = Laboratory(tmp_path, small_recipe, None)
    first, last = lab.command("run", *more), lab.command("run", *more, *words)
    started = start_ranks(
        number, first, cwd=tmp_path / "first", last={"command": last, "cwd": tmp_path / "last"}
    )
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [2] * number, said
    assert "the processes of a run do not agree: " in said[0]
    assert f" {key} is " in said[0]
    assert f" in {number - 1}. Start all of them" in said[0]
    assert not (tmp_path / "run").exists()


def test_a_process_of_another_comparison(tmp_path, small_recipe, text_file):
    """Its seeds or its folder are others."""
    lab = Laboratory(tmp_path, small_recipe, text_file)
    first, *words = lab.command("out")
    compare = [first, *("compare" if word == "train" else word for word in words)]
    last = [
        str(tmp_path / "elsewhere") if word == str(tmp_path / "out") else word for word in compare
    ]
    started = start_ranks(2, compare, last={"command": [*last, "--seeds", "2"]})
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    assert f"do not agree: seeds is [1] in process 0 and [1, 2] in 1; out is {tmp_path}" in said[0]
    assert not (tmp_path / "out").exists()
