"""Faults, each on real processes and files: what is promised in docs/reliability.md."""

import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coupled_adam.errors import TrainingError, UsageError
from coupled_adam.lab import comparison
from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.run import read_run
from coupled_adam.lab.training.config import Execution
from coupled_adam.lab.training.run import train
from laboratory import EXACT, LONG, SHORT, close

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
        train(dataclasses.replace(read_run(finished), folder=run), corpus, Execution(log=()))
        return load_file(run / "model" / "model.safetensors")

    return run, go_on


class Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "content",
    [b"PK half of a checkpoint", b"", pickle.dumps(Trap())],
    ids=["half", "empty", "trap"],
)
def test_a_damaged_checkpoint_is_refused(unfinished, trained, content, tmp_path, monkeypatch):
    """Nothing in it is executed; once it is removed, the one before it is continued."""
    run, go_on = unfinished
    monkeypatch.chdir(tmp_path)
    path = run / "checkpoints" / "step-50"
    path.write_bytes(content)
    before = {p: p.read_bytes() for p in run.rglob("step-*")}
    with pytest.raises(
        UsageError, match=rf"{path} is damaged \(.*\): remove it to continue"
    ) as said:
        go_on()
    assert "\n" not in str(said.value)
    assert not (tmp_path / "executed").exists()
    assert {p: p.read_bytes() for p in run.rglob("step-*")} == before
    path.unlink()
    continued = go_on()
    expected = load_file(trained[0] / "model" / "model.safetensors")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in expected.items())


def test_a_folder_of_others_is_refused(unfinished):
    """A log of the same name would be emptied; what precedes config.yaml may be a killed run's."""
    run, go_on = unfinished
    (run / "config.yaml").unlink()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"run holds checkpoints but no run, whose config\.yaml"):
        go_on()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
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
    options = {"execution": Execution(log=()), "cache": tmp_path / "cache"}
    for out in (new, begun):
        with pytest.raises(UsageError, match="no text"):
            comparison.compare(more, out, resume=out == begun, **options)
    assert [*begun.parent.iterdir()] == [begun]
    assert [path.read_bytes() for path in begun.iterdir()] == [before]


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
    assert not (run / "model").exists()
    go_on()


def test_two_runs_of_one_folder(lab):
    """The second refuses while the first is there, and may when that has been killed."""
    (first,) = lab.start("cut", *ARM, *LONG)
    metrics = lab.folder / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGSTOP)
    stderr = lab.run("cut", *ARM, *LONG, "--resume", code=2)
    assert "cut is in use by another process: wait for it" in error(stderr)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    lab.run("cut", *ARM, *LONG, "--resume")
    lab.assert_equal("cut", *ARM, *LONG)


# --- processes that end ---


@pytest.mark.parametrize(
    ("fault", "checkpoints"),
    [
        ("checkpoint 2", ["step-10"]),  # half of it is written
        ("rename 2", ["step-10"]),  # it has no name yet
        ("model 1", ["step-30", "step-40"]),
        ("evaluation 1", ["step-30", "step-40"]),
    ],
)
def test_killed_while_it_writes(lab, fault, checkpoints):
    """kill -9 in the middle: what was whole is there, and the run goes on from it."""
    lab.run("cut", *ARM, *SHORT, fault=fault, code=-signal.SIGKILL)
    folder = lab.folder / "cut" / "checkpoints"
    assert lab.checkpoints("cut") == checkpoints
    lab.run("cut", *ARM, *SHORT, "--resume")
    assert sorted(path.name for path in folder.iterdir()) == ["step-30", "step-40"]
    assert not [*folder.parent.glob(".model-*")]
    lab.assert_equal("cut", *ARM, *SHORT)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 75, "stopped by SIGTERM after step"), (signal.SIGINT, 130, "interrupted")],
)
def test_signals_that_come_again_and_again(lab, number, code, said):
    (process,) = lab.start("cut", *ARM, *LONG)
    metrics = lab.folder / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    sent = 0
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


@pytest.mark.parametrize(
    ("fault", "code", "said", "checkpoints"),
    [
        ("interrupt 2", 130, "interrupted; continue with --resume", ["step-10"]),  # in a checkpoint
        ("term 1", 75, "stopped by SIGTERM; continue with --resume", ["step-30", "step-40"]),
    ],
)
def test_signals_beside_the_training(lab, fault, code, said, checkpoints):
    """Ctrl-C while a checkpoint is written, SIGTERM while the model is tested: one line."""
    stderr = lab.run("cut", *ARM, *SHORT, fault=fault, code=code)
    assert said in error(stderr)
    assert "Traceback" not in stderr
    assert lab.checkpoints("cut") == checkpoints
    assert not (lab.folder / "cut" / "checkpoints" / "unfinished").exists()
    lab.run("cut", *ARM, *SHORT, "--resume")
    lab.assert_equal("cut", *ARM, *SHORT)


def test_a_rank_that_dies(lab):
    """The other ends with an error, though nobody stops it; the run goes on with one process."""
    processes = lab.srun("cut", *ARM, *EXACT, fault="death 24")
    said = [process.communicate(timeout=200)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [1, -signal.SIGKILL], said
    assert "another process of this run has ended" in error(said[0])
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
    assert sorted(path.name for path in folder.iterdir()) == before
    lab.run("cut", *arguments, "--resume", processes=2)
    close(lab.reference(*ARM, *LONG, *EXACT)[0], lab.weights("cut"), 1e-10)
