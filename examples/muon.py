"""Muon for the hidden matrices, Coupled Adam for the embeddings, AdamW for the rest.

python examples/muon.py --steps 300
"""

import argparse

import torch

from coupled_adam import CoupledAdamW, embedding_parameters, param_groups
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--embeddings", choices=["coupled", "adamw"], default="coupled")
options = parser.parse_args()

model = small_gpt2()
# Muon is for matrices that map hidden states to hidden states: in GPT-2, those of the blocks.
hidden = [p for p in model.transformer.h.parameters() if p.dim() == 2]
muon = torch.optim.Muon(hidden, lr=2e-2, weight_decay=0.1)

# param_groups takes all trainable parameters, so those of Muon are frozen during the call.
for p in hidden:
    p.requires_grad_(False)
groups = param_groups(model)
for p in hidden:
    p.requires_grad_(True)
print(groups)
if options.embeddings == "coupled":
    adam = CoupledAdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    coupled = [p for g in adam.param_groups if g["coupled"] for p in g["params"]]
    assert coupled == list(embedding_parameters(model).values())
else:
    adam = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

optimizers = [muon, adam]
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, options.steps) for o in optimizers]
for step in range(options.steps):
    ids = batch(step)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for schedule in schedules:
        schedule.step()
    if (step + 1) % 50 == 0 or step + 1 == options.steps:
        ratio = mean_norm_ratio(model.lm_head.weight)
        print(f"step {step + 1}: loss {loss.item():.3f}, relative mean norm {ratio:.3f}")
