"""Coupled Adam in torchtitan: an ``OptimizersContainer`` that knows one more optimizer.

In your config registry, use ``default_coupled_adamw(...)`` in place of ``default_adamw(...)``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from coupled_adam import LEAN, CoupledAdamW


class CoupledOptimizersContainer(OptimizersContainer):
    """torchtitan's container, in which ``optimizer_name`` may also be ``"CoupledAdamW"``."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The container's options, as they are."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == "CoupledAdamW":
            return CoupledAdamW
        return OptimizersContainer._resolve_optimizer_factory(name)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                "implementation='fused_opt_states_bf16' creates a second moment [V, H] for each "
                "matrix, but a coupled one has vectors in float32: use 'fused'"
            )
        super().__init__(config, model_parts=model_parts)


def default_coupled_adamw(
    lr: float = 8e-4, *, embeddings: Mapping[str, Any] = LEAN, **options: Any
) -> CoupledOptimizersContainer.Config:
    """Coupled Adam for ``tok_embeddings`` and ``lm_head``, AdamW for the rest, in one optimizer.

    ``embeddings`` are options of the embeddings alone; ``{}`` is the algorithm of the paper.
    """
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    coupled = {**options, "weight_decay": 0.0, **embeddings, "coupled": True}
    coupled["lr"] *= coupled.pop("lr_factor", 1.0)
    return CoupledOptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"(^|\.)(tok_embeddings|lm_head|output)\.weight$",
                optimizer_name="CoupledAdamW",
                optimizer_kwargs=coupled,
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="CoupledAdamW", optimizer_kwargs=options),
        ]
    )
