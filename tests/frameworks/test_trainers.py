"""The frameworks' own trainers, from their entry points to the last step, in real processes.

The same file is the program of each, which is told the framework and a folder.
"""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coupled_adam import LEAN, CoupledAdamW, param_groups

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[UNK]", "[EOS]", *"abcdefghijklm"]
V, H, STEPS = len(WORDS), 32, 2
TEXTS = ["a b c d e f", "f e d c b a", "g h i j k l", "m l k j i h"] * 4


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)


def save_llama(folder):
    """A folder as a model of the hub, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": H, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"vocab_size": V, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**size, **heads, **tokens)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_chats(path, content):
    """Each text as a question and its answer, whose text ``content`` makes a field of."""
    chats = (
        [{"role": role, "content": content(text)} for role in ("user", "assistant")]
        for text in TEXTS
    )
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def stand_in(package, *modules):
    for name in (package, *(f"{package}.{module}" for module in modules)):
        sys.modules[name] = mock.MagicMock()


class TwoMatrices(torch.nn.Module):
    """What a training loop of one's own may have as a model: embeddings, a layer and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = torch.nn.Embedding(V, H), torch.nn.Linear(H, H)
        self.head = torch.nn.Linear(H, V, bias=False)

    def forward(self, ids):
        return self.head(self.hidden(self.embed(ids)))


def litgpt(folder):
    """Its trainer, ``pretrain``."""
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from torch.utils.data import DataLoader

    class Numbers(DataModule):
        def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
            pass

        def train_dataloader(self):
            return DataLoader(torch.arange(8 * 9).reshape(8, 9) % V, 2)

        val_dataloader = train_dataloader

    options = {"vocab_size": V, "embeddings": "lean", "lr": 1e-2}
    sys.argv.append("tiny")  # which it parses once more, to save it beside the model
    pretrain.setup(
        "tiny",
        Config(name="tiny", padded_vocab_size=V, n_layer=1, n_head=2, n_embd=H, block_size=8),
        out_dir=folder / "out",
        precision="32-true",
        data=Numbers(),
        train=TrainArgs(
            global_batch_size=2,
            micro_batch_size=2,
            max_tokens=STEPS * 16,
            max_norm=1.0,
            lr_warmup_steps=1,
        ),
        eval=EvalArgs(interval=100, max_iters=1),
        optimizer={"class_path": "coupled_adam.CoupledAdamW", "init_args": options},
        devices=1,
        logger_name="csv",
    )


def ms_swift(folder):
    """Its trainer, ``sft_main``."""
    from swift import sft_main

    (folder / "plugin.py").write_text("import coupled_adam.integrations.ms_swift\n")
    options = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "dataset": folder / "data.jsonl",
        "external_plugins": folder / "plugin.py",
        "optimizer": "coupled_adamw",
        "optim_args": "embeddings=lean",
        "optim": "adamw_bnb_8bit",
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "torch_dtype": "float32",
        "output_dir": folder / "out",
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_num_workers": 0,
    }
    sft_main([word for name, value in options.items() for word in (f"--{name}", str(value))])


def olmo_core(folder):
    """Its trainer."""
    from olmo_core.data.data_loader import TextDataLoaderBase
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    from coupled_adam.integrations.olmo_core import CoupledAdamWConfig, coupled_matrices

    class Numbers(TextDataLoaderBase):
        total_batches = STEPS

        def _iter_batches(self):
            for step in range(STEPS):
                yield {"input_ids": torch.arange(step, step + 16).reshape(2, 8) % V}

        def get_mock_batch(self):
            return {"input_ids": torch.zeros(2, 8, dtype=torch.long)}

        def reshuffle(self, epoch=None, **_):
            self._epoch = epoch or 1

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    sizes = {"d_model": H, "vocab_size": V, "n_layers": 1, "n_heads": 2}
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=16,
        max_sequence_length=8,
        max_grad_norm=1.0,
        optim=CoupledAdamWConfig(lr=1e-2, group_overrides=[coupled_matrices("lean")]),
    ).build(TransformerConfig.llama_like(**sizes).build())
    numbers = Numbers(collator=None, work_dir=folder, global_batch_size=16)
    duration = Duration.steps(STEPS)
    TrainerConfig(str(folder / "out"), max_duration=duration).build(module, numbers).fit()


def timm(folder):
    """``create_optimizer_v2``, on a model with embeddings, in a loop of our own."""
    # It needs CUDA's libraries. timm imports it, and its optimizers do not use it.
    stand_in("torchvision", "datasets", "ops", "ops.misc", "transforms", "transforms.functional")
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    default_registry.register(OptimInfo("coupledadamw", CoupledAdamW, has_betas=True))
    model = TwoMatrices()
    optimizer = create_optimizer_v2(
        model,
        "coupledadamw",
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        param_group_fn=lambda model: param_groups(model, "lean", vocab_size=V),
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]
    for _ in range(STEPS):
        model(torch.arange(V)).logsumexp(1).sum().backward()
        optimizer.step()


def sentence_transformers(folder):
    """Its trainer with the callback, whose names are those of input embeddings."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        losses,
        models,
    )
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    from coupled_adam.embeddings.transformers import EmbeddingMeasures

    transformer = models.Transformer(str(folder / "model"))
    model = SentenceTransformer(modules=[transformer, models.Pooling(H)], device="cpu")
    trainer = SentenceTransformerTrainer(
        model,
        Arguments(str(folder / "out"), max_steps=STEPS, use_cpu=True, report_to="none"),
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.add_callback(EmbeddingMeasures(trainer, every=1))
    trainer.train()
    names = {name for line in trainer.state.log_history for name in line if "embeddings" in name}
    assert "input_embeddings/isotropy" in names
    assert all(name.startswith("input_embeddings/") for name in names), names


def llama_factory(folder):
    """The launcher of its trainer, v1, in each of torchrun's two processes."""
    torch.accelerator.synchronize = lambda: None  # which on a CPU it would call in vain
    (folder / "config.yaml").write_text(f"""
    model: {folder}/model
    template: chatml
    train_dataset: {folder}/texts.jsonl
    output_dir: {folder}/out
    max_steps: {STEPS}
    batching_workers: 0
    bf16: false
    enable_activation_checkpointing: false
    optim_config: {{name: coupled_adamw, lr: 1.0e-2, weight_decay: 0.3, embeddings: lean}}
    """)
    sys.argv[1:] = ["sft", str(folder / "config.yaml")]
    runpy.run_module("coupled_adam.integrations.llama_factory", run_name="__main__")


PROGRAMS = {
    "litgpt": "litgpt",
    "llama_factory": "llamafactory",
    "ms_swift": "swift",
    "olmo_core": "olmo_core",
    "sentence_transformers": "sentence_transformers",
    "timm": "timm",
}
"""The functions above, and the package that each needs."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_trainer(name, tmp_path, frameworks_in_processes):
    if importlib.util.find_spec(PROGRAMS[name]) is None:
        pytest.skip("not installed")
    save_llama(tmp_path / "model")
    save_chats(tmp_path / "data.jsonl", str)
    save_chats(tmp_path / "texts.jsonl", lambda text: [{"type": "text", "value": text}])
    start = [sys.executable]
    if name == "llama_factory":
        start += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # litgpt compiles its model
    subprocess.run([*start, __file__, name, tmp_path], check=True, env=environment)


if __name__ == "__main__":
    steps = []
    register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    name, folder = sys.argv.pop(1), Path(sys.argv.pop(1))
    globals()[name](folder)
    # The last word: LEAN has taken all steps, and nothing else has taken any.
    # OLMo-core first saves the state, and torch creates it by a step with a learning rate of 0.
    assert len(steps) == STEPS + (name == "olmo_core"), steps
    assert len({*map(id, steps)}) == 1
    optimizer = steps[0]
    if name == "sentence_transformers":  # where the page has no use for coupling
        sys.exit()
    assert isinstance(optimizer, CoupledAdamW)
    core = "bitsandbytes" if name == "ms_swift" else "builtins"  # None's
    assert type(optimizer.core).__module__.startswith(core)
    groups = [group for group in optimizer.param_groups if group["coupled"]]
    coupled = [p for group in groups for p in group["params"]]
    assert [tuple(p.shape) for p in coupled] == [(V, H)] * 2
    lean = {name: LEAN[name] for name in ("betas", "row_exponent", "zero_sum")}
    assert all(lean.items() <= group.items() for group in groups)
    if name == "llama_factory":
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}
    for p in coupled:
        shapes = {key: tuple(value.shape) for key, value in optimizer.state[p].items()}
        expected = {"step": (), "exp_avg_sq": (H,), "row_exp_avg_sq": (V,), "mean_update": (H,)}
        assert shapes == expected
