"""TRL and sentence-transformers, whose trainers are subclasses of Hugging Face's."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from coupled_adam.embeddings import analyze
from coupled_adam.embeddings.transformers import EmbeddingMeasures
from coupled_adam.transformers import CoupledAdamWFactory, GradNorm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are the packages'

WORDS = ["[PAD]", "[UNK]", "[EOS]", *"abcdefghij"]
V = len(WORDS)
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


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(cls, **options):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    return cls(LlamaConfig(**SIZE, **special, num_attention_heads=2, **options))


def trained(trainer, coupled):
    """Which matrices were coupled, and that the norm of the clipping was logged."""
    trainer.add_callback(GradNorm(trainer))
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    groups = [g for g in optimizer.param_groups if g["coupled"]]
    assert {name for g in groups for name in g["param_names"]} == coupled
    assert all(optimizer.state[p]["exp_avg_sq"].shape == (8,) for g in groups for p in g["params"])
    logged = [line for line in trainer.state.log_history if "optimizer/grad_norm" in line]
    assert [line["step"] for line in logged] == [1, 2]


def test_sft(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    args = trl.SFTConfig(str(tmp_path), **TRAINING, max_grad_norm=0.0, bf16=False)
    trainer = trl.SFTTrainer(
        llama(LlamaForCausalLM),
        args,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(CoupledAdamWFactory, {"args": args, "max_grad_norm": 1.0}),
    )
    trained(trainer, {"model.embed_tokens.weight", "lm_head.weight"})


def test_reward(tmp_path):
    """The score has no vocabulary, so the input embeddings alone are coupled."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    args = trl.RewardConfig(str(tmp_path), **TRAINING, max_grad_norm=0.0, bf16=False)
    pairs = {"chosen": TEXTS, "rejected": TEXTS[::-1]}
    trainer = trl.RewardTrainer(
        llama(LlamaForSequenceClassification, num_labels=1),
        args,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(CoupledAdamWFactory, {"args": args, "max_grad_norm": 1.0}),
    )
    trained(trainer, {"model.embed_tokens.weight"})


def test_sentence_transformers(tmp_path):
    """The microscope's callback: a contrastive loss has no softmax over a vocabulary."""
    st = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.models import Pooling, Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    torch.manual_seed(0)
    bert = BertModel(BertConfig(**SIZE, num_attention_heads=2, max_position_embeddings=16))
    bert.save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    model = st.SentenceTransformer(
        modules=[Transformer(str(tmp_path / "bert")), Pooling(8)], device="cpu"
    )
    trainer = st.SentenceTransformerTrainer(
        model,
        st.SentenceTransformerTrainingArguments(str(tmp_path / "run"), **TRAINING),
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]}),
        loss=MultipleNegativesRankingLoss(model),
    )
    table = model[0].auto_model.embeddings.word_embeddings
    trainer.add_callback(
        EmbeddingMeasures(trainer, 1, embeddings=lambda _: {"output": table.weight})
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "embeddings/mean_norm" in line]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["embeddings/mean_norm"] == analyze(table.weight).mean_norm
