"""Reports: the numbers of finished runs, no others, in every format."""

import dataclasses
import functools
import html.parser
import io
import itertools
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console
from scipy import stats

from coupled_adam.embeddings import analyze
from coupled_adam.errors import UsageError, own_command
from coupled_adam.lab.arms import ARMS, Arm
from coupled_adam.lab.models import build_model, count_parameters
from coupled_adam.lab.recipe import override
from coupled_adam.lab.reporting import report as reporting
from coupled_adam.lab.reporting.conclusion import conclusion
from coupled_adam.lab.reporting.figures import _best_arms, draw_all, overview
from coupled_adam.lab.reporting.frame import frame_of, read_runs
from coupled_adam.lab.reporting.plots import arm_colors
from coupled_adam.lab.reporting.report import report
from coupled_adam.lab.reporting.results import arm_results, footnotes
from coupled_adam.lab.reporting.statistics import fit_proportional
from coupled_adam.lab.run import Run
from lab.browser import needs_browser, told_by
from laboratory import snapshot

LOSSES = {"adamw": [3.0, 3.1, 3.2], "coupled_adam": [2.5, 2.6, 2.7]}


def make_run(folder, recipe, arm, seed, loss, **more):
    """A run folder as training and evaluation leave it, of a model that was not trained."""
    run = folder / f"{recipe.name}-{arm}-seed-{seed}"
    run.mkdir(parents=True)
    config = {"arm": arm, "seed": seed, "recipe": recipe.only(arm, seed).to_dict()}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "environment.json").write_text(json.dumps({"git_commit": "abc", "command": ["x"]}))
    torch.manual_seed(seed)
    model = build_model(recipe)
    model.save_pretrained(run / "model")
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 1000, recipe.model.vocab_size)
    np.save(run / "unigram_counts.npy", counts)
    lines = [{"step": step, "mean_norm": 0.1, "mean_norm_ratio": 0.2} for step in (0, 10, 20)]
    lines += [{"step": step, "train_loss": 5 - step / 10, "valid_loss": 5.0} for step in (10, 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arm == "adamw":
        (run / "second_moments").mkdir()
        for step in (10, 20):
            np.save(run / "second_moments" / f"step-{step}.npy", counts / counts.sum() * step)
    result = {
        "test_loss": loss,
        "test_tokens": 1000,
        "parameters": count_parameters(model),
        "embeddings": analyze(model.get_output_embeddings().weight, counts).to_dict(),
        **more,
    }
    (run / "evaluation.json").write_text(json.dumps(result))
    return run


@pytest.fixture
def comparison(tmp_path, recipe):
    """Two arms, three seeds."""
    for arm, losses in LOSSES.items():
        for seed, loss in enumerate(losses, 1):
            make_run(tmp_path / "runs", recipe, arm, seed, loss)
    return tmp_path / "runs"


def printed(table, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (
            {"adamw": [3.0, 3.1, 3.2], "coupled_adam": [2.5, 2.61, 2.69]},
            "The test loss of Coupled Adam is lower than that of AdamW by 0.500 (95 % confidence "
            "interval 0.475 to 0.525; paired t-test over 3 seeds, p < 0.001).",
        ),
        (
            {"adamw": [2.5, 2.6, 2.6], "coupled_adam": [3.0, 3.1, 3.2]},
            "The test loss of Coupled Adam is higher than that of AdamW by 0.533 (95 % confidence "
            "interval 0.390 to 0.677; paired t-test over 3 seeds, p = 0.0039).",
        ),
        (
            {"adamw": [3.0, 3.1, 3.2], "coupled_adam": [3.1, 3.0, 3.0]},
            "The test losses of Coupled Adam and AdamW cannot be told apart with 3 seeds: the "
            "first minus the second is -0.067 (95 % confidence interval -0.446 to +0.313; paired "
            "t-test, p = 0.53).",
        ),
        (
            {"adamw": [3.0], "coupled_adam": [2.5]},
            "Test loss with one seed: 2.500 (Coupled Adam), 3.000 (AdamW). One seed cannot tell "
            "whether a loss is lower; three can: --seeds 3 --resume",
        ),
        (
            {"adamw": [3.0, 3.1], "coupled_adam": [2.5]},
            "Coupled Adam and AdamW have fewer than two seeds in common: no test is possible.",
        ),
        ({"adamw": [3.0, 3.1]}, "A test needs runs with AdamW and with another"),
        ({"coupled_adam": [3.0, 3.1]}, "A test needs runs with AdamW and with another"),
        # Three arms are ordered, from the lowest loss; what may be chance is said to be.
        (
            {"adamw": [3.0, 3.1], "coupled_adam": [2.51, 2.6], "lean": [2.5, 2.599]},
            "LEAN has the lowest test loss, 2.550; Coupled Adam is 0.005 higher, which may be "
            "chance; AdamW is 0.500 higher. ",
        ),
        (
            {"coupled_adam": [2.51, 2.6], "lean": [2.5, 2.599], "sgd": [4.0, 4.1]},
            "LEAN has the lowest test loss, 2.550; Coupled Adam is 0.005 higher, which may be "
            "chance; SGD, f = 9 is 1.500 higher. A test needs runs with AdamW and with another",
        ),
    ],
)
def test_conclusion(losses, said, recipe, tmp_path):
    """No more than the tests say."""
    more = {"lean": {"optimizer": "lean"}, "sgd": {"optimizer": "sgd", "lr_factor": 9}}
    recipe = override(recipe, {f"arms.{name}": options for name, options in more.items()})
    frame = frame_of_losses(recipe, losses)
    (paragraph,) = conclusion(frame, {})
    assert paragraph.startswith(said)
    *_, diverged, unfinished = conclusion(
        frame, {tmp_path: "diverged at step 3", tmp_path / "a": "not finished"}
    )
    assert diverged == "1 run diverged and cannot be compared."
    assert unfinished.startswith("1 run not finished")


def fast_run(recipe, arm, seed, loss, folder=Path("missing"), metrics=()):
    """A run that is on no disk, with other embeddings for each arm."""
    one = 0.9 if arm == "coupled_adam" else 0.1
    embeddings = {"isotropy": one + seed / 1000, "mean_norm_ratio": 1 - one}
    evaluation = {"test_loss": loss, "parameters": 1000, "embeddings": embeddings}
    run = Run(recipe, arm, seed, folder)
    vars(run).update(evaluation=evaluation, metrics=metrics)
    return run


def frame_of_losses(recipe, losses):
    """The data frame of runs with these test losses, by arm and in the order of their seeds."""
    return frame_of(
        [
            fast_run(recipe, arm, seed, loss)
            for arm, values in losses.items()
            for seed, loss in enumerate(values, 1)
        ]
    )


def test_a_page_of_one_seed_shows_the_command(comparison, monkeypatch):
    """As code that works as typed, where no PATH leads to it as well.

    Each measure has a meaning of its own, and the caption its line on a telephone.
    """
    for run in comparison.glob("*-seed-[23]"):
        shutil.rmtree(run)
    (comparison / "comparison.yaml").touch()
    monkeypatch.setattr("sys.argv", [".venv/bin/coupled-adam"])
    monkeypatch.setenv("PATH", str(comparison))
    page = report([comparison], comparison / "report").page.read_text()
    more = f"compare --seeds 3 --resume --out {comparison}"
    assert f"<code>.venv/bin/coupled-adam {more}</code>" in page
    (comparison / "coupled-adam").touch(0o700)
    assert own_command() == "coupled-adam"
    narrow = page[page.index("(max-width: 40rem)") : page.index("</style>")]
    assert "#results caption { display: block; }" in narrow
    letters = page[page.index("</table>") : page.index("The small print")]
    meanings = [entry.partition(": ")[2] for entry in letters.split(">")[-1].split("; ")]
    assert len({*meanings}) == len(meanings)


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (0, "lr_factor 1 of Coupled Adam is the lowest of the values tried: the best may be lower"),
        (1, None),
        (2, "lr_factor 4 of Coupled Adam, f = 4 is the highest of the values tried: the best may "),
    ],
)
def test_the_best_value_at_the_edge(best, said, recipe, tmp_path):
    swept = {"optimizer": "coupled_adam", "lr_factor": [1, 2, 4]}
    recipe = override(recipe, {"arms": {"adamw": {"optimizer": "adamw"}, "coupled_adam": swept}})
    runs = [
        fast_run(recipe, arm, 1, loss, metrics=[{"step": 1, "valid_loss": loss}])
        for number, arm in enumerate(recipe.arms, -1)
        for loss in [3.0 if number == best else 4.0]
    ]
    (paragraph,) = conclusion(frame_of(runs), {})
    assert (said in paragraph) if said else ("values tried" not in paragraph)


def test_conclusion_of_one_seed(recipe, tmp_path):
    """The command that goes on."""
    out = tmp_path / "my runs"
    out.mkdir()
    (out / "comparison.yaml").touch()
    runs = [fast_run(recipe, arm, 1, 3.0, out / arm) for arm in ("coupled_adam", "adamw")]
    (paragraph,) = conclusion(frame_of(runs), {})
    sentence, command = paragraph.split("\n")
    assert sentence.endswith("One seed cannot tell whether a loss is lower; three can:")
    assert shlex.split(command) == [
        *("coupled-adam", "compare", "--seeds", "3", "--resume", "--out", str(out))
    ]


def test_the_baseline_is_the_best_adamw_in_validation(recipe):
    """Others can then not look better because the AdamW beside them is not tuned."""
    tuned = [{"optimizer": "adamw", "lr_factor": factor} for factor in (2, 4)]
    arms = {"coupled": {"optimizer": "coupled_adam"}, "a": tuned[0], "b": tuned[1]}
    recipe = override(recipe, {"arms": {**arms, "plain": {"optimizer": "adamw"}}})
    losses = {"coupled": 3.0, "a": 4.0, "b": 3.5, "plain": 5.0}

    def baseline(*arms, seeds=(1, 2), without=()):
        frame = frame_of(
            [
                fast_run(recipe, arm, seed, 3.0, metrics=[{"step": 1, "valid_loss": losses[arm]}])
                for arm in arms
                for seed in seeds
                if (arm, seed) not in without
            ]
        )
        return [*frame.arm_name[frame.is_baseline]]

    assert baseline("coupled", "a", "plain", "b") == ["b"] * 2
    assert baseline("coupled", "plain", "a") == ["a"] * 2
    assert baseline("coupled", "plain") == ["plain"] * 2
    assert baseline("coupled") == []
    # A run of the best one diverged.
    assert baseline("coupled", "a", "plain", "b", without=[("b", 2)]) == ["a"] * 2


def test_the_best_arm_with_each_optimizer(recipe):
    """Validation chooses, the test losses are compared, and an arm that lacks a run is out.

    An arm with a name of its own is compared by itself, under this name.
    """
    arms = {
        f"{optimizer}-{number}": {"optimizer": optimizer, "lr_factor": factor}
        for optimizer in ("adamw", "lean")
        for number, factor in ((1, 2), (2, 4))
    }
    arms["mine"] = {"optimizer": "adamw", "beta1": 0}
    several = override(recipe, {"arms": arms, "seeds": [1, 2]})
    valid = {"adamw-1": 4.5, "adamw-2": 4.0, "lean-1": 4.2, "lean-2": 3.0, "mine": 4.1}
    runs = [
        fast_run(
            several,
            arm,
            seed,
            5 + index + seed / 100 * (1 + index / 9),
            metrics=[{"step": 10, "valid_loss": valid[arm] + seed / 100}],
        )
        for index, arm in enumerate(arms)
        for seed in (1, 2)
        if (arm, seed) != ("lean-2", 2)  # it diverged
    ]
    (paragraph,) = conclusion(frame_of(runs), {})
    assert paragraph.startswith(
        "AdamW, f = 4 has the lowest test loss, 6.017; LEAN, f = 2 is 1.002 higher; "
    )
    assert "The test loss of LEAN, f = 2 is higher than that of AdamW, f = 4 by 1.00" in paragraph
    assert "; mine: AdamW, beta1 0 is 3.005 higher. " in paragraph
    # It is called by that name alone once its options have been said.
    assert "The test loss of mine is higher than that of AdamW, f = 4" in paragraph
    assert (
        "The arms with the lowest validation loss are AdamW, f = 4 (4.015); LEAN, f = 2 (4.215); "
        "mine (4.115)."
    ) in paragraph
    assert paragraph.endswith("values tried: the best may be lower.")


def test_a_report_shows_itself(comparison):
    """In a terminal and in a notebook, with the conclusion and, in a notebook, the overview."""
    made = report([comparison], comparison / "report")
    said = "The test loss of Coupled Adam is lower than that of AdamW by 0.500"
    assert said in printed(made)
    shown = made._repr_html_()
    assert said in shown
    # Below the table and in it, the test is one: each seed's loss is lower by 0.5.
    assert "p &lt; 0.001" in shown.partition("<table")[0]
    assert "<b>2.6 (1)</b><small>p &lt; 0.001</small>" in shown
    assert shown.count("<small>p") == shown.count("<small>p &lt; 0.001</small>")  # bold ones alone
    table = (comparison / "report" / "table.md").read_text()
    assert "by a one-sided Student t-test at 95 %, as in the paper" in table
    assert 'src="data:image/png;base64,' in shown


def test_arms_time_and_links(tmp_path, recipe):
    """The page says how long each arm took, by what it differs, and where its runs are."""
    run = make_run(tmp_path / "a b?", recipe, "adamw", 1, 3.0)
    lines = [{"step": step, "tokens_per_second": speed} for step, speed in ((20, 10), (40, 40))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report([tmp_path], tmp_path / "report")
    page = Page((tmp_path / "report" / "index.html").read_text())
    # 2560 tokens, half at 10 a second and half at 40.
    assert "2.7 min" in page.text
    assert "optimizer=adamw" in page.text
    (link,) = (source for source in page.sources if not source.startswith("data:"))
    assert link == "../a%20b%3F/small-adamw-seed-1"


PICTURES = tuple(
    f"figures/small/{name}"
    for name in ("loss", "drift", "cloud", "norms", "spectrum", "second_moment")
)


@pytest.mark.pixels
def test_report(comparison):
    """Table, statistics and files of a comparison of two arms."""
    table = printed(report([comparison], comparison / "report"))
    assert "3.1 (1)" in table
    assert "2.6 (1)" in table
    out = comparison / "report"
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {
        "index.html",
        "table.md",
        "table.tex",
        "summary.csv",
        "runs.csv",
        "results.json",
        ".files.json",
        ".lock",
        *(f"{name}.{form}" for name in ("overview", *PICTURES) for form in ("png", "svg")),
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.rglob("*.png"))
    again = overview(read_runs([comparison])[0])  # drawn of the same runs, it has the same bytes
    for form, image in (("png", again.png), ("svg", again.svg)):
        assert image == (out / f"overview.{form}").read_bytes()
    header, _, standard, coupled, *_ = (out / "table.md").read_text().splitlines()
    assert header.startswith("| D | N | Optimizer | L ↓ | Iso ↑ |")
    assert "Acc" not in header  # nothing has it
    assert "r̄" not in header
    assert standard.startswith("| 2.56k | 3.42k | AdamW | 3.1 (1) |")
    assert coupled.startswith("| 2.56k | 3.42k | Coupled Adam | **2.6 (1)** |")
    assert r"Coupled Adam & \textbf{2.6 (1)}" in (out / "table.tex").read_text()

    adamw, ours = pd.read_csv(out / "summary.csv").itertuples()
    expected = stats.ttest_ind(LOSSES["coupled_adam"], LOSSES["adamw"], alternative="less").pvalue
    assert ours.test_loss_p == pytest.approx(expected)
    assert ours.test_loss_mean == pytest.approx(2.6)
    assert np.isnan(adamw.test_loss_p)
    assert adamw.test_loss_n == 3
    assert ours.test_loss_p_paired == 0  # each seed's loss is lower by 0.5
    paths = sorted(comparison.glob("*-adamw-*/evaluation.json"))
    measured = [json.loads(path.read_text())["embeddings"] for path in paths]
    for name in ("isotropy_unit", "effective_rank", "norm_frequency_correlation_published"):
        mean = np.mean([measures[name] for measures in measured])
        assert getattr(adamw, f"{name}_mean") == pytest.approx(mean)
    page = (out / "index.html").read_text()
    for header in ("Iso at unit norm", "Iso centered, at unit norm"):
        assert header in page
        assert header not in (out / "table.md").read_text()
    assert "as published" not in page
    assert "centered: with the mean removed" in page
    losses = pd.read_csv(out / "runs.csv").test_loss
    assert [*losses] == [*LOSSES["adamw"], *LOSSES["coupled_adam"]]
    results = json.loads((out / "results.json").read_text())
    assert (results[0]["arm"], results[0]["embeddings"]) == ("adamw", measured[0])


def test_bold(recipe):
    """Better than AdamW; AdamW, if the only other is worse; or each other, as in Table 7."""
    recipe = override(recipe, {"arms.sgd": {"optimizer": "sgd", "lr_factor": 2}})

    def bold(losses, **options):
        frame = frame_of_losses(recipe, losses)
        rows = arm_results(frame, **options)
        (note,) = footnotes(frame, **options)
        return [row.run.arm_name for row in rows if row.metrics["test_loss"].cell.bold], note

    three = {**LOSSES, "sgd": [2.55, 2.62, 2.7]}
    arms, note = bold(three)
    assert arms == ["coupled_adam", "sgd"]
    assert "Bold: better than AdamW, by a one-sided" in note
    arms, note = bold(three, bold="all")
    assert arms == []  # none of the two is better than the other
    assert "Bold: better than each of the others, by" in note
    assert bold(LOSSES, bold="all")[0] == ["coupled_adam"]
    arms, note = bold(dict(zip(LOSSES, reversed(LOSSES.values()))))
    assert arms == ["adamw"]
    assert "better than AdamW, or AdamW better than the only other optimizer, by" in note
    rows = arm_results(frame_of_losses(recipe, LOSSES), bold="all")
    assert rows[1].metrics["test_loss"].p is not None
    # Single runs, as in Table 2, have no test; of equal ones none is bold.
    assert bold({"adamw": [3.0], "coupled_adam": [2.9]}, bold="value") == (
        ["coupled_adam"],
        "One seed, so neither deviation nor test. Bold: the best value.",
    )
    assert bold({"adamw": [3.0], "coupled_adam": [3.0]}, bold="value")[0] == []
    arms, note = bold(three, bold="value")
    assert arms == ["coupled_adam"]
    assert note.endswith("Bold: the best mean, without a test.")


def test_what_is_bold_on_a_page_is_what_it_says(recipe):
    """Pairs decide both: differences that agree are found, however much the seeds differ."""
    frame = frame_of_losses(recipe, {"adamw": [3.0, 4.0, 5.0], "coupled_adam": [2.9, 3.9, 4.91]})
    losses = {row.run.arm_name: row.metrics["test_loss"] for row in arm_results(frame)}
    assert [arm for arm, metric in losses.items() if metric.page_cell.bold] == ["coupled_adam"]
    assert not any(metric.cell.bold for metric in losses.values())
    (sentence, *_) = conclusion(frame, {})
    assert "Coupled Adam is lower than that of AdamW" in sentence
    # The other way round, the unpaired test alone would find one.
    frame = frame_of_losses(recipe, {"adamw": [3.0, 3.2, 3.4], "coupled_adam": [2.9, 2.85, 2.7]})
    (ours,) = (r for r in arm_results(frame) if r.run.arm_name == "coupled_adam")
    (sentence, *_) = conclusion(frame, {})
    assert ours.metrics["test_loss"].page_cell.bold == ("is lower than that of AdamW" in sentence)


def test_a_report_is_told_what_is_bold(comparison):
    report([comparison], comparison / "report", bold="all")
    table = (comparison / "report" / "table.md").read_text()
    assert "Bold: better than each of the others" in table


def test_what_was_not_run_is_a_dash(tmp_path, recipe):
    """One seed, one arm with accuracies, and an unfinished run."""
    lm_eval = {"accuracy": 0.4, "stderr": 0.01, "tasks": {}}
    similarity = {"sets": {}, "mean": 57.3}
    make_run(tmp_path, recipe, "adamw", 1, 3.0)
    make_run(tmp_path, recipe, "coupled_adam", 1, 2.5, lm_eval=lm_eval, word_similarity=similarity)
    cut = make_run(tmp_path, recipe, "coupled_adam", 2, 2.5)
    (cut / "evaluation.json").unlink()
    report([tmp_path], tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    assert "| AdamW | 3.000 | – |" in text
    assert "| Coupled Adam | 2.500 | 0.400 |" in text
    assert "| 57.3 |" in text
    assert "**" not in text  # with one seed there is no test
    assert "One seed, so neither deviation nor test." in text
    page = (tmp_path / "report" / "index.html").read_text()
    assert f"{cut}: not finished" in page


def test_a_report_replaces_only_a_report(comparison, tmp_path):
    """Not runs, a file, or another page with such names."""
    run, site = comparison / "small-adamw-seed-1", tmp_path / "site"
    (site / "figures").mkdir(parents=True)
    for name in ("index.html", "runs.csv", "figures/mine.png"):
        (site / name).write_text("mine")
    for place in (comparison, tmp_path, run, run / "model", run / "config.yaml", site):
        before = snapshot(tmp_path)
        with pytest.raises(UsageError, match=r"something other than a report|is no folder"):
            report([comparison], place)
        assert snapshot(tmp_path) == before


def test_what_a_user_adds_to_a_report_stays(comparison, recipe):
    """Notes and pictures of one's own; what the report itself no longer has is removed."""
    out = comparison / "report"
    make_run(comparison / "more", override(recipe, {"name": "more"}), "adamw", 1, 3.0)
    report([comparison], out)
    assert (out / "figures" / "more" / "loss.svg").exists()
    mine = [out / name for name in ("notes.txt", "mine.png", "figures/mine.png", "a/b/mine.png")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    shutil.rmtree(comparison / "more")
    report([comparison], out)
    assert all(path.read_text() == "mine" for path in mine)
    assert not (out / "figures" / "more").exists()
    assert (out / "overview.png").exists()


def test_a_report_writes_and_removes_nothing_elsewhere(comparison, tmp_path):
    """Another person's may hold a link, or a list of files that leads out of it."""
    out, other = comparison / "report", tmp_path / "other"
    report([comparison], out)
    other.mkdir()
    (other / "mine.png").touch()
    listed = ["../../other/mine.png", str(other / "mine.png"), "linked/mine.png"]
    (out / "linked").symlink_to(other)
    (out / ".files.json").write_text(json.dumps(listed))
    report([comparison], out)
    assert [path.name for path in other.iterdir()] == ["mine.png"]
    shutil.rmtree(out / "figures")
    (out / "figures").symlink_to(other)
    with pytest.raises(UsageError, match="a link that leads out"):
        report([comparison], out)
    assert [path.name for path in other.iterdir()] == ["mine.png"]


def test_runs_without_a_config_are_named(comparison, recipe):
    """One that is lost, empty or another program's; in a folder of others it is theirs."""
    lost = make_run(comparison, override(recipe, {"name": "lost"}), "adamw", 1, 3.0)
    (lost / "config.yaml").unlink()
    (comparison / "wandb").mkdir()
    (comparison / "wandb" / "config.yaml").write_text("theirs: 1")
    runs, left_out = read_runs([comparison])
    assert len(runs) == 6
    assert left_out == {lost: "it has no config.yaml"}
    for content in ("", "theirs: 1", "arm: adamw\nseed: 1\nrecipe: 3"):
        (lost / "config.yaml").write_text(content)
        with pytest.raises(UsageError, match=rf"{lost}/config.yaml is damaged"):
            read_runs([comparison])


def measured(value, *part):
    """A change of an evaluation: what one of its measures is."""

    def change(evaluation):
        measures = functools.reduce(dict.__getitem__, part, evaluation["embeddings"])
        measures["effective_rank"] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # Only singular values are several; what is used later must not fail there.
        *((measured(value), "is damaged .*effective_rank") for value in ({}, [1.0], "x", True)),
        (measured([1.0], "centered"), "is damaged .*effective_rank"),
        # NaN is no JSON, and would not be written again: that of a newer version, too.
        (lambda evaluation: evaluation.update(newer=float("nan")), "is damaged .*NaN"),
        # As after ``evaluate RUN --batches 1``.
        (
            lambda evaluation: evaluation.update(test_loss=0.1, test_tokens=32),
            r"differ in test_tokens \(.*32.*make a report of each",
        ),
    ],
)
def test_evaluations_that_are_refused(change, said, comparison):
    path = comparison / "small-coupled_adam-seed-1" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    change(evaluation)
    path.write_text(json.dumps(evaluation))
    with pytest.raises(UsageError, match=said):
        report([comparison], comparison / "report")


def test_runs_of_other_settings_are_not_compared(tmp_path, recipe):
    """One name, two learning rates: their runs are neither seeds nor arms of one experiment."""
    make_run(tmp_path / "one", recipe, "adamw", 1, 3.0)
    make_run(tmp_path / "other", override(recipe, {"training.lr": 0.5}), "coupled_adam", 2, 2.0)
    message = r"both of the recipe small, but differ in training\.lr \(0\.01 and 0\.5\)"
    with pytest.raises(UsageError, match=message):
        report([tmp_path], tmp_path / "report")


def test_experiments_of_one_size_are_told_by_their_names(tmp_path, recipe):
    for name, lr in (("small", 0.01), ("fast", 0.5)):
        named = override(recipe, {"name": name, "training.lr": lr})
        make_run(tmp_path, named, "adamw", 1, 3.0)
    table = printed(report([tmp_path], tmp_path / "report"))
    assert re.search(r"recipe +Optimizer +L ↓", table)
    assert re.search(r"fast +AdamW +3\.000", table)


def test_a_run_counts_once(comparison, recipe):
    """A copy would feign a smaller p; so would a folder that is named twice."""
    shutil.copytree(comparison / "small-adamw-seed-1", comparison / "z" / "copy")
    runs, left_out = read_runs([comparison, comparison / "z", comparison / "z" / ".." / "z"])
    assert len(runs) == 6
    [(folder, reason)] = left_out.items()
    assert folder.resolve() == comparison / "z" / "copy"
    assert reason == f"the same arm and seed as {comparison / 'small-adamw-seed-1'}"


def test_runs_behind_links(comparison, tmp_path):
    """Those of several comparisons that are put side by side; a circle of links ends."""
    together = tmp_path / "together" / "deep"
    together.mkdir(parents=True)
    for name in ("small-adamw-seed-1", "small-coupled_adam-seed-1"):
        (together / name).symlink_to(comparison / name)
    (together / "circle").symlink_to(tmp_path / "together")
    runs, left_out = read_runs([tmp_path / "together"])
    assert [*runs.arm_name] == ["adamw", "coupled_adam"]
    assert left_out == {}


def test_a_folder_without_runs_is_named(comparison, recipe, tmp_path):
    """And not left out in silence beside others; nothing is made in its place."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, said in {
        "missing": "there is no such folder",
        "file": "there is no such folder",
        "empty": "no run is there",
    }.items():
        wrong = tmp_path / name
        for folders in ([comparison, wrong], [wrong]):
            with pytest.raises(UsageError, match=f"^{wrong}: {said}"):
                report(folders, folders[0] / "report")
    assert not (tmp_path / "missing").exists()
    assert not [*(tmp_path / "empty").iterdir()]
    (make_run(tmp_path / "new", recipe, "adamw", 1, 3.0) / "evaluation.json").unlink()
    with pytest.raises(UsageError, match="no finished run is there"):
        report([tmp_path / "new"], tmp_path / "new" / "report")
    assert not (tmp_path / "new" / "report").exists()


def test_a_damaged_run_is_named(comparison):
    for file in ("metrics.jsonl", "evaluation.json", "config.yaml"):
        path = comparison / "small-adamw-seed-1" / file
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2].rstrip("\n") + "{\n")
        with pytest.raises(UsageError, match=rf"seed-1/{file} is damaged .*: restore it, or move"):
            report([comparison], comparison / "report")
        path.write_text(whole)
    assert len(read_runs([comparison])[0]) == 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewArm(Arm):
    """An arm as CONTRIBUTING.md says that one is added: its class, and its name in ARMS."""

    name = "New"
    optimizer: Literal["new"] = "new"


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(
    "arms", ["lean", "adamw", "coupled_adam lean", "new", "adamw new lean"], ids=str
)
def test_any_arms_have_a_report(arms, seeds, recipe, tmp_path, monkeypatch):
    """Also without AdamW; each has a color of its own, and its name in the legend."""
    monkeypatch.setitem(ARMS, "new", NewArm)
    named = {f"_{arm}": {"optimizer": arm} for arm in arms.split()}
    recipe = override(recipe, {"arms": named})
    for arm, seed in itertools.product(named, range(1, seeds + 1)):
        make_run(tmp_path / "runs", recipe, arm, seed, 3.0)
    assert report([tmp_path / "runs"], tmp_path / "report").page.exists()
    frame = read_runs([tmp_path / "runs"])[0]
    assert len({*arm_colors(frame).values()}) == len(named)
    (drawn,) = overview(frame).figure.legends
    assert {*frame.label} <= {text.get_text() for text in drawn.get_texts()}


def test_the_fit_of_fig_4_is_in_the_tables(comparison):
    """In runs.csv, where there are second moments; here they are 20 times the probability."""
    report([comparison], comparison / "report")
    runs = pd.read_csv(comparison / "report" / "runs.csv").set_index("arm")
    fit = runs[["second_moment_A", "second_moment_r_squared", "second_moment_A_of_logarithms"]]
    assert fit.loc["adamw"].to_numpy() == pytest.approx(np.array([[20, 1, 20]] * 3))
    assert fit.loc["coupled_adam"].isna().all(axis=None)


def test_models_may_be_gone(comparison):
    """The numbers suffice for a table; only pictures of models need the models."""
    for model in comparison.rglob("model"):
        shutil.rmtree(model)
    assert "2.6 (1)" in printed(report([comparison], comparison / "report"))
    assert (comparison / "report" / "overview.png").exists()


@pytest.mark.pixels
def test_several_recipes_and_sweeps(tmp_path, recipe):
    """The order of the runs, and the pictures that one recipe without a sweep does not have."""
    arms = {
        **recipe.to_dict()["arms"],
        **{
            f"n{n}": {"optimizer": "coupled_adam", "second_moment_scale": 2.0**-n}
            for n in (-2, 1, 10)
        },
        "f100": {"optimizer": "sgd", "lr_factor": 100},
        "f50": {"optimizer": "sgd", "lr_factor": 50.0},
    }
    sweep = override(recipe, {"arms": arms})
    longer = override(recipe, {"name": "longer", "training.steps": 80})
    larger = override(recipe, {"name": "larger", "model.n_embd": 16})
    for arm in arms:
        make_run(tmp_path, sweep, arm, 1, 3.0)
    for other in (longer, larger):
        for arm in recipe.arms:
            make_run(tmp_path / other.name, other, arm, 1, 3.0)
    runs, _ = read_runs([tmp_path])
    assert [*runs.label[runs.experiment == "small"]] == [
        "AdamW",
        "Coupled Adam",
        *(f"n{n}: Coupled Adam, n = {n}" for n in (-2, 1, 10)),
        "f50: SGD, f = 50",
        "f100: SGD, f = 100",
    ]
    assert [*runs.experiment.unique()] == ["small", "longer", "larger"]
    pictures = {Path(picture.file).name: picture for picture in draw_all(runs)}
    of_sizes = ("loss_against_tokens", "map", "second_moment_fit")
    for name in ("scale", "scale_measures", "sgd", "sgd_measures", *of_sizes):
        assert pictures[name].png.startswith(b"\x89PNG")
    assert "accuracy_against_tokens" not in pictures


def test_app_g_is_by_optimizer(tmp_path, recipe):
    """Whatever the arms are called, LEAN included; of a sweep the best in validation."""
    arms = {
        "usual": {"optimizer": "adamw"},
        "ours": {"optimizer": "lean"},
        **{f"n{n}": {"optimizer": "coupled_adam", "second_moment_scale": 2.0**-n} for n in (1, 2)},
        "f100": {"optimizer": "sgd", "lr_factor": 100},
    }
    short = override(recipe, {"arms": arms})
    for experiment in (short, override(short, {"name": "longer", "training.steps": 80})):
        for arm in arms:
            run = make_run(tmp_path / experiment.name, experiment, arm, 1, 3.0)
            if arm == "n1":  # the better one
                log = run / "metrics.jsonl"
                log.write_text(log.read_text().replace('valid_loss": 5.0', 'valid_loss": 4'))
    (picture,) = (p for p in draw_all(read_runs([tmp_path])[0]) if "loss_against" in p.file)
    (axes,) = picture.figure.axes
    _, labels = axes.get_legend_handles_labels()
    assert {label.split(",")[0] for label in labels} == {"AdamW", "LEAN", "Coupled Adam"}
    best = _best_arms(read_runs([tmp_path])[0])
    assert best.arm_name.unique().tolist() == ["usual", "n1", "ours"]


def test_a_report_that_fails_leaves_the_last(comparison, monkeypatch):
    out = comparison / "report"
    report([comparison], out)
    before = snapshot(out)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "report_page", full)
    with pytest.raises(OSError, match="No space left"):
        report([comparison], out)
    assert snapshot(out) == before
    assert [path.name for path in comparison.glob("report*")] == ["report"]
    with pytest.raises(UsageError, match="no run is there"):
        report([out / "figures"], out)


class Page(html.parser.HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.sources = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_escaped(tmp_path, recipe):
    run = make_run(tmp_path, recipe, "adamw", 1, 3.0)
    environment = {"command": ["<script>alert(1)</script>"], "git_commit": "<b>"}
    (run / "environment.json").write_text(json.dumps(environment))
    odd = tmp_path / "<img src=x>"
    odd.mkdir()
    (odd / "config.yaml").write_text((run / "config.yaml").read_text())
    report([tmp_path], tmp_path / "report")
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "<img src=x>" in page.text
    assert page.tags.count("img") >= 5
    # Nothing is loaded from elsewhere; the links lead to the runs.
    assert {s for s in page.sources if not s.startswith("data:")} == {"../small-adamw-seed-1"}


def test_fit():
    x = np.array([1.0, 2.0, 4.0])
    assert fit_proportional(x, 3 * x) == pytest.approx((3, 1))
    a, r_squared = fit_proportional(x, np.array([1.0, 5.0, 6.0]))
    assert a == pytest.approx((1 + 10 + 24) / 21)
    line = stats.linregress(x, [1.0, 5.0, 6.0])
    assert r_squared < line.rvalue**2  # which has an intercept, too


@pytest.mark.slow
@needs_browser
def test_the_table_fits_the_window(tmp_path, recipe):
    """With arms whose labels are long, and three seeds, in a wide window and in a narrow one."""
    tuned = {"optimizer": "adamw", "lr_factor": [4, 8], "beta1": 0.0, "beta2": 0.999}
    sweep = override(recipe, {"arms": {**recipe.to_dict()["arms"], "tuned": tuned}})
    for arm, seed in itertools.product(sweep.arms, (1, 2, 3)):
        make_run(tmp_path / "runs", sweep, arm, seed, 3.0 + 0.01 * seed)
    page = report([tmp_path / "runs"], tmp_path / "report").page
    probe = """[document.querySelectorAll("#results td").length > 40,
        [...document.querySelectorAll("#results .wide")].every(e => e.scrollWidth <= e.clientWidth),
        document.documentElement.scrollWidth <= innerWidth]"""
    assert [*told_by(page, probe, tmp_path / "profile")] == [[True, True, True]] * 2
