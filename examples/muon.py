"""Muon for the hidden matrices, Coupled Adam for the embeddings, AdamW for the rest.

python examples/muon.py --steps 300
"""

import argparse

import torch

from coupled_adam import MuonWithCoupledAdam
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--embeddings", choices=["coupled", "adamw"], default="coupled")
options = parser.parse_args()

model = small_gpt2()
# One learning rate suits both: Muon's updates are scaled to the size of AdamW's.
# embeddings={"lr_factor": 4} gives the embeddings a rate of their own.
optimizer = MuonWithCoupledAdam(model, lr=3e-3, betas=(0.9, 0.95))
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
