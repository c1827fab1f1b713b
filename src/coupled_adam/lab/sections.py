"""The sections ``model``, ``data`` and ``training`` of a recipe."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from coupled_adam.errors import UsageError
from coupled_adam.fields import (
    LARGEST,
    Beta,
    Count,
    NotNegative,
    Positive,
    PositiveOrInfinite,
    Seed,
    Share,
)


@dataclasses.dataclass(frozen=True)
class Model:
    """The architecture of the model.

    architecture: gpt2; stablelm, which has LayerNorm, SwiGLU and rotary positions; or any other
        causal language model of transformers by its ``model_type``, such as llama or qwen3.
    vocab_size: V, the number of rows of the embeddings; a tokenizer may have fewer tokens.
    n_layer: the number of blocks, at most 1000.
    n_head: the number of attention heads in a block; it divides ``n_embd``.
    n_embd: H, the hidden size and the width of the embeddings.
    n_positions: the maximum sequence length; null means the training's sequence length.
    intermediate_size: the width of the feed-forward layers; null means four times H.
    bias: whether linear layers and norms have biases; stablelm has them in its norms only.
    tied: whether input and output embeddings are one matrix.
    config: more values of its configuration, by their names in transformers, such as
        ``{num_key_value_heads: 1}``; not for gpt2 and stablelm.
    """

    architecture: str
    # The smallest byte-level vocabulary has 256 bytes and the end-of-text token.
    vocab_size: Annotated[Count, Field(ge=257)]
    n_layer: Annotated[Count, Field(le=1000)]
    n_head: Count
    n_embd: Count
    n_positions: Count | None = None
    intermediate_size: Count | None = None
    bias: bool = True
    tied: bool = True
    config: dict[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError for values that do not fit together."""
        if self.n_embd % self.n_head:
            raise UsageError(
                f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head}"
            )
        if self.architecture == "stablelm" and self.n_embd // self.n_head % 2:
            raise UsageError(
                f"model.n_embd={self.n_embd} with model.n_head={self.n_head} makes heads of odd "
                "width, which rotary positions cannot rotate"
            )
        # For these two the other keys cover everything, and try_out() skips them.
        if self.config and self.architecture in ("gpt2", "stablelm"):
            raise UsageError(
                f"model.config={self.config} is not for {self.architecture}, which the other keys "
                "of model describe: leave it out"
            )


SOURCES = {
    "text": (),
    "hub": (
        "hub_config",
        "hub_revision",
        "hub_documents",
        "hub_otherwise",
        "valid_split",
        "test_split",
        "shuffle_seed",
    ),
    "tokens": ("token_dtype",),
}
"""The keys of :class:`Data` that name a source, and those that apply to it alone."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The source of the text: ``text``, ``hub`` or ``tokens``; by default Python's documentation.

    text: a file or folder of .txt, .md, .jsonl, .csv or .parquet files, which may be compressed.
    separator: the text between two documents in plain text files; null cuts files into passages.
    hub: the id of a data set on the Hugging Face hub, or a folder in its format.
    hub_config: the configuration of the data set, if it has several.
    hub_revision: the branch, tag or commit of the data set.
    hub_documents: the number of rows in all of ``train_split``; fewer are an error, unless
        ``max_tokens`` is reached first. Null skips this check.
    hub_otherwise: a hint shown if the data set cannot be read.
    train_split: the split of the data set that is trained on.
    valid_split: its split for validation; null takes a share of the documents, ``held_out``.
    test_split: its split for the test; null takes a share of the documents, ``held_out``.
    shuffle_seed: shuffle its documents with this seed; null leaves them in order.
    column: the column, or the key in .jsonl, .json and .parquet files, that holds the text.
    tokens: a folder of token files in the formats of nanoGPT and llm.c.
    token_dtype: the type of the ids in token files; null detects it.
    tokenizer: the id or folder of a tokenizer; null trains a byte-level BPE on the training text.
    held_out: the share of the documents for validation, and again for the test, unless
        ``valid_split`` and ``test_split`` name splits of the data set.
    max_tokens: the maximum number of training tokens.
    max_held_out_tokens: the maximum number of tokens in each held-out split.
    """

    text: str | None = None
    separator: str | None = None
    hub: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    hub_documents: Count | None = None
    hub_otherwise: str | None = None
    train_split: str = "train"
    valid_split: str | None = None
    test_split: str | None = None
    shuffle_seed: Seed | None = None
    column: str = "text"
    tokens: str | None = None
    token_dtype: Literal["uint16", "uint32", "int64"] | None = None
    tokenizer: str | None = None
    held_out: Annotated[Positive, Field(lt=0.5)] = 0.05
    max_tokens: Count | None = None
    max_held_out_tokens: Count | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values that do not fit together."""
        # Without any of them the text is Python's documentation, which is there wherever Python is.
        sources = [name for name in SOURCES if getattr(self, name) is not None]
        if len(sources) > 1:
            raise UsageError(f"data.{' and data.'.join(sources)} exclude each other: give only one")
        for source in SOURCES.keys() - {*sources}:
            for name in SOURCES[source]:
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"data.{name}={getattr(self, name)} is for data.{source}, which is not "
                        "given: leave it out, or set it to null"
                    )
        if self.separator == "":
            raise UsageError("data.separator='' separates nothing: give some text, or null")


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of one run. Durations are in optimizer steps.

    batch_size: the number of sequences in a batch, over all processes.
    sequence_length: the number of tokens in a sequence.
    lr: the highest learning rate, at the end of the warmup.
    warmup: the number of warmup steps or, if it is below 1, their share of all steps.
    steps, tokens: the length of the run; give exactly one of the two.
    schedule: the learning rate's schedule after the warmup: cosine, constant, or wsd (warmup,
        stable, decay).
    decay: the share of the steps in which wsd decays the learning rate.
    final_lr: the final learning rate of cosine and wsd, as a share of ``lr``.
    betas: the decay rates of the first and second moments.
    eps: added to the root of the second moment.
    weight_decay: the weight decay of all matrices except embeddings; biases and norms have none.
    decay_positions: whether learned positions decay like other matrices; if not, they have no
        weight decay, like token embeddings.
    max_grad_norm: the norm to which gradients are clipped; ``.inf`` disables clipping.
    precision: the precision of parameters and arithmetic, in Lightning's names.
    evaluate_every: the number of steps between evaluations; each is followed by a checkpoint.
    evaluation_batches: the number of batches of the validation split used in each evaluation; null
        means the whole split.
    test_batches: the number of batches of the test split used in the final evaluation; null means
        the whole split.
    """

    batch_size: Count
    sequence_length: Count
    lr: Positive
    warmup: Annotated[NotNegative, Field(le=LARGEST)]
    steps: Count | None = None
    tokens: Count | None = None
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    decay: Annotated[Share, Field(gt=0)] = 0.2
    final_lr: Share = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1
    decay_positions: bool = False
    max_grad_norm: PositiveOrInfinite = 1.0
    precision: Literal["64-true", "32-true", "bf16-mixed"] = "32-true"
    evaluate_every: Count = 1000
    evaluation_batches: Count | None = None
    test_batches: Count | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values that do not fit together."""
        # Of two lengths one would be ignored: a recipe that replaces an inherited one unsets it.
        if (self.steps is None) == (self.tokens is None):
            raise UsageError(
                "set exactly one of training.steps and training.tokens, and the other to null: "
                f"they are {self.steps or 'null'} and {self.tokens or 'null'}"
            )
        if self.tokens is not None and self.tokens < self.batch_size * self.sequence_length:
            raise UsageError(
                f"training.tokens={self.tokens} is less than one batch of "
                f"{self.batch_size} x {self.sequence_length} tokens"
            )
        if self.warmup > 1 and self.warmup % 1:  # a number like 1.5 may be meant as either
            raise UsageError(
                f"training.warmup={self.warmup} must be a whole number of steps, or a share below 1"
            )

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in one batch."""
        return self.batch_size * self.sequence_length

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of one run."""
        return self.steps or (self.tokens or 0) // self.tokens_per_step
