"""Hugging Face's ``Trainer`` and the trainers built on it, with our line and with a class."""

import functools
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import token_models
from coupled_adam import LEAN, CoupledAdamW, param_groups
from coupled_adam.transformers import CoupledAdamWFactory, use_coupled_adam

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
    for ids in Texts.ids.split(2 * ACCUMULATED):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


EMBEDDINGS = {"lr_factor": 2, "betas": (0.5, 0.99)}


def test_trainer(tmp_path):
    """As a plain loop, with accumulation; the rate that is logged is the user's."""
    options = {"embeddings": EMBEDDINGS, "embedding_weight_decay": 0.2}
    trainer = Trainer(
        gpt2().double(),  # so that noise in gradients of zero, which Adam amplifies, is below eps
        arguments(tmp_path),
        train_dataset=Texts(),
    )
    use_coupled_adam(trainer, **options)
    trainer.train()
    model = gpt2().double()
    optimizer = CoupledAdamW(
        param_groups(model, **options), 1e-2, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    (coupled,) = (group for group in optimizer.param_groups if group["coupled"])
    assert (coupled["lr"], coupled["betas"]) == (2e-2, (0.5, 0.99))
    by_hand(model, optimizer)
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=name)
    logged = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert logged == [1e-2] * STEPS
    with pytest.raises(ValueError, match=r"has an optimizer already.*before train"):
        use_coupled_adam(trainer)


class OwnOptimizer(Trainer):
    """Makes its optimizer as many public projects do, whatever it has been given."""

    def create_optimizer(self, *_):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class OwnClass(Trainer):
    """Takes a class of an optimizer where a factory may be, from its arguments."""

    def create_optimizer(self, *_):
        if self.optimizer is None:
            cls, options = Trainer.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = cls([{"params": [*self.model.parameters()]}], **options)
        return self.optimizer


@pytest.mark.parametrize("trainer_class", [OwnOptimizer, OwnClass])
def test_a_trainer_that_makes_its_own_optimizer(trainer_class, tmp_path):
    """It does not train, and the two lines of the message let it."""
    model, args = gpt2(), arguments(tmp_path)
    trainer = trainer_class(model, args, train_dataset=Texts())
    use_coupled_adam(trainer, embeddings="lean")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=rf"{trainer_class.__name__} makes its own .*AdamW"):
        trainer.train()
    assert all(map(torch.equal, before, model.parameters()))
    trainer = trainer_class(model, args, train_dataset=Texts())
    trainer.optimizer = CoupledAdamWFactory()(model, args, embeddings="lean")
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, CoupledAdamW)


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"max_steps": 2500}, 2500), ({"max_steps": -1, "num_train_epochs": 500}, 3000)],
)
@pytest.mark.parametrize("in_text", [False, True])
def test_auto_steps(options, steps, in_text, tmp_path):
    """The number that the trainer will take; the factor is in its log."""
    if in_text:
        options = options | {"optim_args": "embeddings=lean,steps=auto"}
    trainer = Trainer(
        gpt2(), arguments(tmp_path, **options), train_dataset=Texts(), callbacks=[Stops()]
    )
    use_coupled_adam(trainer, **({} if in_text else {"embeddings": "lean", "steps": "auto"}))
    trainer.train()
    assert trainer.state.max_steps == steps
    (coupled,) = (g for g in trainer.optimizer.param_groups if g["coupled"])
    assert coupled["initial_lr_factor"] == 30_000 / steps
    assert {"embedding_lr_factor": 30_000 / steps}.items() <= trainer.state.log_history[0].items()


class RunsOutOfMemory(transformers.GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None, **more):
        if len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids=input_ids, labels=labels, **more)


def test_auto_steps_with_a_batch_size_that_is_found(tmp_path):
    """The first batch does not fit: half of it, twice the steps, and so half the factor."""
    options = {"max_steps": -1, "num_train_epochs": 500, "auto_find_batch_size": True}
    options |= {"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"}

    model = RunsOutOfMemory(gpt2().config)
    args = arguments(tmp_path, **options)
    trainer = Trainer(model, args, train_dataset=Texts(), callbacks=[Stops()])
    use_coupled_adam(trainer, embeddings="lean", steps="auto")
    trainer.train()
    assert trainer.state.max_steps == 12_000
    first, *_, coupled = trainer.optimizer.param_groups
    assert (coupled["initial_lr_factor"], coupled["lr_factor_from"]) == (2.5, "steps=12000")
    assert coupled["lr"] == pytest.approx(2.5 * first["lr"])
    assert trainer.state.log_history[0]["embedding_lr_factor"] == 2.5


def test_a_model_where_a_trainer_is_meant():
    with pytest.raises(TypeError, match="trainer must be a Trainer, not GPT2LMHeadModel"):
        use_coupled_adam(gpt2())


def test_auto_steps_of_an_unknown_number(tmp_path):
    args = arguments(tmp_path, max_steps=-1)
    with pytest.raises(ValueError, match="steps='auto' needs max_steps"):
        CoupledAdamWFactory()(gpt2(), args, embeddings="lean", steps="auto")


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_by_position(by_name, tmp_path):
    """Some trainers give them so, and what they were given by name as well."""
    args = arguments(tmp_path, learning_rate=0.25)
    options = {"args": args} if by_name else {}
    optimizer = CoupledAdamWFactory()(gpt2(), args, embeddings="lean", **options)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_line_leaves_the_random_numbers_alone(tmp_path):
    trainer = Trainer(gpt2(), arguments(tmp_path), train_dataset=Texts())
    before = torch.get_rng_state()
    use_coupled_adam(trainer, embeddings="lean", steps="auto")
    assert torch.equal(before, torch.get_rng_state())


def test_options_in_text(tmp_path):
    args = arguments(tmp_path, optim_args="embeddings=lean, maximize=True, second_moment_scale=0.5")
    groups = CoupledAdamWFactory()(gpt2(), args, eps=1e-5).param_groups
    assert {(g["fused"], g["lr"], g["eps"]) for g in groups if not g["coupled"]} == {
        (True, 1e-2, 1e-5)
    }
    assert {(g["maximize"], g["second_moment_scale"]) for g in groups} == {(True, 0.5)}
    assert [g["row_exponent"] for g in groups if g["coupled"]] == [LEAN["row_exponent"]]
    text = "betas=(0.8, 0.9), embeddings={'lr_factor': 4, 'betas': [0.0, 0.99]}, amsgrad=True,"
    *others, coupled = CoupledAdamWFactory()(
        gpt2(), arguments(tmp_path, optim_args=text)
    ).param_groups
    assert {(g["lr"], g["betas"]) for g in others} == {(1e-2, (0.8, 0.9))}
    assert (coupled["lr"], coupled["betas"], coupled["amsgrad"]) == (4e-2, (0.0, 0.99), True)
    with pytest.raises(TypeError, match=r"\{'args': training_arguments\}"):
        CoupledAdamWFactory()(gpt2())


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("", {"embedding": "lean"}, TypeError, r"no option 'embedding': did .*\['embeddings"),
        ("", {"embeddings": "laen"}, ValueError, "Invalid embeddings value: 'laen'"),
        ("embeddings=laen", {}, ValueError, "Invalid embeddings value: 'laen'"),
        ("row_exponnet=0.5", {}, TypeError, r"'row_exponnet': did you mean .'row_exponent"),
        ("lean", {}, ValueError, r"optim_args='lean' must be"),
        ("", {"model": None}, TypeError, "CoupledAdamW has no option 'model'"),
        ("", {"lr_factor": 2}, ValueError, "lr_factor=2 is an option of the embeddings"),
        ("eps=-1", {}, ValueError, "Invalid epsilon value: -1|eps"),
        ("vocab_dim=1", {}, ValueError, "vocab_dim=1 has no effect"),
        ("maximize=false", {}, ValueError, "Invalid maximize: 'false'"),
        ("", {"embeddings": "lean", "zero_sum": True}, ValueError, "zero_sum=True has no effect"),
    ],
)
def test_what_is_mistyped_is_refused_at_once(text, options, error, message, tmp_path):
    """And not when training begins: the trainer is as it was."""
    trainer = Trainer(gpt2(), arguments(tmp_path, optim_args=text), train_dataset=Texts())
    with pytest.raises(error, match=message):
        use_coupled_adam(trainer, **options)
    assert trainer.optimizer_cls_and_kwargs is None


def test_optim_args_need_the_line(tmp_path):
    """As the page says: without the line the trainer's optimizer is torch's."""
    args = arguments(tmp_path, optim_args="embeddings=lean")
    trainer = Trainer(gpt2(), args, train_dataset=Texts())
    assert type(trainer.create_optimizer()) is torch.optim.AdamW
    trainer = Trainer(gpt2(), args, train_dataset=Texts())
    use_coupled_adam(trainer)
    groups = trainer.create_optimizer().param_groups
    assert [g["row_exponent"] for g in groups if g["coupled"]] == [LEAN["row_exponent"]]


def test_trainer_resumes(tmp_path):
    """Bit for bit, from the state with one second moment for each column."""
    options = {"lr": 1e-2, "couple": "output"}

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


def test_adamws_checkpoint_in_the_trainer(tmp_path):
    """The trainer's AdamW has two groups: the error says how to transfer its state."""
    options = {"train_dataset": Texts(), "args": arguments(tmp_path, max_steps=1, save_steps=1)}
    Trainer(gpt2(), **options).train()
    options["args"].max_steps = 2
    use_coupled_adam(trainer := Trainer(gpt2(), **options), embeddings="lean")
    with pytest.raises(ValueError, match=r"param groups of .*transfer the state.*also for Trainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_page_names_the_versions_that_are_tried():
    root = Path(__file__).parents[2]
    pinned = (root / "constraints.txt").read_text()
    pinned += (Path(__file__).parent / "requirements.txt").read_text()
    pinned += (root / "Makefile").read_text().replace(" torchrec==", "\ntorchrec==")
    page = (root / "docs" / "frameworks.md").read_text()
    named = re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", page)
    assert len(named) > 10
    for name, version in named:
        assert re.search(rf"^{name}=={re.escape(version)}$", pinned, flags=re.M), name
