"""DeepSpeed's ZeRO 1 and 2 through transformers' Trainer on two processes, against its DDP.

The same file is the program of each rank. Its processes are new ones, since what has imported
Accelerate without DeepSpeed goes without it.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from coupled_adam.transformers import use_coupled_adam

    # It would be compiled; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

TOKENS = torch.randint(64, (96, 8), generator=torch.Generator().manual_seed(0))
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"
)


def trained(folder, resume=None, **options):
    """The model after six steps, of which a checkpoint is made after three."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    size = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    without_dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**size, **without_dropout))
    args = TrainingArguments(
        folder,
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        **options,
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": x, "labels": x} for x in TOKENS])
    use_coupled_adam(trainer, embeddings="lean", steps="auto")
    trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
    return model


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="not installed")
def test_trainer(frameworks_in_processes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, __file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for stage in (1, 2):
        assert done.stdout.count(f"<stage {stage}: passed>") == 2


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    expected = trained(f"{folder}/ddp")
    for stage in (1, 2):
        config = {"zero_optimization": {"stage": stage}, **AUTO}
        for resume in (None, "checkpoint-3"):
            model = trained(f"{folder}/zero-{stage}", resume, deepspeed=config)
            for p, q in zip(expected.parameters(), model.parameters(), strict=True):
                # The keys' biases have gradients of rounding errors, which Adam makes larger.
                torch.testing.assert_close(q, p, rtol=0, atol=1e-4)
        print(f"<stage {stage}: passed>", flush=True)
