"""Coupled Adam: Adam and AdamW with one second moment for all rows of an embedding matrix.

The optimizer of "Better Embeddings with Coupled Adam" (ACL 2025, arXiv 2502.08441) for PyTorch.
This module needs torch only; :mod:`coupled_adam.embeddings` measures embedding matrices, and the
``coupled-adam`` command runs comparisons.
"""

from coupled_adam.optim.coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim.param_groups import param_groups
from coupled_adam.optim.state import to_adam_state_dict
from coupled_adam.optim.token_embeddings import embedding_parameters

__version__ = "0.1.0"

__all__ = [
    "CoupledAdam",
    "CoupledAdamW",
    "embedding_parameters",
    "param_groups",
    "to_adam_state_dict",
]
