"""Muon for the hidden matrices, LEAN for the token embeddings, AdamW for everything else.

python examples/muon.py --steps 300
"""

import argparse

import torch

from coupled_adam import MuonWithCoupledAdam
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--embeddings", choices=["lean", "coupled", "adamw"], default="lean")
options = parser.parse_args()

model = small_gpt2()
# One learning rate suits both: Muon's updates are scaled to the size of AdamW's.
embeddings = "coupled" if options.embeddings == "adamw" else options.embeddings
steps = options.steps if embeddings == "lean" else None  # LEAN's rate follows from it
optimizer = MuonWithCoupledAdam(
    model, lr=3e-3, betas=(0.9, 0.95), embeddings=embeddings, steps=steps
)
if options.embeddings == "adamw":  # for comparison
    for group in optimizer.param_groups:
        group["coupled"] = False
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
for step in range(options.steps):
    ids = batch(step)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if (step + 1) % 50 == 0 or step + 1 == options.steps:
        ratio = mean_norm_ratio(model.lm_head.weight)
        print(f"step {step + 1}: loss {loss.item():.3f}, relative mean norm {ratio:.3f}")
