"""Measures logged during training, by Lightning and by Hugging Face's Trainer, on sharded models.

The same file is the program of each rank.
"""

import copy
import csv
import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import token_models
from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.embeddings import analyze
from coupled_adam.embeddings.lightning import EmbeddingMeasures
from coupled_adam.embeddings.measures import LOGGED, numbers
from coupled_adam.embeddings.monitor import FIRST, Monitor, model_embeddings
from coupled_adam.embeddings.transformers import EmbeddingMeasures as TrainerMeasures
from processes import run_cases, run_on_ranks

V = 50
gpt2 = functools.partial(token_models.gpt2, 0, vocab_size=V, n_embd=8, n_positions=16)


def batches(number):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, V, (2, 16), generator=generator) for _ in range(number)]


class Module(pl.LightningModule):
    """A user's module around a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, ids):
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return CoupledAdamW(param_groups(self), lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_lightning(tmp_path):
    """Every third optimizer step, whatever is accumulated; untied models have two matrices."""
    module = Module(gpt2(tie_word_embeddings=False))
    before = copy.deepcopy(module.model)
    counts = torch.arange(V)
    trainer = pl.Trainer(
        max_steps=6,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1),
        callbacks=[EmbeddingMeasures(3, counts, all_measures=True)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.cat(batches(12)), 2))
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        lines = [row for row in csv.DictReader(file) if row["embeddings/isotropy"]]
    assert [int(row["step"]) for row in lines] == [0, 3, 6]
    for row, model in ((lines[0], before), (lines[-1], module.model)):
        for prefix, layer in (
            ("embeddings", model.lm_head),
            ("input_embeddings", model.transformer.wte),
        ):
            report = analyze(layer.weight, counts)
            for name, number in numbers(LOGGED, report).items():
                assert float(row[f"{prefix}/{name}"]) == pytest.approx(number)
    assert not lines[0]["embeddings/largest_logit"]  # before the first step there are no logits
    assert all(float(row["embeddings/largest_logit"]) > 0 for row in lines[1:])


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        ids = batches(12)[index][0]
        return {"input_ids": ids, "labels": ids}


def test_trainer(tmp_path):
    """In its log, and so wherever the Trainer reports to."""
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    trainer = Trainer(
        gpt2(),
        TrainingArguments(
            str(tmp_path),
            max_steps=6,
            logging_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=Texts(),
    )
    trainer.add_callback(TrainerMeasures(trainer, 2))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "embeddings/isotropy" in line]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    losses = [line["step"] for line in trainer.state.log_history if "loss" in line]
    assert losses == [3, 6]  # the trainer's own log is not lost where both fall on one step
    report = analyze(trainer.model.lm_head.weight)
    assert lines[-1]["embeddings/mean_norm"] == report.mean_norm
    named = {name.removeprefix("embeddings/") for name in lines[-1] if name.startswith("embed")}
    assert named == {*FIRST, "largest_logit"} - {"norm_frequency_correlation"}  # without counts
    assert not any("input_embeddings" in name or "frequency" in name for name in lines[-1])


def test_the_largest_logit():
    """Of all forward passes of a step that is measured, and of no others."""
    model, monitor = gpt2(), Monitor(2)
    first, second, other = batches(3)
    monitor.watch(model, 1)
    model(other)
    assert "embeddings/largest_logit" not in monitor.measure(model, True)
    monitor.watch(model, 2)
    largest = max(model(ids).logits.abs().max().item() for ids in (first, second))
    assert monitor.measure(model, True)["embeddings/largest_logit"] == pytest.approx(largest)
    model(other)
    assert "embeddings/largest_logit" not in monitor.measure(model, True)


def test_warnings_beyond_the_limits():
    """Once when a limit is crossed, and again only after the value has been below."""
    model = nn.Linear(4, V)
    monitor = Monitor(1, find=lambda model: {"output": model.weight})
    monitor.measure(model, True)
    with torch.no_grad():
        model.weight += 50
    with pytest.warns(
        UserWarning, match=r"embeddings/mean_norm_ratio is .*, above the limit of 0.9"
    ):
        monitor.measure(model, True)
    monitor.measure(model, True)  # a second warning would be an error here
    with torch.no_grad():
        model.weight -= 50
    monitor.measure(model, True)
    with torch.no_grad():
        model.weight += 50
    with pytest.warns(UserWarning, match="mean_norm_ratio"):
        monitor.measure(model, True)


def test_models_of_ones_own():
    """Found as the optimizer finds them, or named by a function; where neither, that is said."""
    model = nn.Sequential(nn.Embedding(V, 4), nn.Linear(4, V))
    by_itself = Monitor(1).measure(model, True)
    assert by_itself["embeddings/isotropy"] == analyze(model[1].weight).isotropy
    assert by_itself["input_embeddings/isotropy"] == analyze(model[0].weight).isotropy
    with pytest.raises(ValueError, match="ModuleList has no clear token embeddings: pass embed"):
        Monitor(1).measure(nn.ModuleList(nn.Embedding(n, 4) for n in (V, 7)), True)
    monitor = Monitor(1, find=lambda model: {"output": model[1].weight})
    numbers = monitor.measure(model, True)
    assert numbers["embeddings/isotropy"] == analyze(model[1].weight).isotropy
    assert monitor.measure(model, False) == {}
    assert list(model_embeddings(nn.ModuleDict({"inside": gpt2()}))) == ["output"]
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        EmbeddingMeasures(0)


def sharded():
    """FSDP2: measured between steps, the matrices are gathered, and are those of now."""
    whole = gpt2(tie_word_embeddings=False)
    split = copy.deepcopy(whole)
    for block in split.transformer.h:
        fully_shard(block)
    fully_shard(split)
    optimizers = [CoupledAdamW(param_groups(model), lr=1e-2) for model in (whole, split)]
    monitor = Monitor(1)
    for ids in batches(4):
        for model, optimizer in zip((whole, split), optimizers):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            # Gathered for an evaluation, the copy must not be measured after the next step.
            with torch.no_grad():
                model(input_ids=ids)
        numbers = monitor.measure(split, dist.get_rank() == 0)
        expected = monitor.measure(whole, dist.get_rank() == 0)
        assert numbers == pytest.approx(expected, rel=1e-3)
        assert bool(numbers) == (dist.get_rank() == 0)


def test_sharded():
    run_on_ranks(2, __file__, ["sharded"])


if __name__ == "__main__":
    run_cases({"sharded": sharded})
