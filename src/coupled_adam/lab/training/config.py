"""How a run is executed."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a run is executed here. It affects results by rounding only, and may change on resume.

    device: ``"cpu"``, ``"cuda"``, one of several GPUs as ``"cuda:1"``, or ``"mps"``.
    strategy: how several processes share the work: ``"ddp"``, or ``"fsdp2"``, which shards model
        and optimizer.
    micro_batch_size: sequences per forward pass in each process; gradients are accumulated over
        them. None: each process takes its share of the batch at once.
    compile: whether to compile the model with ``torch.compile``.
    log: loggers in addition to ``metrics.jsonl``.
    """

    device: str = "cpu"
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    micro_batch_size: int | None = None
    compile: bool = False
    log: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
