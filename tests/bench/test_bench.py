"""The timing of optimizer steps: what it counts is right."""

import gc
import itertools
import json
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from bench.cases import Case
from bench.machine import Machine
from bench.optimizers import BASELINE, OPTIMIZERS, Candidate, candidate, make_step
from bench.results import Timed, bench_table
from bench.steps import bench
from bench.timing import Quartiles, sample_in_turn, step_sampler
from bench.training import TrainingSpeed, training_speed
from torch import nn

from coupled_adam.lab.recipe import load_recipe, override

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


STEADY = [(2.0, 1.0, 1.0), (3.0, 1.0, 1.0), (8.0, 2.0, 2.0)]


def test_memory():
    """States are as large as is promised; so is what a step holds beside them."""
    rows, columns = 8192, 256
    matrix = 4 * rows * columns
    names = ["CoupledAdamW", "AdamW foreach"]
    ours, foreach = bench([Case(rows, columns)], names, seconds=0.01)
    assert ours.state_bytes == matrix + 4 * columns + 4
    assert foreach.state_bytes == 2 * matrix + 4
    assert all(len(timed.samples) >= 6 for timed in (ours, foreach))
    assert ours.moved_bytes == 6 * matrix
    assert foreach.moved_bytes is None
    script = runpy.run_path(str(BENCHMARKS / "memory.py"))
    extra = [script["third_step"](f"{rows}x{columns}", name) for name in names]
    assert extra[0] < 0.01 * matrix
    assert extra[1] >= matrix


def test_clipping_is_part_of_the_step():
    """Ours clips in its step; for others it is done before the step."""
    moments = []
    for name in ("CoupledAdamW", "AdamW", BASELINE):
        embedding, other = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
        embedding.grad, other.grad = torch.full((4, 2), 6.0), torch.full((3,), 8.0)
        optimizer, step = make_step(name, embedding, [other], clip=True)
        step()
        moments.append(optimizer.state[other]["exp_avg"])
    norm = (8 * 6.0**2 + 3 * 8.0**2) ** 0.5
    for moment in moments:
        torch.testing.assert_close(moment, torch.full((3,), 0.1 * 8 / norm))


@pytest.mark.parametrize("case", [Case(64, 8, others=2), Case(64, 8, clip=True)])
def test_moved_bytes_are_unknown_of_more_than_the_matrix(case):
    assert candidate(BASELINE).moved_bytes(case) is None
    assert candidate(BASELINE).moved_bytes(Case(64, 8)) == 7 * 64 * 8 * 4
    assert candidate("CoupledAdamW fused").moved_bytes(Case(64, 8, "bfloat16")) == 6 * 64 * 8 * 2


def test_ratio_and_bandwidth():
    case = Case(1000, 10)
    timed = Timed(case, "CoupledAdamW", STEADY, 0, 0, moved_bytes=6 * case.matrix_bytes)
    assert timed.seconds == 3.0
    assert timed.baseline_seconds == 1.0
    assert timed.ratio == (2.0, 3.0, 4.0)
    # Three times what a copy moves, in three times its time.
    assert timed.bandwidth == pytest.approx(1.0)


def test_noise_is_said_in_words():
    """Whatever the ratio is: the quartiles' distance counts relative to the median."""
    assert not Quartiles(0.95, 1.0, 1.14).noisy
    assert Quartiles(0.95, 1.0, 1.16).noisy
    assert not Quartiles(7.0, 8.0, 8.5).noisy
    quiet = [(1.0 + 0.001 * i, 1.0, 1.0) for i in range(9)]
    shown = []
    for samples in (quiet, STEADY):
        timed = Timed(Case(10, 4), "AdamW", samples, 0, None, None)
        (row,) = bench_table([timed]).rows
        shown.append((row[4], timed.to_dict()["noisy"]))
    assert shown == [("(1.00–1.01)", False), ("(2.00–4.00) too noisy to tell", True)]
    speed = TrainingSpeed("tiny", 1, 1, [(a, b) for a, b, _ in STEADY])
    assert speed.summary.endswith("too noisy to tell")
    assert speed.to_dict()["noisy"]


def test_json_and_back():
    samples = [(1.23456789e-4, 1e-3, 5e-6), (2e-4, 1e-3, 6e-6)]
    timed = Timed(Case(10, 4, "bfloat16", 2, True), "AdamW", samples, 8, None, 3)
    read = Timed.from_dict(json.loads(json.dumps(timed.to_dict())))
    assert read.case == timed.case
    assert read.samples == [(1.23457e-4, 1e-3, 5e-6), (2e-4, 1e-3, 6e-6)]
    assert (read.optimizer, read.state_bytes, read.extra_bytes, read.moved_bytes) == (
        "AdamW",
        8,
        None,
        3,
    )


@pytest.mark.parametrize("collects", [True, False])
def test_samples_are_taken_in_turn(collects):
    """The first two of a round change places, the collector is off and then as before."""
    calls = []

    def sampler(name):
        def sample():
            assert not gc.isenabled()
            calls.append(name)
            return float(len(calls))

        return sample

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        rounds = sample_in_turn([sampler(name) for name in "ABC"], least=4, most=10, seconds=0)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert "".join(calls) == "ABCBACABCBAC"
    assert rounds[:2] == [(1.0, 2.0, 3.0), (5.0, 4.0, 6.0)]


def test_rounds_end_with_a_whole_pair_of_orders():
    """However early the time is over; and never later than the most that are asked for."""

    def sample(least, most, seconds):
        return len(
            sample_in_turn([lambda: 1.0, lambda: 1.0], least=least, most=most, seconds=seconds)
        )

    assert sample(1, 9, 0) == 2
    assert sample(6, 100, 0) == 6
    assert sample(3, 3, 1e9) == 3


def test_the_collector_is_on_again_after_an_error():
    def fail():
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        sample_in_turn([fail, fail], least=1, most=1)
    assert gc.isenabled()


def test_a_sample_is_the_mean_of_many_short_steps(monkeypatch):
    """On a clock that advances with each step by a hundredth of what a sample should take."""
    clock = itertools.count()
    seconds = 0.0

    def step():
        nonlocal seconds
        next(clock)
        seconds += 5e-5

    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    sample = step_sampler(step, "cpu")
    before = next(clock)
    assert sample() == pytest.approx(5e-5)
    assert next(clock) - before - 1 == pytest.approx(100, abs=1)


def test_command(tmp_path, monkeypatch, capsys):
    """As a user runs it: a table, or JSON alone, and a picture."""
    picture = tmp_path / "bench.png"
    common = ["speed.py", "--shapes", "64x8", "--seconds", "0.01", "--device", "cpu"]
    script = runpy.run_path(str(BENCHMARKS / "speed.py"))
    monkeypatch.setattr(sys, "argv", [*common, "--picture", str(picture), "--json"])
    script["main"]()
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["packages"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert [r["optimizer"] for r in found["results"]] == list(OPTIMIZERS)
    assert all(len(r["samples"]) >= 6 for r in found["results"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    only = ["--optimizers", "CoupledAdamW", "--clip", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", [*common, *only])
    monkeypatch.setenv("COLUMNS", "120")
    script["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Kernels of Coupled Adam: C ")
    assert any("64 × 8 bfloat16, clip  CoupledAdamW" in line for line in lines)


@pytest.mark.parametrize(("load", "busy"), [(1.9, False), (2.1, True), (None, False)])
def test_a_busy_machine_is_named(load, busy):
    found = Machine("cpu", "AVX2", threads=2, load=load, kernels={"C": "available"})
    assert found.to_dict()["busy"] is busy
    assert found.notes[0] == "Kernels of Coupled Adam: C available."
    assert ("load average 2.1, 2 threads" in " ".join(found.notes)) is busy


def test_optimizers_of_other_packages(monkeypatch):
    """Those that are installed are timed beside ours."""
    installed = types.ModuleType("optimi")
    installed.AdamW = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "optimi", installed)
    script = runpy.run_path(str(BENCHMARKS / "speed.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(OPTIMIZERS, "optimi AdamW", raising=False)
        script["add_others"]()
        assert isinstance(OPTIMIZERS.pop("optimi AdamW"), Candidate)


def test_a_variant_is_one_more_entry(monkeypatch):
    """Of the dictionary of optimizers: it is then timed by its name."""
    made = []

    def make(embedding, others, clip):
        made.append(clip)
        return torch.optim.SGD([embedding, *others], lr=1e-4)

    monkeypatch.setitem(OPTIMIZERS, "SGD", Candidate(make, matrices_moved=3))
    optimizer, step = make_step("SGD", *Case(4, 2).parameters("cpu"), clip=False)
    step()
    assert type(optimizer) is torch.optim.SGD
    assert made == [None]
    assert candidate("SGD").moved_bytes(Case(4, 2)) == 3 * 4 * 2 * 4


@pytest.mark.slow
def test_training_speed(capsys, monkeypatch):
    recipe = override(load_recipe("tiny"), {"training.batch_size": 2, "model.n_layer": 1})
    speed = training_speed(recipe, steps=3)
    ours, theirs = speed.tokens_per_second
    assert ours > 0 < theirs
    assert speed.tokens == 2 * recipe.training.sequence_length
    assert len(speed.samples) == 3
    command = ["speed.py", "--recipe", "tiny", "--steps", "2", "training.batch_size=2"]
    monkeypatch.setattr(sys, "argv", [*command, "model.n_layer=1"])
    runpy.run_path(str(BENCHMARKS / "speed.py"), run_name="__main__")
    assert "tokens/s with CoupledAdamW" in capsys.readouterr().out
