"""LEAN for the token embeddings with Accelerate: accumulation, clipping, saving and loading.

    accelerate launch examples/accelerate_loop.py --steps 300 --out /tmp/accelerate

Run it again to continue from the saved state.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator

from coupled_adam import CoupledAdamW
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--stop-after", type=int, help="leave after so many steps, as if interrupted")
parser.add_argument("--out", type=Path, default=Path("accelerate"))
options = parser.parse_args()

ACCUMULATE = 2
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=not torch.cuda.is_available())
model = small_gpt2()
optimizer = CoupledAdamW(
    model,
    lr=3e-3,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    embeddings="lean",
    steps=options.steps,
    fused=True,
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(scheduler)

state = options.out / "state"
if state.exists():
    accelerator.load_state(state)
start = scheduler.last_epoch

share = 16 // (ACCUMULATE * accelerator.num_processes)  # sequences per forward pass
for step in range(start, options.steps):
    for part in range(ACCUMULATE):
        first = (part * accelerator.num_processes + accelerator.process_index) * share
        ids = batch(step)[first : first + share].to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    if step + 1 in (options.steps, options.stop_after):
        accelerator.save_state(state)
        break

whole = accelerator.unwrap_model(model)
ratio = mean_norm_ratio(whole.lm_head.weight)
accelerator.print(f"step {step + 1}: loss {loss.item():.3f}, relative mean norm {ratio:.3f}")
if accelerator.is_main_process:
    whole.save_pretrained(options.out / "model")
accelerator.end_training()
