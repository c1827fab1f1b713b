"""Time what a step of two tiny matrices takes the host, in pairs with torch's fused AdamW.

    python benchmarks/host.py

That is what a step costs where the matrices are small, or a GPU waits for the host. Of each
optimizer, steps alternate with AdamW's, and the smallest of many times counts: whatever else the
machine does only adds to it.
"""

import time

import torch
from torch import nn

from coupled_adam import LEAN, CoupledAdamW

PAIRS, STEPS, MATRICES = 500, 5, 2


def time_of(optimizer: torch.optim.Optimizer) -> float:
    """Microseconds of one step."""
    start = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (time.perf_counter() - start) / STEPS * 1e6


def main() -> None:
    """Print a line for each optimizer."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    optimizers = {"Coupled Adam": {"coupled": True}, "LEAN": {"coupled": True, **LEAN}}
    for name, options in optimizers.items():
        parameters = [nn.Parameter(torch.randn(8, 4, device=device)) for _ in range(MATRICES)]
        for p in parameters:
            p.grad = torch.randn_like(p)
        adamw = torch.optim.AdamW(parameters, fused=True)
        ours = CoupledAdamW([{"params": parameters, **options}], fused=True)
        times = [(time_of(adamw), time_of(ours)) for _ in range(PAIRS)]
        torch_time, own_time = (min(column) for column in zip(*times[PAIRS // 10 :]))
        print(
            f"{name:12} {own_time:6.1f} us, AdamW {torch_time:6.1f} us, ratio "
            f"{own_time / torch_time:.2f} ({device}, {MATRICES} matrices)"
        )


if __name__ == "__main__":
    main()
