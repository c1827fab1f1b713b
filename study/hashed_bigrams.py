r"""What a table larger than the vocabulary is worth, by the optimizer that trains it.

The study's model gets a second input embedding: a table of 2^20 rows, in which the last two tokens
are looked up by a hash of their ids. All runs differ in the optimizer of this table alone. A run
takes one to six minutes of one core, so that none is ever resumed in the middle::

    python -m study.hashed_bigrams --text TEXT --held-out valid.txt.xz --held-out test.txt.xz \
        --steps 600 --seeds 31 --rates 0.01,0.04 lean adagrad
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, SparseAdam
from transformers import PreTrainedModel

from coupled_adam import LEAN, CoupledAdamW
from coupled_adam.lab.data.batches import Batches
from coupled_adam.lab.data.corpus import Corpus, default_cache, prepare_corpus
from coupled_adam.lab.models import build_model
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.schedules import lr_scheduler

from .documents import document_losses
from .head import losses
from .questions import QUESTIONS
from .run import HERE, add_result, has_result, machine, parse_seeds, recipe_of

ROWS = 2**20
RESULTS = HERE / "results" / "hashed_bigrams.json"


class RowWiseAdagrad(Optimizer):
    """Adagrad with one number for each row of a table, as recommenders have it.

    FBGEMM calls it exact row-wise Adagrad: with the rows g_i of a gradient [V, H],
    s_i <- s_i + mean_j g_ij^2, and row i moves by lr g_i / (sqrt(s_i) + eps).
    """

    def __init__(self, params: Any, lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                grad = table.grad.coalesce()
                (rows,), g = grad.indices(), grad.values()
                sums = self.state[table].setdefault("sum", torch.zeros(len(table)))
                sums[rows] += g.square().mean(1)
                step = g / (sums[rows].sqrt() + group["eps"])[:, None]
                table.index_add_(0, rows, step, alpha=-group["lr"])


LOOKED_UP = {**LEAN, "lr_factor": 1.0, "zero_sum": False, "coupled": True, "weight_decay": 0.0}
"""What ``embeddings="lean"`` gives a table with sparse gradients, at the rate itself."""


def lean(params: list[Tensor], lr: float) -> CoupledAdamW:
    """LEAN of a table with sparse gradients."""
    return CoupledAdamW([{"params": params, **LOOKED_UP}], lr)


class SplitLean(CoupledAdamW):
    """LEAN of a table whose rows four ranks have: each part is a table, with a nu of its own."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        (self.table,) = params
        # Parameters that share the table's memory
        parts = [nn.Parameter(rows) for rows in self.table.detach().chunk(4)]
        super().__init__([{"params": parts, **LOOKED_UP}], lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Give each part the rows of the gradient that are its own, and update all."""
        assert self.table.grad is not None
        grad = self.table.grad.coalesce()
        (rows,), values = grad.indices(), grad.values()
        for number, part in enumerate(self.param_groups[0]["params"]):
            own = rows // len(part) == number
            indices = rows[own][None] - number * len(part)
            part.grad = torch.sparse_coo_tensor(
                indices, values[own], part.shape, check_invariants=True
            )
        self.table.grad = None
        super().step()


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], Optimizer]] = {
    "lean": lean,
    "split lean": SplitLean,
    "sparse adam 0.9 0.999": SparseAdam,
    "sparse adam 0 0.999": functools.partial(SparseAdam, betas=(0.0, 0.999)),
    "adagrad": Adagrad,
    "row-wise adagrad": RowWiseAdagrad,
    "sgd": SGD,
    "adamw 0 0.999": functools.partial(AdamW, betas=(0.0, 0.999), weight_decay=0.0, fused=True),
}
"""The optimizers of the table; only torch's AdamW needs dense gradients."""
NO_TABLE = "no table"


def hashes(ids: Tensor, rows: int = ROWS) -> Tensor:
    """The row of each token and the one before it, [batch, length], as of the token ids.

    The first token of a sequence counts as if it followed token 0. As the bigram tables of
    modded-nanogpt and nanochat: two products with large odd numbers, and their exclusive or.
    """
    before = nn.functional.pad(ids[:, :-1], (1, 0))
    return ((ids * 36_313) ^ (before * 27_191)) % rows


def add_table(model: PreTrainedModel, rows: int = ROWS, *, sparse: bool = True) -> nn.Embedding:
    """Let a GPT-2 add the rows of a table, zeros at first, to the embeddings of its tokens."""
    tokens = model.get_input_embeddings()
    table = nn.Embedding(rows, model.config.hidden_size, sparse=sparse)
    nn.init.zeros_(table.weight)

    def with_bigrams(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        bigrams: Tensor = table(hashes(arguments[0], rows))
        return output + bigrams

    tokens.register_forward_hook(with_bigrams)
    return table


def train(recipe: Recipe, corpus: Corpus, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train a model, and return what is known of the table; the model is in ``"model"``.

    All other parameters have what the recipe's arm gives them, and the norm of their gradients is
    clipped. The table's gradients are not, since torch clips no sparse ones. Its rate follows the
    schedule of the others.
    """
    (others,) = recipe.arms.values()
    seed_everything(seed, verbose=False)
    model = build_model(recipe)
    optimizers = [others.build_optimizer(model, recipe.training)]
    if arm != NO_TABLE:
        table = add_table(model, sparse="adamw" not in arm).weight
        optimizers.append(OPTIMIZERS[arm]([table], rate))
    schedules = [lr_scheduler(optimizer, recipe) for optimizer in optimizers]
    seconds = []
    for batch in Batches(corpus.tokens("train"), recipe, seed):
        losses(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.training.max_grad_norm)
        for optimizer in optimizers:
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)  # the last is the table's
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    trained: dict[str, Any] = {"model": model}
    if arm != NO_TABLE:
        state = [x for of_part in optimizers[-1].state.values() for x in of_part.values()]
        trained |= {
            "step_ms": 1000 * statistics.median(seconds[1::2]),
            "state_bytes": sum(x.nbytes for x in state if torch.is_tensor(x) and x.dim()),
            "trained_rows": int(table.any(1).sum()),
            "row_norm": table[table.any(1)].norm(dim=1).mean().item(),
        }
    return trained


def main() -> None:
    """Make the runs that have no result yet, one after the other, and add each to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", choices=[NO_TABLE, *OPTIMIZERS], metavar="ARM")
    parser.add_argument("--text", required=True, help="the study's training text")
    parser.add_argument("--held-out", action="append", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=600, choices=(600, 2400))
    parser.add_argument("--rates", default="0", help="of the table: one or more, with commas")
    parser.add_argument("--seeds", type=parse_seeds, default=[31], metavar="1,2,...")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made_by = machine()  # with the commit of now, which may be another one afterwards
    recipe = recipe_of(
        QUESTIONS["first_page"][f"{options.steps} steps line 0.9 0.95"], options.text
    )
    corpus = prepare_corpus(recipe, default_cache())
    assert corpus.tokenizer_folder is not None
    rates = [float(rate) for rate in options.rates.split(",")]
    for arm, rate, seed in itertools.product(options.arms, rates, options.seeds):
        name = f"{options.steps} steps {arm}" + (f" {rate:g}" if arm != NO_TABLE else "")
        if has_result(options.out, name, seed):
            continue
        trained = train(recipe, corpus, arm, rate, seed)
        documents = document_losses(
            trained.pop("model"),
            options.held_out,
            corpus.tokenizer_folder,
            corpus.unigram_counts(),
            recipe.training.sequence_length,
        )
        result = {**trained, "documents": documents, "environment": made_by}
        add_result(options.out, name, seed, result)
        print(f"{name}, seed {seed}: {documents['valid']['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
