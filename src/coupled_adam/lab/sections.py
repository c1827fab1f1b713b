"""The sections ``model`` and ``training`` of a recipe; ``data`` is in :mod:`coupled_adam.text`."""

import dataclasses
import math
from typing import Any, Literal

from coupled_adam.errors import UsageError

LARGEST = 10**15
"""The limit of all counts: far larger than any in use, and exact as a float."""


def require(condition: bool, message: str) -> None:
    """Raise UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def require_counts(section: Any, name: str, *fields: str) -> None:
    """Raise UsageError unless each of these fields of a section is None or from 1 to 10^15."""
    for field in fields:
        value = getattr(section, field)
        require(value is None or value >= 1, f"{name}.{field}={value} must be 1 or more")
        require(value is None or value <= LARGEST, f"{name}.{field}={value} must be at most 1e15")


@dataclasses.dataclass(frozen=True)
class Model:
    """The architecture of the model. Its hidden size H is ``n_embd``.

    n_positions: the maximum sequence length; null means the training's sequence length.
    intermediate_size: the width of the feed-forward layers; null means four times H.
    tied: whether input and output embeddings are one matrix.
    """

    architecture: Literal["gpt2", "stablelm"]
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int | None = None
    intermediate_size: int | None = None
    bias: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        """Raise UsageError for values that are out of range or do not fit together."""
        require_counts(
            self, "model", "n_layer", "n_head", "n_embd", "n_positions", "intermediate_size"
        )
        # The smallest byte-level vocabulary has 256 bytes and the end-of-text token.
        require(
            257 <= self.vocab_size <= LARGEST,
            f"model.vocab_size={self.vocab_size} must be 257 or more, and at most 1e15",
        )
        require(
            self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head}",
        )
        require(
            self.architecture != "stablelm" or (self.n_embd // self.n_head) % 2 == 0,
            f"model.n_embd={self.n_embd} with model.n_head={self.n_head} makes heads of odd "
            "width, which rotary positions cannot rotate",
        )


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of one run. Durations are in optimizer steps.

    batch_size: the number of sequences in a batch, over all processes.
    warmup: the number of warmup steps or, if it is below 1, their share of all steps.
    steps, tokens: the length of the run, which is given by exactly one of the two.
    schedule: the learning rate's schedule after the warmup: cosine, constant, or wsd (warmup,
        stable, decay).
    decay: the share of the steps in which wsd decays the learning rate.
    final_lr: the final learning rate of cosine and wsd, as a share of ``lr``.
    weight_decay: the weight decay of all matrices except embeddings; biases and norms have none.
    decay_positions: whether learned positions have weight decay like other matrices. If not, they
        are treated like token embeddings.
    max_grad_norm: the norm to which gradients are clipped; ``.inf`` disables clipping.
    precision: the precision of parameters and arithmetic, in Lightning's names.
    evaluate_every: the number of steps between evaluations; each is followed by a checkpoint.
    evaluation_batches: the number of batches of the validation split used in each evaluation; null
        means the whole split.
    test_batches: the number of batches of the test split used in the final evaluation; null means
        the whole split.
    """

    batch_size: int
    sequence_length: int
    lr: float
    warmup: float
    steps: int | None = None
    tokens: int | None = None
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    decay: float = 0.2
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_positions: bool = False
    max_grad_norm: float = 1.0
    precision: Literal["64-true", "32-true", "bf16-mixed"] = "32-true"
    evaluate_every: int = 1000
    evaluation_batches: int | None = None
    test_batches: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values that are out of range or do not fit together."""
        require_counts(self, "training", "batch_size", "sequence_length", "steps", "tokens")
        require_counts(self, "training", "evaluate_every", "evaluation_batches", "test_batches")
        require(
            (self.steps is None) != (self.tokens is None),
            "give one of training.steps and training.tokens, which is the length of a run, and set "
            f"the other to null: they are {self.steps or 'null'} and {self.tokens or 'null'}",
        )
        require(
            self.tokens is None or self.tokens >= self.batch_size * self.sequence_length,
            f"training.tokens={self.tokens} is less than one batch of "
            f"{self.batch_size} x {self.sequence_length} tokens",
        )
        require(0 < self.lr < math.inf, f"training.lr={self.lr} must be above 0")
        require(
            0 <= self.warmup <= LARGEST,
            f"training.warmup={self.warmup} must be 0 or more, and at most 1e15",
        )
        require(
            self.warmup < 1 or self.warmup == int(self.warmup),
            f"training.warmup={self.warmup} must be a whole number of steps, or a share below 1",
        )
        require(0 <= self.final_lr <= 1, f"training.final_lr={self.final_lr} must be from 0 to 1")
        require(0 < self.decay <= 1, f"training.decay={self.decay} must be above 0 and at most 1")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"training.betas={list(self.betas)} must be at least 0, below 1",
        )
        require(0 <= self.eps < math.inf, f"training.eps={self.eps} must be 0 or more")
        require(
            0 <= self.weight_decay < math.inf,
            f"training.weight_decay={self.weight_decay} must be 0 or more",
        )
        require(
            self.max_grad_norm > 0, f"training.max_grad_norm={self.max_grad_norm} must be above 0"
        )
