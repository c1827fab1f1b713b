"""Embeddings during training: found in the model, gathered from their shards, and measured."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coupled_adam.embeddings.report import Measures, analyze

Find = Callable[[Any], Mapping[str, Tensor]]

LOGGED = (
    "isotropy",
    "mean_norm",
    "mean_norm_ratio",
    "condition",
    "mean_cosine_similarity",
    "effective_rank",
    "norm_frequency_correlation",
)


def model_embeddings(model: nn.Module) -> dict[str, Tensor]:
    """The embeddings of a transformers model, which may be inside another module.

    Returns:
        ``"output"``: [V, H], and ``"input"`` where that is another matrix; a model without a head
        has only an input. They are the model's own parameters; see :func:`full_tensor`.

    Raises:
        ValueError: there is no such model inside.
    """
    for module in cast(Iterator[Any], model.modules()):
        if hasattr(module, "get_output_embeddings") and hasattr(module, "get_input_embeddings"):
            head, inputs = module.get_output_embeddings(), module.get_input_embeddings()
            found = {"output": head, "input": inputs}
            weights = {role: layer.weight for role, layer in found.items() if layer is not None}
            if weights.get("input") is weights.get("output"):
                del weights["input"]
            if weights:
                return weights
    raise ValueError(
        f"{type(model).__name__} holds no transformers model: give embeddings=, a function from "
        'the model to its matrices, such as lambda model: {"output": model.head.weight}'
    )


def full_tensor(matrix: Tensor) -> Tensor:
    """The whole of a sharded matrix (DTensor), detached: every process must call this."""
    matrix = matrix.detach()
    gather = getattr(matrix, "full_tensor", None)
    return matrix if gather is None else gather()


class Monitor:
    """What a training callback needs: when to measure, and the numbers to log.

    Args:
        every: steps between two measurements.
        counts: unigram counts [V], for the correlation with frequency.
        find: the model's matrices by their role; see :func:`model_embeddings`.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(
        self, every: int, counts: Tensor | NDArray[Any] | None = None, find: Find | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more steps")
        self.every = every
        self.counts = counts
        self.find = find or model_embeddings
        self._last = -1

    def is_due(self, step: int) -> bool:
        """Whether to measure after this step, and it has not been done yet."""
        due = step % self.every == 0 and step != self._last
        if due:
            self._last = step
        return due

    def measure(self, model: Any, here: bool) -> dict[str, float]:
        """The numbers by name. Every process must call this; only those that are ``here`` get them.

        The names are those of :class:`Measures`, after ``embeddings/`` for the output embeddings
        and ``input_embeddings/`` for those of the input, where that is another matrix.
        """
        _reshard(model)
        matrices = {role: full_tensor(matrix) for role, matrix in self.find(model).items()}
        if not here:
            return {}
        logged = {}
        for role, matrix in matrices.items():
            prefix = "input_embeddings" if role == "input" else "embeddings"
            report: Measures = analyze(matrix, self.counts)
            for name in LOGGED:
                value = getattr(report, name)
                if value is not None:
                    logged[f"{prefix}/{name}"] = value
        return logged


def _reshard(model: Any) -> None:
    """Let FSDP2 put its shards back in place, which the optimizer updates, of a gathered copy."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule):
            module.reshard()
