"""Coupled Adam: Adam and AdamW with one second moment for all rows of an embedding matrix.

The optimizer of "Better Embeddings with Coupled Adam" (ACL 2025, arXiv 2502.08441) for PyTorch.
This module depends on torch alone. :mod:`coupled_adam.embeddings` measures embedding matrices, and
the ``coupled-adam`` command trains, evaluates and compares language models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coupled_adam.optim.clipping import clip_grad_norm_
    from coupled_adam.optim.conversion import to_adam_state_dict
    from coupled_adam.optim.coupled_adam import CoupledAdam, CoupledAdamW
    from coupled_adam.optim.find_embeddings import embedding_parameters
    from coupled_adam.optim.flat import FlatShard
    from coupled_adam.optim.kernels import kernels
    from coupled_adam.optim.lean import LEAN
    from coupled_adam.optim.muon import MuonWithCoupledAdam
    from coupled_adam.optim.param_groups import param_groups

__version__ = "0.1.0"

__all__ = [
    "LEAN",
    "CoupledAdam",
    "CoupledAdamW",
    "FlatShard",
    "MuonWithCoupledAdam",
    "clip_grad_norm_",
    "embedding_parameters",
    "kernels",
    "param_groups",
    "to_adam_state_dict",
]


# Each name is imported when it is asked for: importing this module costs no more than torch.
_MODULES = {
    "LEAN": "lean",
    "CoupledAdam": "coupled_adam",
    "CoupledAdamW": "coupled_adam",
    "FlatShard": "flat",
    "MuonWithCoupledAdam": "muon",
    "clip_grad_norm_": "clipping",
    "embedding_parameters": "find_embeddings",
    "kernels": "kernels",
    "param_groups": "param_groups",
    "to_adam_state_dict": "conversion",
}


def __getattr__(name: str) -> Any:
    """Import the optimizer on first use, so that ``coupled-adam --help`` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"coupled_adam.optim.{_MODULES[name]}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
