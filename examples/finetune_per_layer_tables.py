"""Finetune a small Gemma 4 whose per-layer table has sparse gradients: LEAN, with no AdamW state.

    python examples/finetune_per_layer_tables.py --steps 60 --out /tmp/gemma
    python examples/finetune_per_layer_tables.py --loop --dtype bfloat16

The first trains with the Hugging Face Trainer, the second in a loop. Both first take a step with
AdamW and dense gradients, and print what the embeddings need before and after the change. The model
has the classes of the real one in small sizes; with yours, load it with ``from_pretrained``.
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Trainer, TrainingArguments

from coupled_adam import CoupledAdamW, clip_grad_norm_, embedding_parameters
from coupled_adam.transformers import use_coupled_adam
from text import batch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--loop", action="store_true", help="a loop instead of the Trainer")
parser.add_argument("--out", default="finetuned")
options = parser.parse_args()

RATE, SIZE = 3e-3, 16
device = "cuda" if torch.cuda.is_available() else "cpu"


def pairs(step: int, size: int = SIZE) -> Tensor:
    """Token ids [size, 32] below 16,384: pairs of ASCII characters, of which a text has few."""
    first, second = batch(step, size).clamp(max=127).unflatten(1, (-1, 2)).unbind(2)
    return first * 128 + second


def gemma4() -> Gemma4ForCausalLM:
    """Embeddings [16384, 64], which are the head, too, and a per-layer table [16384, 4 x 64]."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=128**2,
        vocab_size_per_layer_input=128**2,
        hidden_size=64,
        hidden_size_per_layer_input=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=16,
    )
    return Gemma4ForCausalLM(config).to(device, getattr(torch, options.dtype))


def take_step(model: Gemma4ForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> float:
    """A step of the loop; the loss before it."""
    ids = pairs(step).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)  # sparse gradients, too
    optimizer.step()
    return float(loss)


def report(name: str, model: Gemma4ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Print what the two tables need: their state, and the gradients of a batch."""
    tables = embedding_parameters(model).values()
    state = sum(x.nbytes for p in tables for x in optimizer.state[p].values())
    optimizer.zero_grad()
    model(input_ids=pairs(0).to(device), labels=pairs(0).to(device)).loss.backward()
    gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in tables]
    size = sum(x.nbytes for x in gradients)
    print(f"{name}: {state / 1e6:.2f} MB of state, {size / 1e6:.2f} MB of gradients")


before = gemma4()
adamw = torch.optim.AdamW(before.parameters(), lr=RATE)
take_step(before, adamw, 0)
report("before, AdamW", before, adamw)
del before, adamw

model = gemma4()
model.model.embed_tokens_per_layer.sparse = True  # the one line of the model
rounding = options.dtype == "bfloat16"  # at random, so that small updates are kept on average
if options.loop:
    optimizer = CoupledAdamW(model, lr=RATE, embeddings="lean", stochastic_rounding=rounding)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = take_step(model, optimizer, step)
        if (step + 1) % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1}: loss {loss:.3f}")
    report("after, LEAN", model, optimizer)
else:

    class Pairs(Dataset):
        """A data set of sequences, one for each index."""

        def __len__(self) -> int:
            """The number of sequences that the training needs."""
            return SIZE * options.steps

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            """Input and labels of a sequence, [32] each."""
            ids = pairs(index, size=1)[0]
            return {"input_ids": ids, "labels": ids}

    args = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=SIZE,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=device == "cpu",
    )
    trainer = Trainer(model, args, train_dataset=Pairs())
    use_coupled_adam(trainer, embeddings="lean", stochastic_rounding=rounding)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"step {options.steps}: loss {losses[-1]:.3f}")
    report("after, LEAN", model, trainer.optimizer.optimizer)
