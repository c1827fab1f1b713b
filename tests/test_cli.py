"""The command as a user runs it: real processes, real folders."""

import dataclasses
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer, GPT2LMHeadModel

from coupled_adam import cli
from coupled_adam.cli import main, recipes
from coupled_adam.cli.options import DeviceOption, _limit_threads
from coupled_adam.cli.parser import make_parser, parsed
from coupled_adam.cli.terminal import quiet_libraries, show
from coupled_adam.embeddings import analyze
from coupled_adam.errors import UsageError
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.reporting.report import Report
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.run_log import RunLog
from coupled_adam.rendering.tables import Cell, Table
from processes import Process


def run(*arguments, start=Process, **options):
    """The command's exit code, standard output and standard error."""
    command = [sys.executable, "-m", "coupled_adam", *map(str, arguments)]
    process = start(command, env={**os.environ, "COLUMNS": "120"}, **options)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def fresh(command, env, cwd):
    """A process that imports by itself, and has two threads for the longest test."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, env={**env, "OMP_NUM_THREADS": "2"}, cwd=cwd, text=True, **pipes
    )


def snapshot(folder: Path):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_compare(small_recipe, text_file, tmp_path, capsys):
    """Two seeds on a user's text: folder, table, pictures; then --resume adds a seed."""

    def compare(*more):
        arguments = ["compare", "--device=cpu", "--out", str(out), *map(str, more)]
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return main(arguments), *capsys.readouterr()

    out = tmp_path / "new" / "out"
    common = ("--recipe", small_recipe, "--text", text_file)
    code, stdout, stderr = compare(*common, "--seeds", 2, "--steps", 10)
    assert code == 0, stderr
    assert "AdamW" in stdout
    assert "Coupled Adam" in stdout
    runs = [f"{arm}-seed-{seed}" for arm in ("adamw", "coupled_adam") for seed in (1, 2)]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*runs, "comparison.yaml", "report", ".lock"]
    )
    for name in runs:
        folder = out / name
        files = "config.yaml environment.json metrics.jsonl evaluation.json checkpoints model"
        files += " tensorboard unigram_counts.npy .lock"
        files += " second_moments" if name.startswith("adamw") else ""
        assert {path.name for path in folder.iterdir()} == {*files.split()}
        # The model is one that Hugging Face loads, and the numbers are its numbers.
        model = GPT2LMHeadModel.from_pretrained(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert len(tokenizer) == model.config.vocab_size == 300
        evaluation = json.loads((folder / "evaluation.json").read_text())
        measured = analyze(model.transformer.wte.weight).to_dict()
        for key in ("isotropy", "mean_norm", "mean_norm_ratio", "condition"):
            assert evaluation["embeddings"][key] == measured[key]
        assert evaluation["parameters"] == model.num_parameters()
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics if "valid_loss" in line] == [5, 10]
        assert metrics[0]["step"] == 0
    # The arms start from the same weights and see the same batches.
    first = [
        json.loads((out / f"{arm}-seed-1" / "metrics.jsonl").read_text().splitlines()[0])
        for arm in ("adamw", "coupled_adam")
    ]
    assert first[0] == first[1]
    assert (out / "report" / "index.html").exists()
    # The configuration of a run is a recipe.
    again = load_recipe(str(out / "adamw-seed-2" / "config.yaml"))
    assert (again.seeds, list(again.arms), again.training.total_steps) == ([2], ["adamw"], 10)

    before = {name: (out / name / "evaluation.json").stat().st_mtime_ns for name in runs}
    code, _, stderr = compare("--resume", "--seeds", 3)
    assert code == 0, stderr
    assert (out / "adamw-seed-3" / "evaluation.json").exists()
    assert before == {name: (out / name / "evaluation.json").stat().st_mtime_ns for name in runs}

    code, _, stderr = compare("--resume", "--steps", 20)
    assert code == 2
    assert "training.steps=10 there, 20 here" in stderr


def test_errors(small_recipe, text_file, tmp_path, capsys, monkeypatch):
    """One line with the fix, exit code 2, nothing made, nothing overwritten."""
    empty, short, taken = (tmp_path / name for name in ("empty.txt", "short.txt", "taken"))
    empty.write_text("")
    short.write_text("Too short.")
    taken.mkdir()
    (taken / "precious").write_text("data")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    for arguments, message in (
        (("--text", tmp_path / "x.txt"), f"--text {tmp_path / 'x.txt'}: there is no"),
        (("--text", empty), f"data.text={empty}: there is no text in it"),
        (("--text", short), f"data.text={short} is too short"),
        (("--out", taken), "continue it with --resume"),
        (("--out", text_file), "exists"),
        (("--out", taken, "--resume"), "holds no comparison"),
        (("--variant", "os:system"), "builtin_function_or_method, not a Variant"),
        (("--device", "cuda:99"), "--device cuda:99 is not available here"),
        (
            ("--model.architecture=llama", "--model.config={attention_dropout: 5.0}"),
            "model.architecture=llama cannot be trained with these values of model, and config",
        ),
    ):
        recipe = [] if "--resume" in arguments else ["--recipe", small_recipe]
        assert main(["compare", *map(str, [*arguments, *recipe])]) == 2, message
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("coupled-adam: error: ")
        assert message in line
        assert snapshot(tmp_path) == before, message


@pytest.mark.parametrize(
    "use",
    [
        lambda _: torch.empty(2**50),
        Mock(side_effect=MemoryError()),
        Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.\nTried")),
        Mock(side_effect=RuntimeError("could not create a primitive")),  # of oneDNN
        Mock(side_effect=RuntimeError("can't start new thread")),
    ],
    ids=["a CPU", "Python", "a GPU", "oneDNN", "threads"],
)
def test_out_of_memory_is_one_line(use, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "run", use)
    assert main(["recipes"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("coupled-adam: error: out of memory or threads: ")
    assert stderr.count("\n") == 1


def test_a_bug_is_a_traceback(monkeypatch):
    monkeypatch.setattr(recipes, "run", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["recipes"])


def test_nothing_that_a_terminal_obeys_is_shown(capsys, tmp_path):
    """Of names of files, models and tokens: no escape sequence comes through."""
    evil = "a\x1b[2J\x1b]0;title\x07\x9bK\rb"
    show(f"{evil} {Path(evil)}")
    table = Table([evil, evil], [[evil, Cell(evil, bold=True)], evil], evil, [evil])
    show(table)
    show(Report(tmp_path, [evil], table, b""))
    printed = RunLog(Run(load_recipe("tiny"), "adamw", 1, tmp_path / evil))
    printed.on_train_start(
        Mock(global_step=1, max_steps=1, optimizers=[Mock(param_groups=[])]), Mock()
    )
    printed.on_exception()
    assert main(["analyze", str(tmp_path / evil)]) == 2
    out, err = capsys.readouterr()
    said = out.replace("\n", "") + err.replace("\n", "").replace("\r", "")
    assert "a [2J" in said
    assert said.isprintable()


def test_numbers_and_paths_stay_whole(monkeypatch, capsys):
    """In however narrow a terminal."""
    monkeypatch.setenv("COLUMNS", "20")
    path, number = f"/a/path/{'long' * 9}", "-0.123456789 (1)"
    show(Table(["name", "L", "Iso"], [["of several words", number, number]]))
    show(path)
    shown = capsys.readouterr().out
    assert shown.count(number) == 2
    assert path in shown


@pytest.fixture
def analyzed(tmp_path):
    """The command on a matrix in a folder; its exit code."""
    np.save(tmp_path / "m.npy", np.random.default_rng(0).normal(size=(30, 4)))
    return lambda *options: main(["analyze", str(tmp_path / "m.npy"), *map(str, options)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # --overwrite is for pages.
        *(
            (f"{option} {name} --overwrite", f"{option} {name} is a page: end its name in .html")
            for option in ("--html", "--explore")
            for name in ("model.safetensors", "page")
        ),
        ("--html x.html", "x.html exists: choose another name, or add --overwrite"),
        ("--html .", "--html . is a folder"),
        ("--html new.html --explore link.html", "are the same file: choose two"),
    ],
)
def test_a_result_replaces_nothing_unasked(
    options, message, analyzed, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "page", "x.html"):
        Path(name).write_text("mine")
    Path("link.html").symlink_to("new.html")
    before = snapshot(tmp_path)
    assert analyzed(*options.split()) == 2
    assert message in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_result_replaces_what_it_is_asked_to(analyzed, tmp_path):
    (tmp_path / "x.html").write_text("mine")
    assert analyzed("--html", tmp_path / "x.html", "--overwrite") == 0
    assert "isotropy" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["analyze", "FOLDER"], "--html"),
        (["evaluate", "FOLDER"], "--out"),
        (["report", "FOLDER"], "--out"),
        (["train", "--arm=adamw"], "--out"),
        (["compare"], "--out"),
        (["repair", "FOLDER"], "--out"),
    ],
    ids=" ".join,
)
def test_where_results_go_is_checked_before_the_work(
    command, option, text_file, tmp_path, capsys, monkeypatch
):
    """Nothing is read, trained or measured for a path that cannot be written."""
    for work in (
        "coupled_adam.embeddings.analysis.analyze_model",
        "coupled_adam.lab.evaluation.evaluate.evaluate_model",
        "coupled_adam.lab.reporting.report.read_runs",
        "coupled_adam.lab.comparison.prepare_corpus",
    ):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("it has begun"))
    (tmp_path / "file").write_text("")
    words = [str(tmp_path) if word == "FOLDER" else word for word in command]
    place = tmp_path / "file" / "x.png"
    assert main([*words, option, str(place)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option} {place} cannot be written" in line
    assert set(tmp_path.iterdir()) == {text_file, tmp_path / "file"}


def test_a_disk_that_fills_up_does_not_take_the_result(analyzed, tmp_path, capsys, monkeypatch):
    """The numbers are on standard output, and the error names the file, in its own words."""
    reason = "No space left on this device"
    full = Mock(side_effect=OSError(28, reason, str(tmp_path / "x.html")))
    monkeypatch.setattr("coupled_adam.outputs.write_atomically", full)
    assert analyzed("--html", tmp_path / "x.html") == 1
    out, err = capsys.readouterr()
    assert "isotropy" in out
    assert err == f"coupled-adam: error: {reason}: {tmp_path / 'x.html'}\n"


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_no_file_is_written_into(kind, analyzed, tmp_path):
    """With or without --overwrite, and it stays what it is."""
    out, reader = tmp_path / "out", None
    if kind == "a pipe":
        os.mkfifo(out)
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 2**20)
    else:
        try:
            os.mknod(out, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
            out.write_text("x")
        except PermissionError:
            pytest.skip("not everybody may make devices")
    before = out.lstat().st_mode
    assert analyzed("--html", out, "--overwrite") == 0
    assert out.lstat().st_mode == before
    if reader is not None:
        assert b"isotropy" in os.read(reader, 2**20)


# Standard output is closed, or cannot be written, before the command starts.
CLOSED = "import os, sys; os.close(1); sys.stdout = None; "
FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
GONE = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.stdout = open(1, 'w'); "
BOTH_GONE = GONE + "os.dup2(w, 2); "
BLANK_PICTURES = (
    "from matplotlib.figure import Figure; "
    "Figure.savefig = lambda _, file, **__: file.write(b'a picture'); "
)
CALL = "import sys; from coupled_adam.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "tiny"]], ids=["table", "text"])
@pytest.mark.parametrize(
    ("before", "code", "said"),
    [
        (CLOSED, 0, ""),
        (FULL, 1, "coupled-adam: error: No space left on device\n"),
        (GONE, 141, ""),
    ],
    ids=["closed", "full", "gone"],
)
def test_an_output_that_takes_nothing(before, code, said, arguments):
    process = Process([sys.executable, "-c", before + CALL, *arguments])
    assert process.communicate() == ("", said)
    assert process.returncode == code


def test_a_terminal_without_unicode(tmp_path):
    np.save(tmp_path / "m.npy", np.eye(5))
    program = "import sys; sys.stdout.reconfigure(encoding='ascii'); " + CALL
    process = Process([sys.executable, "-c", program, "analyze", str(tmp_path / "m.npy")])
    shown, said = process.communicate()
    assert (process.returncode, said) == (0, "")
    assert "?" in shown


@pytest.mark.parametrize(
    ("before", "code"),
    [(CLOSED, 0), (GONE, 141), (BOTH_GONE, 141)],
    ids=["closed", "gone", "both gone"],
)
def test_a_comparison_does_not_end_with_its_reader(before, code, small_recipe, text_file, tmp_path):
    """As after ``compare ... |& head -1``: what was to be trained is trained."""
    arguments = ["--recipe", small_recipe, "--text", text_file, "--steps=2", "--logger"]
    arguments += ["--arms=adamw", "--device=cpu", "--out", tmp_path / "out"]
    program = before + BLANK_PICTURES + CALL
    process = Process([sys.executable, "-c", program, "compare", *map(str, arguments)])
    _, stderr = process.communicate()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert (tmp_path / "out" / "report" / "index.html").exists()


def test_a_dry_run_trains_nothing(small_recipe, text_file, tmp_path, capsys):
    words = ["--recipe", small_recipe, "--text", text_file, "--arms.*.lr=1e-3,1e-2", "--seeds=3"]
    words += ["--device=cpu", "--dry-run", "--out", tmp_path / "out"]
    assert main(["compare", *map(str, words)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "coupled_adam-2 Coupled Adam, lr 0.01" in said
    assert re.search(r"12 runs, whose steps would take about \d+\.\d min each here", said)
    assert not (tmp_path / "out").exists()


def test_a_stray_rank_silences_nothing(monkeypatch, capsys):
    """Of what another program has left in the environment."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert main(["recipes"]) == 0
    assert "tiny" in capsys.readouterr().out


@pytest.fixture
def begun(small_recipe, tmp_path):
    """A comparison of two seeds that was begun in ``out``."""
    recipe = override(load_recipe(str(small_recipe)), {"seeds": [1, 2], "training.steps": 7})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comparison.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    return recipe


def test_resume_with_the_same_recipe(begun, small_recipe, tmp_path, monkeypatch):
    """It continues with the arms and seeds that there are."""
    asked = []

    def compare(recipe, out, **_):
        asked.append(recipe)

    monkeypatch.setattr("coupled_adam.lab.comparison.compare", compare)
    resume = ["compare", "--resume", "--out", str(tmp_path / "out")]
    assert main(resume) == 0
    assert main([*resume, "--recipe", str(small_recipe), "--steps", "7"]) == 0
    assert asked == [begun, begun]


def test_one_of_several_gpus(monkeypatch):
    """By its number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [DeviceOption(device=name).usable_device() for name in ("auto", "cuda", "cuda:1")]
    assert devices == ["cuda", "cuda", "cuda:1"]
    with pytest.raises(UsageError, match="--device cuda:2 is not available here; available: cuda"):
        DeviceOption(device="cuda:2").usable_device()


@pytest.mark.parametrize(
    "command", [["compare"], ["train", "--arm=adamw"]], ids=["compare", "train"]
)
def test_nothing_to_resume(command, small_recipe, tmp_path, monkeypatch, capsys):
    """A recipe that is named is begun; without one, OUT may be a slip of the pen."""
    for work in ("compare", "train_and_evaluate"):
        monkeypatch.setattr(f"coupled_adam.lab.comparison.{work}", lambda *_, **__: None)
    resume = [*command, "--resume", "--out", str(tmp_path / "new")]
    assert main([*resume, "--recipe", str(small_recipe)]) == 0
    assert main(resume) == 2
    assert "to resume: leave out --resume" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["small.yaml", "tiny"])
@pytest.mark.usefixtures("begun")
def test_resume_with_another_recipe(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--resume", "--out", str(tmp_path / "out"), "--recipe", recipe]) == 2
    assert "holds another comparison" in capsys.readouterr().err


def parser_of(name):
    return make_parser(cli.load_command(name))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_options_are_the_arguments(name):
    """Each field is an argument, and none is explained by what only Python calls it."""
    parser = parser_of(name)
    arguments = {action.dest for action in parser._actions if "." not in action.dest} - {"help"}
    fields = {field.name for field in dataclasses.fields(cli.load_command(name).Options)}
    assert fields - {"keys"} == arguments
    shown = parser.format_help()
    assert not re.search(r"type: |None|Literal", shown), shown
    assert all(action.help for action in parser._actions)
    assert f"coupled-adam {name}" in cli.load_command(name).__doc__  # an example


def test_a_key_of_the_recipe_is_an_option(monkeypatch):
    """It has the last word, however it is written."""
    options = parsed(
        cli.load_command("compare"),
        ["--training.lr=1e-3", "--model.n_layer=4", "--arms.lean.lr_factor", "[2, 4]", "--steps=7"],
    )
    recipe = options.recipe_of(load_recipe("demo").to_dict())
    assert (recipe.training.lr, recipe.model.n_layer, recipe.training.total_steps) == (1e-3, 4, 7)
    assert list(recipe.arms) == ["adamw", "tuned", "coupled_adam", "lean-1", "lean-2"]


@pytest.mark.parametrize("typed", ["###", "---", "no", "1e3", "my # text", r"\n\n", '"', "[a", "~"])
def test_a_string_is_what_has_been_typed(typed):
    """Whatever YAML would make of it: a comment, a number or False; but null is none."""
    for text, expected in ((typed, typed), ("null", None)):
        command = parsed(cli.load_command("compare"), [f"--data.separator={text}"])
        assert command.recipe_of(load_recipe("demo").to_dict()).data.separator == expected


def test_a_text_takes_the_place_of_another_source(tmp_path):
    """With the keys that were of that source alone; those of any source stay."""
    hub = {"data.hub": "x", "data.shuffle_seed": 3, "data.valid_split": "valid"}
    plain = override(load_recipe("124M-5B"), hub).to_dict()
    command = cli.load_command("compare")
    data = parsed(command, ["--text", str(tmp_path)]).recipe_of(plain).data
    assert data.text == str(tmp_path)
    assert data.hub is data.shuffle_seed is data.valid_split is None
    assert data.tokenizer == "openai-community/gpt2"
    with pytest.raises(UsageError, match=r"data\.shuffle_seed=4 is for data\.hub, which is not gi"):
        parsed(command, ["--text", "x", "--data.shuffle_seed=4"]).recipe_of(plain)
    # So does any source that is typed; a copy of a data set has its splits, not its revision.
    plain = load_recipe("124M-5B").to_dict()
    assert plain["data"]["hub_revision"] == "refs/convert/parquet"
    data = parsed(command, ["--data.tokens", "some"]).recipe_of(plain).data
    assert (data.tokens, data.hub, data.hub_revision, data.hub_documents) == ("some", *[None] * 3)
    assert data.tokenizer == "openai-community/gpt2"
    plain = load_recipe("1.3B-26B").to_dict()
    data = parsed(command, ["--data.hub", "me/copy"]).recipe_of(plain).data
    assert (data.hub, data.valid_split, data.hub_otherwise) == ("me/copy", "validation", None)


@pytest.mark.parametrize(
    ("command", "words", "key", "values"),
    [
        ("analyze", "x --neighbours a b --neighbours c", "neighbours", ["a", "b", "c"]),
        ("analyze", "x --exclude padding --exclude unseen", "exclude", ["padding", "unseen"]),
        ("compare", "--seeds 1 --seeds 2", "seeds", [1, 2]),
        ("train", "--arm lean --logger", "logger", []),
    ],
)
def test_a_list_may_be_given_in_parts(command, words, key, values):
    assert getattr(parsed(cli.load_command(command), words.split()), key) == values


def test_a_warning_is_one_line_without_a_place():
    quiet_libraries()
    said = warnings.formatwarning("a\nb", UserWarning, "place.py", 3)
    assert said == "coupled-adam: warning: a b\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_torchrun_takes_no_option_for_its_own(name):
    """It refuses an option of ours that one of its own begins with, as --log once was."""
    theirs = [word for action in get_args_parser()._actions for word in action.option_strings]
    ours = [word for a in parser_of(name)._actions for word in a.option_strings]
    taken = {word for word in ours if any(other.startswith(word) for other in theirs)}
    assert taken <= {"-h", "--help"}


def test_import_needs_torch_alone():
    """The core loads nothing that torch does not load itself, apart from its own modules."""
    script = """
import sys, torch
from torch.optim import adam  # what any use of torch.optim loads
before = set(sys.modules)
from coupled_adam import *
assert CoupledAdamW.__module__ == "coupled_adam.optim.coupled_adam"
more = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not more - {"coupled_adam", "torch", "difflib", "fnmatch"}, more
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow(minutes=3)
def test_the_main_job_shows_the_effect(tmp_path):
    """`coupled-adam compare`, as the README claims it, with fewer steps."""
    result = run("compare", "--steps", 160, start=fresh, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "runs" / "demo" / "report" / "results.json").read_text())
    assert [result["arm"] for result in results] == ["adamw", "tuned", "coupled_adam", "lean"]
    usual, standard, coupled, lean = results
    for arm in (usual, standard):
        assert arm["embeddings"]["mean_norm_ratio"] > 0.2
    for arm, most in ((coupled, 0.05), (lean, 0.25)):  # LEAN's mean moves in the first 100 steps
        assert arm["embeddings"]["mean_norm_ratio"] < most
        assert arm["embeddings"]["isotropy"] > standard["embeddings"]["isotropy"]
    # Nearly as in benchmarks/results/demo; a defect costs far more than this.
    assert abs(lean["test_loss"] - standard["test_loss"]) < 0.1
    assert abs(coupled["test_loss"] - standard["test_loss"]) < 0.35
    assert standard["test_loss"] < 5.3
    # 4,096 x 64 in float32: two matrices, one and 64 numbers, or a number for each row and column
    state = [float(size) for size in re.findall(r"([\d.]+)\s+[kM]B", result.stdout)]
    assert state == [2.1, 2.1, 1.0, 17.0]
    assert "\ncoupled-adam compare --seeds 3 --resume --out runs/demo" in result.stdout


def test_small_models_take_few_threads(monkeypatch):
    """Unless the environment says how many, or the model is larger."""
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _limit_threads(366_336)
    _limit_threads(1_200_000)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    _limit_threads(366_336)
    assert chosen == [2]
