"""What is compared: the optimizers of the embeddings. All else in a run is the same.

An arm is a small class whose fields are its options in a recipe; to add one, write the class and
enter it in :data:`OPTIMIZERS`. All other parameters are AdamW's in every arm.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.optim.token_embeddings import Couple

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Training


class Arm(Protocol):
    """An arm of a comparison."""

    @property
    def label(self) -> str:
        """Its name in tables and pictures."""

    def optimizer(self, model: nn.Module, training: "Training") -> torch.optim.Optimizer:
        """Its optimizer, for the trainable parameters of a model."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW for all parameters.

    The token embeddings have ``lr_factor`` times the learning rate, and ``embedding_weight_decay``.
    """

    lr_factor: float = 1.0
    embedding_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for options out of range."""
        _check_embedding_options(self)

    @property
    def label(self) -> str:
        """Standard, and what is not the default."""
        return ", ".join(["Standard", *_embedding_options(self)])

    def optimizer(self, model: nn.Module, training: "Training") -> torch.optim.Optimizer:
        """torch's AdamW on the groups of :func:`coupled_adam.param_groups`."""
        groups = param_groups(
            model,
            weight_decay=training.weight_decay,
            embedding_weight_decay=self.embedding_weight_decay,
        )
        for group in groups:
            if group.pop("coupled"):
                group["lr"] = self.lr_factor * training.lr
        return torch.optim.AdamW(groups, training.lr, training.betas, training.eps)


@dataclasses.dataclass(frozen=True)
class CoupledAdam:
    """Coupled Adam for the token embeddings; ``second_moment_scale`` is the 2^-n of Sec. 6.1.

    What is coupled has ``lr_factor`` times the learning rate; all embeddings have
    ``embedding_weight_decay``.
    """

    second_moment_scale: float = 1.0
    couple: Couple = "both"
    lr_factor: float = 1.0
    embedding_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for options out of range."""
        if not 0 < self.second_moment_scale < math.inf:
            raise ValueError(f"second_moment_scale={self.second_moment_scale} must be above 0")
        _check_embedding_options(self)

    @property
    def label(self) -> str:
        """Coupled, and what is not the default."""
        parts = ["Coupled"]
        if self.second_moment_scale != 1:
            parts.append(f"n = {-math.log2(self.second_moment_scale):g}")
        if self.couple != "both":
            parts.append(f"{self.couple} only")
        return ", ".join([*parts, *_embedding_options(self)])

    def optimizer(self, model: nn.Module, training: "Training") -> torch.optim.Optimizer:
        """CoupledAdamW on the groups of :func:`coupled_adam.param_groups`."""
        groups = param_groups(
            model,
            weight_decay=training.weight_decay,
            embedding_weight_decay=self.embedding_weight_decay,
            couple=self.couple,
        )
        for group in groups:
            if group["coupled"]:
                group["lr"] = self.lr_factor * training.lr
        return CoupledAdamW(
            groups,
            training.lr,
            training.betas,
            training.eps,
            second_moment_scale=self.second_moment_scale,
        )


def _check_embedding_options(arm: AdamW | CoupledAdam) -> None:
    if not 0 < arm.lr_factor < math.inf:
        raise ValueError(f"lr_factor={arm.lr_factor} must be above 0")
    if not 0 <= arm.embedding_weight_decay < math.inf:
        raise ValueError(f"embedding_weight_decay={arm.embedding_weight_decay} must be 0 or more")


def _embedding_options(arm: AdamW | CoupledAdam) -> Iterator[str]:
    if arm.lr_factor != 1:
        yield f"f = {arm.lr_factor:g}"
    if arm.embedding_weight_decay:
        yield f"decay {arm.embedding_weight_decay:g}"


@dataclasses.dataclass(frozen=True)
class SGD:
    """SGD with momentum for the token embeddings (Algorithm 2), at ``lr_factor`` times the rate."""

    lr_factor: float
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for options out of range."""
        if not 0 < self.lr_factor < math.inf:
            raise ValueError(f"lr_factor={self.lr_factor} must be above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must be at least 0 and below 1")
        if not math.isfinite(self.dampening):
            raise ValueError(f"dampening={self.dampening} must be a number")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov=true needs momentum above 0 and dampening=0")

    @property
    def label(self) -> str:
        """SGD, and its factor f."""
        return f"SGD, f = {self.lr_factor:g}"

    def optimizer(self, model: nn.Module, training: "Training") -> torch.optim.Optimizer:
        """AdamW that leaves the group of the embeddings to SGD."""
        groups = param_groups(model, weight_decay=training.weight_decay)
        for group in groups:
            if group.pop("coupled"):
                group["lr"] = self.lr_factor * training.lr
                group["sgd"] = {
                    "momentum": self.momentum,
                    "dampening": self.dampening,
                    "nesterov": self.nesterov,
                }
        return EmbeddingSGD(groups, training.lr, training.betas, training.eps)


class EmbeddingSGD(torch.optim.AdamW):
    """AdamW whose param groups with an option ``sgd`` are updated by SGD instead.

    ``sgd`` holds the momentum, dampening and nesterov of :class:`torch.optim.SGD`; the group's
    ``lr`` and ``weight_decay`` are SGD's. One optimizer, so that one schedule and one checkpoint
    hold for both.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of AdamW, and one of SGD."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "sgd" not in group]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if "sgd" in group:
                self._step_sgd(group)
        return loss

    @torch.no_grad()
    def _step_sgd(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            [p.grad for p in params if p.grad is not None],
            buffers,
            weight_decay=group["weight_decay"],
            lr=group["lr"],
            maximize=group["maximize"],
            has_sparse_grad=False,
            **group["sgd"],
        )
        for p, buffer in zip(params, buffers):
            state = self.state[p]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1  # Adam's loading expects it
            if buffer is not None:
                state["momentum_buffer"] = buffer


OPTIMIZERS: dict[str, type[Arm]] = {"adamw": AdamW, "coupled_adam": CoupledAdam, "sgd": SGD}
"""What a recipe may name as an arm's ``optimizer``."""
