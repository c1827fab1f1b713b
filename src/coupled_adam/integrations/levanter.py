"""Coupled Adam in Levanter: ``optimizer: {type: coupled_adam, learning_rate: 6e-4}``.

Import this module before the configuration is read.
"""

from dataclasses import dataclass
from typing import Any

import haliax
import jax
import optax
from levanter.optim.config import OptimizerConfig

from coupled_adam.optax import coupled_adamw


def labels(params: Any) -> Any:
    """Matrices with an axis of tokens, ``"vocab"``, are coupled over it."""

    def label(leaf: Any) -> Any:
        names = [axis.name for axis in leaf.axes] if haliax.is_named_array(leaf) else []
        place = names.index("vocab") if "vocab" in names and len(names) == 2 else None
        kind = "adamw" if place is None else ("coupled", "coupled_columns")[place]
        return jax.tree.map(lambda _: kind, leaf)

    return jax.tree.map(label, params, is_leaf=haliax.is_named_array)


@OptimizerConfig.register_subclass("coupled_adam")
@dataclass
class CoupledAdamConfig(OptimizerConfig):
    """The options of Levanter's ``adam``."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Clip, then update."""

        def optimizer(learning_rate: Any) -> optax.GradientTransformation:
            clip = optax.clip_by_global_norm(self.max_grad_norm or float("inf"))
            update = coupled_adamw(
                learning_rate,
                self.beta1,
                self.beta2,
                self.epsilon,
                weight_decay=self.weight_decay,
                mask=self.build_weight_decay_mask(),
                labels=labels,
            )
            return optax.chain(clip, update)

        # Levanter logs the learning rate that this keeps.
        schedule = self.lr_scheduler(num_train_steps)
        return optax.inject_hyperparams(optimizer)(learning_rate=schedule)
