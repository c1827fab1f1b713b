"""Batches and schedules; runs that are killed, stopped, shared by processes, or fail."""

import json
import platform
import re
import resource
import signal
import subprocess
import sys
import types
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from torch import nn

import token_models
from coupled_adam import cli
from coupled_adam.errors import UsageError
from coupled_adam.lab.data.batches import Batches, held_out_batches, held_out_loader
from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
from coupled_adam.lab.evaluation.evaluate import evaluate_run, held_out_loss
from coupled_adam.lab.evaluation.load_model import load_model
from coupled_adam.lab.models import build_model, check_architecture, output_embeddings
from coupled_adam.lab.recipe import load_recipe, override
from coupled_adam.lab.run import Run
from coupled_adam.lab.training import train as training
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.loggers import MetricsFile, truncate_log
from coupled_adam.lab.training.schedules import lr_scheduler
from coupled_adam.lab.training.variant import Variant
from laboratory import EXACT, LONG, Laboratory, close


def test_batches_cover_each_epoch_once(recipe):
    """Every block once in an epoch, in another order in the next; targets follow their inputs."""
    tokens = np.arange(16 * 8 + 1, dtype=np.uint16)  # 8 blocks, 2 batches of 4 in an epoch
    batches = list(Batches(tokens, override(recipe, {"training.steps": 6}), seed=3))
    assert len(batches) == 6
    for batch in batches:
        assert batch.shape == (4, 17)
        assert torch.equal(batch, batch[:, :1] + torch.arange(17))
    starts = [torch.cat(batches[i : i + 2])[:, 0].tolist() for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(0, 128, 16)) for epoch in starts)
    assert starts[0] != starts[1] != starts[2]


def test_batches_depend_on_the_seed_alone_and_resume(recipe):
    tokens = np.random.default_rng(0).integers(0, 300, 1000).astype(np.uint16)
    whole = list(Batches(tokens, recipe, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(whole, Batches(tokens, recipe, seed=1)))
    assert not torch.equal(whole[0], next(iter(Batches(tokens, recipe, seed=2))))
    started = Batches(tokens, recipe, seed=1)
    iterator = iter(started)
    for _ in range(7):
        next(iterator)
    # Continued by two processes: each has its share of the same batches.
    shares = []
    for rank in range(2):
        resumed = Batches(tokens, recipe, seed=1, rank=rank, world_size=2)
        resumed.load_state_dict(started.state_dict())
        shares.append(list(resumed))
    together = [torch.cat(pair) for pair in zip(*shares, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(whole[7:], together, strict=True))


def test_held_out_batches_are_all_whole_blocks_in_order():
    tokens = np.arange(16 * 6 + 5, dtype=np.uint16)
    blocks = torch.cat(list(held_out_batches(tokens, 4, 16)))
    assert blocks[:, 0].tolist() == [0, 16, 32, 48, 64, 80]
    assert blocks.shape == (6, 17)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_held_out_shares_are_all_blocks_once(recipe, world_size):
    tokens = np.arange(16 * 7 + 5, dtype=np.uint16)
    counted, batches = [], set()
    for rank in range(world_size):
        share = list(held_out_loader(tokens, recipe, rank=rank, world_size=world_size))
        counted += [b[0].item() for ids, counts in share for b, c in zip(ids, counts) if c]
        batches.add(len(share))
    assert sorted(counted) == list(range(0, 112, 16))
    assert len(batches) == 1  # or a sharded model waits for the one that has no more
    limited = override(recipe, {"training.evaluation_batches": 1})
    assert sum(len(ids) for ids, _ in held_out_loader(tokens, limited)) == 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"training.schedule": "cosine", "training.warmup": 10}, {0: 0, 5: 0.5, 10: 1, 100: 0.1}),
        ({"training.schedule": "cosine", "training.warmup": 0.1}, {5: 0.5, 10: 1, 55: 0.55}),
        ({"training.schedule": "constant", "training.warmup": 10}, {5: 0.5, 10: 1, 99: 1}),
        (
            {"training.schedule": "wsd", "training.warmup": 10, "training.decay": 0.2},
            {0: 0, 5: 0.5, 10: 1, 80: 1, 90: 0.55, 100: 0.1},
        ),
        (
            {"training.schedule": "wsd", "training.warmup": 10, "training.decay": 0.001},
            {5: 0.5, 10: 1, 100: 1},
        ),
    ],
)
def test_schedules(recipe, values, expected):
    """The learning rate after so many steps, as a share of the highest."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = lr_scheduler(optimizer, override(recipe, {"training.steps": 100, **values}))
    rates = []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"] / 2)
        optimizer.step()
        scheduler.step()
    assert {step: pytest.approx(rates[step]) for step in expected} == expected


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    places = [(0, "isotropy"), (10, "train_loss"), (20, "train_loss"), (20, "valid_loss")]
    places.append((30, "train_loss"))
    lines = [json.dumps({"step": step, name: 1.0}) + "\n" for step, name in places]
    path.write_text("".join(lines) + '{"step": 40, "tra')  # killed while writing
    truncate_log(path, 20)
    MetricsFile(path).log_metrics({"train_loss": 2.0}, step=30)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in kept] == [0, 10, 20, 20, 30]
    assert kept[-1] == {"step": 30, "train_loss": 2.0}
    truncate_log(path, -1)
    assert path.read_text() == ""


@pytest.mark.parametrize("arm", ["adamw", "coupled_adam"])
def test_killed_and_resumed_runs_equal_an_uninterrupted_one(lab, arm):
    """kill -9, Ctrl-C, SIGTERM, kill -9 again: the same bit for bit."""
    arguments = ["cut", "--arm", arm, *LONG]
    lab.stop(*arguments, step=20, number=signal.SIGKILL, code=-signal.SIGKILL)
    arguments.append("--resume")
    stderr = lab.stop(*arguments, step=40, number=signal.SIGINT, code=130)
    assert "interrupted; continue with --resume" in stderr
    stderr = lab.stop(*arguments, step=60, number=signal.SIGTERM, code=75)
    assert "stopped by SIGTERM after step" in stderr
    lab.stop(*arguments, step=80, number=signal.SIGKILL, code=-signal.SIGKILL)
    assert not (lab.folder / "cut" / "model").exists()
    lab.run(*arguments)

    lab.assert_equal("cut", "--arm", arm, *LONG)
    assert lab.checkpoints("cut") == ["step-130", "step-140"]
    moments = sorted(path.name for path in (lab.folder / "cut" / "second_moments").glob("*"))
    steps = range(10, 150, 10) if arm == "adamw" else []
    assert moments == sorted(f"step-{step}.npy" for step in steps)


def test_ctrl_c_waits_for_the_loggers(lab, monkeypatch):
    """Interrupted in one, all have the step; TensorBoard would be left with a lock taken."""
    in_file, in_tensorboard = MetricsFile.log_metrics, TensorBoardLogger.log_metrics
    told = []

    def interrupted(logger, metrics, step):
        if step == 20:
            signal.raise_signal(signal.SIGINT)
        in_file(logger, metrics, step)

    def noted(logger, metrics, step):
        in_tensorboard(logger, metrics, step)
        told.append(step)

    monkeypatch.setattr(MetricsFile, "log_metrics", interrupted)
    monkeypatch.setattr(TensorBoardLogger, "log_metrics", noted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        said = lab.run("run", "--arm", "adamw", *LONG, code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted; continue with --resume" in said
    assert lab.metrics("run")[-1]["step"] == told[-1] == 20


def test_two_processes_equal_one(lab):
    """DDP (as torchrun and as SLURM start it) and FSDP2 over gloo, and accumulation."""
    lab.run("accumulated", "--arm", "coupled_adam", *EXACT, "--micro-batch-size", 3)
    lab.run("ddp", "--arm", "coupled_adam", *EXACT, "--micro-batch-size", 1, processes=2)
    lab.run("fsdp2", "--arm", "coupled_adam", *EXACT, "--strategy", "fsdp2", processes=2)
    processes = lab.srun("slurm", "--arm", "coupled_adam", *EXACT)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    one, metrics, evaluation = lab.reference("--arm", "coupled_adam", *EXACT)
    for other in ("accumulated", "ddp", "fsdp2", "slurm"):
        close(one, lab.weights(other), 1e-10)
        _, log, evaluated = lab.result(other)
        for mine, theirs in zip(metrics, log, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-7), other
        assert evaluated["test_loss"] == pytest.approx(evaluation["test_loss"], rel=1e-7)


@pytest.mark.slow
def test_torchrun(lab):
    """The launcher itself, and not what tests/processes.py puts in its place."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    interpreter, *train = lab.command("two", "--arm", "coupled_adam", *EXACT)
    result = subprocess.run([interpreter, *launcher, *train], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    close(lab.reference("--arm", "coupled_adam", *EXACT)[0], lab.weights("two"), 1e-10)


def test_sharded_run_is_killed_and_resumed(lab):
    """FSDP2, whose checkpoint is a folder, on two ranks, then on four.

    AdamW's second moments are those of one process.
    """
    options = ["--arm", "adamw", *EXACT, "--steps", 60, "--training.evaluate_every=10"]
    sharded = [*options, "--strategy", "fsdp2"]
    lab.run("one", *options)
    lab.stop("cut", *sharded, step=20, number=signal.SIGKILL, code=-9, processes=2)
    lab.run("cut", *sharded, "--resume", processes=4)
    # With torch 2.7 FSDP2 is less exact, also without the interruption.
    less = 100 if torch.__version__.startswith("2.7.") else 1
    close(lab.weights("one"), lab.weights("cut"), less * 1e-10)
    for step in range(10, 70, 10):
        moments = [
            np.load(lab.folder / run / "second_moments" / f"step-{step}.npy")
            for run in ("one", "cut")
        ]
        assert moments[0].shape == (300,)
        np.testing.assert_allclose(moments[0], moments[1], rtol=less * 1e-6)


def test_processes_and_accumulation_may_change_on_resume(lab):
    """Two processes stop at the same step when SIGTERM comes; one continues, in other portions."""
    first = ["cut", "--arm", "coupled_adam", *EXACT, *LONG]
    stderr = lab.stop(*first, step=50, number=signal.SIGTERM, code=75, processes=2)
    assert stderr.count("stopped by SIGTERM after step") == 1  # rank 0 speaks
    lab.run(*first, "--resume", "--micro-batch-size", 1)
    whole, *_ = lab.reference("--arm", "coupled_adam", *EXACT, *LONG)
    close(whole, lab.weights("cut"), 1e-10)


@pytest.mark.parametrize(
    ("arm", "lr", "problem"),
    [
        ("adamw", "1e30", "is nan"),  # the loss, or the norm of the gradient
        ("adamw", "1e39", "the update is too large"),  # beyond float32
        ("coupled_adam", "3e37", "the output embeddings are not finite"),
    ],
)
def test_what_is_not_finite_stops_the_run(lab, arm, lr, problem):
    arguments = ["--arm", arm, f"--training.lr={lr}", "--training.evaluate_every=1"]
    stderr = lab.run("run", *arguments, "--training.warmup=1", code=1)
    (line,) = [line for line in stderr.splitlines() if line.startswith("coupled-adam: error:")]
    assert f"{problem} at step " in line or f"{problem} (" in line
    assert "the last checkpoint is kept" in line
    assert not (lab.folder / "run" / "model").exists()


def test_a_full_disk_leaves_the_checkpoint(lab):
    """Here: files may not grow beyond a few kB."""
    first = ["cut", "--arm", "adamw", *LONG]
    lab.stop(*first, step=50, number=signal.SIGTERM, code=75)
    before = lab.checkpoints("cut")
    stderr = lab.run(*first, "--resume", "--logger", code=1, fault="limit 8192")
    assert "error: File too large" in stderr
    assert "continue with --resume" in stderr
    assert lab.checkpoints("cut") == before
    lab.run(*first, "--resume")
    lab.assert_equal("cut", "--arm", "adamw", *LONG)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_kept(lab):
    """Blocks of 40 MB, as logits are, would otherwise be got anew, 10,000 pages each time."""
    lab.run("run", "--arm", "adamw", "--steps", 2, "--logger")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10**7)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 3 * 10_000


@pytest.mark.slow
def test_compiled(lab):
    arguments = ["--arm", "coupled_adam", "--steps", 10, *EXACT]
    lab.run("eager", *arguments)
    lab.run("compiled", *arguments, "--compile", processes=1)
    close(lab.weights("eager"), lab.weights("compiled"), 1e-10)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["--arm", "muon", "--arms.muon={optimizer: muon, row_exponent: 0.5, zero_sum: true}"],
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9"),
        ),
        ["--arm", "in", "--model.tied=false", "--arms.in={optimizer: coupled_adam, couple: input}"],
        ["--arm", "adamw", "--model.architecture=stablelm", "--training.precision=bf16-mixed"],
        ["--arm", "coupled_adam", "--model.bias=false", "--training.schedule=wsd"],
        ["--arm", "coupled_adam", "--training.schedule=constant", "--training.warmup=0.1"],
    ],
    ids=lambda arguments: arguments[1] + " " + arguments[2].partition("=")[0],
)
def test_every_family(lab, arguments):
    """The loss falls, and TensorBoard has it; other arms are those of the paper's recipes below."""
    lab.run("run", *arguments)
    losses = [line["train_loss"] for line in lab.metrics("run") if "train_loss" in line]
    assert losses[-1] < losses[0]
    assert losses[-1] < np.log(300) - 0.1
    assert list((lab.folder / "run" / "tensorboard").glob("events.out.tfevents.*"))
    evaluation = json.loads((lab.folder / "run" / "evaluation.json").read_text())
    assert 0 < evaluation["test_loss"] < np.log(300)


@pytest.fixture
def hub(tmp_path):
    """A data set as the hub has them, with splits of its own, and a tokenizer, in folders."""
    folder = tmp_path / "hub"
    folder.mkdir()
    texts = sorted(topics.values(), key=len)[-40:]
    for split, part in (("train", texts[:36]), ("validation", texts[36:38]), ("test", texts[38:])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    token_models.byte_level(texts[:36], 500).save_pretrained(tmp_path / "tokenizer")
    return [f"--data.hub={folder}", f"--data.tokenizer={tmp_path / 'tokenizer'}"]


@pytest.mark.parametrize(
    ("recipe", "arm"),
    [
        ("30M", "coupled_adam"),
        ("124M-20B-scaled", "coupled_adam_n-5"),
        ("124M-20B-sgd", "sgd_f100"),
        ("2.6B-210B", "coupled_adam"),
    ],
)
def test_the_papers_recipes_made_small(tmp_path, hub, recipe, arm):
    """All of a recipe but its size: data set, tokenizer, bf16, warmup, evaluation in batches."""
    lab = Laboratory(tmp_path, recipe, None)
    small = ["--model.n_layer=1", "--model.n_head=2", "--model.n_embd=16", "--training.warmup=4"]
    small += ["--model.vocab_size=512", "--model.intermediate_size=32", "--training.batch_size=4"]
    small += ["--training.sequence_length=64", "--training.evaluate_every=10"]
    small += ["--data.held_out=0.1", "--training.lr=1e-2"]
    lab.run("run", "--arm", arm, "--steps", 30, *small, *hub, "--micro-batch-size", 2)
    metrics = lab.metrics("run")
    losses = [line["train_loss"] for line in metrics if "train_loss" in line]
    assert losses[-1] < losses[0]
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert np.isfinite(evaluation["test_loss"])
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["recipe"]["training"]["precision"] == "bf16-mixed"
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())["corpus"]
    own_splits = recipe == "2.6B-210B"
    assert (facts["documents"] == {"train": 36, "valid": 2, "test": 2}) == own_splits


def test_a_batch_that_cannot_be_shared(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "world_size", lambda: 3)
    with pytest.raises(UsageError, match=r"batch_size=4 cannot be divided among 3 processes"):
        training.train(Run(recipe, "adamw", 1, tmp_path / "run"), None, Execution())
    assert not (tmp_path / "run").exists()


def test_a_variant_intervenes_when_it_should(recipe, text_file, tmp_path, monkeypatch):
    """After each step, after half of them, and before the model is saved."""
    calls = []

    def at_the_end(model):
        calls.append("end")
        with torch.no_grad():
            output_embeddings(model).fill_(2.0)

    variant = Variant(
        after_step=lambda _: calls.append("step"),
        half_way=lambda _, optimizer: calls.append(type(optimizer).__name__),
        at_the_end=at_the_end,
    )
    monkeypatch.setitem(sys.modules, "interventions", types.SimpleNamespace(NOTED=variant))
    changes = {"training.steps": 5, "variant": "interventions:NOTED"}
    recipe = override(recipe, {"data.text": str(text_file), **changes})
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    run = Run(recipe, "adamw", 1, tmp_path / "run")
    training.train(run, corpus, Execution(logger=[]))
    assert calls == ["step", "step", "AdamW", "step", "step", "step", "end"]
    weights = load_file(run.folder / "model" / "model.safetensors")
    assert (weights["transformer.wte.weight"] == 2).all()
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["recipe"]["variant"] == "interventions:NOTED"
    training.train(run, corpus, Execution(logger=[]))  # it is finished
    assert len(calls) == 7


def test_a_variant_may_pad_its_matrices(recipe, text_file, tmp_path, monkeypatch):
    """As Megatron does, to a multiple: rows that are no tokens of the text are not measured."""

    def padded(recipe):
        model = build_model(recipe)
        model.resize_token_embeddings(recipe.model.vocab_size + 20, mean_resizing=False)
        with torch.no_grad():
            output_embeddings(model)[-20:] = 100.0
        return model

    padding = Variant(build_model=padded)
    monkeypatch.setitem(sys.modules, "padding", types.SimpleNamespace(PADDED=padding))
    changes = {"data.text": str(text_file), "training.steps": 2, "variant": "padding:PADDED"}
    recipe = override(recipe, changes)
    corpus = prepare_corpus(recipe, tmp_path / "cache")
    run = Run(recipe, "adamw", 1, tmp_path / "run")
    training.train(run, corpus, Execution(logger=[]))
    assert run.curve("mean_norm")[1][-1] < 1
    assert evaluate_run(run, corpus)["embeddings"]["mean_norm"] < 1
    assert len(run.embeddings()) == len(run.counts()) == recipe.model.vocab_size


@pytest.fixture
def variants(tmp_path, monkeypatch):
    """A module with a variant, in a folder; it leaves a file there when it is imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "doubled.py").write_text(
        "from pathlib import Path\n"
        "from coupled_adam.lab.training.loss import sequence_losses\n"
        "from coupled_adam.lab.training.variant import Variant\n"
        "Path(__file__).with_name('imported').touch()\n"
        "LOSS = Variant(sequence_losses=lambda *a: 2 * sequence_losses(*a))\n"
        "NONE = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "doubled", raising=False)
    return tmp_path / "modules"


def test_a_variant_is_named_in_the_recipe(lab, variants, small_recipe, tmp_path, monkeypatch):
    """It is trained and evaluated with its own loss, and only if the user names it."""
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {small_recipe}\nvariant: doubled:LOSS\n")
    arguments = ["--arm", "adamw", "--steps", 10, "--logger"]
    lab.run("run", *arguments, "--recipe", own)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["recipe"]["variant"] == "doubled:LOSS"
    # The standard loss of the same model is half of it.
    test_loss = json.loads((tmp_path / "run" / "evaluation.json").read_text())["test_loss"]
    tokens = prepare_corpus(load_recipe(str(tmp_path / "run" / "config.yaml")), default_cache())
    model = load_model(tmp_path / "run" / "model", "cpu")
    loss = held_out_loss(model, tokens.tokens("test"), 16, None)["test_loss"]
    assert test_loss == pytest.approx(2 * loss)

    # From here on the folder is another person's.
    (variants / "imported").unlink()
    monkeypatch.delitem(sys.modules, "doubled")
    resume = ["train", *map(str, arguments), "--resume", "--out", str(tmp_path / "run")]
    for command in (
        resume,
        [*resume, "--recipe", str(tmp_path / "run" / "config.yaml")],
        ["evaluate", str(tmp_path / "run")],
    ):
        assert cli.main(command) == 2
        assert not (variants / "imported").exists()
    again = ["evaluate", str(tmp_path / "run"), "--batches", "1", "--variant", "doubled:LOSS"]
    assert cli.main(again) == 0
    assert (variants / "imported").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("doubled:NONE", "is a int"), ("doubled:X", "X"), ("no_such:X", "no_such")]
)
@pytest.mark.usefixtures("variants")
def test_what_is_no_variant(name, said, lab):
    arguments = ["--arm", "adamw", "--steps", 10, "--logger"]
    stderr = lab.run("new", *arguments, f"--variant={name}", code=2)
    assert f"variant={name}" in stderr
    assert said in stderr


@pytest.mark.parametrize("architecture", ["bert", "electra"])
@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_model_that_sees_the_answer(command, architecture, tmp_path, capsys):
    """It would have a low loss, which would mean nothing; nothing is written."""
    out = tmp_path / "out"
    arm = ["--arm", "adamw"] if command == "train" else []
    code = cli.main(
        [command, "--recipe", "tiny", *arm, "--model.architecture", architecture, "--out", str(out)]
    )
    assert code == 2
    assert re.search(
        rf"model.architecture={architecture}: \w+ predicts tokens from later ones",
        capsys.readouterr().err,
    )
    assert not out.exists()


@pytest.mark.parametrize("architecture", ["gpt2", "stablelm", "llama", "qwen3", "mixtral", "opt"])
def test_architectures_that_do_not(architecture):
    """And no random number is drawn for the question."""
    before = torch.get_rng_state()
    check_architecture(override(load_recipe("tiny"), {"model.architecture": architecture}))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_variant_that_sees_the_answer(lab, tmp_path, monkeypatch):
    """A model of masked tokens has to say that it is one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "masked.py").write_text(
        "from transformers import BertConfig, BertLMHeadModel\n"
        "from coupled_adam.lab.training.variant import Variant\n"
        "def build(recipe):\n"
        "    size = recipe.model\n"
        "    return BertLMHeadModel(BertConfig(vocab_size=size.vocab_size,\n"
        "        hidden_size=size.n_embd, num_hidden_layers=1, num_attention_heads=1))\n"
        "NEXT = Variant(build_model=build)\n"
        "MASKED = Variant(build_model=build, is_causal=False)\n"
    )
    said = lab.run("run", "--arm", "adamw", "--variant", "masked:NEXT", code=2)
    assert "variant=masked:NEXT: BertLMHeadModel predicts tokens from later ones" in said
    lab.run("other", "--arm", "adamw", "--variant", "masked:MASKED", "--training.steps", "2")
