"""Whether the optimizer is right on a GPU, and how fast it is, in at most ten minutes.

    PYTHONPATH=src python benchmarks/gpu.py benchmarks/results/bench/h200.json    # or: make gpu

It needs torch, Triton and numpy, and nothing else: no other package, no installed one of ours, no
network. First come the checks of tests/optim/gpu_checks.py; then steps of a matrix, in pairs with
torch's fused AdamW, with what was expected of them, their launches and memory; then steps of all
parameters of a GPT-2; then training steps of that GPT-2, in pairs with AdamW. What is known so far
is written after each of them. ``benchmarks/speed_table.py`` makes the page's table from the file.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.cases import Case, parse_case
from bench.machine import describe_machine
from bench.optimizers import BASELINE, candidate, make_step
from bench.steps import bench
from bench.timing import Quartiles, now, sample_in_turn, step_sampler
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.files import write_atomically

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from optim.gpu_checks import CHECKS, CHECKS_ON_A_GPU

LEAN = "CoupledAdamW LEAN"
TIMED = ("CoupledAdamW", "CoupledAdamW fused", "CoupledAdamW a=0.5, zero-sum", LEAN)


def environment() -> dict[str, Any]:
    """The software and hardware."""
    packages = {"torch": torch.__version__}
    if (triton := sys.modules.get("triton")) is not None:
        packages["triton"] = triton.__version__
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": packages,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def expected(case: Case, name: str) -> float | None:
    """The expected upper bound of the time of a step, relative to fused AdamW's.

    It is the ratio of the bytes that are moved, and a tenth for launches and sums. Clipping moves
    three matrices in both: the norm reads the gradient, and scaling reads and writes it.
    """
    moved, baseline = (candidate(x).matrices_moved for x in (name, BASELINE))
    if case.dtype != "float32" or moved is None or baseline is None:
        return None
    clipping = 3 * case.clip
    return (moved + clipping) / (baseline + clipping) + 0.1


def launches(step: Callable[[], object]) -> int:
    """Count a step's launches on the GPU: kernels, and operations that set or copy memory."""
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in profile.events())


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of a matrix, by case and optimizer."""
    device = options.device
    cases = [
        parse_case(shape, dtype, clip)
        for shape in options.shapes
        for dtype in ("float32", "bfloat16")
        for clip in (False, True)
    ]
    for timed in bench(cases, TIMED, device=device, seconds=options.seconds):
        case, name, ratio = timed.case, timed.optimizer, timed.ratio
        count = None
        if device == "cuda":
            count = launches(make_step(name, *case.parameters(device), case.clip)[1])
        most = expected(case, name)
        remarks = [
            f"{case.label}, {name}: {ratio.median:.2f} "
            f"({ratio.low:.2f}–{ratio.high:.2f}) of AdamW fused",
            f"expected at most {most:.2f}" if most is not None else "",
            f"{count} launches" if count is not None else "",
            f"{(timed.extra_bytes or 0) / 1e6:.1f} MB beside the state",
            ratio.remark,
        ]
        print(", ".join(remark for remark in remarks if remark), flush=True)
        yield {**timed.to_dict(), "expected": most, "launches": count}


class GPT(nn.Module):
    """A GPT-2 with tied embeddings, of torch's modules: 124M parameters by default."""

    def __init__(self, rows: int, columns: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(rows, columns), nn.Embedding(length, columns)
        nn.init.normal_(self.tokens.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            columns,
            max(1, columns // 64),
            4 * columns,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(columns), enable_nested_tensor=False
        )
        self.head = nn.Linear(columns, rows, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy of all tokens [batch, length + 1] but the first."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        places = torch.arange(length, device=ids.device)
        hidden = self.tokens(inputs) + self.positions(places)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """A step that clips the gradients first."""

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return clip_and_step


def model_and_optimizer(options: argparse.Namespace, name: str) -> tuple[GPT, Callable[[], object]]:
    """A model, and a clipped step of AdamW or, by any other name, of Coupled Adam."""
    case = parse_case(options.shapes[0], "float32", clip=True)
    torch.manual_seed(0)
    model = GPT(case.rows, case.columns, options.layers, options.length).to(options.device)
    if name == "AdamW":
        return model, clipped(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    kind = "lean" if name == LEAN else "coupled"
    groups = param_groups(model, kind, vocab_size=case.rows)
    return model, clipped(model, CoupledAdamW(groups, lr=1e-4, fused=True))


def model_steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Clipped steps of all parameters of the model."""
    for name in ("CoupledAdamW", LEAN):
        samplers = []
        for each in (name, "AdamW"):
            model, step = model_and_optimizer(options, each)
            for p in model.parameters():
                p.grad = torch.randn_like(p) * 1e-4
            samplers.append(step_sampler(step, options.device))
        rounds = sample_in_turn(samplers, least=6, most=100, seconds=options.seconds)
        yield summary(f"all parameters, clipped: {name}", rounds)


def training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole training steps on random tokens in bfloat16 autocast."""
    device, (batch, length) = options.device, (options.batch_size, options.length)

    def trainer(name: str) -> Callable[[], float]:
        model, step = model_and_optimizer(options, name)
        vocabulary = model.tokens.num_embeddings

        def train() -> float:
            ids = torch.randint(vocabulary, (batch, length + 1), device=device)
            start = now(device)
            model.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = model(ids)
            loss.backward()
            step()
            return now(device) - start

        for _ in range(3):
            train()
        return train

    for name in ("CoupledAdamW", LEAN):
        pair = [trainer(name), trainer("AdamW")]
        rounds = sample_in_turn(pair, least=6, most=options.steps, seconds=options.seconds * 10)
        yield summary(f"training: {name}", rounds)


def summary(name: str, rounds: list[tuple[float, ...]]) -> dict[str, Any]:
    ratio = Quartiles.of(ours / theirs for ours, theirs in rounds)
    print(f"{name}: {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) of AdamW fused")
    return {"name": name, "ratio": ratio, "samples": rounds}


def checks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each check: how long it took, and what went wrong."""
    end = time.monotonic() + options.check_seconds
    for name, check in (CHECKS_ON_A_GPU if options.device == "cuda" else CHECKS).items():
        if time.monotonic() > end:
            print(f"the checks took more than {options.check_seconds:.0f} s: {name} is left out")
            yield {"name": name, "passed": False, "problem": "left out"}
            continue
        start, problem = time.monotonic(), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(options.device)
        except Exception:
            problem = traceback.format_exc()
        seconds = time.monotonic() - start
        print(f"{'FAILED' if problem else 'right'}: {name} ({seconds:.1f} s)", flush=True)
        if problem:
            print(problem, flush=True)
        yield {"name": name, "passed": not problem, "seconds": seconds, "problem": problem}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", default=["50304x768", "128256x4096"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each optimizer and case")
    parser.add_argument("--layers", type=int, default=12, help="of the model of the first shape")
    parser.add_argument("--length", type=int, default=1024, help="of its sequences")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a training step")
    parser.add_argument("--steps", type=int, default=100, help="of training, with each optimizer")
    parser.add_argument("--check-seconds", type=float, default=240, help="no check begins after")
    parser.add_argument("--minutes", type=float, default=10.0, help="nothing begins after them")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU, and torch finds none here", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    machine = describe_machine(options.device)
    print(f"{machine.device}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("\n".join(machine.notes), flush=True)
    content: dict[str, Any] = {"environment": environment(), "machine": machine.to_dict()}
    sections = {"checks": checks, "results": steps, "model": model_steps, "training": training}
    for name, section in sections.items():
        content[name] = []
        for measured in section(options):
            content[name].append(measured)
            write_atomically(options.target, json.dumps(content))
            if time.monotonic() > end:
                break
    return int(not all(check["passed"] for check in content["checks"]))


if __name__ == "__main__":
    sys.exit(main())
