"""How a run is executed."""

import dataclasses
from typing import Literal

from coupled_adam.fields import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed here. It changes results only by rounding, and may change on resume.

    device: cpu, cuda, one of several GPUs as cuda:1, or mps.
    strategy: how several processes (torchrun, srun) share a run; fsdp2 shards model and optimizer.
    micro_batch_size: sequences that a process computes at a time, accumulating gradients (default:
        its whole share of the batch).
    compile: compile the model.
    logger: loggers in addition to metrics.jsonl (default: tensorboard); none without a value.
    """

    device: str = "cpu"
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    micro_batch_size: Count | None = None
    compile: bool = False
    logger: list[Literal["tensorboard", "wandb"]] = dataclasses.field(
        default_factory=lambda: ["tensorboard"], metadata={"nargs": "*"}
    )
