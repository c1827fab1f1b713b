"""LEAN for the token embeddings in a plain PyTorch loop: schedule, clipping and a checkpoint.

    python examples/pytorch_loop.py --steps 300 --checkpoint /tmp/run.pt

Run it again to continue from the checkpoint.
"""

import argparse
from pathlib import Path

import torch

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--stop-after", type=int, help="leave after so many steps, as if interrupted")
parser.add_argument("--optimizer", choices=["lean", "coupled", "adamw"], default="lean")
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
options = parser.parse_args()

model = small_gpt2()
# Finds the token embeddings; biases, norms and embeddings do not decay.
embeddings = "coupled" if options.optimizer == "adamw" else options.optimizer
steps = options.steps if embeddings == "lean" else None  # LEAN's rate follows from it
groups = param_groups(model, embeddings, steps=steps)
print(groups)
optimizer_class = torch.optim.AdamW if options.optimizer == "adamw" else CoupledAdamW
optimizer = optimizer_class(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

run = {"optimizer": options.optimizer, "steps": options.steps}
start = 0
if options.checkpoint.exists():
    saved = torch.load(options.checkpoint, weights_only=True)
    if saved["run"] != run:  # the schedule depends on the steps
        parser.error(f"{options.checkpoint} is of {saved['run']}: choose another --checkpoint")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    start = saved["step"]
    print(f"continuing after step {start} of {options.steps}")

for step in range(start, options.steps):
    ids = batch(step)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % 50 == 0 or step + 1 in (options.steps, options.stop_after):
        ratio = mean_norm_ratio(model.lm_head.weight)
        print(f"step {step + 1}: loss {loss.item():.3f}, relative mean norm {ratio:.3f}")
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "run": run,
            "step": step + 1,
        }
        temporary = options.checkpoint.with_suffix(".tmp")
        torch.save(saved, temporary)
        temporary.replace(options.checkpoint)
    if step + 1 == options.stop_after:
        break
