"""The wider model's training, in small: what a step is, and that runs do not meet."""

import dataclasses
import json
import sys

import pytest
import torch
from study import wider
from study.wider import ARMS, RUNS, Setting, Training, train_together

SMALL = Setting(vocab_size=300, width=16, layers=2, heads=2, length=8, batch=4, steps=12, lr=1e-2)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")),
]


@pytest.fixture(scope="module")
def text():
    """Token ids in which each is often followed by the same next one."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30, (400,), generator=random)
    return torch.stack([ids, ids * 7 % 300], 1).flatten().int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arm", ARMS)
def test_all_arms_learn(arm, device, text, monkeypatch):
    monkeypatch.setitem(ARMS["lean"], "betas", (0.0, 0.5))  # zero-sum from step 2 on, not 100
    training = Training(SMALL, f"{arm} n=4", 1, text.to(device))
    train_together([training], SMALL)
    assert training.losses[0].item() == pytest.approx(5.7, abs=0.1)  # log 300
    assert training.losses[-3:].mean() < training.losses[0] - 0.2
    result = training.result(text[:101].to(device), text[101:].to(device))
    json.dumps(result, allow_nan=False)
    assert result["mean_norm_ratio"] < (0.12 if arm == "lean" else 1)


def test_a_run_is_the_plain_loop(text):
    """AdamW with the schedule, the clipping and the blocks of the seed, each block once."""
    training = Training(SMALL, "adamw 0 0.999 n=2", 3, text)
    torch.manual_seed(3)
    model = wider.Model(SMALL)
    table, positions = model.tokens.weight, model.positions.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not table]
    groups = [
        {"params": [p for p in matrices if p is not positions], "weight_decay": 0.1},
        {"params": [positions, *(p for p in model.parameters() if p.dim() == 1)]},
        {"params": [table], "lr": 2e-2, "betas": (0.0, 0.999)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [*SMALL.schedule().tolist(), 0].__getitem__
    )
    order = training._order.flatten().tolist()
    assert len({*order}) == SMALL.steps * SMALL.batch
    for step in range(SMALL.steps):
        training.advance()
        starts = [8 * block for block in order[4 * step : 4 * step + 4]]
        loss = model(torch.stack([text[start : start + 9] for start in starts]).long())
        assert training.losses[step] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(training.model.tokens.weight, table, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_at_the_same_time_do_not_meet(device, text):
    names = ("lean n=2", "adamw 0.9 0.95 n=0")
    together, alone = (
        [Training(SMALL, name, 2, text.to(device)) for name in names] for _ in range(2)
    )
    train_together(together, SMALL)
    for one, other in zip(together, alone):
        train_together([other], SMALL)
        torch.testing.assert_close(one.losses, other.losses)
    assert together[0].losses[0] == together[1].losses[0]  # the same weights and the same batch
    assert together[0].losses[-1] != together[1].losses[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("arm", ARMS)
def test_a_graph_takes_the_same_steps(arm, text):
    captured, eager = (Training(SMALL, f"{arm} n=2", 1, text.cuda()) for _ in range(2))
    for _ in range(SMALL.steps):
        captured.advance()
        eager._take()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured.losses, eager.losses, rtol=1e-3, atol=1e-3)


def test_the_schedule():
    multipliers = Setting(steps=1000).schedule()
    assert multipliers[[0, 99, 100]].tolist() == pytest.approx([0.01, 1, 1])
    assert multipliers[550].item() == pytest.approx(0.55)
    assert multipliers[-1].item() == pytest.approx(0.1, abs=1e-4)


def test_the_command_adds_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COUPLED_ADAM_CACHE", str(tmp_path / "cache"))
    words = ("the cat sat on the mat", "a dog ran over the hill", "it rains", "they sing songs")
    lines = [" ".join(words[(i * j) % 4] for j in range(1, 30)) for i in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} {line}" for i, line in enumerate(lines)))
    results = tmp_path / "new.json"
    fields = {**dataclasses.asdict(SMALL), "steps": 2, "batch": 2}
    command = ["wider", "--text", str(tmp_path / "text.txt"), "--results", str(results)]
    command += ["--device", "cpu", *(f"--{k.replace('_', '-')}={v}" for k, v in fields.items())]
    for only, seeds in (("lean n=[02]", "1"), ("lean n=2", "1,2")):
        monkeypatch.setattr(sys, "argv", [*command, "--only", only, "--seeds", seeds])
        wider.main()
    content = json.loads(results.read_text())
    assert {name: [*run["seeds"]] for name, run in content.items()} == {
        "lean n=0": ["1"],
        "lean n=2": ["1", "2"],
    }
    assert capsys.readouterr().out.count("\n") == 3
    monkeypatch.setattr(sys, "argv", [*command, "--steps", "3"])
    with pytest.raises(SystemExit):
        wider.main()
    assert "of another setting" in capsys.readouterr().err


def test_results_are_of_runs_as_they_are():
    for name, run in json.loads((wider.HERE / "results" / "wider.json").read_text()).items():
        assert name in RUNS
        assert run["setting"] == dataclasses.asdict(Setting())
