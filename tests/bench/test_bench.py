"""The timing of optimizer steps: what it counts is right."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from bench.cases import Case
from bench.optimizers import OPTIMIZERS
from bench.results import Timed
from bench.steps import bench
from bench.timing import sample_in_turn
from bench.training import training_speed

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


def test_ratio_and_bandwidth():
    case = Case(1000, 10)
    timed = Timed(case, "CoupledAdamW", STEADY, 0, 0, moved_bytes=6 * case.matrix_bytes)
    assert timed.seconds == 3.0
    assert timed.baseline_seconds == 1.0
    assert timed.ratio == (2.0, 3.0, 4.0)
    # Three times what a copy moves, in three times its time.
    assert timed.bandwidth == pytest.approx(1.0)


def test_samples_are_taken_in_turn():
    """The first two of a round change places, as the one that follows another may be warmer."""
    calls = []

    def sampler(name):
        return lambda: calls.append(name) or float(len(calls))

    rounds = sample_in_turn([sampler(name) for name in "ABC"], least=4, most=10, seconds=0)
    assert "".join(calls) == "ABCBACABCBAC"
    assert rounds[:2] == [(1.0, 2.0, 3.0), (5.0, 4.0, 6.0)]


@pytest.mark.slow
def test_command(monkeypatch, capsys):
    """As a user runs it: a table, or JSON alone."""
    common = ["speed.py", "--shapes", "64x8", "--seconds", "0.01", "--device", "cpu"]
    script = runpy.run_path(str(BENCHMARKS / "speed.py"))
    monkeypatch.setattr(sys, "argv", [*common, "--json"])
    script["main"]()
    record = json.loads(capsys.readouterr().out)
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert [r["optimizer"] for r in record["results"]] == list(OPTIMIZERS)
    assert all(len(r["samples"]) >= 6 for r in record["results"])
    only = ["--optimizers", "CoupledAdamW", "--clip", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", [*common, *only])
    monkeypatch.setenv("COLUMNS", "120")
    script["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Kernels of Coupled Adam: C ")
    assert any("64 × 8 bfloat16, clip  CoupledAdamW" in line for line in lines)


@pytest.mark.slow
def test_training_speed(capsys, monkeypatch):
    recipe = override(load_recipe("tiny"), {"training.batch_size": 2, "model.n_layer": 1})
    speed = training_speed(recipe, steps=3)
    ours, theirs = speed["tokens_per_second"]
    assert ours > 0 < theirs
    assert speed["tokens"] == 2 * recipe.training.sequence_length
    assert len(speed["samples"]) == 3
    command = ["speed.py", "--recipe", "tiny", "--steps", "2", "training.batch_size=2"]
    monkeypatch.setattr(sys, "argv", [*command, "model.n_layer=1"])
    runpy.run_path(str(BENCHMARKS / "speed.py"), run_name="__main__")
    assert "tokens/s with CoupledAdamW" in capsys.readouterr().out


def test_the_table_of_jax():
    """Its measured columns are those of the committed results."""
    measured = json.loads((BENCHMARKS / "results" / "jax_memory.json").read_text())["results"]
    page = (BENCHMARKS.parent / "docs" / "jax.md").read_text()
    (table,) = (part for part in page.split("\n\n") if "temporary memory |" in part)
    rows = [[cell.strip(" `") for cell in line[1:-1].split("|")] for line in table.splitlines()]
    assert [row[0] for row in rows[2:]] == [*measured]
    for name, _, _, state, temporary, ratio in rows[2:]:
        result, baseline = measured[name], measured["optax.adamw"]["median"]
        for text, value in (
            (state, result["state_bytes"] / 1e6),
            (temporary, result["temporary_bytes"] / 1e6),
            (ratio, result["median"] / baseline),
        ):
            shown = text.removesuffix(" MB")
            assert float(shown) == pytest.approx(
                value, abs=0.51 * 10 ** -len(shown.partition(".")[2])
            )
