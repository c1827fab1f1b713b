"""Coupled Adam in OLMo-core: an ``OptimConfig`` whose groups take ``coupled`` as an option."""

from dataclasses import dataclass, field

from olmo_core.optim import OptimConfig, OptimGroupOverride

from coupled_adam import CoupledAdamW


@OptimConfig.register("coupled_adamw")
@dataclass
class CoupledAdamWConfig(OptimConfig):
    """``AdamWConfig`` with the embeddings and the head coupled."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    group_overrides: list[OptimGroupOverride] | None = field(
        default_factory=lambda: [
            OptimGroupOverride(
                params=["embeddings.weight", "lm_head.w_out.weight"],
                opts={"coupled": True, "weight_decay": 0.0},
            )
        ]
    )

    @classmethod
    def optimizer(cls) -> type[CoupledAdamW]:
        """The class that :meth:`build` constructs."""
        return CoupledAdamW
