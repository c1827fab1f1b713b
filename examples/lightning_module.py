"""LEAN for the token embeddings with Lightning, returned from ``configure_optimizers``.

    python examples/lightning_module.py --steps 300 --out /tmp/lightning

Run it again to continue from the Trainer's last checkpoint.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from coupled_adam import CoupledAdamW
from coupled_adam.embeddings import mean_norm_ratio
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--stop-after", type=int, help="leave after so many steps, as if interrupted")
parser.add_argument("--out", type=Path, default=Path("lightning"))
options = parser.parse_args()


class Batches:
    """The batches in order. Lightning saves their state, which makes a resumed run exact."""

    position = 0

    def __len__(self) -> int:
        """The number of batches, one for each step."""
        return options.steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield batches of token ids, [16, 64]."""
        while self.position < len(self):
            self.position += 1
            yield batch(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """The position, which Lightning saves in checkpoints."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from a checkpoint."""
        self.position = state["position"]


class LanguageModel(pl.LightningModule):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_gpt2()

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """The optimizer, and a learning-rate schedule that advances after each optimizer step."""
        optimizer = CoupledAdamW(
            self,
            lr=3e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            embeddings="lean",
            steps=options.steps,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


pl.seed_everything(0)
module = LanguageModel()
trainer = pl.Trainer(
    max_steps=options.stop_after or options.steps,
    default_root_dir=options.out,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(options.out, save_last=True, every_n_train_steps=10)],
    logger=False,
)
last = options.out / "last.ckpt"
trainer.fit(
    module,
    Batches(),
    ckpt_path=last if last.exists() else None,
    weights_only=True,
)
module.model.save_pretrained(options.out / "model")
ratio = mean_norm_ratio(module.model.lm_head.weight)
print(f"step {trainer.global_step}: relative mean norm {ratio:.3f}")
