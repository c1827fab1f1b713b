"""Optimizers of the embeddings at six times the study's width, on one GPU in ten minutes.

    python -m study.wider --text english/train.txt.xz --results NEW.json
    python -m study.wider --text TEXT --results NEW.json --seeds 6,7,8 --only "lean n=2"

All of the text is on the device, the model is compiled, a whole training step is one CUDA graph,
and several runs go at the same time, each on a stream of its own: small models leave most of a GPU
idle. Runs that have a result are skipped. On a CPU the steps are the same, and are neither compiled
nor captured.
"""

import argparse
import dataclasses
import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.bench.peers import Ember
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from coupled_adam import LEAN, CoupledAdamW
from coupled_adam.embeddings import mean_norm_ratio
from coupled_adam.lab.data.corpus import Corpus, default_cache, prepare_corpus

from .questions import ADAMW, Entry
from .run import HERE, add_result, has_result, machine, parse_seeds, read_results, recipe_of


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model and its training; the core is AdamW's at 0.9, 0.95 with a decay of 0.1."""

    vocab_size: int = 8192
    width: int = 384
    layers: int = 5
    heads: int = 6
    length: int = 512
    batch: int = 8
    steps: int = 9768
    lr: float = 2e-3

    @property
    def warmup(self) -> int:
        """A hundred steps, or a sixth of fewer than 600."""
        return min(100, self.steps // 6)

    def schedule(self) -> Tensor:
        """What the learning rate is multiplied with, [steps]: a warmup, then a cosine to 0.1."""
        step = torch.arange(self.steps, dtype=torch.float64)
        after = (step - self.warmup) / max(1, self.steps - self.warmup)
        falling = 0.1 + 0.45 * (1 + torch.cos(math.pi * after))
        return torch.where(step < self.warmup, (step + 1) / max(1, self.warmup), falling).float()


ARMS: dict[str, dict[str, Any]] = {
    "adamw 0 0.999": {"betas": (0.0, 0.999)},
    "adamw 0.9 0.95": {"betas": (0.9, 0.95)},
    "lean": {"coupled": True, **{key: LEAN[key] for key in LEAN if key != "lr_factor"}},
    "ember": {},
}
"""The options of the embeddings' param group."""

RUNS = {f"{arm} n={n}": (arm, n) for arm in ARMS for n in (0, 2, 4, 6)}
"""By name, the arm and n: the embeddings have 2^(n/2) times the rate of the core."""


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [batch, length, H] to hidden states."""
        by_head = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = by_head.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, H / heads]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        widened = functional.gelu(self.up(self.before_mlp(x)), approximate="tanh")
        hidden: Tensor = x + self.down(widened)
        return hidden


class Model(nn.Module):
    """A tied GPT-2 without dropout, in torch operations that a graph can capture."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, layers = setting.width, setting.layers
        self.tokens = nn.Embedding(setting.vocab_size, width)
        self.positions = nn.Embedding(setting.length, width)
        self.blocks = nn.ModuleList(Block(width, setting.heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, blocks: Tensor) -> Tensor:
        """The mean loss of blocks of token ids, [batch, length + 1]."""
        x = self.tokens(blocks[:, :-1]) + self.positions.weight[: blocks.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), blocks[:, 1:].flatten())


def optimizers(model: Model, arm: str, factor: float, lr: float) -> list[Optimizer]:
    """The core's AdamW, and what updates the embeddings at ``factor`` times its rate.

    Rates are tensors on the device, which a captured step can change.
    """
    table = model.tokens.weight
    on_gpu = table.is_cuda

    def group(parameters: Iterable[Tensor], decay: float, relative: float = 1.0) -> dict[str, Any]:
        rate = torch.tensor(lr * relative, device=table.device)
        return {"params": [*parameters], "weight_decay": decay, "lr": rate}

    others = [p for p in model.parameters() if p is not table and p is not model.positions.weight]
    core = [
        group((p for p in others if p.dim() == 2), 0.1),
        group([model.positions.weight, *(p for p in others if p.dim() == 1)], 0.0),
    ]
    embeddings = group([table], 0.0, factor) | ARMS[arm]
    usual: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95)}
    usual |= {"fused": True, "capturable": True} if on_gpu else {"foreach": False}
    if arm == "ember":
        ember = Ember([table], embeddings["lr"], capturable=on_gpu)
        return [AdamW(core, **usual), ember]
    kind = CoupledAdamW if "coupled" in embeddings else AdamW
    return [kind([*core, embeddings], **usual)]


class Training:
    """A run: its model, its order of the text's blocks, and its next step.

    Attributes:
        losses: of each step that was taken, [steps], on the device.
    """

    def __init__(self, setting: Setting, name: str, seed: int, text: Tensor) -> None:
        arm, n = RUNS[name]
        self.name, self.seed = name, seed
        self._setting, self._text, device = setting, text, text.device
        torch.manual_seed(seed)
        self.model = Model(setting).to(device)
        # Runs share what is compiled: it has the weights as arguments.
        on_gpu = device.type == "cuda"
        self._compiled = torch.compile(self.model, dynamic=False) if on_gpu else self.model
        self._optimizers = optimizers(self.model, arm, 2 ** (n / 2), setting.lr)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._rates = [(group["lr"], group["lr"].clone()) for group in groups]
        # As many permutations of the blocks as it takes; the order is that of the seed alone.
        random = torch.Generator().manual_seed(1000 + seed)
        blocks = (len(text) - 1) // setting.length
        needed = setting.steps * setting.batch
        orders = [torch.randperm(blocks, generator=random) for _ in range(-(-needed // blocks))]
        order = torch.cat(orders)[:needed].view(setting.steps, setting.batch)
        self._order, self._schedule = order.to(device), setting.schedule().to(device)
        self._span = torch.arange(setting.length + 1, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self.losses = torch.zeros(setting.steps, device=device)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._taken = 0

    def advance(self) -> None:
        """Take the next step: the first three as they are, all others as one graph."""
        self._taken += 1
        if self._stream is None:
            self._take()
            return
        with torch.cuda.stream(self._stream):
            if self._taken <= 3:
                self._stream.wait_stream(torch.cuda.default_stream())
                self._take()
                return
            if self._graph is None:
                # What is captured allocates its own gradients, and is not executed.
                self._stream.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self._stream):
                    self._take()
            self._graph.replay()

    def _take(self) -> None:
        """One step, without any value that the host would have to wait for."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        multiplier = self._schedule[self._step][0]
        for rate, full in self._rates:
            rate.copy_(full * multiplier)
        loss = self._loss(self._compiled, self._text, self._order[self._step][0])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.losses.index_copy_(0, self._step, loss.detach()[None])
        self._step += 1

    def _loss(self, model: Callable[[Tensor], Tensor], text: Tensor, blocks: Tensor) -> Tensor:
        """The loss on blocks of a text, by their numbers, [batch]."""
        ids = text[blocks[:, None] * self._setting.length + self._span].long()
        on_gpu = text.is_cuda
        with torch.autocast(text.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            return model(ids)

    @torch.no_grad()
    def held_out_loss(self, text: Tensor) -> float:
        """The mean loss on all complete blocks of a text."""
        blocks = torch.arange((len(text) - 1) // self._setting.length, device=text.device)
        batches = blocks.split(64)
        total = sum(self._loss(self.model, text, batch).item() * len(batch) for batch in batches)
        return total / len(blocks)

    def result(self, valid: Tensor, test: Tensor) -> dict[str, Any]:
        """Losses, and the geometry of the embeddings."""
        table = self.model.tokens.weight.detach()
        curve = [piece.mean().item() for piece in self.losses.split(50)]
        return {
            "valid_loss": self.held_out_loss(valid),
            "test_loss": self.held_out_loss(test),
            "mean_norm_ratio": mean_norm_ratio(table),
            "norm": table.norm(dim=1).mean().item(),
            "curve": [round(loss, 4) for loss in curve],
        }


def train_together(trainings: Iterable[Training], setting: Setting) -> None:
    """Take all steps of several runs, in turn."""
    trainings = [*trainings]
    for step in range(setting.steps):
        for training in trainings:
            training.advance()
        if torch.cuda.is_available() and step % 100 == 99:  # let the host not run far ahead
            torch.cuda.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def texts(corpus: Corpus, device: str) -> Mapping[str, Tensor]:
    """The token ids of each split, [tokens], on the device."""
    return {
        split: torch.from_numpy(corpus.tokens(split)[:].astype(np.int32)).to(device)
        for split in ("train", "valid", "test")
    }


def main() -> None:
    """Train what has no result yet, and add it to the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, help="the study's training text")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "wider.json", help="a file"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help=f"by default all of {', '.join(RUNS)}"
    )
    parser.add_argument("--seeds", type=parse_seeds, default=[1], metavar="1,2,...")
    parser.add_argument("--together", type=int, default=4, metavar="RUNS", help="at the same time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    for field in dataclasses.fields(Setting):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    options = parser.parse_args()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)}
    setting = Setting(**{key: value for key, value in given.items() if value is not None})
    if not fnmatch.filter(RUNS, options.only):
        parser.error(f"--only {options.only!r} matches none of {', '.join(RUNS)}")
    for name, run in read_results(options.results).items():
        if run["setting"] != dataclasses.asdict(setting):
            parser.error(f"{options.results} has {name!r} of another setting: name another file")
    torch.set_float32_matmul_precision("high")
    overrides = {"model.vocab_size": setting.vocab_size}
    corpus = prepare_corpus(recipe_of(Entry(ADAMW, overrides), options.text), default_cache())
    text = texts(corpus, options.device)
    due = [
        (name, seed)
        for seed in options.seeds
        for name in fnmatch.filter(RUNS, options.only)
        if not has_result(options.results, name, seed)
    ]
    made_by = machine()
    for first in range(0, len(due), options.together):
        began = time.perf_counter()
        wave = [Training(setting, *job, text["train"]) for job in due[first:][: options.together]]
        train_together(wave, setting)
        for training in wave:
            result = training.result(text["valid"], text["test"])
            result |= {"seconds": time.perf_counter() - began, "environment": made_by}
            of_all = {"setting": dataclasses.asdict(setting)}
            add_result(options.results, training.name, training.seed, result, **of_all)
            print(f"{training.name}, seed {training.seed}: {result['test_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
