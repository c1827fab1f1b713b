"""Faults, each on real processes and files: what is promised in docs/reliability.md."""

import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from coupled_adam import cli
from coupled_adam.errors import TrainingError, UsageError
from coupled_adam.lab import comparison
from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run
from coupled_adam.lab.run import read_run
from coupled_adam.lab.training.checkpoints import Checkpoints
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train
from laboratory import EXACT, FAULTY, LONG, SHORT, close, snapshot
from processes import Process

ARM = ["--arm", "coupled_adam"]


def error(stderr):
    """The one line that the command says of an error."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("coupled-adam: ")]
    return line


# --- folders with something else in them ---


@pytest.fixture
def unfinished(trained, tmp_path):
    """The run as if it had been killed before its model was saved, and a way to continue it."""
    finished, corpus = trained
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "model")

    def go_on(corpus=corpus):
        train(dataclasses.replace(read_run(finished), folder=run), corpus, Execution(logger=[]))
        return load_file(run / "model" / "model.safetensors")

    return run, go_on


class Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def flipped(content, place):
    """A copy in which one bit is another."""
    at = int(place * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def without_loops(content):
    """A checkpoint that torch loads without an error, and Lightning goes on from in silence."""
    checkpoint = torch.load(io.BytesIO(content), weights_only=True)
    del checkpoint["loops"]
    checkpoint["optimizer_states"][0]["state"] = {}
    saved = io.BytesIO()
    torch.save(checkpoint, saved)
    return saved.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: flipped(content, 0),
        lambda content: flipped(content, 0.3),
        lambda content: flipped(content, 0.9),
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        lambda _: pickle.dumps(Trap()),
        without_loops,
    ],
    ids=["first bit", "bit", "late bit", "half", "empty", "trap", "edited"],
)
def test_a_damaged_checkpoint_is_not_continued(unfinished, trained, damage, tmp_path, monkeypatch):
    """The run says so, and goes on from the one before to the same result; without one it ends."""
    run, go_on = unfinished
    monkeypatch.chdir(tmp_path)
    first, last = (run / "checkpoints" / f"step-{step}" for step in (25, 50))
    whole = first.read_bytes()
    for path in (first, last):
        path.write_bytes(damage(path.read_bytes()))
    before = snapshot(run)
    with pytest.raises(UsageError, match=rf"{last} is damaged, and there is no other: remove it"):
        go_on()
    assert snapshot(run) == before
    first.write_bytes(whole)
    with pytest.warns(UserWarning, match=rf"damaged, and removed: {last}; continuing from {first}"):
        continued = go_on()
    assert not (tmp_path / "executed").exists()
    expected = load_file(trained[0] / "model" / "model.safetensors")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in expected.items())


def test_a_damaged_file_of_a_sharded_checkpoint(tmp_path):
    """Each file counts, and none may be missing."""
    folder, sums = tmp_path / "checkpoints", {}
    for step in (1, 2):
        (folder / f"step-{step}").mkdir(parents=True)
        for name in ("__0_0.distcp", ".metadata"):
            (folder / f"step-{step}" / name).write_bytes(content := f"{name} {step}".encode())
            digest = hashlib.sha256(content).hexdigest()
            sums.setdefault(f"step-{step}", {})[name] = digest
    (folder / "checksums.json").write_text(json.dumps(sums))
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.last() == (2, folder / "step-2")
    (folder / "step-2" / ".metadata").unlink()
    with pytest.warns(UserWarning, match="step-2"):
        assert checkpoints.last() == (1, folder / "step-1")
    assert not (folder / "step-2").exists()
    (folder / "step-1" / "__0_0.distcp").write_bytes(b"__0_0.distcp 3")
    with pytest.raises(UsageError, match="step-1 is damaged"):
        checkpoints.last()


def test_a_checkpoint_of_another_run(unfinished, trained, recipe):
    """It is whole, but does not fit."""
    run, go_on = unfinished
    path = run / "checkpoints" / "step-50"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"] = {}
    torch.save(checkpoint, path)
    sums = run / "checkpoints" / "checksums.json"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text(json.dumps({**json.loads(sums.read_text()), path.name: {"": digest}}))
    with pytest.raises(UsageError, match=rf"{path} does not fit this run \(.*\): remove it to"):
        go_on()


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"step-50": null}'], ids=str)
def test_a_checkpoint_without_its_checksums_is_damaged(content, unfinished):
    """Nobody could tell whether a bit of it has flipped."""
    run, go_on = unfinished
    sums = run / "checkpoints" / "checksums.json"
    sums.unlink() if content is None else sums.write_text(content)
    before = snapshot(run)
    with pytest.raises(UsageError, match="damaged"):
        go_on()
    assert snapshot(run) == before


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        MemoryError("no more"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "place",
    [
        "coupled_adam.lab.training.checkpoints.CheckpointIO.load_checkpoint",
        "coupled_adam.lab.training.checkpoints.checksum",
        "coupled_adam.inputs.read_text",
    ],
)
def test_trouble_of_the_moment_is_not_damage(trouble, place, unfinished, monkeypatch):
    """What cannot be read now is kept, and nobody is told to remove it."""
    run, go_on = unfinished
    before = snapshot(run)
    with monkeypatch.context() as patch:
        patch.setattr(place, Mock(side_effect=trouble))
        said = re.escape(getattr(trouble, "strerror", None) or str(trouble))
        with pytest.raises((UsageError, type(trouble)), match=said) as raised:
            go_on()
    assert not re.search("damaged|remove|move it", str(raised.value))
    del before[run / "environment.json"]  # which records that it was continued
    assert snapshot(run).items() >= before.items()
    go_on()


def test_trouble_of_the_moment_in_reports(trained, monkeypatch):
    """Counts and second moments are damaged for what they hold, not for what the system says."""
    run = read_run(trained[0])
    trouble = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr("numpy.lib.format.open_memmap", Mock(side_effect=trouble))
    for read in (run.counts, run.second_moments):
        with pytest.raises(UsageError, match=r"npy cannot be read \(Too many open files\)$"):
            read()


def test_copies_beside_a_checkpoint_are_left(unfinished, trained):
    """Their names are not a step's, whatever they begin with."""
    run, go_on = unfinished
    copies = [run / "checkpoints" / f"step-50{end}" for end in (".old", "~", " (copy)", ".npy")]
    for copy in copies:
        shutil.copy(run / "checkpoints" / "step-25", copy)
    (run / "second_moments" / "step-50.old.npy").write_bytes(b"")
    expected = load_file(trained[0] / "model" / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in go_on().items())
    assert all(copy.exists() for copy in copies)
    assert [*read_run(run).second_moments()] == [25 * 64, 50 * 64]


def test_a_run_of_an_older_version_goes_on(unfinished):
    """Its file lacks keys that are new; what they are by default is what it did."""
    run, go_on = unfinished
    config = yaml.safe_load((run / "config.yaml").read_text())
    for section, key in (("training", "decay_positions"), ("data", "hub_otherwise")):
        del config["recipe"][section][key]
    del config["recipe"]["variant"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    go_on()
    shutil.rmtree(run / "model")
    config["recipe"]["training"]["decay_positions"] = True
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UsageError, match="holds another run"):
        go_on()


def test_a_folder_of_others_is_refused(unfinished):
    """A log of the same name would be emptied; what precedes config.yaml may be a killed run's."""
    run, go_on = unfinished
    (run / "config.yaml").unlink()
    before = snapshot(run)
    with pytest.raises(UsageError, match=r"run holds checkpoints but no config\.yaml"):
        go_on()
    assert snapshot(run) == before
    for name in ("checkpoints", "second_moments"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    go_on()


def test_a_comparison_that_cannot_go_on_changes_nothing(recipe, tmp_path, monkeypatch):
    """What fails for want of a text makes no folder, and leaves one that is resumed as it was."""
    begun, new = tmp_path / "runs" / "begun", tmp_path / "runs" / "new"
    begun.mkdir(parents=True)
    (begun / "comparison.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    before = (begun / "comparison.yaml").read_bytes()
    monkeypatch.setattr(comparison, "prepare_corpus", Mock(side_effect=UsageError("no text")))
    more = dataclasses.replace(recipe, seeds=[1, 2])
    options = {"execution": Execution(logger=[]), "cache": tmp_path / "cache"}
    for out in (new, begun):
        with pytest.raises(UsageError, match="no text"):
            comparison.compare(more, out, resume=out == begun, **options)
    assert [*begun.parent.iterdir()] == [begun]
    assert snapshot(begun) == {begun / "comparison.yaml": before, begun / ".lock": b""}


def test_what_is_somebody_elses_is_left(unfinished, recipe, tmp_path, monkeypatch, capsys):
    """No lock is made in it, no hidden file removed, and nothing written through a link."""
    run, go_on = unfinished
    (run / ".model-12345678").touch()
    go_on()
    assert (run / ".model-12345678").exists()

    monkeypatch.setattr(comparison, "prepare_corpus", Mock(side_effect=AssertionError))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "metrics.jsonl").touch()
    command = ["train", "--recipe=tiny", "--arm=adamw", "--resume", "--device=cpu", "--out"]
    assert cli.main([*command, str(tmp_path / "theirs")]) == 2
    assert "theirs holds metrics.jsonl but no config.yaml" in error(capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["metrics.jsonl"]

    shutil.rmtree(run / "model")
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="holds a link, checkpoints, through which"):
        go_on()


def test_a_comparison_has_its_folder_while_it_tokenizes(recipe, tmp_path, monkeypatch):
    """Another, which begins and would end meanwhile, is not overwritten: it cannot begin."""
    options = {"execution": Execution(logger=[]), "cache": tmp_path / "cache"}

    def prepare(*_):
        with pytest.raises(UsageError, match="out is in use by another process"):
            comparison.compare(dataclasses.replace(recipe, seeds=[3]), tmp_path / "out", **options)
        raise UsageError("no text")

    monkeypatch.setattr(comparison, "prepare_corpus", prepare)
    with pytest.raises(UsageError, match="no text"):
        comparison.compare(recipe, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_a_run_continues_with_is_recorded(unfinished):
    run, go_on = unfinished
    began = json.loads((run / "environment.json").read_text())
    assert "resumed" not in began
    go_on()
    recorded = json.loads((run / "environment.json").read_text())
    (resumed,) = recorded.pop("resumed")
    assert recorded == began
    assert (resumed["step"], resumed["processes"]) == (50, 1)
    assert resumed["packages"]["torch"] == torch.__version__


def test_another_text_is_refused(unfinished, trained, tmp_path):
    run, go_on = unfinished
    recipe = read_run(trained[0]).recipe
    text = Path(recipe.data.text)
    before = text.read_text()
    text.write_text(f"{before}\n\none more document")
    changed = prepare_corpus(recipe, tmp_path / "cache")
    text.write_text(before)
    with pytest.raises(UsageError, match=r"was begun with another text than data.text=.* now"):
        go_on(changed)
    # The text is the same, and another tokenizer made other tokens of it.
    copy = shutil.copytree(trained[1].folder, tmp_path / "copy")
    tokens = dataclasses.replace(trained[1], folder=copy)
    np.save(tokens.folder / "unigram_counts.npy", tokens.unigram_counts() + 1)
    with pytest.raises(UsageError, match="was begun with another text"):
        go_on(tokens)
    # What tells which text it was is gone.
    for name in ("environment.json", "unigram_counts.npy"):
        (run / name).rename(tmp_path / name)
        with pytest.raises(UsageError, match=f"^{run} has no {name}, which .*: restore this file"):
            go_on()
        (tmp_path / name).rename(run / name)
    assert not (run / "model").exists()
    go_on()


def test_two_runs_of_one_folder(lab):
    """The second refuses while the first is there, and may when that has been killed."""
    first = lab.begun("cut", *ARM, *LONG)
    os.killpg(first.pid, signal.SIGSTOP)
    stderr = lab.run("cut", *ARM, *LONG, "--resume", code=2)
    assert "cut is in use by another process: wait for it" in error(stderr)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    lab.run("cut", *ARM, *LONG, "--resume")
    lab.assert_equal("cut", *ARM, *LONG)


# --- processes that end ---


KILLED, ENDED = ["step-10"], ["step-30", "step-40"]


@pytest.mark.parametrize(
    ("fault", "code", "said", "checkpoints"),
    [
        ("checkpoint 2", -signal.SIGKILL, "", KILLED),  # half of it is written
        ("rename 2", -signal.SIGKILL, "", KILLED),  # it has no name yet
        ("model 1", -signal.SIGKILL, "", ENDED),
        ("evaluation 1", -signal.SIGKILL, "", ENDED),
        ("interrupt 2", 130, "interrupted; continue with --resume", KILLED),  # in a checkpoint
        ("term 1", 75, "stopped by SIGTERM; continue with --resume", ENDED),
    ],
)
def test_killed_while_it_writes(lab, fault, code, said, checkpoints):
    """kill -9, Ctrl-C or SIGTERM in the middle: the run goes on from what was whole."""
    stderr = lab.run("cut", *ARM, *SHORT, fault=fault, code=code)
    assert "Traceback" not in stderr
    folder = lab.folder / "cut" / "checkpoints"
    assert lab.checkpoints("cut") == checkpoints
    if said:
        assert said in error(stderr)
        assert not (folder / "unfinished").exists()
    lab.run("cut", *ARM, *SHORT, "--resume")
    assert {path.name for path in folder.iterdir()} == {"checksums.json", *ENDED}
    assert [path.name for path in folder.parent.rglob(".*")] == [".lock"]
    lab.assert_equal("cut", *ARM, *SHORT)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 75, "stopped by SIGTERM after step"), (signal.SIGINT, 130, "interrupted")],
)
def test_signals_that_come_again_and_again(lab, number, code, said):
    process = lab.begun("cut", *ARM, *LONG)
    sent, deadline = 0, time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(number)
        sent += 1
        time.sleep(0.002)
    _, stderr = process.communicate(timeout=100)
    assert sent > 1
    assert process.returncode == code, stderr
    assert said in error(stderr)
    # What interrupts a weak reference's callback is not passed on: Python prints it, and goes on.
    ignored = r"Exception ignored in: .*\nTraceback .*\n( .*\n|\n)+KeyboardInterrupt:? ?\n"
    assert "Traceback" not in re.sub(ignored, "", stderr)
    lab.run("cut", *ARM, *LONG, "--resume")
    lab.assert_equal("cut", *ARM, *LONG)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies(rank, lab):
    """The other ends with an error, though nobody stops it; the run goes on with one process."""
    processes = lab.srun("cut", *ARM, *EXACT, fault=f"death-of-{rank} 24")
    said = [process.communicate(timeout=200)[1] for process in processes]
    survivor = 1 - rank
    assert processes[rank].returncode == -signal.SIGKILL, said
    assert processes[survivor].returncode == 1, said
    assert "another process of this run has ended" in error(said[survivor])
    lab.run("cut", *ARM, *EXACT, "--resume")
    close(lab.reference(*ARM, *EXACT)[0], lab.weights("cut"), 1e-10)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_not_finite_on_one_rank(lab, strategy):
    """All end at the same step with the same error, and nobody waits for another."""
    arguments = ["run", *ARM, *EXACT, "--strategy", strategy]
    processes = lab.srun(*arguments, fault="nan 24")
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    assert "the norm of the gradient is nan at step" in error(said[0])
    assert "coupled-adam: error" not in said[1]
    assert "the last checkpoint is kept" in error(said[0])
    assert not (lab.folder / "run" / "model").exists()


# --- disks ---


def test_a_disk_that_is_full_for_the_model(unfinished, monkeypatch):
    """safetensors and tokenizers have errors of their own, which are no OSErrors."""
    run, go_on = unfinished
    error = Exception("File too large (os error 27)")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.GPT2LMHeadModel.save_pretrained", Mock(side_effect=error))
        with pytest.raises(TrainingError, match=r"model cannot be written \(File too large"):
            go_on()
    assert not [*run.glob(".model-*")]
    go_on()


# --- files of runs that are damaged ---

WHOLE = ["", "{", "[]", "null", "3", '"x"', "\xff", "{}"]
VALUES = [None, "x", -1, 1e999, [], {}, True, [[]], {"x": {"x": []}}, 10**400]


def damages(path):
    """What a file may hold instead: something else as a whole, or in one of its places."""
    yield from WHOLE
    text = path.read_text()
    if path.suffix == ".jsonl":
        *first, last = text.splitlines()
        content = json.loads(last)
        yield text[: len(text) // 2] + "\n"
        before = "".join(f"{line}\n" for line in first)
    else:
        content, before = (yaml.safe_load if path.suffix == ".yaml" else json.loads)(text), ""
    for key, value in content.items():
        for other in [*VALUES, "gone"]:
            changed = {**content, key: other}
            if other == "gone":
                del changed[key]
            yield before + json.dumps(changed) + "\n"
        if isinstance(value, dict):
            for inner in value:
                yield before + json.dumps({**content, key: {**value, inner: [{}]}}) + "\n"


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))


def folder_instead(path):
    path.unlink()
    path.mkdir()


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def write(content, path):
    path.write_bytes(content)


MUTATIONS = [
    lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    partial(write, b""),
    lambda path: path.write_bytes(2 * path.read_bytes()),
    zipped,
    folder_instead,
    pipe_instead,
]


# Without a common divisor with the numbers of commands and mutations, so that all of them are tried
@pytest.mark.parametrize("every", [29, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_no_mutation_changes_a_result(every, trained, tmp_path, monkeypatch, capsys):
    """Whatever happens to a file of a run, there is the same result, or one line that names it."""
    monkeypatch.chdir(tmp_path)
    finished, corpus = trained
    for place in ("comparison", "data.corpus"):
        monkeypatch.setattr(f"coupled_adam.lab.{place}.prepare_corpus", lambda *_: corpus)
    whole, run = shutil.copytree(finished, tmp_path / "whole" / "run"), tmp_path / "run"
    evaluate_run(read_run(whole), corpus)
    commands = {
        "report": ["report", run, "--out", tmp_path / "report"],
        "evaluate": ["evaluate", run, "--device=cpu"],
        "train": ["train", "--arm=adamw", "--device=cpu", "--logger", "--resume", "--out", run],
    }

    def result(command):
        """What a command has made of the run, but for times and places."""
        if command == "report":
            return (tmp_path / "report" / "runs.csv").read_text().replace(str(run), "")
        if command == "evaluate":
            return json.loads((run / "evaluation.json").read_text())
        weights = load_file(run / "model" / "model.safetensors")
        return {name: tensor.tolist() for name, tensor in weights.items()}

    def execute(command, path=".", change=lambda _: None):
        """The result; None where the run is refused, whose files are left as they are."""
        shutil.copytree(whole, run)
        if command == "train":  # the last checkpoint is there, and the model is not
            shutil.rmtree(run / "model")
            (run / "evaluation.json").unlink()
        if (run / path).exists():
            change(run / path)
        before = snapshot(run)
        code = cli.main([*map(str, commands[command])])
        said = capsys.readouterr().err
        assert code in (0, 2), said
        if code:
            assert str(run) in error(said)
            assert snapshot(run).items() >= before.items()
        made = None if code else result(command)
        shutil.rmtree(run)
        shutil.rmtree(tmp_path / "report", ignore_errors=True)
        return made

    expected = {command: execute(command) for command in commands}
    files = sorted(path.relative_to(whole) for path in whole.rglob("[!.]*") if path.is_file())
    made = [
        (execute(command, path, change), expected[command])
        for path, change, command in [*itertools.product(files, MUTATIONS, commands)][::every]
    ]
    assert all(result in (None, unharmed) for result, unharmed in made)
    for name in ("config.yaml", "environment.json", "evaluation.json", "metrics.jsonl"):
        # What is another value is not told from what a user has chosen.
        damaged = zip([*damages(whole / name)][:: 2 * every], itertools.cycle(commands))
        made += [
            (execute(command, name, partial(write, damage.encode("latin-1"))), None)
            for damage, command in damaged
        ]
    assert not (tmp_path / "executed").exists()
    assert 0 < [result for result, _ in made].count(None) < len(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "said"),
    [
        ("fsdp2", "limit-of-one 20000", "process 1: File too large: "),
        ("ddp", "limit 20000", "File too large: "),
    ],
)
def test_a_disk_that_is_full_for_one_rank(lab, strategy, fault, said):
    """All ranks end, and the first one names the checkpoint; nothing half-written is left."""
    arguments = [*ARM, *LONG, *EXACT, "--strategy", strategy]
    lab.stop("cut", *arguments, step=12, number=signal.SIGTERM, code=75, processes=2)
    before = lab.checkpoints("cut")
    started = lab.start("cut", *arguments, "--resume", processes=2, fault=fault)
    stderr = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], stderr
    folder = lab.folder / "cut" / "checkpoints"
    assert f"coupled-adam: error: {said}{folder}/step-" in error(stderr[0])
    assert "continue with --resume" in error(stderr[0])
    assert "Traceback" not in "".join(stderr)
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", *before]
    lab.run("cut", *arguments, "--resume", processes=2)
    close(lab.reference(*ARM, *LONG, *EXACT)[0], lab.weights("cut"), 1e-10)


# --- faults at any operation on a file ---

# For each the codes that the command may end with: a signal may come after the last step, and a
# file may be one that nothing depends on. 77 points have been tried.
FAULTS = {"kill": {-signal.SIGKILL}, "sigterm": {75, 0}, "ctrl-c": {130}, "disk-error": {0, 1, 2}}
POINTS = 3
FEW = ["--steps=4", "--training.evaluate_every=2", "--device=cpu", "--logger"]


def tree(folder):
    """All files of runs and reports without what is never the same: times, and a zip's padding."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = map(json.loads, content.splitlines())
            content = [{k: v for k, v in line.items() if "second" not in k} for line in lines]
        if path.name in ("environment.json", "checksums.json", "index.html", "runs.csv"):
            content = None
        if path.parent.name == "checkpoints" and path.name.startswith("step-"):
            content = None  # its weights are those of the model
        files[name] = content
    return files


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "train", "evaluate", "report"])
def test_a_fault_at_any_operation(command, small_recipe, text_file, tmp_path):
    """Several times: before a file is opened for writing, renamed or removed, or a folder is made.

    It is kill -9, SIGTERM, Ctrl-C or an error of the disk. The same command again, with
    ``--resume`` if it trains, ends as if nothing had happened.
    """
    begun, out = tmp_path / "begun", tmp_path / "out"
    training = ["--recipe", small_recipe, "--text", text_file, *FEW]
    arguments = {
        "compare": ["compare", *training, "--out", out],
        "train": ["train", "--arm=adamw", *training, "--out", out],
        "evaluate": ["evaluate", out / "adamw-seed-1", "--device=cpu", "--batches=2"],
        "report": ["report", out],
    }

    def run(*more, fault="kill", number=0):
        program = [FAULTY, fault, number, *arguments[command], *more]
        process = Process([sys.executable, *program], {**os.environ, "WATCHED": str(tmp_path)})
        _, stderr = process.communicate()
        return process.returncode, stderr

    if command in ("evaluate", "report"):
        assert cli.main([*map(str, arguments["compare"])]) == 0
        if command == "evaluate":
            (out / "adamw-seed-1" / "evaluation.json").unlink()
        out.rename(begun)
        shutil.copytree(begun, out)
    code, stderr = run()  # to the end
    assert code == 0, stderr
    operations = int((tmp_path / "operations").read_text())
    expected = tree(out)
    drawn = random.Random(0)
    for _ in range(POINTS):
        fault, number = drawn.choice([*FAULTS]), drawn.randint(1, operations)
        shutil.rmtree(out)
        if begun.exists():
            shutil.copytree(begun, out)
        code, stderr = run(fault=fault, number=number)
        assert code in FAULTS[fault], (fault, number, stderr)
        assert "Traceback" not in stderr, (fault, number, stderr)
        code, stderr = run(*(["--resume"] if command in ("compare", "train") else []))
        assert code == 0, (fault, number, stderr)
        assert tree(out) == expected, (fault, number)
        hidden = {path.name for path in tmp_path.rglob(".*")}
        assert hidden <= {".lock", ".files.json"}, (fault, number)
