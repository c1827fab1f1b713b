"""A comparison as a whole: what happens to the other runs when one of them ends badly."""

from pathlib import Path

import pytest

from coupled_adam import cli
from coupled_adam.errors import DivergedError
from coupled_adam.lab.comparison import compare
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.run import read_run
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


@pytest.mark.slow
def test_a_sweep_to_its_best_value(small_recipe, text_file, tmp_path, monkeypatch, capsys):
    """As one would type it: more values behind the first ones, more seeds, the best of them."""
    monkeypatch.chdir(tmp_path)
    sweep = f"compare --text {text_file} --steps 4 --device cpu --logger --out out"
    sweep += " --arms coupled_adam adamw --arms.coupled_adam.lr_factor"

    def runs(line):
        assert cli.main(line.split()) == 0
        capsys.readouterr()
        return {path.parent.name for path in Path("out").glob("*/evaluation.json")}

    names = ["adamw", *(f"coupled_adam-{number}" for number in (1, 2, 3))]
    of_one, of_two = ([f"{name}-seed-{seed}" for name in names] for seed in (1, 2))
    assert runs(f"{sweep} 1,4 --recipe {small_recipe}") == {*of_one[:3]}
    assert runs(f"{sweep} 1,4 --resume") == {*of_one[:3]}
    assert runs(f"{sweep} 1,4,16 --resume") == {*of_one}
    assert runs(f"{sweep} 1,4,16 --resume --recipe {small_recipe}") == {*of_one}
    seeds = "compare --out out --seeds 2 --device cpu --logger --resume"
    assert runs(seeds) == {*of_one, *of_two}
    factors = [read_run(Path("out", run)).arm.lr_factor for run in of_two[1:]]
    assert factors == [1, 4, 16]
    assert (
        "The arms with the lowest validation loss are" in Path("out/report/index.html").read_text()
    )
