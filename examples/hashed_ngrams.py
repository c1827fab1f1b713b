"""A table larger than the vocabulary: hashed trigrams in host memory, beside a small GPT-2.

    python examples/hashed_ngrams.py --steps 300
    python examples/hashed_ngrams.py --steps 300 --rows 0   # without the table

The model is on a GPU if there is one, and the table stays on the CPU.
"""

import argparse

import torch
from torch import nn

from coupled_adam import CoupledAdamW, clip_grad_norm_, param_groups
from text import HashedTrigrams, batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--rows", type=int, default=1_000_000)
options = parser.parse_args()


device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.ModuleDict({"gpt2": small_gpt2().to(device)})
if options.rows:
    model["trigrams"] = HashedTrigrams(torch.zeros(options.rows, 64))
groups = param_groups(model, "lean", steps=options.steps)
print(groups)  # the table has a group of its own, without zero_sum
optimizer = CoupledAdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

for step in range(options.steps):
    ids = batch(step).to(device)
    inputs = model["gpt2"].transformer.wte(ids)
    if options.rows:
        inputs = inputs + model["trigrams"](ids)
    loss = model["gpt2"](inputs_embeds=inputs, labels=ids).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)  # sparse gradients, too
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 50 == 0 or step + 1 == options.steps:
        print(f"step {step + 1}: loss {loss.item():.3f}")

if options.rows:
    state = optimizer.state[model["trigrams"].table.weight]
    size = sum(x.nbytes for x in state.values())
    touched = int(state["row_count"])
    bytes_a_row = size / options.rows
    print(
        f"{touched:,} rows were trained, with {bytes_a_row:.1f} bytes of state a row of the table"
    )
