"""What a step of LEAN waits for other ranks, with gloo on one machine, where rows are split.

    torchrun --nproc-per-node 4 benchmarks/sharded.py

Rank 0 writes the milliseconds of a step, and of the all-reduces in it, to ``results/sharded.json``;
medians over the steps. Each process has one thread.
"""

import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench.machine import describe_machine
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from coupled_adam import LEAN, CoupledAdamW
from coupled_adam.optim import sharded

SHAPES, STEPS = ((8192, 512), (50304, 768)), 40
RESULTS = Path(__file__).parent / "results" / "sharded.json"


def timed(shape: tuple[int, int]) -> dict[str, float]:
    """Milliseconds of a step, and of its two all-reduces, waits for the slowest rank included."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    p = nn.Parameter(distribute_tensor(0.02 * torch.randn(shape), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
    options = {name: value for name, value in LEAN.items() if name != "lr_factor"}
    optimizer = CoupledAdamW([{"params": [p], "coupled": True, **options}], weight_decay=0.0)
    steps, waits = [], [0.0]
    reduce = sharded.all_reduced

    def measured(*args: object) -> torch.Tensor:
        began = time.perf_counter()
        total = reduce(*args)
        waits[-1] += time.perf_counter() - began
        return total

    sharded.all_reduced = measured
    for _ in range(STEPS):
        dist.barrier()
        waits.append(0.0)
        began = time.perf_counter()
        optimizer.step()
        steps.append(time.perf_counter() - began)
    sharded.all_reduced = reduce
    return {
        "step": 1000 * statistics.median(steps[5:]),
        "all-reduces": 1000 * statistics.median(waits[6:]),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, machine = dist.get_world_size(), describe_machine("cpu").to_dict()
    times = {f"{rows} x {columns}": timed((rows, columns)) for rows, columns in SHAPES}
    if dist.get_rank() == 0:
        content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        content[f"{ranks} ranks"] = {"machine": machine, **times}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")
        print(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
