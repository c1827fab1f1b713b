"""Coupled Adam in torchtitan: an ``OptimizersContainer`` that knows one more optimizer.

In your config registry, use ``default_coupled_adamw(lr=..., embeddings="lean", steps=...)`` in the
place of ``default_adamw(lr=...)``.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from coupled_adam import CoupledAdamW
from coupled_adam.integrations import TOKEN_MATRICES, token_matrices
from coupled_adam.optim.param_groups import Embeddings, embedding_options

_OWN_NAMES = re.compile(r"(^|\.)(tok_embeddings|lm_head|output)\.weight$")


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

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: Sequence[ParamGroupConfig], *args: Any, **more: Any
    ) -> Any:
        """As torchtitan's, with the names of a part's token matrices, of which it may have none."""
        names = token_matrices(model, _OWN_NAMES)
        pattern = f"^({'|'.join(map(re.escape, names))})$"
        configs = [
            dataclasses.replace(config, pattern=pattern)
            if config.pattern == TOKEN_MATRICES
            else config
            for config in param_group_configs
            if names or config.pattern != TOKEN_MATRICES
        ]
        return OptimizersContainer._build_param_groups(model, configs, *args, **more)


def default_coupled_adamw(
    lr: float = 8e-4,
    *,
    embeddings: Embeddings = "coupled",
    steps: int | None = None,
    **options: Any,
) -> CoupledOptimizersContainer.Config:
    """Coupled Adam for the embeddings and the head, AdamW for the rest, in one optimizer.

    They are those of :func:`coupled_adam.embedding_parameters`, and torchtitan's own names of them.
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
                pattern=TOKEN_MATRICES,
                optimizer_name="CoupledAdamW",
                optimizer_kwargs=coupled,
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="CoupledAdamW", optimizer_kwargs=options),
        ]
    )
