"""Coupled Adam in torchtitan: an ``OptimizersContainer`` that knows one more optimizer.

In your config registry, use ``default_coupled_adamw(lr=..., embeddings="lean", steps=...)`` in the
place of ``default_adamw(lr=...)``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from coupled_adam import CoupledAdamW
from coupled_adam.optim.param_groups import Embeddings, embedding_options


class CoupledOptimizersContainer(OptimizersContainer):
    """torchtitan's container, in which ``optimizer_name`` may also be ``"CoupledAdamW"``."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The container's options, as they are."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        factory: Callable[..., Optimizer] = CoupledAdamW
        if name != "CoupledAdamW":
            factory = OptimizersContainer._resolve_optimizer_factory(name)
        return factory


def default_coupled_adamw(
    lr: float = 8e-4,
    *,
    embeddings: Embeddings = "coupled",
    steps: int | None = None,
    **options: Any,
) -> CoupledOptimizersContainer.Config:
    """Coupled Adam for ``tok_embeddings`` and ``lm_head``, AdamW for the rest, in one optimizer.

    ``embeddings`` and ``steps``, the ``training.steps`` of the configuration, are as in
    :func:`coupled_adam.param_groups`.
    """
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    # torchtitan gives each group all of its options, and knows no lr_factor.
    coupled = {**options, "weight_decay": 0.0, **embedding_options(embeddings, steps)}
    coupled |= {"lr": coupled["lr"] * coupled.pop("lr_factor", 1.0), "coupled": True}
    coupled.pop("lr_factor_from", None)
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
