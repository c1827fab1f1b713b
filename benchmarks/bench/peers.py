"""What the step of this package stands beside: another optimizer's, and the least there can be.

Ember ("Token Geometry", arXiv 2607.01455) is written here from its formula, in torch's operations,
as its authors' one file is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Ember(Optimizer):
    """Ember: v_ij = r_i c_j / s of moving averages of g^2; V + H + 1 numbers, no momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta2: float = 0.999,
        eps: float = 1e-8,
        capturable: bool = False,  # as in torch: the step's number is on the device
    ):
        super().__init__(params, {"lr": lr, "beta2": beta2, "eps": eps, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            beta2 = group["beta2"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    vector = torch.zeros(p.shape[1], dtype=torch.float32, device=p.device)
                    state["column"] = vector
                    state["step"] = torch.zeros_like(vector[0]) if group["capturable"] else 0
                    state["row"] = torch.zeros(len(p), dtype=torch.float32, device=p.device)
                state["step"] += 1
                square = p.grad.float().square()
                state["row"].lerp_(square.mean(1), 1 - beta2)
                state["column"].lerp_(square.mean(0), 1 - beta2)
                correction = 1 - beta2 ** state["step"]
                row = (state["row"] / (state["row"].mean() * correction)).sqrt()
                denominator = torch.outer(row, state["column"].sqrt()).add_(group["eps"])
                p.sub_(p.grad / denominator * group["lr"])


class PlainUpdate(Optimizer):
    """e - c g, which reads g, and reads and writes e: the least that a step can do."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
