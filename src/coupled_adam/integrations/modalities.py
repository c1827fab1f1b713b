"""Coupled Adam in Modalities, the framework of some of the paper's experiments.

In the script that builds ``Main``::

    main.add_custom_component("optimizer", "coupled_adam_w", coupled_adam_w, CoupledAdamWConfig)

and in the YAML file, below ``optimizer``, ``component_key: optimizer`` and ``variant_key:
coupled_adam_w``.
"""

from typing import Any

from modalities.config.pydantic_if_types import PydanticPytorchModuleType
from pydantic import BaseModel
from torch import nn

from coupled_adam import CoupledAdamW


class CoupledAdamWConfig(BaseModel):
    """The options in the YAML file."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    embeddings: str | dict[str, Any] = "coupled"
    steps: int | None = None  # of the whole training, for LEAN's rate
    wrapped_model: PydanticPytorchModuleType


def coupled_adam_w(wrapped_model: nn.Module, **options: Any) -> CoupledAdamW:
    """Build the optimizer of a model that FSDP2 has sharded, with the groups of ``param_groups``.

    Modalities' own groups leave out parameters of which a rank has no rows.
    """
    return CoupledAdamW(wrapped_model, **options)
