"""Coupled Adam in OLMo-core: an ``OptimConfig`` that builds the optimizer of the whole model."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from olmo_core.optim import OptimConfig, OptimGroupOverride
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.integrations import TOKEN_MATRICES, token_matrices
from coupled_adam.optim.param_groups import Embeddings, embedding_options

_OWN_NAMES = re.compile(r"^(embeddings|lm_head\.w_out)\.weight$")


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

    def build_groups(self, model: nn.Module, strict: bool = True) -> Any:
        """As OLMo-core's, with the names of a part's token matrices, of which it may have none."""
        names = token_matrices(model, _OWN_NAMES)
        overrides = []
        for override in self.group_overrides or []:
            if override.params == [TOKEN_MATRICES]:
                override = OptimGroupOverride(params=names, opts=override.opts)
            if override.params:
                overrides.append(override)
        groups = dataclasses.replace(self, group_overrides=overrides)
        return super(CoupledAdamWConfig, groups).build_groups(model, strict)


def coupled_matrices(embeddings: Embeddings, steps: int | None = None) -> OptimGroupOverride:
    """The group of the embeddings and the head, for ``group_overrides=[coupled_matrices("lean")]``.

    They are those of :func:`coupled_adam.embedding_parameters`, and OLMo-core's own names of them;
    a tied head is none, and a stage of a pipeline may have neither.

    Args:
        embeddings, steps: as in :func:`coupled_adam.param_groups`.
    """
    options = {"coupled": True, "weight_decay": 0.0, **embedding_options(embeddings, steps)}
    return OptimGroupOverride(params=[TOKEN_MATRICES], opts=options)
