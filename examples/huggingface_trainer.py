"""LEAN for the token embeddings with the Hugging Face Trainer.

    python examples/huggingface_trainer.py --steps 300 --out /tmp/trainer

Run it again with ``--resume`` to continue from the Trainer's last checkpoint.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from coupled_adam.embeddings import mean_norm_ratio
from coupled_adam.transformers import use_coupled_adam
from text import batch, small_gpt2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-steps", type=int, default=100)
parser.add_argument("--out", default="trainer")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()


class Bytes(Dataset):
    """A data set of byte sequences, one for each index."""

    def __len__(self) -> int:
        """The number of sequences that the training needs."""
        return 16 * options.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Input and labels of a sequence, [64] each."""
        ids = batch(index, size=1)[0]
        return {"input_ids": ids, "labels": ids}


args = TrainingArguments(
    options.out,
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.1,
    adam_beta2=0.95,
    lr_scheduler_type="cosine",
    save_steps=options.save_steps,
    logging_steps=50,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(small_gpt2(), args, train_dataset=Bytes())
use_coupled_adam(trainer, embeddings="lean", steps="auto")
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
ratio = mean_norm_ratio(trainer.model.lm_head.weight)
print(f"step {trainer.state.global_step}: relative mean norm {ratio:.3f}")
