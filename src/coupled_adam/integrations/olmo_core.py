"""Coupled Adam in OLMo-core: an ``OptimConfig`` that builds the optimizer of the whole model."""

from dataclasses import dataclass, field

from olmo_core.optim import OptimConfig, OptimGroupOverride

from coupled_adam import CoupledAdamW
from coupled_adam.optim.param_groups import Embeddings, embedding_options


@OptimConfig.register("coupled_adamw")
@dataclass
class CoupledAdamWConfig(OptimConfig):
    """``AdamWConfig`` with the embeddings and the head coupled."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    group_overrides: list[OptimGroupOverride] | None = field(
        default_factory=lambda: [coupled_matrices("coupled")]
    )

    @classmethod
    def optimizer(cls) -> type[CoupledAdamW]:
        """The class that :meth:`build` constructs."""
        return CoupledAdamW


def coupled_matrices(embeddings: Embeddings, steps: int | None = None) -> OptimGroupOverride:
    """The group of the embeddings and the head, for ``group_overrides=[coupled_matrices("lean")]``.

    Args:
        embeddings, steps: as in :func:`coupled_adam.param_groups`.
    """
    options = {"coupled": True, "weight_decay": 0.0, **embedding_options(embeddings, steps)}
    return OptimGroupOverride(params=["embeddings.weight", "lm_head.w_out.weight"], opts=options)
