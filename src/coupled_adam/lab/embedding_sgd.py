"""A single optimizer that uses SGD for the embeddings and AdamW for all other parameters."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch


class PartlyAdamW(torch.optim.AdamW):
    """AdamW, except that param groups with a certain option are updated by :meth:`step_group`.

    Since this is a single optimizer, it needs only one schedule and one checkpoint.

    Attributes:
        option: the name of the option.
    """

    option: ClassVar[str]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, by AdamW or by :meth:`step_group` depending on the param group."""
        loss = None
        if closure is not None:  # before the groups change: it may call zero_grad
            with torch.enable_grad():
                loss = closure()
        # AdamW's own step is given the groups that are its own, whatever happens in it.
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if self.option not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if self.option in group:
                self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that has the option."""
        raise NotImplementedError


class EmbeddingSGD(PartlyAdamW):
    """AdamW, except that groups with the option ``momentum`` have SGD, without weight decay."""

    option = "momentum"

    @torch.no_grad()
    def step_group(self, group: dict[str, Any]) -> None:
        """Update the group's parameters by SGD."""
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])
                # AdamW's loading expects a number of steps.
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
