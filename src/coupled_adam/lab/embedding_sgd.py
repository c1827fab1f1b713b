"""A single optimizer that uses SGD for the embeddings and AdamW for all other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd


class EmbeddingSGD(torch.optim.AdamW):
    """AdamW, except that param groups with the option ``sgd`` are updated by SGD.

    ``sgd`` contains the options momentum, dampening and nesterov of :class:`torch.optim.SGD`; SGD
    also uses the group's ``lr`` and ``weight_decay``. Since this is a single optimizer, it needs
    only one schedule and one checkpoint.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, by AdamW or SGD depending on the param group."""
        loss = None
        if closure is not None:  # before the groups change: it may call zero_grad
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "sgd" not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "sgd" in group:
                self._step_sgd(group)
        return loss

    @torch.no_grad()
    def _step_sgd(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            [p.grad for p in params if p.grad is not None],
            buffers,
            weight_decay=group["weight_decay"],
            lr=group["lr"],
            maximize=group["maximize"],
            has_sparse_grad=False,
            **group["sgd"],
        )
        for p, buffer in zip(params, buffers):
            state = self.state[p]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1  # AdamW's loading expects it
            if buffer is not None:
                state["momentum_buffer"] = buffer
