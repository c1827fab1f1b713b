"""Hugging Face's ``Trainer`` and the trainers built on it, with the factory and with a class."""

import functools

import pytest
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import token_models
from coupled_adam import CoupledAdamW, MuonWithCoupledAdam, param_groups
from coupled_adam.transformers import CoupledAdamWFactory, GradNorm

V, STEPS, ACCUMULATED = 50, 6, 2
gpt2 = functools.partial(token_models.gpt2, 0, vocab_size=V, n_embd=8, n_positions=16)


class Texts(torch.utils.data.Dataset):
    ids = torch.randint(0, V, (2 * STEPS * ACCUMULATED, 16), generator=torch.manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        # The trainer divides by the number of labels, which would count the first token, too.
        return {"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])}


def arguments(folder, **options):
    return TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": ACCUMULATED,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            "save_steps": STEPS // 2,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            **options,
        },
    )


def by_hand(model, optimizer):
    """What the trainer does, in a plain loop."""
    norms = []
    for ids in Texts.ids.split(2 * ACCUMULATED):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms


GROUPS = {"lr_factor": 2, "betas": (0.5, 0.99), "embedding_weight_decay": 0.2}


def test_trainer(tmp_path):
    """As a plain loop, with accumulation, clipping in the step, and the norm logged."""
    trainer = Trainer(
        gpt2().double(),  # so that noise in gradients of zero, which Adam amplifies, is below eps
        args := arguments(tmp_path),
        train_dataset=Texts(),
        optimizer_cls_and_kwargs=(
            CoupledAdamWFactory,
            {"args": args, "groups": GROUPS, "max_grad_norm": 0.4},
        ),
    )
    trainer.add_callback(GradNorm(trainer))
    trainer.train()
    model = gpt2().double()
    optimizer = CoupledAdamW(
        param_groups(model, **GROUPS), 1e-2, (0.9, 0.95), weight_decay=0.1, max_grad_norm=0.4
    )
    (coupled,) = (group for group in optimizer.param_groups if group["coupled"])
    assert (coupled["lr"], coupled["betas"]) == (2e-2, (0.5, 0.99))
    norms = by_hand(model, optimizer)
    assert min(norms) > 0.4
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=name)
    logged = [line for line in trainer.state.log_history if "optimizer/grad_norm" in line]
    assert [line["step"] for line in logged] == [*range(1, STEPS + 1)]
    for line, norm in zip(logged, norms):
        assert line["optimizer/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert sum("loss" in line for line in trainer.state.log_history) == STEPS


def test_trainer_resumes(tmp_path):
    """Bit for bit, from the state with one second moment for each column."""
    options = {"lr": 1e-2, "groups": {"couple": "output"}}

    def trainer():
        return Trainer(
            gpt2(tie_word_embeddings=False),
            arguments(tmp_path),
            train_dataset=Texts(),
            optimizer_cls_and_kwargs=(CoupledAdamWFactory, options),
        )

    (whole := trainer()).train()
    (resumed := trainer()).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    (coupled,) = (g for g in resumed.optimizer.param_groups if g["coupled"])
    assert coupled["param_names"] == ["lm_head.weight"]
    (p,) = coupled["params"]
    assert resumed.optimizer.state[p]["exp_avg_sq"].shape == (8,)


def test_a_class_and_the_size_of_the_vocabulary(tmp_path):
    """The trainer passes on groups of parameters: the size couples what the factory couples."""
    options = {"lr": 1e-2, "betas": (0.9, 0.95)}
    trainers = [
        Trainer(
            gpt2(),
            arguments(tmp_path, weight_decay=0.0, save_strategy="no"),
            train_dataset=Texts(),
            optimizer_cls_and_kwargs=built,
        )
        for built in (
            (CoupledAdamW, {**options, "vocab_size": V}),
            (CoupledAdamWFactory, {**options, "weight_decay": 0.0}),
        )
    ]
    for trainer in trainers:
        trainer.train()
    for p, q in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("tied", [True, False])
def test_t5(tied, tmp_path):
    """A trainer without the argument takes the attribute; encoder and decoder share the matrix."""
    model = token_models.t5(
        vocab_size=V, d_model=8, decoder_start_token_id=0, tie_word_embeddings=tied
    )
    options = arguments(tmp_path, max_steps=2, save_strategy="no").to_dict()
    args = Seq2SeqTrainingArguments(
        **{name: options[name] for name in ("output_dir", "max_steps", "learning_rate", "use_cpu")},
        report_to="none",
        save_strategy="no",
    )
    ids = torch.arange(3, 9)
    trainer = Seq2SeqTrainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
    trainer.optimizer_cls_and_kwargs = (CoupledAdamWFactory, {"args": args})
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    (coupled,) = (group for group in optimizer.param_groups if group["coupled"])
    assert coupled["param_names"][0] == "shared.weight"
    assert all(optimizer.state[p]["exp_avg_sq"].shape == (8,) for p in coupled["params"])


def test_the_rate_that_is_logged_is_that_of_the_input_embeddings(tmp_path):
    """The trainer logs that of the first group."""
    args = arguments(tmp_path, learning_rate=3e-3, save_strategy="no", max_steps=2)
    trainer = Trainer(gpt2(tie_word_embeddings=False), args, train_dataset=Texts())
    rates = {"lr": 9e-3, "head_lr": 1e-3}
    trainer.optimizer_cls_and_kwargs = (CoupledAdamWFactory, {"args": args, "groups": rates})
    trainer.train()
    logged = {line["learning_rate"] for line in trainer.state.log_history if "loss" in line}
    assert logged == {9e-3}
    assert {g["lr"] for g in trainer.optimizer.param_groups} == {9e-3, 1e-3, 3e-3}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_muon(tmp_path):
    """A function that returns the class is a factory, too; a schedule keeps the ratio of rates."""
    trainer = Trainer(
        gpt2(),
        arguments(tmp_path, lr_scheduler_type="linear", max_steps=4, save_strategy="no"),
        train_dataset=Texts(),
        optimizer_cls_and_kwargs=(
            lambda: MuonWithCoupledAdam,
            {"lr": 1e-3, "groups": {"lr_factor": 5}},
        ),
    )
    seen = []
    trainer.add_callback(Rates(seen))
    trainer.train()
    assert seen == [pytest.approx([1e-3 * f, 5e-3 * f, 1e-3 * f]) for f in SCHEDULE]


SCHEDULE = (1, 0.75, 0.5, 0.25)


class Rates(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_pre_optimizer_step(self, *_, optimizer, **__):
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def test_as_axolotl_calls_it(tmp_path):
    """With its arguments as a second argument, and options that go before them."""
    optimizer = CoupledAdamWFactory()(gpt2(), arguments(tmp_path), lr=3.0, eps=1e-5)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1, 0.0]
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {
        (3.0, (0.9, 0.95), 1e-5)
    }


def test_errors(tmp_path):
    with pytest.raises(TypeError, match=r"\{'args': training_arguments\}"):
        CoupledAdamWFactory()(gpt2())
    with pytest.raises(TypeError, match=r"'learning_rate'"):
        CoupledAdamWFactory()(gpt2(), lr=1.0, learning_rate=1.0)
    trainer = Trainer(
        gpt2(),
        arguments(tmp_path),
        train_dataset=Texts(),
        optimizer_cls_and_kwargs=(CoupledAdamWFactory, {"lr": 1.0}),
    )
    trainer.add_callback(GradNorm(trainer))
    with pytest.raises(ValueError, match=r"no max_grad_norm.*max_grad_norm=0"):
        trainer.train()
