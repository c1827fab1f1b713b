"""TRL, whose trainers are subclasses of Hugging Face's, and PEFT."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import token_models
from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.transformers import CoupledAdamWFactory, use_coupled_adam
from frameworks.test_trainers import V, tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are the packages'

SIZE = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
TEXTS = ["a b c d e f", "f e d c b a", "g h i j a b", "b a j i h g"] * 2
TRAINING = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}


def llama(cls, **options):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    return token_models.llama(cls, **SIZE, **special, **options)


def trained(trainer, coupled):
    """Which matrices were coupled, and that the user's rate was logged."""
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    groups = [g for g in optimizer.param_groups if g["coupled"]]
    assert {name for g in groups for name in g["param_names"]} == coupled
    assert all(optimizer.state[p]["exp_avg_sq"].shape == (8,) for g in groups for p in g["params"])
    logged = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert logged[0]["learning_rate"] == TRAINING["learning_rate"]


def test_reward(tmp_path):
    """The score has no vocabulary, so the input embeddings alone are coupled."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    args = trl.RewardConfig(str(tmp_path), **TRAINING, bf16=False)
    pairs = {"chosen": TEXTS, "rejected": TEXTS[::-1]}
    trainer = trl.RewardTrainer(
        llama(LlamaForSequenceClassification, num_labels=1),
        args,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(CoupledAdamWFactory, {"args": args, "embeddings": "lean"}),
    )
    trained(trainer, {"model.embed_tokens.weight"})


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO"])
def test_the_line_for_every_trainer(name, tmp_path):
    """Those without the argument take the attribute."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    options = {**TRAINING, "bf16": False}
    data, more = {"prompt": ["a b"] * 8}, {}
    if name == "SFT":
        data = {"text": TEXTS}
    elif name == "DPO":
        data |= {"chosen": TEXTS, "rejected": TEXTS[::-1]}
    elif name == "KTO":
        data |= {"completion": TEXTS, "label": [True, False] * 4}
    else:
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
        options |= {"per_device_train_batch_size": 4, "num_generations": 4}
        options["max_completion_length"] = 4
    llama(LlamaForCausalLM).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = getattr(trl, f"{name}Config")(str(tmp_path / "run"), **options)
    trainer = getattr(trl, f"{name}Trainer")(
        LlamaForCausalLM.from_pretrained(tmp_path / "model"),  # where DPO looks for its reference
        args=args,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **more,
    )
    use_coupled_adam(trainer, embeddings="lean")
    trained(trainer, {"model.embed_tokens.weight", "lm_head.weight"})


EMBEDDING = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
HEAD = "base_model.model.lm_head.modules_to_save.default.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("options", "coupled"),
    [
        ({}, set()),
        ({"modules_to_save": ["embed_tokens"]}, {EMBEDDING}),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, {EMBEDDING, HEAD}),
        (
            {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
            {EMBEDDING, HEAD},
        ),
        ({"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}}, set()),
    ],
)
def test_peft(options, coupled, tied):
    """What is trained of whole matrices is coupled, once where it stays tied; and nothing else."""
    peft = pytest.importorskip("peft")
    model = llama(LlamaForCausalLM, tie_word_embeddings=tied)
    chosen = copy.deepcopy(options)  # which PEFT changes
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **chosen)
    adapted = peft.get_peft_model(model, config)
    if tied and "ensure_weight_tying" in options:
        coupled = {EMBEDDING}
    optimizer = CoupledAdamW(param_groups(adapted), lr=1e-2)
    groups = [group for group in optimizer.param_groups if group["coupled"]]
    assert {name for group in groups for name in group["param_names"]} == coupled
    ids = torch.arange(8)[None]
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert coupled <= changed
    assert not any("original_module" in name for name in changed)
