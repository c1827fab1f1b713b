"""Lightning's command line, which passes a plain list of parameters to a class that it is told."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

V = 20


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def training_step(self, ids):
        return nn.functional.cross_entropy(self.head(self.embed(ids)), ids)

    def train_dataloader(self):
        return DataLoader(torch.arange(V), 10)


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli(tmp_path):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    cli = LightningCLI(
        Model,
        save_config_callback=None,
        args=[
            "fit",
            "--optimizer=coupled_adam.CoupledAdamW",
            f"--optimizer.vocab_size={V}",
            "--optimizer.embeddings=lean",
            "--optimizer.lr=0.1",
            "--trainer.max_steps=2",
            "--trainer.accelerator=cpu",
            f"--trainer.default_root_dir={tmp_path}",
            *(f"--trainer.{name}=false" for name in off),
        ],
    )
    optimizer = cli.trainer.optimizers[0]
    shapes = [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups]
    assert shapes == [[(V,)], [(V, 4), (V, 4)]]
    assert [(g["coupled"], g["lr"]) for g in optimizer.param_groups] == [(False, 0.1), (True, 0.2)]
    state = optimizer.state[cli.model.embed.weight]
    assert {name: tuple(value.shape) for name, value in state.items() if name != "step"} == {
        "exp_avg_sq": (4,),
        "row_exp_avg_sq": (V,),
        "mean_update": (4,),
    }
