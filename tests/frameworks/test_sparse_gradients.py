"""Sparse gradients in the frameworks that clip them: the norms are those of a dense table."""

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
)

from coupled_adam import LEAN, CoupledAdamW, clip_grad_norm_
from coupled_adam.transformers import use_coupled_adam
from frameworks.test_transformers import arguments

STEPS, RATE = 4, 1e-2
LEAN_SPARSE = LEAN | {"zero_sum": False}  # so that a dense table has the same updates


class Model(PreTrainedModel):
    """Embeddings beside a table of hashed bigrams."""

    config_class = PretrainedConfig

    def __init__(self, config=None, sparse=True):
        super().__init__(config or PretrainedConfig())
        torch.manual_seed(0)
        self.wte = nn.Embedding(96, 8)
        self.bigrams = nn.Embedding(4096, 8, sparse=sparse)
        self.head = nn.Linear(8, 96, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None):
        before = torch.roll(input_ids, 1, dims=1)
        x = self.wte(input_ids) + self.bigrams((input_ids * 96 + before) % 4096)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


TEXTS = [
    {"input_ids": ids, "labels": ids}
    for ids in torch.randint(96, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
]


def optimizer_of(model):
    options = LEAN_SPARSE | {"lr_factor": 1.0}
    if not model.bigrams.sparse:  # which is told by its gradients otherwise
        return CoupledAdamW(model, lr=RATE, embeddings=options, vocab_size=[96, 4096])
    return CoupledAdamW(model, lr=RATE, embeddings=options)


def by_hand(sparse, max_norm):
    """A loop; the model, and the norms before clipping."""
    model, norms = Model(sparse=sparse), []
    optimizer = optimizer_of(model)
    for batch in DataLoader(TEXTS, batch_size=4):
        model(**batch)["loss"].backward()
        norms.append(float(clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def assert_same(model, expected):
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def in_trainer(folder, max_norm):
    model = Model()
    options = {"max_steps": STEPS, "learning_rate": RATE, "max_grad_norm": max_norm}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    options |= {"weight_decay": 0.01, "adam_beta2": 0.999, "save_strategy": "no"}
    trainer = Trainer(model, arguments(folder, **options), train_dataset=TEXTS)
    use_coupled_adam(trainer, embeddings=LEAN_SPARSE | {"lr_factor": 1.0})
    trainer.train()
    return model, [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]


def in_accelerate(_, max_norm):
    accelerator = Accelerator(cpu=True)
    model, norms = Model(), []
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    for batch in DataLoader(TEXTS, batch_size=4):
        accelerator.backward(prepared(**batch)["loss"])
        norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return optimizer_of(self.model)


def in_lightning(folder, max_norm):
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=max_norm,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TEXTS, batch_size=4))
    return module.model, None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_norm", [0.005, 0.0], ids=["clipped", "logged alone"])
@pytest.mark.parametrize("framework", [in_trainer, in_accelerate, in_lightning])
def test_clips_as_a_dense_table(framework, max_norm, tmp_path):
    """A norm of 0 clips nothing, but the trainer computes the norm for its log."""
    bound = max_norm or torch.inf
    expected, expected_norms = by_hand(sparse=False, max_norm=bound)
    assert min(expected_norms) > 0.005
    if max_norm:  # what does not clip would be noticed
        with pytest.raises(AssertionError, match="not close"):
            assert_same(by_hand(sparse=True, max_norm=torch.inf)[0], expected)
    model, norms = framework(tmp_path, bound if framework is in_accelerate else max_norm)
    if norms is not None:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert_same(model, expected)
    assert_same(by_hand(sparse=True, max_norm=bound)[0], expected)


# --- the per-layer tables of Gemma ---

SMALL = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "sliding_window": 8,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
LAUREL = {"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2}


def gemma(version, sparse):
    torch.manual_seed(0)
    if version == "4":
        model = Gemma4ForCausalLM(Gemma4TextConfig(**SMALL))
    else:
        options = SMALL | LAUREL | {"activation_sparsity_pattern": [0.0, 0.0]}
        model = Gemma3nForCausalLM(Gemma3nTextConfig(**options))
    model.model.embed_tokens_per_layer.sparse = sparse
    return model.double()


def train(model, **options):
    optimizer = CoupledAdamW(model, lr=RATE, **options)
    for batch in DataLoader(TEXTS, batch_size=4):
        model(**batch).loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("version", ["4", "3n"])
def test_per_layer_tables(version):
    """As with a dense gradient; the tied embeddings beside it keep theirs."""
    models = [gemma(version, sparse) for sparse in (True, False)]
    optimizers = [train(model, embeddings=LEAN_SPARSE) for model in models]
    states = [o.state[m.model.embed_tokens_per_layer.weight] for o, m in zip(optimizers, models)]
    assert ["row_count" in state for state in states] == [True, False]
    assert "row_count" not in optimizers[0].state[models[0].model.embed_tokens.weight]
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


@pytest.mark.slow  # with the packages of tests/frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", ["4", "3n"])
def test_per_layer_tables_with_peft(version):
    """PEFT's copy of a table is sparse as well; of some of its rows only where the table is not."""
    peft = pytest.importorskip("peft")

    def adapted(sparse, **options):
        config = peft.LoraConfig(target_modules=["q_proj"], **options)
        return peft.get_peft_model(gemma(version, sparse), config)

    copied = adapted(True, modules_to_save=["embed_tokens_per_layer"])
    (state,) = (x for x in train(copied, embeddings="lean").state.values() if "row_step" in x)
    assert state["row_exp_avg_sq"].shape == (96,)
    rows = {"trainable_token_indices": {"embed_tokens_per_layer": [1, 2, 3]}}
    assert not any(group["coupled"] for group in train(adapted(False, **rows)).param_groups)
    with pytest.raises(RuntimeError, match="unsupported for Sparse"):  # PEFT's sum of the two
        train(adapted(True, **rows))
