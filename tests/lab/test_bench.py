"""The bench: what it counts is right, and it says what it refuses before it starts."""

import itertools
import json

import pytest
import torch
from matplotlib.image import imread
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.bench.steps import (
    BASELINE,
    GROWTH,
    AveragedAdamW,
    Case,
    Timed,
    bench,
    growth_picture,
    optimizers_here,
)
from coupled_adam.bench.training import training_speed
from coupled_adam.cli import main
from coupled_adam.lab.recipe import load_recipe, override

pytestmark = pytest.mark.filterwarnings("ignore:Profiler:UserWarning")


def test_the_average_is_coupled_adam():
    """What ours is timed against computes the same."""
    torch.manual_seed(0)
    start = torch.randn(7, 3, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [CoupledAdamW([ours], lr=1e-2, coupled=True), AveragedAdamW([theirs], lr=1e-2)]
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn_like(start)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_memory():
    """States are as large as is promised; so is what a step holds beside them."""
    rows, columns = 8192, 256
    matrix = 4 * rows * columns
    names = ["CoupledAdamW", "AdamW foreach", "average of V × H"]
    ours, foreach, average = bench([Case(rows, columns)], names, seconds=0.01)
    assert ours.state_bytes == matrix + 4 * columns + 4
    assert ours.extra_bytes < 0.01 * matrix
    assert foreach.state_bytes == 2 * matrix + 4
    assert foreach.extra_bytes >= matrix
    assert average.state_bytes == 2 * matrix
    assert average.extra_bytes >= matrix


def test_clipping_is_timed_with_the_step():
    """By ours it is folded into the step, for others it comes before it."""
    case = Case(64, 8, others=2, clip=True)
    makers = optimizers_here()
    for name in ("CoupledAdamW", "AdamW"):
        (timed,) = bench([case], [name], seconds=0.01)
        assert len(timed.samples) >= 5
        assert timed.moved_bytes is None
    embedding = nn.Parameter(torch.zeros(4, 2))
    assert makers["CoupledAdamW"](embedding, [], 1.0).max_grad_norm == 1.0


def test_ratio_and_bandwidth():
    case = Case(1000, 10)
    samples = [(2.0, 1.0, 1.0), (3.0, 1.0, 1.0), (8.0, 2.0, 2.0)]
    timed = Timed(case, "CoupledAdamW", samples, 0, 0, moved_bytes=6 * case.bytes)
    assert timed.seconds == 3.0
    assert timed.ratio == (2.0, 3.0, 4.0)
    assert timed.bandwidth == pytest.approx(
        1.0
    )  # three times what a copy moves, in thrice its time


@pytest.mark.pixels
def test_command(capsys, tmp_path):
    picture = tmp_path / "bench.png"
    command = ["bench", "--shapes", "64x8", "128x4", "--seconds", "0.01", "--picture", str(picture)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["packages"]["torch"] == torch.__version__
    names = [(r["case"]["rows"], r["optimizer"]) for r in found["results"]]
    assert names == list(itertools.product((64, 128), optimizers_here()))
    assert all(len(r["samples"]) >= 5 for r in found["results"])
    assert imread(picture).shape[2] == 4
    assert main([*command, "--dtype", "bfloat16", "--optimizers", "CoupledAdamW"]) == 0
    out = capsys.readouterr().out
    assert "64 × 8 bfloat16" in out
    assert "CoupledAdamW" in out


def test_growth_picture():
    cases = itertools.chain(*GROWTH.values())
    samples = [(1.0, 2.0, 1.0)] * 5
    results = [
        Timed(case, name, samples, 0, 0, None)
        for case in cases
        for name in ("CoupledAdamW", "AdamW foreach")
    ]
    above, below = growth_picture(results).axes[0], growth_picture(results).axes[3]
    assert [len(line.get_xdata()) for line in above.get_lines()] == [10, 10, 10]
    assert above.get_lines()[1].get_label() == BASELINE
    assert set(below.get_lines()[0].get_ydata()) == {0.5}


@pytest.mark.slow
def test_training_speed(capsys):
    recipe = override(load_recipe("tiny"), {"training.batch_size": 2, "model.n_layer": 1})
    speed = training_speed(recipe, steps=3)
    ours, theirs = speed.tokens_per_second
    assert ours > 0 < theirs
    assert speed.tokens == 2 * recipe.training.sequence_length
    command = ["bench", "--recipe", "tiny", "--steps", "2", "training.batch_size=2"]
    assert main([*command, "model.n_layer=1"]) == 0
    assert "tokens/s with CoupledAdamW" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "12y3"], "--shapes 12y3: tokens, x, dimensions are needed: 50304x768"),
        (["--shapes", "999999999x99999"], "leave it out of --shapes"),
        (["--picture", "bench.jpgg"], "end its name with .png"),
        (["--optimizers", "AdamX"], "--optimizers: no 'AdamX'; there are CoupledAdamW"),
        (["--growth", "--clip"], "--growth has its own shapes"),
        (["--recipe", "tiny", "--growth"], "leave out --growth"),
        (["model.n_layer=2"], "name one with --recipe"),
    ],
)
def test_refused(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
