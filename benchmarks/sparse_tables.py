"""A step of tables with sparse gradients, beside torch's optimizers for them.

    python benchmarks/sparse_tables.py --out benchmarks/results/sparse_tables.json
    python benchmarks/sparse_tables.py --shared benchmarks/results/shared_table.json
    python benchmarks/sparse_tables.py --bags benchmarks/results/embedding_bags.json

The second is of a table that several processes share, each with a thread and its own lookups. The
third, of a recommender's weighted bags, runs in the environment of ``make test-torchrec``: it needs
FBGEMM, where lookups, backward pass and step are one.

Each gradient has 8,192 lookups that follow Zipf's law, so many of them are of the same rows. The
optimizers of a case take their steps in turn in one process, each with a table of its own, and with
the same gradients, as the backward pass leaves them. The largest table is LEAN's alone, as two
would not fit into the memory; with pages of 2 MB, too, as torch asks for them if
THP_MEM_ALLOC_ENABLE=1.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.machine import describe_machine
from torch import Tensor, nn

from coupled_adam import CoupledAdamW

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOKUPS, ROUNDS = 8192, 40
LEAN = {"coupled": True, "row_exponent": 0.75, "betas": (0.0, 0.99), "weight_decay": 0.0}
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "LEAN": lambda params: CoupledAdamW(params, lr=1e-3, **LEAN),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
}
CASES: list[tuple[int, int, tuple[str, ...], bool]] = [
    (10**6, 512, tuple(OPTIMIZERS), False),
    (10**7, 64, tuple(OPTIMIZERS), False),
    (10**6, 32, ("LEAN",), False),
    (10**8, 32, ("LEAN",), False),
    (10**6, 32, ("LEAN",), True),
    (10**8, 32, ("LEAN",), True),
]
"""Rows, columns, optimizers, and whether pages are large."""


def gradient(rows: int, columns: int, seed: int) -> Tensor:
    """Of rows whose logarithms are evenly distributed, as by Zipf's law with an exponent of 1."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(LOOKUPS, generator=generator, dtype=torch.float64)
    indices = ((places * math.log(rows)).exp() - 1).long().clamp(max=rows - 1)
    # As hashes do, so that frequent rows are not neighbours; the multiplier has no common factor.
    indices = indices * 2_654_435_761 % rows
    values = torch.randn(LOOKUPS, columns, generator=generator)
    return torch.sparse_coo_tensor(indices[None], values, (rows, columns), check_invariants=False)


def measure(rows: int, columns: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds of a step, and the bytes of the state."""
    tables = {name: nn.Parameter(torch.full((rows, columns), 0.01)) for name in names}
    optimizers = {name: OPTIMIZERS[name]([table]) for name, table in tables.items()}
    result: dict[str, Any] = {"rows": rows, "columns": columns}
    times: dict[str, list[float]] = {name: [] for name in names}
    for step in range(ROUNDS + 3):
        grad = gradient(rows, columns, step)
        for name in names if step % 2 else reversed(names):
            tables[name].grad = grad.clone()
            began = time.perf_counter()
            optimizers[name].step()
            if step >= 3:  # the first of them make states and touch pages
                times[name].append(1000 * (time.perf_counter() - began))
    result["steps"] = {
        name: {"ms": statistics.median(x), "quartiles": statistics.quantiles(x, n=4)}
        for name, x in times.items()
    }
    result["bytes of state"] = {
        name: sum(x.nbytes for x in optimizers[name].state[table].values() if torch.is_tensor(x))
        for name, table in tables.items()
    }
    return result


def alone(function: str, *arguments: Any, large_pages: bool = False) -> dict[str, Any]:
    """What a function of this module returns in a process of its own, and that process's memory.

    Linux alone tells it.
    """
    code = (
        f"import json, sys; sys.path[:0] = sys.argv[1:]; import sparse_tables as s; "
        f"print('result', json.dumps(s.{function}(*{arguments!r}))); "
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    pages = {"THP_MEM_ALLOC_ENABLE": str(int(large_pages))}
    done = subprocess.run(
        [*command, *sys.path], env=os.environ | pages, capture_output=True, text=True, check=True
    )
    result = json.loads(re.search(r"^result (.*)$", done.stdout, re.M)[1]) or {}
    return {**result, "peak bytes": 1024 * int(re.search(r"VmHWM:\s*(\d+)", done.stdout)[1])}


def few_steps(rows: int, columns: int, name: str) -> None:
    """What a process does of which the memory is wanted."""
    table = nn.Parameter(torch.full((rows, columns), 0.01))
    optimizer = OPTIMIZERS[name]([table])
    for step in range(3):
        table.grad = gradient(rows, columns, step)
        optimizer.step()


UNTIED = (128_256, 1024)
INPUT_TABLES: dict[str, tuple[bool, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "AdamW, fused": (False, lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)),
    "LEAN, dense gradient": (False, OPTIMIZERS["LEAN"]),
    "LEAN, sparse gradient": (True, OPTIMIZERS["LEAN"]),
}
"""The input table of an untied model: whether its gradient is sparse, and its optimizer."""


def untied(name: str) -> dict[str, Any]:
    """Milliseconds of lookups, their backward pass and a step, with the table of a large model."""
    sparse, optimizer_of = INPUT_TABLES[name]
    table = nn.Embedding(*UNTIED, sparse=sparse, _weight=torch.full(UNTIED, 0.01))
    optimizer = optimizer_of([table.weight])
    milliseconds = []
    for step in range(23):
        rows = gradient(UNTIED[0], 1, step)._indices()[0]
        began = time.perf_counter()
        table(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3:
            milliseconds.append(1000 * (time.perf_counter() - began))
    return {"ms": statistics.median(milliseconds)}


BAGS, IN_A_BAG = (10**7, 64), 8
ROW_WISE = "row-wise Adagrad (FBGEMM)"


def bags(name: str) -> dict[str, Any]:
    """Milliseconds from the lookups of weighted bags to the end of the step, and the state.

    They are the processor's, of one thread, so that what else a machine does matters little.
    """
    torch.set_num_threads(1)
    lookup: Callable[..., Tensor]
    if name == ROW_WISE:
        lookup, optimizer, state = fbgemm()
    else:
        table = nn.EmbeddingBag(*BAGS, mode="sum", sparse=True, _weight=torch.full(BAGS, 0.01))
        lookup, optimizer = table, OPTIMIZERS[name]([table.weight])
        state = optimizer.state[table.weight]
    offsets = torch.arange(0, LOOKUPS + 1, IN_A_BAG)
    milliseconds = []
    for step in range(ROUNDS + 3):
        rows = gradient(BAGS[0], 1, step)._indices()[0]
        weights = torch.rand(LOOKUPS, generator=torch.Generator().manual_seed(step))
        ends = offsets if name == ROW_WISE else offsets[:-1]
        began = time.process_time()
        lookup(rows, ends, per_sample_weights=weights).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if step >= 3:
            milliseconds.append(1000 * (time.process_time() - began))
    size = sum(x.nbytes for x in state.values() if torch.is_tensor(x))
    quartiles = statistics.quantiles(milliseconds, n=4)
    return {"ms": quartiles[1], "quartiles": quartiles, "bytes of state": size}


def fbgemm() -> tuple[Callable[..., Tensor], None, dict[str, Tensor]]:
    """A table that its backward pass updates, no optimizer, and the state."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(*BAGS, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-3,
        pooling_mode=PoolingMode.SUM,
    )
    table.split_embedding_weights()[0].fill_(0.01)
    ((state,),) = table.split_optimizer_states()
    return table, None, {"sum": state}


def shared_steps() -> dict[str, float]:
    """Milliseconds of the parts of a step on this rank, and of gloo's sum of sparse gradients."""
    sys.path.insert(0, str(EXAMPLES))
    from shared_host_table import of_all, shared

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    table = nn.Embedding.from_pretrained(shared(*BAGS), freeze=False, sparse=True)
    rows, values = shared(ranks, LOOKUPS, dtype=torch.long), shared(ranks, LOOKUPS, BAGS[1])
    optimizer = OPTIMIZERS["LEAN"]([table.weight])
    if rank == 0:
        nn.init.constant_(table.weight, 0.01)
    times: dict[str, list[float]] = {"lookups": [], "exchange": [], "step": [], "all_reduce": []}
    for step in range(ROUNDS + 3):
        ids = gradient(BAGS[0], 1, ranks * step + rank)._indices()[0]
        dist.barrier()
        marks = [time.perf_counter()]
        table(ids).square().sum().backward()
        marks.append(time.perf_counter())
        own, whole = table.weight.grad, of_all(table.weight.grad, rows, values)
        marks.append(time.perf_counter())
        table.weight.grad = whole if rank == 0 else None
        optimizer.step()
        dist.barrier()
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        dist.all_reduce(own)
        marks.append(time.perf_counter())
        for name, began, ended in zip(times, marks, marks[1:]):
            times[name].append(1000 * (ended - began))
    dist.destroy_process_group()
    return {name: statistics.median(x[3:]) for name, x in times.items()}


def untied_markdown(results: dict[str, Any]) -> str:
    """The rows of the second table on docs/tables.md."""
    return "".join(
        f"| {name} | {case['ms']:,.0f} | {case['peak bytes'] / 1e9:.1f} |\n"
        for name, case in results["untied"].items()
    )


def shared_sentence(results: dict[str, Any]) -> str:
    """What docs/tables.md says of two processes with a table, and of four."""
    two, four = (
        "{lookups:.1f}, {exchange:.1f} and {step:.1f}".format(**results["processes"][n])
        for n in ("2", "4")
    )
    return f"Lookups, exchange and step take 2 processes {two} ms, and 4 {four}"


def markdown(results: dict[str, Any]) -> str:
    """The rows of the table on docs/tables.md: of the largest that several optimizers update."""
    return "".join(
        f"| {name} | {case['steps'][name]['ms']:.2f} | {case['bytes of state'][name] / 1e9:.3f} |\n"
        for case in results["cases"]
        for name in case["steps"]
        if case["rows"] == 10**7
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    paths = parser.add_mutually_exclusive_group(required=True)
    paths.add_argument("--out", type=Path)
    paths.add_argument("--bags", type=Path)
    paths.add_argument("--shared", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        own = shared_steps()
        if os.environ["RANK"] == "0":
            options.shared.write_text(json.dumps(own))
        return
    warnings.simplefilter("ignore")
    machine = describe_machine("cpu").to_dict()
    if options.bags is not None:
        own = {name: alone("bags", name) for name in (*OPTIMIZERS, ROW_WISE)}
        whole = {"machine": machine, "torch": torch.__version__, "bags": own}
        options.bags.write_text(json.dumps(whole, indent=1) + "\n")
        print(json.dumps(own, indent=1))
        return
    if options.shared is not None:
        results = {"machine": machine, "torch": torch.__version__, "processes": {}}
        for n in ("1", "2", "4"):
            torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", n)
            subprocess.run([sys.executable, *torchrun, *sys.argv], check=True)
            results["processes"][n] = json.loads(options.shared.read_text())
        options.shared.write_text(json.dumps(results, indent=1) + "\n")
        print(shared_sentence(results))
        return
    results: dict[str, Any] = {"machine": machine, "cases": []}
    for rows, columns, names, large_pages in CASES:
        case = alone("measure", rows, columns, names, large_pages=large_pages)
        case["large pages"] = large_pages
        case["peak bytes"] = {
            name: alone("few_steps", rows, columns, name, large_pages=large_pages)["peak bytes"]
            for name in names
        }
        results["cases"].append(case)
        print(json.dumps(case), flush=True)
    results["untied"] = {name: alone("untied", name) for name in INPUT_TABLES}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    print(untied_markdown(results))


if __name__ == "__main__":
    main()
