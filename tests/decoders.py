"""A small decoder in float64, and its training: by one process, or by ranks that share batches."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

V, H = 5, 8
SEQUENCES = 12


class Decoder(nn.Module):
    def __init__(self, tied=False, v=V, h=H):
        super().__init__()
        self.embed = nn.Embedding(v, h)
        self.norm = nn.LayerNorm(h)
        self.block = nn.Sequential(nn.Linear(h, 2 * h), nn.Tanh(), nn.Linear(2 * h, h))
        self.head = nn.Linear(h, v, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden + self.block(self.norm(hidden)))


def decoder(tied=False, v=V, h=H, seed=0):
    torch.manual_seed(seed)
    return Decoder(tied, v, h).double()


def loss_of(model, step, part=0, parts=1):
    """The loss on this part of a step's batch."""
    ids = torch.randint(V, (2, SEQUENCES), generator=torch.Generator().manual_seed(step))
    inputs, targets = ids.chunk(parts, dim=1)[part]
    return nn.functional.cross_entropy(model(inputs), targets)


def train(model, optimizer, steps, part=0, parts=1, backward=torch.Tensor.backward):
    """Steps on this part of each step's batch."""
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step, part, parts))
        optimizer.step()
    optimizer.zero_grad()


def assert_same_parameters(model, other):
    """Of any models, bit for bit."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


ROUNDING = 1e-12  # where all is float64, and only the order of sums differs


def assert_same_training(expected, actual, tolerance=ROUNDING):
    """Of two models and their optimizers the parameters and states, which may be in parts."""
    for (name, p), q in zip(expected[0].named_parameters(), actual[0].parameters()):
        torch.testing.assert_close(full(q), full(p), rtol=0, atol=tolerance, msg=name)
        ours, theirs = expected[1].state[p], actual[1].state[q]
        assert theirs.keys() == ours.keys()
        for key, value in ours.items():
            tolerances = {"rtol": 100 * tolerance, "atol": tolerance}
            torch.testing.assert_close(full(theirs[key]), full(value), **tolerances, msg=name + key)


def full(tensor):
    """A tensor that may be in parts on several ranks, whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
