"""Measure embeddings during training; the part that both training callbacks share."""

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
        The parameters [V, H], which may be sharded: ``"output"``, and ``"input"`` if it is another
        matrix. A model without a head has only an input.

    Raises:
        ValueError: if the module contains no such model.
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
        f"{type(model).__name__} contains no transformers model: pass embeddings=, a function that "
        'returns its matrices, such as lambda model: {"output": model.head.weight}'
    )


def full_tensor(matrix: Tensor) -> Tensor:
    """Detach a matrix, and gather it if it is a DTensor; every process must call this."""
    matrix = matrix.detach()
    gather = getattr(matrix, "full_tensor", None)
    return matrix if gather is None else gather()


class Monitor:
    """Tells a training callback when to measure, and returns the numbers to log.

    Args:
        every: the number of steps between two measurements.
        counts: unigram counts [V], for the correlation of norms with frequency.
        find: a function that returns the model's matrices by role; by default
            :func:`model_embeddings`.

    Raises:
        ValueError: if ``every`` is below 1.
    """

    def __init__(
        self, every: int, counts: Tensor | NDArray[Any] | None = None, find: Find | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        self.every = every
        self.counts = counts
        self.find = find or model_embeddings
        self._last = -1

    def is_due(self, step: int) -> bool:
        """Whether to measure after this step; True only once for each step."""
        due = step % self.every == 0 and step != self._last
        if due:
            self._last = step
        return due

    def measure(self, model: Any, here: bool) -> dict[str, float]:
        """Measure the model's embeddings; every process must call this.

        Args:
            model: the model, as ``find`` takes it.
            here: whether this process measures. The others only help to gather the matrices.

        Returns:
            The numbers by name; an empty dict unless ``here``. The names are those of
            :class:`Measures` with the prefix ``embeddings/`` for the output embeddings, and
            ``input_embeddings/`` for the input embeddings if these are another matrix.
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
    """Make FSDP2 replace gathered parameters by the shards, which the optimizer has updated."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule):
            module.reshard()
