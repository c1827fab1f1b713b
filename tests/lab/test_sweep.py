"""Sweeps: what is tried, how the best is chosen, and what is said of it."""

import csv
import dataclasses
import html
import io
import json
import math
import shutil
import sys
import time

import pytest
from rich.console import Console
from scipy import stats

from coupled_adam import cli
from coupled_adam.errors import DivergedError, UsageError
from coupled_adam.lab import sweep as sweeping
from coupled_adam.lab.grid import make_grid, several_values
from coupled_adam.lab.recipe import load_recipe, override, parse_overrides
from coupled_adam.lab.reporting.sweep_report import SweepReport, Tried, best_of_arms
from coupled_adam.lab.training.config import Execution
from processes import Process


@pytest.fixture
def recipe(small_recipe, text_file):
    return override(load_recipe(str(small_recipe)), {"data.text": str(text_file)})


def grid(recipe, *arguments, **options):
    fixed, swept = several_values(arguments)
    return make_grid(override(recipe, parse_overrides(fixed)), swept, **options)


def names(settings):
    return [setting.name for setting in settings]


def test_every_arm_has_the_combinations_of_its_own_values(recipe):
    made = grid(
        recipe, "training.lr=3e-3,1e-3", "arms.*.embedding_weight_decay=0,0.1",
        "arms.coupled_adam.lr_factor=4",
        "arms.coupled*.second_moment_scale=1,2",
    )  # fmt: skip
    assert names(made.settings("adamw")) == [
        "lr=0.001,embedding_weight_decay=0",
        "lr=0.001,embedding_weight_decay=0.1",
        "lr=0.003,embedding_weight_decay=0",
        "lr=0.003,embedding_weight_decay=0.1",
    ]
    settings = made.settings("coupled_adam")
    assert len(set(names(settings))) == 8
    last = settings[-1]
    assert last.name == "lr=0.003,embedding_weight_decay=0.1,second_moment_scale=2"
    assert list(last.recipe.arms) == ["coupled_adam"]
    arm = last.recipe.arm("coupled_adam")
    assert (last.recipe.training.lr, arm.embedding_weight_decay) == (0.003, 0.1)
    assert (arm.second_moment_scale, arm.lr_factor) == (2, 4)  # one value is given to all


def test_an_arm_without_axes_has_one_setting(recipe):
    made = grid(recipe, "arms.coupled_adam.lr_factor=1,4")
    assert names(made.settings("adamw")) == ["unchanged"]
    assert made.settings("adamw")[0].recipe.arms == {"adamw": recipe.arms["adamw"]}


def test_a_value_is_the_same_however_it_is_written(recipe):
    """The folders' names and the runs' configurations do not depend on it."""
    one, other = (grid(recipe, f"training.lr={lr}") for lr in ("1e-3,2.0e-3", "0.002,0.001"))
    assert one.settings("adamw") == other.settings("adamw")


def test_values_with_commas_of_their_own(recipe):
    fixed, swept = several_values(["training.betas=[0.9,0.95]", "arms.a={optimizer: sgd, b: 1}"])
    assert fixed == ["training.betas=[0.9,0.95]", "arms.a={optimizer: sgd, b: 1}"]
    assert not swept
    made = grid(recipe, "training.betas=[0.9,0.95],[0.8,0.99]", "training.schedule=cosine,wsd")
    last = made.settings("adamw")[-1]
    assert last.name == "betas=0.8_0.99,schedule=wsd"
    assert (last.recipe.training.betas, last.recipe.training.schedule) == ((0.8, 0.99), "wsd")


ERRORS = {
    "nothing": ([], "nothing to sweep"),
    "one value": (["training.lr=1e-3"], "nothing to sweep: give two or more values"),
    "one value for all arms": (["arms.*.lr_factor=4"], "nothing to sweep"),
    "no value": (["training.lr="], "training.lr= has no value: give one"),
    "unknown key": (["training.lrr=1,2"], "did you mean lr?"),
    "unknown section": (["trainin.lr=1,2"], "trainin.lr cannot be swept"),
    "seeds": (["seeds=1,2"], "seeds cannot be swept: give them with --seeds 1 2 3"),
    "no section": (["lr=1,2"], "lr cannot be swept: did you mean training.lr?"),
    "nothing to resume": (["--resume"], "holds no sweep to resume"),
    "text": (["data.max_tokens=5,6"], "losses on other text"),
    "vocabulary": (["model.vocab_size=300,400"], "cannot be compared"),
    "optimizer": (["arms.*.optimizer=adamw,sgd"], "cannot be swept"),
    "out of range": (["training.lr=1e-3,-1"], "training.lr=-1 must be above 0"),
    "wrong type": (["training.lr=1e-3,two"], "training.lr"),
    "bad combination": (["model.n_embd=8,9", "model.n_head=1,2"], "must be a multiple"),
    "twice the same": (["training.lr=1e-3,0.001"], "has the value 0.001 twice"),
    "key twice": (["training.lr=1,2", "training.lr=3"], "training.lr is given twice"),
    "arm twice": (["arms.*.lr_factor=1,2", "arms.adamw.lr_factor=3,4"], "has some already"),
    "no such arm": (["arms.adam.lr_factor=1,2"], "did you mean arms.adamw?"),
    "no arm matches": (["arms.x*.lr_factor=1,2"], "there are adamw, coupled_adam"),
    "not every arm has it": (["arms.*.second_moment_scale=1,2"], "arms.adamw has no key"),
    "range in a grid": (["training.lr=1e-3..1e-2"], "needs --optuna TRIALS"),
    "range upside down": (["training.lr=1e-2..1e-3"], "from its lower end to its higher end"),
    "too many": ([f"training.{k}={','.join(map(str, range(1, 40)))}"
                  for k in ("lr", "eps")], "1,521 combinations"),
    "two lengths": (["training.steps=5,10", "--steps", "5"], "--steps gives one length"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(recipe, small_recipe, text_file, tmp_path, capsys, arguments, message):
    """One line, and nothing is made."""
    before = sorted(tmp_path.rglob("*"))
    common = ["sweep", "--recipe", str(small_recipe), "--text", str(text_file)]
    assert cli.main([*common, "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_text_that_is_not_there(small_recipe, tmp_path, capsys):
    """Nothing is said about results, and nothing is made."""
    before = sorted(tmp_path.rglob("*"))
    command = ["sweep", "--recipe", str(small_recipe), "--text", str(tmp_path / "x")]
    assert cli.main([*command, "training.lr=1,2"]) == 2
    assert "results in" not in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


# --- the report ---


def tried(recipe, losses, *arguments):
    """The settings of a grid with these validation losses, and test losses for the best."""
    settings = [s for arm in recipe.arms for s in grid(recipe, *arguments).settings(arm)]
    found = [
        Tried(setting, dict(enumerate(values, 1))) for setting, values in zip(settings, losses)
    ]
    for number, best in enumerate(best_of_arms(found)):
        test = {seed: 4 + loss / 10 + number for seed, loss in best.validation.items()}
        found[found.index(best)] = dataclasses.replace(best, test=test)
    return SweepReport(dataclasses.replace(recipe, seeds=[1, 2]), found)


LOSSES = [[5.0, 5.1], [4.0, 4.2], [4.5, 4.6], [math.inf, 6.0], [4.1, 4.35], [4.2, 4.3]]
RATES = "training.lr=1e-3,1e-2,1e-1"


def test_the_best_is_that_of_the_lowest_mean(recipe):
    report = tried(recipe, LOSSES, RATES)
    assert [best.setting.name for best in report.best] == ["lr=0.01", "lr=0.01"]
    assert [bool(one.test) for one in report.tried] == [False, True, False] * 2


def test_conclusions(recipe):
    """The test's numbers, and no edge where there is none."""
    report = tried(recipe, LOSSES, RATES)
    (only,) = report.conclusions()
    one, other = ([4 + x / 10 + n for x in LOSSES[i]] for i, n in ((1, 0), (4, 1)))
    p = stats.ttest_rel(one, other).pvalue
    assert p < 0.05
    assert only == (
        "The test loss of the best setting of Coupled Adam is higher by 1 than that of AdamW "
        f"(two-sided paired t-test over 2 seeds: p = {p:.2g})."
    )


def test_the_edge_of_the_grid_is_said(recipe):
    losses = [[4.0, 4.0], [4.5, 4.5], [5.0, 5.0], [5.0, 5.0], [4.5, 4.5], [4.4, 4.2]]
    *_, low, high = tried(recipe, losses, RATES).conclusions()
    assert low.startswith("The best lr of AdamW, 0.001, is the lowest that was tried: a lower one")
    assert high.startswith("The best lr of Coupled Adam, 0.1, is the highest that was tried")


def test_what_cannot_be_told(recipe):
    """One seed has no test; a difference within the spread is none; diverged arms have no best."""
    one_seed = tried(recipe, [[4.0], [4.1], [4.2]] * 2, RATES).conclusions()
    assert "a test needs two seeds or more" in one_seed[0]
    report = tried(recipe, LOSSES, RATES)
    best = report.best[1]
    report.tried[4] = dataclasses.replace(best, test={1: 4.0, 2: 5.0})
    assert "cannot be told apart" in SweepReport(report.recipe, report.tried).conclusions()[0]
    diverged = [*LOSSES[:3], *([math.inf, math.inf] for _ in range(3))]
    (sentence,) = tried(recipe, diverged, RATES).conclusions()
    assert sentence == "Every setting of Coupled Adam has a run that diverged."


def test_page_table_and_csv(recipe):
    """Every setting, its loss; the test loss only where it was chosen."""
    report = tried(recipe, LOSSES, RATES)
    page = html.unescape(report.page())
    assert report.conclusions()[0] in page
    best, everything = page.split("<table>")[1:]
    assert best.count("<tr") == 1 + 2
    assert everything.count("<tr") == 1 + 6
    assert ">lr=0.01</td>" in best
    assert "<b>4.1 (1)</b></td>" in best
    assert ">4.41 (1)</td>" in best
    assert "diverged (1 of 2)" in everything
    assert page.count("<img") == 1
    assert "Validation loss against lr" in page

    console = Console(width=80, file=io.StringIO())
    console.print(report.terminal())
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "AdamW lr=0.01 4.1 (1) 4.41 (1)" in lines
    assert "AdamW lr=0.001 5.05 (7)" in lines

    rows = list(csv.DictReader(io.StringIO(report.csv())))
    assert len(rows) == 12
    assert [row["chosen"] for row in rows] == ["False"] * 2 + ["True"] * 2 + ["False"] * 4 + [
        "True"
    ] * 2 + ["False"] * 2
    assert rows[3] == {
        "arm": "adamw", "lr": "0.01", "seed": "2", "valid_loss": "4.2", "test_loss": "4.42",
        "chosen": "True", "folder": "lr=0.01/adamw-seed-2",
    }  # fmt: skip


@pytest.mark.pixels
def test_a_picture_for_each_number(recipe):
    losses = [[4.0 + i / 10, 4.1 + i / 10] for i in range(4)] + [[math.inf, math.inf]] * 4
    report = tried(recipe, losses, "training.lr=1e-3,1e-2", "arms.*.lr_factor=1,4")
    pictures = report._pictures()
    assert [picture.figure.axes[0].get_xlabel() for picture in pictures] == ["lr", "lr_factor"]
    assert all(picture.png.startswith(b"\x89PNG") for picture in pictures)
    axes = pictures[0].figure.axes[0]
    (best,) = [c for c in axes.containers if c.get_label() == "AdamW"]
    assert list(best.lines[0].get_ydata()) == pytest.approx([4.05, 4.25])  # with lr_factor=1


# --- runs ---


@pytest.fixture
def losses(monkeypatch):
    """Runs are not trained, but have a loss by setting; the names of those that were asked for."""
    table, asked = {}, []

    def final(run, *_):
        name = f"{run.folder.parent.name}/{run.arm}"
        asked.append(f"{name}-{run.seed}")
        loss = table.get("of all") or table.get(name, lambda _: 5.0)
        return loss(run) + run.seed / 100

    def test_loss(run, *_):
        asked.append(f"test of {run.folder.parent.name}/{run.folder.name}")
        return {"test_loss": 3.0 + len(run.folder.name) / 10}

    monkeypatch.setattr(sweeping, "_validation_loss", final)
    monkeypatch.setattr(sweeping, "evaluate_trained", test_loss)
    return table, asked


def go(recipe, out, *arguments, seeds=(1, 2), trials=None, resume=False):
    plan = dataclasses.replace(recipe, seeds=list(seeds))
    made = grid(plan, *arguments, ranges=trials is not None)
    options = {"execution": Execution(log=()), "cache": out.parent / "cache", "resume": resume}
    return sweeping.sweep(sweeping.Sweep(made, trials), out, **options)


def test_only_the_chosen_are_tested(recipe, losses, tmp_path):
    table, asked = losses
    table["lr=0.01/adamw"] = lambda _: 4.0
    report = go(recipe, tmp_path / "out", "training.lr=1e-3,1e-2")
    assert [one.setting.name for one in report.best] == ["lr=0.01", "lr=0.001"]
    assert [name for name in asked if name.startswith("test")] == [
        "test of lr=0.01/adamw-seed-1",
        "test of lr=0.01/adamw-seed-2",
        "test of lr=0.001/coupled_adam-seed-1",
        "test of lr=0.001/coupled_adam-seed-2",
    ]
    assert (tmp_path / "out" / "sweep.csv").read_text() == report.csv()
    assert (tmp_path / "out" / "sweep.html").exists()


def test_a_sweep_may_grow(recipe, losses, tmp_path):
    out = tmp_path / "out"
    go(recipe, out, "training.lr=1e-3,1e-2")
    with pytest.raises(UsageError, match="exists: continue it with --resume"):
        go(recipe, out, "training.lr=1e-3,1e-2")
    report = go(recipe, out, "training.lr=1e-2,1e-4", seeds=(3,), resume=True)
    rates = [one.setting.values["lr"] for one in report.tried if one.arm == "adamw"]
    assert rates == [1e-4, 1e-3, 1e-2]
    assert all(list(one.validation) == [1, 2, 3] for one in report.tried)


WARMUP = r"training.warmup=4.0 there, \[1.0, 2.0\] here"


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ({"model.n_layer": 2}, ["training.lr=1e-3,1e-2"], r"\(model.n_layer=1 there, 2 here\)"),
        ({}, ["training.warmup=1,2"], WARMUP),
        ({}, ["training.lr=1,2", "training.warmup=1,2"], WARMUP),
    ],
    ids=["recipe", "another key", "one more key"],
)
def test_a_sweep_may_not_change(values, arguments, message, recipe, losses, tmp_path):
    out = tmp_path / "out"
    go(recipe, out, "training.lr=1e-3,1e-2")
    with pytest.raises(UsageError, match=message):
        go(override(recipe, values), out, *arguments, resume=True)


def test_where_there_is_no_sweep_to_resume(recipe, losses, tmp_path):
    with pytest.raises(UsageError, match="holds no sweep to resume"):
        go(recipe, tmp_path, "training.lr=1e-3,1e-2", resume=True)


@pytest.fixture
def swept(small_recipe, text_file, losses, tmp_path, monkeypatch):
    """A finished sweep of four settings, and the command that resumes it."""
    monkeypatch.setattr(SweepReport, "page", lambda report: "")
    out = tmp_path / "out"
    common = ["sweep", "--out", str(out), "--logger"]
    given = ["--recipe", str(small_recipe), "--text", str(text_file), "--arms", "adamw"]
    values = ["training.lr=1e-3,1e-2", "arms.*.lr_factor=1,4", "--steps", "10"]
    assert cli.main([*common, *given, *values]) == 0
    return out, [*common, "--resume"]


def test_resume_takes_the_recipe_and_the_values(swept, capsys):
    """``--resume`` alone continues; what is given besides extends the sweep."""
    out, resume = swept
    whole = (out / "sweep.csv").read_text()
    (out / "sweep.csv").unlink()
    for more in ([], ["training.lr=1e-2"], ["--steps", "10", "arms.*.lr_factor=4"]):
        assert cli.main([*resume, *more]) == 0
        assert (out / "sweep.csv").read_text() == whole
    assert "4 settings of adamw; seeds 1" in capsys.readouterr().out
    assert cli.main([*resume, "training.lr=1", "--seeds", "2", "3"]) == 0
    assert "6 settings of adamw; seeds 1, 2, 3" in capsys.readouterr().out
    table = list(csv.DictReader(io.StringIO((out / "sweep.csv").read_text())))
    assert {(line["lr"], line["lr_factor"]) for line in table} == {
        (lr, factor) for lr in ("0.001", "0.01", "1") for factor in ("1", "4")
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "20"], "training.steps=10 there, 20 here"),
        (["training.warmup=2"], "training.warmup=4.0 there, 2.0 here"),
        (["training.warmup=1,2"], "training.warmup=4.0 there, [1.0, 2.0] here"),
        (["--recipe", "tiny"], "model.n_layer=1 there, 2 here"),
        (["--arms", "coupled_adam"], "recipe 'small' has no arm 'coupled_adam'"),
    ],
    ids=str,
)
def test_resume_refuses_what_would_change_the_sweep(more, message, swept, capsys):
    _, resume = swept
    assert cli.main([*resume, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_text_leaves_nothing(recipe, tmp_path):
    bad = override(recipe, {"data.text": str(tmp_path / "missing.txt")})
    with pytest.raises(UsageError, match="No such file"):
        go(bad, tmp_path / "new" / "out", "training.lr=1e-3,1e-2")
    assert not (tmp_path / "new").exists()


def test_optuna(recipe, losses, tmp_path):
    """It finds the lowest loss of a range, and goes on after an interruption as without it."""
    pytest.importorskip("optuna")
    table, _ = losses
    table["of all"] = lambda run: abs(math.log10(run.recipe.training.lr / 2e-3))
    arguments = ("training.lr=1e-5..1e-1", "arms.*.lr_factor=1,2,4")
    whole = go(recipe, tmp_path / "whole", *arguments, trials=16)
    assert all(5e-4 < best.setting.values["lr"] < 8e-3 for best in whole.best)
    assert {one.setting.values["lr_factor"] for one in whole.tried} <= {1, 2, 4}
    go(recipe, tmp_path / "parts", *arguments, trials=5)
    parts = go(recipe, tmp_path / "parts", *arguments, trials=16, resume=True)
    assert parts == whole
    with pytest.raises(UsageError, match="--optuna=16 there, None here"):
        go(recipe, tmp_path / "parts", "training.lr=1,2", resume=True)


def test_optuna_is_not_needed_otherwise(small_recipe, text_file, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    common = ["sweep", "--recipe", str(small_recipe), "--text", str(text_file)]
    assert cli.main([*common, "training.lr=1,2", "--optuna", "3"]) == 2
    assert "--optuna needs a package: pip install optuna" in capsys.readouterr().err


def test_a_run_that_diverges_does_not_end_the_sweep(recipe, tmp_path, monkeypatch):
    """Real runs; the loss of one of them is made infinite, and it is not trained again."""
    trained = []
    train = sweeping.train

    def faulty(run, *rest):
        trained.append(run.folder)
        if run.recipe.training.lr == 1:
            run.folder.mkdir(parents=True)
            raise DivergedError("the loss is nan", 3)
        train(run, *rest)

    monkeypatch.setattr(sweeping, "train", faulty)
    short = override(
        dataclasses.replace(recipe, arms={"adamw": recipe.arms["adamw"]}),
        {"training.steps": 12, "training.evaluate_every": 10},
    )
    out = tmp_path / "out"
    report = go(short, out, "training.lr=1e-2,1", seeds=(1,))
    good, bad = report.tried
    assert bad.validation == {1: math.inf}
    folder = out / "lr=0.01" / "adamw-seed-1"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    # The last evaluation was at step 10 of 12: the loss is that of the finished model.
    assert list(logged) == [10]
    assert 0 < abs(good.validation[1] - logged[10]) < 0.2
    assert good.test == {1: json.loads((folder / "evaluation.json").read_text())["test_loss"]}
    assert not (out / "lr=1" / "adamw-seed-1" / "evaluation.json").exists()
    again = go(short, out, "training.lr=1e-2,1", seeds=(1,), resume=True)
    assert again == report
    assert len(trained) == 3  # the finished run is looked at, the other is not trained again


@pytest.mark.slow
def test_a_killed_sweep_is_resumed(small_recipe, text_file, tmp_path):
    """Killed in its second run: with --resume it ends with the same numbers as without."""

    def start(out, *more):
        command = ["sweep", "--recipe", small_recipe, "--text", text_file, "--out", out, "--logger"]
        values = ["training.lr=1e-3,1e-2", "--seeds", "2", "--device", "cpu", *more]
        return Process([sys.executable, "-m", "coupled_adam.cli", *map(str, command), *values])

    whole = start(tmp_path / "whole")
    assert whole.wait() == 0, whole.communicate()
    out = tmp_path / "out"
    metrics = out / "lr=0.001" / "adamw-seed-2" / "metrics.jsonl"
    process = start(out)
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '{"step": 15' in metrics.read_text()):
        assert process.returncode is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (out / "sweep.csv").exists()
    first = (out / "lr=0.001" / "adamw-seed-1" / "model").stat().st_mtime_ns
    resumed = start(out, "--resume")
    assert resumed.wait() == 0, resumed.communicate()
    assert (out / "sweep.csv").read_text() == (tmp_path / "whole" / "sweep.csv").read_text()
    assert (out / "lr=0.001" / "adamw-seed-1" / "model").stat().st_mtime_ns == first
    assert "[4/4] coupled_adam: lr=0.01" in resumed.communicate()[0]
    shutil.rmtree(out)
