"""What a type checker tells a user of the public names: mypy reads this, and no test runs it.

An error that is expected is ignored by its name, which mypy reports as soon as it is none.
"""

import torch
from typing_extensions import assert_type

from coupled_adam import LEAN, CoupledAdam, CoupledAdamW, MuonWithCoupledAdam, param_groups


def train(model: torch.nn.Module) -> None:
    """A loop with each of the optimizers."""
    optimizer = CoupledAdamW(model, lr=6e-4, embeddings="lean", fused=True)
    assert_type(optimizer.step(), None)
    assert_type(optimizer.step(lambda: 1.5), float)
    optimizer.zero_grad()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    CoupledAdam(param_groups(model, LEAN | {"lr_factor": 4}), lr=6e-4)
    CoupledAdamW(model.named_parameters(), vocab_size=50304, embeddings={"lr": 1e-3})
    assert_type(MuonWithCoupledAdam(model, lr=6e-4, embeddings="coupled").step(), None)
    CoupledAdamW(model, embeddings="laen")  # type: ignore[arg-type]
    param_groups(model, "laen")  # type: ignore[arg-type]
    CoupledAdamW(model, embedding="lean")  # type: ignore[call-arg]
