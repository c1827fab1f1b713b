"""A table of hashed trigrams that all processes of a node share, beside a small GPT-2 of each.

    torchrun --nproc-per-node 4 examples/shared_host_table.py --checkpoint /tmp/run.pt

Each process looks up the rows of its own sequences. The first one steps those that any process has
touched, as one process with all sequences would. Run it again to continue from the checkpoint.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.embeddings import mean_norm_ratio
from text import LENGTH, HashedTrigrams, batch, small_gpt2

SEQUENCES, WIDTH = 16, 64


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that all processes map, and that are freed with the last of them, also if killed."""
    place = [os.getpid(), os.memfd_create("shared") if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(place)
    path = "/proc/{}/fd/{}".format(*place)  # a file without a name, of Linux alone
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def of_all(gradient: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """The sparse gradient of all processes, which share rows [processes, n] and values [..., H]."""
    rank = dist.get_rank()
    rows[rank], values[rank] = gradient._indices()[0], gradient._values()
    dist.barrier()  # once all have written theirs
    return torch.sparse_coo_tensor(
        rows.view(1, -1), values.flatten(0, 1), gradient.shape, check_invariants=False
    )


def main() -> None:
    """Train, and save what rank 0 has, which is all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, default=Path("shared_host_table.pt"))
    options = parser.parse_args()
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        parser.error("the processes of other nodes cannot map the table: use one node")
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    share = SEQUENCES // processes

    table = shared(options.rows, WIDTH)
    rows = shared(processes, share * LENGTH, dtype=torch.long)
    values = shared(processes, share * LENGTH, WIDTH)
    model = nn.ModuleDict({"gpt2": small_gpt2(), "trigrams": HashedTrigrams(table)})
    weight = model["trigrams"].table.weight
    optimizer = CoupledAdamW(
        model, lr=3e-3, betas=(0.9, 0.95), embeddings="lean", steps=options.steps
    )
    start = 0
    if options.checkpoint.exists():
        # Mapped, so that a process reads only what it takes
        saved = torch.load(options.checkpoint, mmap=True, weights_only=True)
        model["gpt2"].load_state_dict(saved["gpt2"])
        optimizer.load_state_dict(saved["optimizer"])
        if rank == 0:
            table.copy_(saved["table"])
        else:
            del optimizer.state[weight]
        dist.barrier()
        start = saved["step"]
        print(f"continuing after step {start} of {options.steps}")

    for step in range(start, options.steps):
        ids = batch(step, SEQUENCES)[rank * share : (rank + 1) * share]
        inputs = model["gpt2"].transformer.wte(ids) + model["trigrams"](ids)
        loss = model["gpt2"](inputs_embeds=inputs, labels=ids).loss / processes
        loss.backward()
        for p in model["gpt2"].parameters():  # or DistributedDataParallel
            dist.all_reduce(p.grad)
        torch.nn.utils.clip_grad_norm_(model["gpt2"].parameters(), 1.0)
        whole = of_all(weight.grad, rows, values)
        weight.grad = whole if rank == 0 else None
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # the rows have been stepped, and the others may look them up
        if (step + 1) % options.save_steps == 0 or step + 1 == options.steps:
            dist.all_reduce(loss)
            if rank == 0:
                ratio = mean_norm_ratio(model["gpt2"].lm_head.weight)
                print(f"step {step + 1}: loss {loss:.3f}, relative mean norm {ratio:.3f}")
                saved = {
                    "gpt2": model["gpt2"].state_dict(),
                    "table": table,
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                }
                temporary = options.checkpoint.with_suffix(".tmp")
                torch.save(saved, temporary)
                temporary.replace(options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
