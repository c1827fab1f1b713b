"""A comparison as a whole: what happens to the other runs when one of them ends badly."""

import pytest

from coupled_adam.errors import DivergedError
from coupled_adam.lab.comparison import compare
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.training.execution import Execution


def test_a_run_that_diverges_does_not_end_the_others(small_recipe, text_file, tmp_path):
    """Arms of several values; the rate of one of them is far too high."""
    values = {
        "data.text": str(text_file),
        "arms": {"adamw": {"optimizer": "adamw", "lr": [1e30, 1e-2]}},
        "training.steps": 10,
    }
    recipe = override(load_recipe(str(small_recipe)), values)
    out, reports = tmp_path / "out", []
    options = {"execution": Execution(logger=[]), "cache": tmp_path / "cache"}
    for resume in (False, True):
        with pytest.raises(DivergedError, match=r"adamw-1-seed-1: the .* is nan at step"):
            compare(recipe, out, resume=resume, on_report=reports.append, **options)
    assert not (out / "adamw-1-seed-1" / "model").exists()
    assert (out / "adamw-2-seed-1" / "evaluation.json").exists()
    assert len(reports) == 2
    assert "1 run diverged and cannot be compared." in reports[1].conclusion
    with pytest.raises(DivergedError):
        compare(recipe.only("adamw-1", 1), tmp_path / "alone", **options)
