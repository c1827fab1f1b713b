"""Coupled Adam in Megatron-LM's registry of optimizers, for the word embeddings and the head.

Import this module before the optimizer is built, and set ``optimizer="coupled_adam"`` in the
``OptimizerConfig``; the command line's ``--optimizer`` has a fixed list of names. The registry is
of models without tensor parallelism of the vocabulary here, and without the distributed optimizer:
the rows of a matrix must lie on one rank, as matrices.
"""

from collections.abc import Iterable
from typing import Any

from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS, EmergingOptimizerEntry

from coupled_adam import CoupledAdamW


def coupled_adam(param_groups: Iterable[dict[str, Any]], **options: Any) -> CoupledAdamW:
    """Divide each of Megatron's groups into the matrices of the vocabulary and all others."""
    groups = []
    for group in param_groups:
        by_kind: dict[bool, list[Any]] = {True: [], False: []}
        for p in group["params"]:
            by_kind[getattr(p, "is_embedding_or_output_parameter", False)].append(p)
        groups += [
            {**group, "params": params, "coupled": coupled}
            for coupled, params in by_kind.items()
            if params
        ]
    return CoupledAdamW(groups, **options)


def options(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
    """The options of ``--optimizer adam``."""
    return {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }


_EMERGING_OPTIMIZERS["coupled_adam"] = EmergingOptimizerEntry(
    optimizer_cls=coupled_adam,
    init_state_fn=lambda optimizer, config=None: optimizer.init_state(),
    config_to_kwargs=options,
    default_param_overrides={},  # by default embeddings, biases and norms are Megatron's Adam's
)
