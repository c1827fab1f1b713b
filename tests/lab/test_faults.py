"""Faults, each on real processes and files: what is promised in docs/reliability.md."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from coupled_adam import files
from coupled_adam.errors import TrainingError, UsageError
from coupled_adam.files import file_digest, sole_writer, temporary_path
from coupled_adam.lab import comparison
from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training import distributed
from coupled_adam.lab.training.checkpoints import Checkpoints
from coupled_adam.lab.training.config import Execution, TrainingRun
from coupled_adam.lab.training.folder import claim
from coupled_adam.lab.training.run import train
from laboratory import EXACT, LONG, SHORT, close

ARM = ["--arm", "coupled_adam"]


def error(stderr):
    """The one line that the command says of an error."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("coupled-adam: ")]
    return line


# --- checkpoints that are not what was written ---


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of 40 steps with its recipe and corpus, and one of another seed."""
    folder = tmp_path_factory.mktemp("finished")
    text, path = folder / "text.txt", folder / "small.yaml"
    text.write_text("\n\n".join(sorted(topics.values(), key=len)[-3:]))
    path.write_text(f"""
name: small
model: {{architecture: gpt2, vocab_size: 300, n_layer: 1, n_head: 2, n_embd: 8}}
data: {{text: {text}, held_out: 0.1}}
training:
  {{steps: 40, batch_size: 4, sequence_length: 16, lr: 0.01, warmup: 4, evaluate_every: 10}}
arms: {{coupled_adam: {{optimizer: coupled_adam}}}}
seeds: [1]
""")
    recipe = load_recipe(str(path))
    corpus = prepare_corpus(recipe, folder / "cache")
    for seed in (1, 2):
        run = TrainingRun(recipe, "coupled_adam", seed, folder / str(seed))
        train(run, corpus, Execution(log=()))
    return folder, recipe, corpus


@pytest.fixture
def unfinished(finished, tmp_path):
    """The run as if it had been killed before its model was saved, and a way to continue it."""
    folder, recipe, corpus = finished
    run = shutil.copytree(folder / "1", tmp_path / "run")
    shutil.rmtree(run / "model")

    def go_on(**options):
        execution = Execution(log=(), **options)
        train(TrainingRun(recipe, "coupled_adam", 1, run), corpus, execution)
        return load_file(run / "model" / "model.safetensors")

    return run, go_on


class Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def flip_a_bit(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, _: os.truncate(path, 0),
    "first byte": lambda path, _: flip_a_bit(path, 0),
    "a bit in the middle": lambda path, _: flip_a_bit(path, 0.5),
    "last byte": lambda path, _: flip_a_bit(path, 1),
    "a pickle": lambda path, _: path.write_bytes(pickle.dumps(Trap())),
    "of another run": lambda path, other: shutil.copyfile(other, path),
    "of another run, with its digests": lambda path, other: [
        shutil.copyfile(other.with_name(other.name + end), path.with_name(path.name + end))
        for end in ("", ".json")
    ],
    "without digests": lambda path, _: path.with_name("step-40.json").unlink(),
    "digests of no end": lambda path, _: path.with_name("step-40.json").write_text("[" * 10**5),
    "digests that are numbers": lambda path, _: path.with_name("step-40.json").write_text(
        '{"config": "0", "files": {"step-40": 1}}'
    ),
    "digests that are none": lambda path, _: path.with_name("step-40.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    unfinished, finished, damage, tmp_path, monkeypatch
):
    run, go_on = unfinished
    monkeypatch.chdir(tmp_path)
    path = run / "checkpoints" / "step-40"
    DAMAGES[damage](path, finished[0] / "2" / "checkpoints" / "step-40")
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    way = "--skip-damaged sets it aside, and continues from step-30"
    with pytest.raises(UsageError, match=f"{re.escape(str(path))} .*: {way}"):
        go_on()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files
    damaged = path.read_bytes()
    continued = go_on(skip_damaged=True)
    expected = load_file(finished[0] / "1" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in expected.items())
    assert path.with_name("step-40.damaged").read_bytes() == damaged
    assert not (tmp_path / "executed").exists()


def first_state(content):
    return content["optimizer_states"][0]["state"][0]


CONTENTS = {
    "no weights": lambda content: content.pop("state_dict"),
    "no loops": lambda content: content.pop("loops"),
    "no optimizer": lambda content: content.pop("optimizer_states"),
    "no schedule": lambda content: content.pop("lr_schedulers"),
    "no state": lambda content: content["optimizer_states"][0].update(state={}),
    "state of one missing": lambda content: content["optimizer_states"][0]["state"].pop(2),
    "no groups": lambda content: content["optimizer_states"][0].update(param_groups=[]),
    "weights of another shape": lambda content: content["state_dict"].update(
        {"model.transformer.wte.weight": torch.zeros(300, 9)}
    ),
    "moment of another shape": lambda content: first_state(content).update(
        exp_avg=torch.zeros(7, 8)
    ),
    "moment that is text": lambda content: first_state(content).update(exp_avg="x"),
    "text for a learning rate": lambda content: content["optimizer_states"][0]["param_groups"][
        0
    ].update(lr="x"),
    "text for a step": lambda content: first_state(content).update(step="x"),
    "negative step": lambda content: first_state(content).update(step=torch.tensor(-3.0)),
    "of another step": lambda content: content["loops"]["fit_loop"][
        "epoch_loop.automatic_optimization.optim_progress"
    ]["optimizer"]["step"]["total"].update(completed=20),
    "a list": lambda content: content.update(optimizer_states=[1, 2]),
    "a schedule that is a number": lambda content: content.update(lr_schedulers=[3]),
}


@pytest.mark.parametrize("change", CONTENTS)
def test_a_checkpoint_that_was_not_written_by_us(unfinished, change):
    """Its digests are right, so that only its content shows it."""
    run, go_on = unfinished
    path = run / "checkpoints" / "step-30"  # so that there are steps to make
    for name in ("step-40", "step-40.json"):
        (run / "checkpoints" / name).unlink()
    content = torch.load(path, weights_only=True)
    CONTENTS[change](content)
    torch.save(content, path)
    manifest = {
        "config": file_digest(run / "config.yaml"),
        "files": {"step-30": file_digest(path)},
    }
    path.with_name("step-30.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"step-30 cannot be used \(.*: remove it to continue"):
        go_on()
    assert path.exists()


def test_no_whole_checkpoint(unfinished):
    run, go_on = unfinished
    for step in (30, 40):
        flip_a_bit(run / "checkpoints" / f"step-{step}", 0.5)
    with pytest.raises(UsageError, match=r"remove .*checkpoints to start from the beginning"):
        go_on(skip_damaged=True)
    shutil.rmtree(run / "checkpoints")
    go_on()


def test_remains_of_a_killed_process(unfinished, finished):
    """Ours go: what was unfinished, and digests of what has not got its name; others' stay."""
    run, go_on = unfinished
    folder = run / "checkpoints"
    temporary_path(folder / "step-50").write_bytes(b"half")
    temporary_path(folder / "step-60").mkdir()
    temporary_path(run / "model").mkdir()
    shutil.copy(folder / "step-40.json", folder / "step-50.json")
    others = ["step-7.tmp", "best.json", "step-9.json", "notes.tmp", "step-of-my-own", "step-8"]
    for name in others[:4]:
        (folder / name).write_text("{}")
    for name in others[4:]:
        (folder / name).mkdir()
        (folder / name / "weights").write_text("kept")
    continued = go_on()
    expected = load_file(finished[0] / "1" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in expected.items())
    names = {"step-30", "step-30.json", "step-40", "step-40.json", *others}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "step-8" / "weights").read_text() == "kept"
    assert not [*run.glob(".coupled-adam-*")]


def test_of_a_checkpoint_only_own_files_are_removed(unfinished):
    """A sharded one is a folder, where others may have put something."""
    run, _ = unfinished
    checkpoints = Checkpoints(run, 10)
    path = run / "checkpoints" / "step-5"
    (path / "sub").mkdir(parents=True)
    for name in ("a", "sub/b", "foreign"):
        (path / name).write_text(name)
    secret = run / "secret"
    secret.write_text("")
    names = dict.fromkeys(("a", "sub/b", "../../secret", str(secret)), "")
    content = {"config": file_digest(run / "config.yaml"), "files": names}
    path.with_name("step-5.json").write_text(json.dumps(content))
    checkpoints._remove(path)
    assert [p.name for p in path.rglob("*")] == ["foreign"]
    assert secret.exists()
    (path / "foreign").unlink()
    checkpoints._remove(path)
    assert not [*path.parent.glob("step-5*")]


@pytest.mark.parametrize("name", ["checkpoints", "second_moments"])
def test_a_link_to_a_shared_folder_is_refused(unfinished, tmp_path, name):
    run, go_on = unfinished
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "thesis.tmp").write_text("")
    if (run / name).exists():
        shutil.move(run / name, shared / name)
    (run / name).symlink_to(shared)
    with pytest.raises(UsageError, match=rf"{name} is a symbolic link"):
        go_on()
    assert (shared / "thesis.tmp").exists()


def test_a_file_for_a_folder_is_refused(unfinished):
    run, go_on = unfinished
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("of others")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="checkpoints is no folder"):
        go_on()
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "name", ["config.yaml", "environment.json", "metrics.jsonl", "checkpoints/step-40"]
)
def test_a_pipe_for_a_file_is_refused(unfinished, name):
    """To read it would be to wait for ever."""
    run, go_on = unfinished
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UsageError, match=f"{name} is a pipe or a device"):
        go_on()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        '{"corpus": null}',
        "[" * 10**5,
        '{"corpus": {}, "resumed": [null]}',
        '{"corpus": {}, "packages": ["a"]}',
        '{"corpus": {}, "time": 5}',
    ],
    ids=lambda content: content[:40],
)
def test_a_damaged_environment_is_refused(unfinished, content):
    run, go_on = unfinished
    (run / "environment.json").write_text(content)
    with pytest.raises(UsageError, match=r"environment\.json is damaged"):
        go_on()


def test_a_disk_that_is_full_for_the_model(unfinished, monkeypatch):
    """safetensors and tokenizers have errors of their own, which are no OSErrors."""
    run, go_on = unfinished
    error = Exception("File too large (os error 27)")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.GPT2LMHeadModel.save_pretrained", Mock(side_effect=error))
        with pytest.raises(TrainingError, match=r"model cannot be written \(File too large"):
            go_on()
    assert not [*run.glob(".coupled-adam-*")]
    go_on()


def test_a_folder_of_others_is_refused(unfinished):
    """A log of the same name would be emptied; what precedes config.yaml may be a killed run's."""
    run, go_on = unfinished
    (run / "config.yaml").unlink()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"run holds checkpoints but no run, whose config\.yaml"):
        go_on()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    for path in run.iterdir():
        if path.name not in ("environment.json", "unigram_counts.npy"):
            files.remove(path)
    go_on()


def test_on_the_disk_before_it_has_its_name(unfinished, disk):
    """Model, arrays, checkpoints and all else, so that power may fail at any moment."""
    run, go_on = unfinished
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    disk.log = run / "metrics.jsonl"
    go_on()
    names = {event[1].name for event in disk.events if event[0] == "rename"}
    assert {"step-10", "step-10.json", "model"} <= names
    assert disk.check(run) > 8
    disk.events.clear()
    shutil.rmtree(run)
    go_on()
    assert {"config.yaml", "unigram_counts.npy", "environment.json"} <= {
        event[1].name for event in disk.events if event[0] == "rename"
    }
    assert disk.check(run) > 11


# --- folders with what others have made ---


def test_a_comparison_that_fails_makes_no_folder(finished, tmp_path, monkeypatch):
    """What cannot start, for want of a text for instance, leaves nothing behind."""
    _, recipe, _ = finished
    out = tmp_path / "runs" / "new" / "out"
    monkeypatch.setattr(comparison, "prepare_corpus", Mock(side_effect=UsageError("no text")))
    with pytest.raises(UsageError, match="no text"):
        comparison.compare(recipe, out, execution=Execution(log=()), cache=tmp_path / "cache")
    assert not (tmp_path / "runs").exists()


def test_a_resumed_comparison_that_fails_changes_nothing(finished, tmp_path, monkeypatch):
    _, recipe, _ = finished
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    before = (tmp_path / "comparison.yaml").read_bytes()
    monkeypatch.setattr(comparison, "prepare_corpus", Mock(side_effect=UsageError("no text")))
    more = dataclasses.replace(recipe, seeds=[1, 2])
    options = {"execution": Execution(log=()), "cache": tmp_path / "cache", "resume": True}
    with pytest.raises(UsageError, match="no text"):
        comparison.compare(more, tmp_path, **options)
    assert (tmp_path / "comparison.yaml").read_bytes() == before


# --- what is not as it was when the run began ---


def test_another_environment_is_recorded_and_warned_of(unfinished):
    run, go_on = unfinished
    path = run / "environment.json"
    began = json.loads(path.read_text())
    assert "resumed" not in began
    began["packages"]["torch"] = "2.0.0"
    began["processes"], began["time"] = 64, "2999-01-01T00:00:00+00:00"
    began["processor"], began["threads"] = "Z80", 77
    path.write_text(json.dumps(began))
    with pytest.warns(UserWarning, match="continues at step 40 in another environment") as warned:
        go_on()
    (message,) = [str(w.message) for w in warned if "another environment" in str(w.message)]
    assert f"torch 2.0.0 -> {torch.__version__}" in message
    assert "processes 64 -> 1" in message
    assert "processor Z80 -> " in message
    assert f"threads 77 -> {torch.get_num_threads()}" in message
    assert "the clock is set back, 2999-01-01" in message
    recorded = json.loads(path.read_text())
    (resumed,) = recorded.pop("resumed")
    assert recorded == began
    assert resumed["step"] == 40
    assert resumed["packages"]["torch"] == torch.__version__


def test_the_same_environment_is_no_news(unfinished, recwarn):
    run, go_on = unfinished
    go_on()
    assert not [w for w in recwarn if "environment" in str(w.message)]
    assert len(json.loads((run / "environment.json").read_text())["resumed"]) == 1


ANOTHER_TEXT = r"was begun with another text than data.text=.* now"


def test_another_text_is_refused(unfinished, finished, tmp_path):
    folder, recipe, _ = finished
    run, go_on = unfinished
    text = folder / "text.txt"
    before = text.read_text()
    text.write_text(f"{before}\n\none more document")
    changed = prepare_corpus(recipe, tmp_path / "cache")
    text.write_text(before)
    with pytest.raises(UsageError, match=ANOTHER_TEXT):
        train(TrainingRun(recipe, "coupled_adam", 1, run), changed, Execution(log=()))
    assert not (run / "model").exists()
    go_on()


def test_other_tokens_of_the_same_text_are_refused(unfinished):
    run, go_on = unfinished
    counts = run / "unigram_counts.npy"
    flip_a_bit(counts, 1)
    with pytest.raises(UsageError, match=ANOTHER_TEXT):
        go_on()
    assert not (run / "model").exists()
    flip_a_bit(counts, 1)
    go_on()


def test_token_files_that_were_replaced_are_refused(finished, tmp_path):
    """Though they have the same size and time, as after ``cp -p``."""
    _, recipe, _ = finished
    ids = np.random.default_rng(0).integers(0, 300, 3000).astype("<u2")
    for name in ("train", "val"):
        ids.tofile(tmp_path / f"{name}.bin")
    recipe = override(recipe, {"data.text": None, "data.tokens": str(tmp_path)})
    run = TrainingRun(recipe, "coupled_adam", 1, tmp_path / "run")
    with contextlib.ExitStack() as held:
        claim(run, prepare_corpus(recipe, tmp_path / "cache"), held)
    time = (tmp_path / "train.bin").stat().st_mtime_ns
    ids[::-1].tofile(tmp_path / "train.bin")
    os.utime(tmp_path / "train.bin", ns=(time, time))
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    with (
        contextlib.ExitStack() as held,
        pytest.raises(UsageError, match="was begun with another text"),
    ):
        claim(run, corpus, held)


# --- several processes want the same ---


def test_two_runs_of_one_folder(lab):
    """The second refuses while the first is there, and may when that has been killed."""
    (first,) = lab.start("cut", *ARM, *SHORT)
    metrics = lab.folder / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGSTOP)
    stderr = lab.run("cut", *ARM, *SHORT, "--resume", code=2)
    assert "cut is in use by another process: wait for it" in error(stderr)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    lab.run("cut", *ARM, *SHORT, "--resume")
    lab.assert_equal("cut", *ARM, *SHORT)


def test_two_comparisons_in_one_folder(finished, tmp_path):
    _, recipe, _ = finished
    out = tmp_path / "out"
    out.mkdir()
    with sole_writer(out), pytest.raises(UsageError, match="is in use by another process"):
        comparison.compare(recipe, out, execution=Execution(log=()), cache=tmp_path / "cache")
    assert [path.name for path in out.iterdir()] == [".lock"]


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
    whole = [p.name for p in folder.iterdir() if p.suffix not in (".tmp", ".json")]
    assert sorted(whole) == checkpoints
    lab.run("cut", *ARM, *SHORT, "--resume")
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
        ("interrupt 2", 130, "interrupted; add --resume", ["step-10"]),  # in a checkpoint
        ("term 1", 75, "stopped by SIGTERM; continue with --resume", ["step-30", "step-40"]),
    ],
)
def test_signals_beside_the_training(lab, fault, code, said, checkpoints):
    """Ctrl-C while a checkpoint is written, SIGTERM while the model is tested: one line."""
    stderr = lab.run("cut", *ARM, *SHORT, fault=fault, code=code)
    assert said in error(stderr)
    assert "Traceback" not in stderr
    assert lab.checkpoints("cut") == checkpoints
    assert not [*(lab.folder / "cut").rglob(".coupled-adam-*")]
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


DIFFERENT = [
    ({"training.lr": 0.5}, "training.lr=0.01 in process 0, 0.5 in process 1"),
    ({"training.batch_size": 8}, "training.batch_size=4 in process 0, 8"),
    ({"training.steps": 20}, "training.steps=40 in process 0, 20"),
    ({"training.evaluate_every": 20}, "training.evaluate_every=10 in process 0, 20"),
    ({"arm": "adamw"}, "arm='coupled_adam' in process 0, 'adamw'"),
    ({"seed": 2}, "seed=1 in process 0, 2"),
    ({"strategy": "fsdp2"}, "strategy='ddp' in process 0, 'fsdp2'"),
    ({"device": "cuda"}, "device='cpu' in process 0, 'cuda'"),
    ({"micro_batch_size": 1}, "micro_batch_size=None in process 0, 1"),
    ({"folder": Path("elsewhere")}, "out='.*1' in process 0, '.*elsewhere'"),
]


def settings_of(finished, change):
    """What a process compares with the others when it trains a run."""
    folder, recipe, _ = finished
    run = TrainingRun(recipe, "coupled_adam", 1, folder / "1")
    execution = Execution()
    for name in change:
        if "." in name:
            run = dataclasses.replace(run, recipe=override(recipe, change))
        elif name in {field.name for field in dataclasses.fields(Execution)}:
            execution = dataclasses.replace(execution, **change)
        else:
            run = dataclasses.replace(run, **change)
    return comparison.run_settings(run, execution, resume=False)


def meeting(ranks, *settings):
    """What becomes of processes that meet with some settings: their errors, or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def meet(rank, settings):
        environment = Mock(main_address="127.0.0.1", main_port=port)
        environment.global_rank.return_value = rank
        environment.world_size.return_value = 2
        try:
            return None, distributed._agreed(environment, settings)
        except (UsageError, TrainingError) as error:
            return f"{type(error).__name__} {error}", None

    with ThreadPoolExecutor(2) as pool:
        return [said for said, _ in [*pool.map(meet, ranks, settings)]]


@pytest.mark.parametrize(("change", "said"), DIFFERENT)
def test_ranks_with_different_settings(finished, change, said):
    """All of them say what differs, before any of them has done anything."""
    ours, theirs = settings_of(finished, {}), settings_of(finished, change)
    assert meeting([0, 1], ours, ours) == [None, None]
    first, second = meeting([0, 1], ours, theirs)
    assert first == second
    assert re.match(rf"UsageError the processes .* started differently \({said}", first)


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, r"of the 2 processes of this run, 1 did not come within 0\.5 seconds"),
        (1, r"the first process of this run could not be reached at 127\.0\.0\.1:\d+ within 0\.5"),
    ],
)
def test_a_rank_that_never_comes(finished, monkeypatch, capfd, rank, said):
    assert distributed.PATIENCE == 10 * 60
    monkeypatch.setattr(distributed, "PATIENCE", 0.5)
    monkeypatch.setattr(files, "_SAYS_AFTER", 0.0)
    (error,) = meeting([rank], settings_of(finished, {}))
    assert re.match(f"TrainingError {said}", error)
    assert "waiting for the other process of this run, at 127.0.0.1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", 20], "training.steps=40 in process 0, 20 in process 1"),
        (["--text", "other.txt"], "the processes of this run have different texts"),
    ],
)
def test_ranks_that_are_started_differently(lab, options, said):
    (lab.folder / "other.txt").write_text("\n\n".join(sorted(topics.values(), key=len)[-4:]))
    options = [str(lab.folder / o) if o == "other.txt" else o for o in options]
    processes = lab.srun("cut", *ARM, *EXACT, others=options)
    stderr = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], stderr
    assert said in error(stderr[0])
    assert "coupled-adam: error" not in stderr[1]  # all know it, and one says it
    assert not (lab.folder / "cut").exists()


def test_a_rank_that_dies_before_the_others_know_it(lab):
    """Without torchrun, which would end them, the others wait for a limited time."""
    processes = lab.srun("cut", *ARM, *EXACT, fault="absence 1")
    stderr = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL], stderr
    assert "of the 2 processes of this run, 1 did not come within" in error(stderr[0])


def test_an_error_of_one_rank_before_the_others_know_it(lab):
    """That rank says it, and the others that it did not come."""
    processes = lab.srun("cut", *ARM, *EXACT, others=["--stepps", 20], fault="impatience 1")
    stderr = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 2], stderr
    assert "of the 2 processes of this run, 1 did not come within" in error(stderr[0])
    said = "coupled-adam: error: process 1: unrecognized arguments: --stepps 20; did you mean"
    assert error(stderr[1]).startswith(said)


def test_killed_while_it_makes_a_report(lab):
    """The report that was there is as it was; and can be made anew."""
    lab.run("run", *ARM)
    arguments = ["report", str(lab.folder / "run"), "--out", str(lab.folder / "report")]
    lab.command_line(*arguments, fault="page 2")
    before = {p: p.read_bytes() for p in (lab.folder / "report").rglob("*") if p.is_file()}
    assert "index.html" in {path.name for path in before}
    for fault in ("figures 1", "page 1"):
        lab.command_line(*arguments, fault=fault, code=-signal.SIGKILL)
        after = {p: p.read_bytes() for p in (lab.folder / "report").rglob("*") if p.is_file()}
        assert after == before
    lab.command_line(*arguments, fault="page 2")


# --- disks ---


def in_namespace(script, *arguments, **options):
    """A shell in namespaces of its own, where it may mount; skips where the kernel forbids that."""
    unshare = shutil.which("unshare")
    allowed = (
        unshare
        and not subprocess.run(
            [unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
    )
    if not allowed:
        pytest.skip("needs to mount in a user namespace")
    command = [unshare, "-rm", "sh", "-ec", script, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1.5, 2.5])
def test_a_disk_that_is_full(lab, room):
    """On a disk with room for so many checkpoints: the whole ones stay, and are continued."""
    arguments = [*ARM, *SHORT, "--logger"]
    lab.run("whole", *arguments)
    sizes = [p.stat().st_size for p in (lab.folder / "whole").glob("checkpoints/*")]
    disk, out = lab.folder / "disk", lab.folder / "cut"
    disk.mkdir()
    script = """
mount -t tmpfs -o size=$1 tmpfs "$2"
code=0
shift 2
"$@" || code=$?
cp -r "$DISK/cut" "$OUT"
exit $code
"""
    result = in_namespace(
        script,
        int(room * max(sizes)) + 32768,
        disk,
        *lab.command("disk/cut", *arguments),
        env={**os.environ, "DISK": str(disk), "OUT": str(out), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 1, result.stderr
    assert "No space left on device" in error(result.stderr)
    assert "what was finished is kept, continue with --resume" in error(result.stderr)
    assert len(lab.checkpoints("cut")) == min(int(room), 2)
    lab.run("cut", *arguments, "--resume")
    lab.assert_equal("cut", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "said"),
    [
        ("fsdp2", "limit-of-one 20000", "process 1: File too large: "),
        ("ddp", "limit 20000", "File too large: "),
    ],
)
def test_a_disk_that_is_full_for_one_rank(lab, strategy, fault, said):
    """All ranks end, with one line in all; and nothing half-written is left."""
    arguments = [*ARM, *LONG, *EXACT, "--strategy", strategy]
    lab.stop("cut", *arguments, step=12, number=signal.SIGTERM, code=75, processes=2)
    before = lab.checkpoints("cut")
    started = lab.start("cut", *arguments, "--resume", processes=2, fault=fault)
    stderr = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], stderr
    folder = lab.folder / "cut" / "checkpoints"
    assert f"coupled-adam: error: {said}{folder}/step-" in error("".join(stderr))
    assert "what was finished is kept, continue with --resume" in error("".join(stderr))
    assert "Traceback" not in "".join(stderr)
    names = {name for step in before for name in (step, f"{step}.json")}
    assert {path.name for path in folder.iterdir()} == names
    lab.run("cut", *arguments, "--resume", processes=2)
    close(lab.reference(*ARM, *LONG, *EXACT)[0], lab.weights("cut"), 1e-10)


@pytest.mark.slow
def test_a_read_only_folder(lab):
    """Nothing is changed in it, and the error names it."""
    lab.run("cut", *ARM, *SHORT, fault="model 1", code=-signal.SIGKILL)
    out = lab.folder / "cut"
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    script = """
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
shift
"$@"
"""
    command = lab.command("cut", *ARM, *SHORT, "--resume")
    result = in_namespace(script, out, *command)
    assert result.returncode == 2, result.stderr
    assert f"--out {out} cannot be written (Read-only file system)" in error(result.stderr)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    result = in_namespace(script, out, *lab.command("cut/new", *ARM, *SHORT))
    assert result.returncode == 2
    assert "Read-only file system" in error(result.stderr)
    lab.run("cut", *ARM, *SHORT, "--resume")
