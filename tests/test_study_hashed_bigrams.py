"""The study of tables larger than the vocabulary, in small."""

import pytest
import torch
from study import hashed_bigrams
from study.hashed_bigrams import NO_TABLE, OPTIMIZERS, RowWiseAdagrad, hashes, train
from study.questions import QUESTIONS
from study.run import recipe_of
from torch import nn

from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.recipe import override
from test_study import SMALL


@pytest.fixture
def recipe(text_file):
    entry = QUESTIONS["first_page"]["600 steps line 0.9 0.95"]
    return override(recipe_of(entry, str(text_file)), SMALL)


@pytest.fixture
def corpus(recipe, tmp_path):
    return prepare_corpus(recipe, tmp_path / "cache")


def test_a_hash_is_of_two_tokens():
    ids = torch.randint(4096, (4, 30), generator=torch.Generator().manual_seed(0))
    rows = hashes(ids)
    assert rows.shape == ids.shape
    assert rows.min() >= 0
    assert rows.max() < hashed_bigrams.ROWS
    changed = ids.clone()
    changed[:, 10] += 1
    assert (hashes(changed) != rows).nonzero()[:, 1].unique().tolist() == [10, 11]
    # Few of the pairs of a vocabulary share a row with another one
    pairs = torch.cartesian_prod(torch.arange(500), torch.arange(500))
    assert hashes(pairs)[:, 1].unique().numel() > 0.85 * len(pairs)


def test_row_wise_adagrad():
    """Against the formula on dense gradients in double precision."""
    table = nn.Embedding(7, 3, sparse=True)
    expected, sums = table.weight.detach().double(), torch.zeros(7, dtype=torch.float64)
    optimizer = RowWiseAdagrad([table.weight], lr=0.1)
    for step in range(5):
        ids = torch.tensor([step, 2, 2, 6 - step])
        optimizer.zero_grad()
        table(ids).square().sum().backward()
        g = table.weight.grad.to_dense().double()
        sums += g.square().mean(1)
        expected -= 0.1 * g / (sums.sqrt() + 1e-10)[:, None]
        optimizer.step()
        torch.testing.assert_close(table.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_table_that_four_ranks_have():
    """Each quarter of the rows moves as a table of its own."""
    table = nn.Embedding(12, 4, sparse=True)
    quarters = [nn.Embedding(3, 4, sparse=True) for _ in range(4)]
    optimizers = [hashed_bigrams.SplitLean([table.weight], lr=0.1)]
    for quarter, rows in zip(quarters, table.weight.detach().chunk(4)):
        quarter.weight.data.copy_(rows)
        optimizers.append(hashed_bigrams.lean([quarter.weight], lr=0.1))
    for step in range(5):
        ids = torch.randint(12, (9,), generator=torch.Generator().manual_seed(step))
        (table(ids) * (1 + ids[:, None])).square().sum().backward()
        for number, quarter in enumerate(quarters):
            own = ids[ids // 3 == number]
            (quarter(own - 3 * number) * (1 + own[:, None])).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(table.weight, torch.cat([quarter.weight for quarter in quarters]))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad makes it warn
@pytest.mark.parametrize("arm", OPTIMIZERS)
def test_a_table_that_hardly_moves_changes_nothing(recipe, corpus, arm):
    """And one that does, with any of the optimizers, changes rows of it, and the model."""
    without = train(recipe, corpus, NO_TABLE, 0.0, seed=1)["model"]
    still, moved = (train(recipe, corpus, arm, rate, seed=1) for rate in (1e-30, 1e-2))
    for p, q in zip(without.parameters(), still["model"].parameters(), strict=True):
        assert torch.equal(p, q)
    assert moved["trained_rows"] > 10
    assert not torch.equal(*(x["model"].transformer.wpe.weight for x in (still, moved)))


def test_lean_keeps_eight_bytes_a_row(recipe, corpus):
    states = {
        arm: train(recipe, corpus, arm, 1e-2, seed=1)["state_bytes"] / hashed_bigrams.ROWS
        for arm in ("lean", "row-wise adagrad", "sparse adam 0.9 0.999", "adamw 0 0.999")
    }
    width = 4 * SMALL["model.n_embd"]
    assert states["lean"] == pytest.approx(8, abs=1e-3)
    assert states["row-wise adagrad"] == 4
    assert states["sparse adam 0.9 0.999"] == states["adamw 0 0.999"] == 2 * width
