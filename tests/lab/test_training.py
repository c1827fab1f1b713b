"""Batches, and runs that are killed: what continues must be what would have been."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coupled_adam.lab.recipe import load_recipe
from coupled_adam.lab.training import Batches, MetricsFile, held_out_batches


@pytest.fixture
def training(small_recipe):
    return load_recipe(str(small_recipe)).training


def test_batches_cover_each_epoch_once(training):
    """Every block once in an epoch, in another order in the next; targets follow their inputs."""
    tokens = np.arange(16 * 8 + 1, dtype=np.uint16)  # 8 blocks, 2 batches of 4 in an epoch
    batches = list(Batches(tokens, dataclasses.replace(training, steps=6), seed=3))
    assert len(batches) == 6
    for batch in batches:
        assert batch.shape == (4, 17)
        assert torch.equal(batch, batch[:, :1] + torch.arange(17))
    starts = [torch.cat(batches[i : i + 2])[:, 0].tolist() for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(0, 128, 16)) for epoch in starts)
    assert starts[0] != starts[1] != starts[2]


def test_batches_depend_on_the_seed_alone_and_resume(training):
    tokens = np.random.default_rng(0).integers(0, 300, 1000).astype(np.uint16)
    whole = list(Batches(tokens, training, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(whole, Batches(tokens, training, seed=1)))
    assert not torch.equal(whole[0], next(iter(Batches(tokens, training, seed=2))))
    started = Batches(tokens, training, seed=1)
    iterator = iter(started)
    for _ in range(7):
        next(iterator)
    resumed = Batches(tokens, training, seed=1)
    resumed.load_state_dict(started.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(whole[7:], resumed, strict=True))


def test_held_out_batches_are_all_whole_blocks_in_order(training):
    tokens = np.arange(16 * 6 + 5, dtype=np.uint16)
    blocks = torch.cat([batch for (batch,) in held_out_batches(tokens, training)])
    assert blocks[:, 0].tolist() == [0, 16, 32, 48, 64, 80]
    assert blocks.shape == (6, 17)


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train_loss": 1.0}) + "\n" for step in (0, 10, 20, 30)]
    path.write_text("".join(lines) + '{"step": 40, "tra')  # killed while writing
    MetricsFile(path, 20).log_metrics({"train_loss": 2.0, "epoch": 0}, step=29)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in kept] == [0, 10, 20, 30]
    assert kept[-1] == {"step": 30, "train_loss": 2.0}


def command(small_recipe, text_file, out, *more):
    return [
        *(sys.executable, "-m", "coupled_adam.cli", "compare", "--recipe", str(small_recipe)),
        *("--text", str(text_file), "--out", str(out), "--device", "cpu", *more),
    ]


def stop_at(process, metrics, step, number):
    """Send a signal once the run has logged that step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            process.send_signal(number)
            return process.wait(timeout=60)
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {process.poll()}")


@pytest.mark.slow
def test_killed_and_resumed_runs_equal_an_uninterrupted_one(small_recipe, text_file, tmp_path):
    """kill -9 in the first arm, Ctrl-C in the second, kill -9 again: the same bit for bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(small_recipe, text_file, whole), check=True)

    stops = [
        ("adamw-seed-1", 20, signal.SIGKILL, -signal.SIGKILL),
        ("coupled_adam-seed-1", 10, signal.SIGINT, 130),
        ("coupled_adam-seed-1", 30, signal.SIGKILL, -signal.SIGKILL),
    ]
    more: list[str] = []
    for run, step, number, code in stops:
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(command(small_recipe, text_file, cut, *more), stderr=stderr)
        assert stop_at(process, cut / run / "metrics.jsonl", step, number) == code
        if number == signal.SIGINT:
            assert "interrupted; add --resume" in (tmp_path / "stderr").read_text()
        assert not (cut / run / "model").exists()
        more = ["--resume"]
    subprocess.run(command(small_recipe, text_file, cut, *more), check=True)

    for run in ("adamw-seed-1", "coupled_adam-seed-1"):
        for file in ("evaluation.json", "metrics.jsonl", "config.yaml"):
            assert (cut / run / file).read_text() == (whole / run / file).read_text(), file
        weights = [
            load_file(folder / run / "model" / "model.safetensors") for folder in (whole, cut)
        ]
        for name, tensor in weights[0].items():
            assert torch.equal(tensor, weights[1][name]), name
    assert (cut / "report" / "results.json").read_text() == (
        whole / "report" / "results.json"
    ).read_text()


def test_interrupted_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A checkpoint that cannot be finished does not touch the one before."""
    from coupled_adam.lab.training import CheckpointIO

    path = tmp_path / "step-5.ckpt"
    CheckpointIO().save_checkpoint({"global_step": 5}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        CheckpointIO().save_checkpoint({"global_step": 10}, path)
    assert torch.load(path, weights_only=True) == {"global_step": 5}
