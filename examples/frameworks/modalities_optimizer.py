"""Coupled Adam in Modalities, the framework of some of the paper's experiments.

In the script that builds ``Main``::

    main.add_custom_component("optimizer", "coupled_adam_w", coupled_adam_w, CoupledAdamWConfig)

and in the YAML file, below ``optimizer``, ``component_key: optimizer`` and ``variant_key:
coupled_adam_w``.
"""

from modalities.config.pydantic_if_types import PydanticPytorchModuleType
from pydantic import BaseModel
from torch import nn

from coupled_adam import CoupledAdamW, param_groups


class CoupledAdamWConfig(BaseModel):
    """The options in the YAML file."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    wrapped_model: PydanticPytorchModuleType


def coupled_adam_w(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    wrapped_model: nn.Module,
) -> CoupledAdamW:
    """Build the optimizer of a model that FSDP2 has sharded.

    With ``param_groups`` in the place of Modalities' own groups, which leave out parameters of
    which a rank has no rows.
    """
    groups = param_groups(wrapped_model)
    return CoupledAdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
