"""Tables with sparse gradients: as the dense oracle, whatever the indices; nothing of size V moves.

The same file is the program of each rank of the tests with several processes.
"""

import copy
import json
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import sparse_tables
import torch
import torch.distributed as dist
from oracle import CoupledAdamOracle
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import LEAN, CoupledAdamW, param_groups, to_adam_state_dict
from optim.cases import tolerance
from processes import run_cases, run_on_ranks

SPARSE = {"coupled": True, "row_exponent": 0.75, "betas": (0.0, 0.99), "weight_decay": 0.0}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def sparse(indices, values, rows):
    return torch.sparse_coo_tensor(
        torch.as_tensor(indices)[None], values, (rows, values.shape[1]), check_invariants=True
    )


def dense(gradient):
    return gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient


class Configuration:
    """A random table, options and gradients, with everything that indices may do."""

    def __init__(self, seed, dtype=torch.float64):
        self.draw = draw = random.Random(seed)
        self.dtype = dtype
        self.rows = draw.choice([1, 2, 9, 40, 300])
        self.columns = draw.choice([1, 3, 16, 33, 260])
        self.options = {
            **SPARSE,
            "row_exponent": draw.choice([0.5, 0.75, 1.0]),
            "betas": (0.0, draw.choice([0.5, 0.9, 0.99, 0.999])),
            "second_moment_scale": draw.choice([1.0, 0.25]),
            "maximize": draw.random() < 0.2,
            "lr": 1e-2,
            "fused": draw.choice([None, None, False]),
        }
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randn(self.rows, self.columns, generator=generator).to(dtype)
        self.gradients = []
        for _ in range(12):
            number = draw.choice([0, 1, self.rows, 2 * self.rows + 5])
            kind = draw.choice([torch.int32, torch.int64])
            indices = torch.randint(self.rows, (number,), generator=generator).to(kind)
            values = torch.randn(number, self.columns, generator=generator).to(dtype)
            gradient = sparse(indices, values * draw.choice([1e-3, 1.0]), self.rows)
            if draw.random() < 0.3:
                gradient = gradient.coalesce()
            self.gradients.append(dense(gradient) if draw.random() < 0.15 else gradient)

    def check(self):
        p = nn.Parameter(self.start.clone())
        optimizer = CoupledAdamW([p], **self.options)
        oracle = CoupledAdamOracle(
            self.start.double().numpy(),
            lr=self.options["lr"],
            beta1=0.0,
            beta2=self.options["betas"][1],
            **{n: self.options[n] for n in ("row_exponent", "second_moment_scale", "maximize")},
        )
        for gradient in self.gradients:
            p.grad = gradient
            optimizer.step()
            oracle.step(dense(gradient).double().numpy())
            state = optimizer.state[p]
            if "row_step" in state:
                assert state["row_count"] == np.count_nonzero(oracle.r)
            # Rows are given to new ids, and the state comes from a checkpoint.
            if self.draw.random() < 0.3:
                rows = self.draw.choices(range(self.rows), k=self.draw.choice([1, self.rows]))
                for name in state.keys() & {"row_exp_avg_sq", self.draw.choice([None, "row_step"])}:
                    state[name][rows] = 0
                oracle.r[rows] = 0
            if self.draw.random() < 0.2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        scale = max(1.0, np.abs(oracle.embeddings).max())
        difference = np.abs(p.detach().double().numpy() - oracle.embeddings).max() / scale
        # A long memory lets roundings of a few steps add up.
        assert difference < 20 * tolerance(self.dtype), self.options
        np.testing.assert_allclose(state["exp_avg_sq"].numpy(), oracle.nu, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_random_configurations(dtype):
    for seed in range(40):
        Configuration(seed, dtype).check()


@pytest.mark.slow
def test_many_random_configurations():
    for seed in range(1000, 1200):
        Configuration(seed).check()


def steps(optimizer, p, gradients):
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()


def gradients(rows=50, columns=16, dtype=torch.float32, number=10):
    generator = torch.Generator().manual_seed(1)
    return [
        sparse(
            torch.randint(rows, (30,), generator=generator),
            torch.randn(30, columns, generator=generator).to(dtype),
            rows,
        )
        for _ in range(number)
    ]


def table(rows=50, columns=16, dtype=torch.float32):
    return nn.Parameter(torch.ones(rows, columns, dtype=dtype))


@pytest.mark.parametrize("fused", [None, False])
def test_nothing_of_the_tables_size(fused):
    """No operation after the first step makes a tensor with a number for each row."""
    rows, largest = 100_000, []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_new = isinstance(result, torch.Tensor) and not function._schema.is_mutable
            if is_new and not function.is_view and result.layout == torch.strided:
                largest.append(result.numel())
            return result

    p = table(rows, 2)
    optimizer = CoupledAdamW([p], **SPARSE, fused=fused)
    first, *others = gradients(rows, 2)
    steps(optimizer, p, [first])
    for gradient in others:
        p.grad = gradient
        with Sizes():
            optimizer.step()
    assert max(largest, default=0) < 1000
    state = optimizer.state[p]
    assert sum(x.nbytes for x in state.values()) < 8 * rows + 100


def test_the_same_bits_again():
    results = []
    for _ in range(3):
        p = table(dtype=torch.bfloat16)
        optimizer = CoupledAdamW([p], **SPARSE, stochastic_rounding=True)
        steps(optimizer, p, gradients(dtype=torch.bfloat16))
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_stochastic_rounding_is_that_of_the_rows():
    """Every copy of a row is rounded as the row itself, whichever others are touched."""
    results = []
    for fused in (None, False):
        p = table(dtype=torch.bfloat16)
        optimizer = CoupledAdamW([p], lr=1e-3, **SPARSE, fused=fused, stochastic_rounding=True)
        steps(optimizer, p, gradients(dtype=torch.bfloat16))
        results.append(p.detach().float())
    different = (results[0] != results[1]).float().mean()
    assert different < 0.02  # where a rounding of the sum is next to the random number
    assert (results[0] != 1).float().mean() > 0.3


# --- hostile gradients ---


@pytest.mark.parametrize("fused", [None, False])
def test_infinity_stops_its_row_alone(fused):
    p, clean = table(), table()
    optimizers = [CoupledAdamW([x], **SPARSE, fused=fused) for x in (p, clean)]
    for step, gradient in enumerate(gradients()):
        values = dense(gradient)
        values[7] = 0
        for optimizer, x, at_7 in zip(optimizers, (p, clean), (torch.inf, 0.0)):
            rows = torch.arange(50)
            changed = values.clone()
            changed[7] = at_7 if step == 4 else 1.0 if step < 4 else 0.0
            x.grad = sparse(rows, changed, 50)
            if step == 7:  # so late that the power of beta2 is 0
                optimizer.state[x]["step"] += 10**6
            optimizer.step()
        if step == 4:
            stopped = p.detach()[7].clone()
    assert p.isfinite().all()
    assert torch.equal(p[7], stopped)
    others = torch.arange(50) != 7
    torch.testing.assert_close(p[others], clean[others], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fused", [None, False])
def test_a_gradient_that_is_wider_than_its_table(fused):
    """It is not rounded to the table's dtype, as little as a dense one is."""
    results = []
    for layout in (lambda gradient: gradient, dense):
        p = table(dtype=torch.bfloat16)
        p.grad_dtype = None
        optimizer = CoupledAdamW([p], **SPARSE, fused=fused)
        try:
            steps(optimizer, p, map(layout, gradients()))
        except RuntimeError:
            pytest.skip("torch refuses it itself")
        results.append(optimizer.state[p]["exp_avg_sq"])
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


@pytest.mark.parametrize("fused", [None, False])
def test_nan_spoils_what_it_spoils_in_a_dense_gradient(fused):
    results = []
    for is_sparse in (True, False):
        p = table(12, 4)
        optimizer = CoupledAdamW([p], **SPARSE, fused=fused)
        for step, gradient in enumerate(gradients(12, 4, number=3)):
            gradient = gradient.coalesce()
            if step == 1:
                gradient.values()[2, 1] = torch.nan
            p.grad = gradient if is_sparse else dense(gradient)
            optimizer.step()
        results.append(p.detach().isnan())
    touched = results[0]
    # A dense pass writes NaN into rows without a gradient, too; those are not touched here.
    assert torch.equal(touched, results[1] & touched)
    assert touched.any()


def test_rows_that_are_none_of_the_table():
    """An error before anything moves, and never a write outside of the table."""
    p, other = table(), nn.Parameter(torch.ones(3, 3))
    optimizer = CoupledAdamW([{"params": [other]}, {"params": [p], **SPARSE}], lr=1.0)
    for rows in ([50], [-1], [3, 10**12]):
        p.grad = torch.sparse_coo_tensor(
            torch.tensor([rows]), torch.ones(len(rows), 16), (50, 16), check_invariants=False
        )
        other.grad = torch.ones(3, 3)
        with pytest.raises(RuntimeError, match=r"sparse gradient has rows .* but its table has 50"):
            optimizer.step()
        assert torch.equal(other, torch.ones(3, 3))


# --- models ---


class HashedBigrams(nn.Module):
    """A language model with an n-gram table beside its own, as in public speed runs."""

    def __init__(self, tied=False):
        super().__init__()
        self.wte = nn.Embedding(100, 16)
        self.bigrams = nn.Embedding(5000, 16, sparse=True)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids):
        hashed = (ids[:, 1:] * 31 + ids[:, :-1]) % 5000
        x = self.wte(ids)
        x = torch.cat([x[:, :1], x[:, 1:] + self.bigrams(hashed)], 1)
        return self.head(self.hidden(x))


class Recommender(nn.Module):
    """Tables of all sizes, none of which is a vocabulary."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 16, mode="sum", sparse=True) for rows in (10, 500, 7, 500)
        )
        self.score = nn.Linear(16, 1)

    def forward(self, ids):
        return self.score(sum(t(ids % t.num_embeddings) for t in self.tables))


def coupled_groups(groups):
    return [group for group in groups if group["coupled"]]


@pytest.mark.parametrize("embeddings", ["lean", LEAN | {"lr_factor": 4}], ids=str)
def test_tables_are_found(embeddings):
    groups = param_groups(HashedBigrams(), embeddings, embedding_weight_decay=0.1)
    dense_group, sparse_group = coupled_groups(groups)
    assert dense_group["param_names"] == ["wte.weight", "head.weight"]
    assert (dense_group["zero_sum"], dense_group["weight_decay"]) == (True, 0.1)
    assert sparse_group["param_names"] == ["bigrams.weight"]
    assert (sparse_group["zero_sum"], sparse_group["weight_decay"]) == (False, 0.0)
    assert "zero_sum=False, " in str(groups).splitlines()[-1]
    assert "sparse=True" in str(groups).splitlines()[-1]
    names = [
        name
        for group in coupled_groups(param_groups(Recommender(), embeddings))
        for name in group["param_names"]
    ]
    assert names == [f"tables.{i}.weight" for i in range(4)]


@pytest.mark.parametrize("model_class", [HashedBigrams, Recommender])
def test_models_train(model_class):
    torch.manual_seed(0)
    model = model_class()
    optimizer = CoupledAdamW(model, lr=1e-2, embeddings="lean", steps=1000)
    ids = torch.randint(100, (8, 12))
    losses = []
    for _ in range(30):
        logits = model(ids)
        if model_class is Recommender:
            loss = (logits - 1).square().mean()
        else:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    sparse_tables = [p for p in optimizer.state if "row_step" in optimizer.state[p]]
    assert len(sparse_tables) == (4 if model_class is Recommender else 1)


def test_a_sparse_table_that_is_tied_to_a_head():
    """Its gradient is dense, and so it is ordinary LEAN."""
    model = nn.ModuleDict({"wte": nn.Embedding(20, 4, sparse=True), "head": nn.Linear(4, 20)})
    model["head"].weight = model["wte"].weight
    optimizer = CoupledAdamW(model, embeddings="lean")
    (group,) = coupled_groups(optimizer.param_groups)
    assert group["zero_sum"]
    for _ in range(2):
        model["head"](model["wte"](torch.arange(5))).sum().backward()
        optimizer.step()
    assert "row_step" not in optimizer.state[model["wte"].weight]


def test_a_functional_lookup_of_a_named_table():
    """What is not seen in a module is seen in the gradient."""
    model = nn.Module()
    model.hashes = nn.Parameter(torch.zeros(40, 4))
    options = {**LEAN, "zero_sum": False}
    optimizer = CoupledAdamW(param_groups(model, options, tables={"hashes": 0}))
    for _ in range(3):
        nn.functional.embedding(torch.tensor([1, 1, 3]), model.hashes, sparse=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.hashes]["row_step"].tolist()[:4] == [0, 3, 0, 3]
    assert (model.hashes.detach()[[1, 3]] != 0).all()


AT_CONSTRUCTION = [
    ("coupled", "averages over all rows. Use LEAN"),
    ({"row_exponent": 0.5}, r"betas=\(0.9, 0.999\) moves all rows. Set betas"),
    (LEAN | {"betas": (0.5, 0.99)}, r"betas=\(0.5, 0.99\) moves all rows"),
]


@pytest.mark.parametrize(("embeddings", "message"), AT_CONSTRUCTION)
def test_refused_at_construction(embeddings, message):
    with pytest.raises(ValueError, match=r"'bigrams.weight' \[5000, 16\] has .*" + message):
        CoupledAdamW(HashedBigrams(), embeddings=embeddings)


IN_A_STEP = [
    ({"row_exponent": 0.0}, "averages over all rows"),
    ({"zero_sum": True}, "zero_sum=True moves all rows. Set zero_sum=False in its group"),
    ({"weight_decay": 0.5}, "weight_decay=0.5 moves all rows. Set weight_decay=0"),
    ({"betas": (0.5, 0.99)}, r"betas=\(0.5, 0.99\) moves all rows"),
    ({"vocab_dim": 1}, "only a whole matrix"),
    ({"differentiable": True}, "cannot be recorded"),
]


@pytest.mark.parametrize(("options", "message"), IN_A_STEP)
def test_refused_before_anything_moves(options, message):
    p, other = table(), nn.Parameter(torch.ones(3, 3))
    optimizer = CoupledAdamW([{"params": [other]}, {"params": [p], **SPARSE, **options}], lr=1.0)
    (p.grad, *_), other.grad = gradients(), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(other, torch.ones(3, 3))
    assert torch.equal(p, torch.ones(50, 16))
    assert not optimizer.state


# --- checkpoints ---


def test_to_options_that_move_all_rows():
    """r decays on the way."""
    p, q = table(dtype=torch.float64), table(dtype=torch.float64)
    sparse_one, dense_one = (CoupledAdamW([x], **SPARSE) for x in (p, q))
    steps(sparse_one, p, gradients(dtype=torch.float64))
    steps(dense_one, q, map(dense, gradients(dtype=torch.float64)))
    zero_sum = {**SPARSE, "zero_sum": True}
    states = []
    for optimizer in (sparse_one, dense_one):
        saved = optimizer.state_dict()
        saved["param_groups"][0]["zero_sum"] = True
        loaded = CoupledAdamW([table(dtype=torch.float64)], **zero_sum)
        loaded.load_state_dict(saved)
        (state,) = loaded.state.values()
        assert "row_step" not in state
        states.append(state)
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-12, atol=0)
    adams = [to_adam_state_dict(x.state_dict())["state"][0] for x in (sparse_one, dense_one)]
    assert adams[0].keys() == adams[1].keys() == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(adams[0]["exp_avg_sq"], adams[1]["exp_avg_sq"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.AdamW])
def test_from_adam(cls):
    p = table()
    adam = cls([p], lr=1e-3)
    adams = gradients()[:5]
    steps(adam, p, adams if cls is torch.optim.SparseAdam else map(dense, adams))
    v = adam.state[p]["exp_avg_sq"].clone()
    optimizer = CoupledAdamW([p], **SPARSE)
    saved = adam.state_dict()
    saved["param_groups"] = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state[p]["row_exp_avg_sq"], v.mean(1))
    steps(optimizer, p, gradients()[5:])
    state = optimizer.state[p]
    assert state["step"] == 10
    assert state["row_step"].max() == 10
    assert state["row_step"].min() == 5
    assert p.isfinite().all()


WRONG_STATES = {
    "shape": {"row_step": torch.zeros(49, dtype=torch.int32)},
    "dtype": {"row_step": torch.zeros(50)},
    "future": {"row_step": torch.full((50,), 99, dtype=torch.int32)},
    "negative": {"row_step": torch.full((50,), -1, dtype=torch.int32)},
}


@pytest.mark.parametrize("wrong", WRONG_STATES.values(), ids=WRONG_STATES.keys())
def test_damaged_states(wrong):
    p = table()
    optimizer = CoupledAdamW([p], **SPARSE)
    steps(optimizer, p, gradients()[:2])
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0] |= wrong
    with pytest.raises(ValueError, match=r"cannot load the state of parameter 0 .*row_"):
        optimizer.load_state_dict(saved)
    for name, value in optimizer.state[p].items():
        assert torch.equal(value, before["state"][0][name])


def test_init_state_of_a_table_that_is_found():
    """What a distributed checkpoint is loaded into has all entries."""
    model = HashedBigrams()
    optimizer = CoupledAdamW(model, embeddings="lean")
    optimizer.init_state()
    assert optimizer.state[model.bigrams.weight].keys() == {
        *("step", "exp_avg_sq", "row_exp_avg_sq", "row_step", "row_count")
    }


def test_the_page_has_the_numbers_that_were_measured():
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks/results/sparse_tables.json").read_text())
    page = (root / "docs/tables.md").read_text()
    assert sparse_tables.markdown(results) in page
    assert sparse_tables.untied_markdown(results) in page
    bags = json.loads((root / "benchmarks/results/embedding_bags.json").read_text())["bags"]
    names = ("LEAN", "Adagrad", sparse_tables.ROW_WISE, "SparseAdam")
    lean, adagrad, fbgemm, adam = (f"{bags[name]['ms']:.1f}" for name in names)
    sentence = (
        f"LEAN {lean} ms of one thread, Adagrad {adagrad}, FBGEMM's row-wise Adagrad {fbgemm},"
    )
    assert f"{sentence}\nSparseAdam {adam} (" in page
    shared = json.loads((root / "benchmarks/results/shared_table.json").read_text())
    assert f"{sparse_tables.shared_sentence(shared)} (" in " ".join(page.split())
    # An id, a row and its gradient; with 10 Gbit/s
    a_lookup = 8 + 2 * 4 * sparse_tables.BAGS[1]
    milliseconds = sparse_tables.LOOKUPS * a_lookup / 1.25e9 * 1e3
    assert f"{a_lookup} bytes a lookup, {milliseconds:.1f} ms a process and step at 10" in page
    for case in results["cases"]:
        assert case["bytes of state"]["LEAN"] == pytest.approx(8 * case["rows"], rel=1e-3)


# --- several processes ---


def ddp():
    """Every rank has the same gradient, and so the same table, as one process with all the data."""
    torch.manual_seed(0)
    model = HashedBigrams()
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    optimizers = [CoupledAdamW(m, lr=1e-2, embeddings="lean", steps=1000) for m in (wrapped, alone)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(5):
        ids = torch.randint(100, (4 * ranks, 6), generator=torch.Generator().manual_seed(step))
        for m, own in ((wrapped, ids[4 * rank : 4 * rank + 4]), (alone, ids)):
            m(own).logsumexp(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


def shared_table():
    """A step of a table that all ranks share has the bits of one process with all gradients."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from shared_host_table import of_all, shared

    ranks, rank = dist.get_world_size(), dist.get_rank()
    p, alone = nn.Parameter(shared(50, 16)), nn.Parameter(torch.zeros(50, 16))
    rows, values = shared(ranks, 30, dtype=torch.long), shared(ranks, 30, 16)
    optimizer, expected = (CoupledAdamW([x], **SPARSE) for x in (p, alone))
    for step in range(5):
        every = gradients(number=ranks * (step + 1))[-ranks:]
        whole = of_all(every[rank], rows, values)
        p.grad = whole if rank == 0 else None
        optimizer.step()
        dist.barrier()
        together = torch.cat([x._indices()[0] for x in every])
        steps(expected, alone, [sparse(together, torch.cat([x._values() for x in every]), 50)])
        assert torch.equal(p, alone)
    assert (p != 0).any()
    assert (p in optimizer.state) == (rank == 0)


def other_tables():
    """Ranks whose tables differ in size are refused; some hear only that these have left."""
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"sizes \[60, 4\]" if rank else "gloo"):
        DistributedDataParallel(nn.Embedding(60 if rank else 50, 4, sparse=True))


CASES = {"ddp": ddp, "shared_table": shared_table, "other_tables": other_tables}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes(ranks):
    run_on_ranks(ranks, __file__, CASES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(CASES)
