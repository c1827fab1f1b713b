"""What a run trains, and how it is executed."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.variant import Variant, load_variant


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One run: an arm of a recipe and a seed, trained into a folder.

    variant: that of the recipe, whose code is executed.
    """

    recipe: Recipe
    arm: str
    seed: int
    folder: Path
    variant: Variant = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Load the recipe's variant."""
        object.__setattr__(self, "variant", load_variant(self.recipe.variant))

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.yaml``: the same whatever the run is compared with."""
        recipe = self.recipe.only(self.arm, self.seed)
        return {"arm": self.arm, "seed": self.seed, "recipe": recipe.to_dict()}


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a run is executed here. It affects results by rounding only, and may change on resume.

    device: ``"cpu"``, ``"cuda"`` or ``"mps"``.
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
