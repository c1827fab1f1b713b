"""torchrec's tables; ``make test-torchrec`` runs this in an environment of its own."""

import pytest
import torch
from torch import nn

from coupled_adam import LEAN, CoupledAdamW, clip_grad_norm_

torchrec = pytest.importorskip("torchrec")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"user": 100, "item": 1000}


def model():
    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in SIZES.items()
    ]
    bags = torchrec.EmbeddingBagCollection(tables=tables)
    return nn.ModuleDict({"bags": bags, "over": nn.Linear(16, 1)})


def batch(step):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, (2, 8), generator=generator)
    values = [
        torch.randint(rows, (int(number),), generator=generator)
        for rows, number in zip(SIZES.values(), lengths.sum(1))
    ]
    return torchrec.KeyedJaggedTensor(
        keys=[*SIZES], values=torch.cat(values), lengths=lengths.flatten()
    )


def train(own, optimizer, steps=20):
    losses = []
    for step in range(steps):
        loss = (own["over"](own["bags"](batch(step)).values()) - 1).square().mean()
        loss.backward()
        clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_collection():
    """Its tables have sparse gradients and no zero-sum updates, and move as dense ones do."""
    from coupled_adam.integrations.torchrec import with_sparse_gradients

    own, dense = with_sparse_gradients(model()), model()
    optimizer = CoupledAdamW(own, lr=1e-2, embeddings="lean", steps=100)
    *_, group = optimizer.param_groups
    assert (group["sparse"], group["zero_sum"], len(group["params"])) == (True, False, 2)
    options = LEAN | {"zero_sum": False, "lr_factor": group["initial_lr_factor"]}
    expected = CoupledAdamW(
        dense, lr=1e-2, embeddings=options, vocab_size=[*SIZES.values()], embedding_weight_decay=0.0
    )
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    losses = train(own, optimizer)
    assert losses == pytest.approx(train(dense, expected), rel=1e-4)
    assert losses[-1] < losses[0] / 2
    for name, rows in SIZES.items():
        ids = [{*batch(step)[name].values().tolist()} for step in range(20)]
        table = own["bags"].embedding_bags[name].weight
        moved = (table != before[f"bags.embedding_bags.{name}.weight"]).any(1).nonzero().flatten()
        assert {*moved.tolist()} == set().union(*ids[1:])  # LEAN's first step moves nothing
        assert optimizer.state[table]["row_count"] == len(set().union(*ids))
        assert optimizer.state[table]["row_step"].shape == (rows,)


def test_in_torchrecs_own_wrappers():
    """The optimizer that keeps states by names, and the one of the backward pass."""
    from torchrec.optim import KeyedOptimizerWrapper, apply_optimizer_in_backward

    from coupled_adam.integrations.torchrec import with_sparse_gradients

    own = with_sparse_gradients(model())
    named = dict(own.named_parameters())
    keyed = KeyedOptimizerWrapper(named, lambda _: CoupledAdamW(own, lr=1e-2, embeddings="lean"))
    losses = train(own, keyed)
    assert losses[-1] < losses[0] / 2
    assert keyed.state_dict()["state"].keys() == named.keys()

    own = with_sparse_gradients(model())
    table = own["bags"].embedding_bags["item"].weight
    before = table.detach().clone()
    options = {name: x for name, x in LEAN.items() if name not in ("lr_factor", "zero_sum")}
    apply_optimizer_in_backward(
        CoupledAdamW,
        own["bags"].parameters(),
        {"lr": 1e-2, "weight_decay": 0.0, "coupled": True, **options},
    )
    for step in range(2):
        own["bags"](batch(step)).values().square().sum().backward()
    moved = (table != before).any(1).nonzero().flatten().tolist()
    assert sorted(moved) == batch(1)["item"].values().unique().tolist()


def test_nothing_to_do():
    from coupled_adam.integrations.torchrec import with_sparse_gradients

    with pytest.raises(ValueError, match=r"Linear has no EmbeddingBagCollection.*FBGEMM"):
        with_sparse_gradients(nn.Linear(2, 2))
