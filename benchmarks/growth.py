"""Measure how the time of a step grows: with V from 1k to 512k, H from 64 to 8192, and with the
number of other matrices.

    python benchmarks/growth.py --picture docs/images/bench-growth.png > results.json

What is measured is what ``coupled-adam bench`` measures, for cases that differ in one attribute.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from coupled_adam.bench.cases import Case
from coupled_adam.bench.machine import describe_machine
from coupled_adam.bench.optimizers import BASELINE
from coupled_adam.bench.results import Timed
from coupled_adam.bench.steps import bench
from coupled_adam.files import write_atomically
from coupled_adam.lab.training.environment import environment
from coupled_adam.rendering.pictures import drawn

GROWTH: dict[str, list[Case]] = {
    "rows": [Case(2**n * 1024, 768) for n in range(10)],
    "columns": [Case(32768, 2**n * 64) for n in range(8)],
    "others": [Case(8192, 256, others=n) for n in (1, 4, 16, 64, 256, 1024)],
}
"""Cases by the one attribute that varies."""
OPTIMIZERS = ("CoupledAdamW fused", "AdamW foreach")
_AXES = {
    "rows": "tokens V (H = 768)",
    "columns": "H (V = 32,768)",
    "others": "matrices [64, 64] in addition to [8192, 256]",
}


def growth_picture(results: Sequence[Timed]) -> Figure:
    """Draw the time of a step, and its ratio to the baseline's, for the cases in GROWTH."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, len(GROWTH), sharex="col", squeeze=False)
    for column, (key, cases) in enumerate(GROWTH.items()):
        above, below = axes[:, column]
        for number, name in enumerate(dict.fromkeys(result.optimizer for result in results)):
            timed = [r for r in results if r.optimizer == name and r.case in cases]
            x = [getattr(result.case, key) for result in timed]
            style = {"marker": "o", "markersize": 3, "color": f"C{number}", "label": name}
            above.plot(x, [result.seconds for result in timed], **style)
            low, median, high = zip(*(result.ratio for result in timed))
            below.plot(x, median, **style)
            below.fill_between(x, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
            if not number:
                above.plot(x, [r.baseline_seconds for r in timed], color="gray", label=BASELINE)
        below.axhline(1, color="gray", linewidth=1)
        above.set(xscale="log", yscale="log")
        below.set(xscale="log", xlabel=_AXES[key], ylim=(0, None))
        above.yaxis.set_major_formatter(EngFormatter("s"))
        above.yaxis.set_minor_formatter(NullFormatter())
        below.xaxis.set_major_formatter(EngFormatter())
    axes[0, 0].set_ylabel("time of a step")
    axes[1, 0].set_ylabel(f"as a multiple of {BASELINE}")
    axes[0, 0].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args()
    facts = {"environment": environment(), "machine": describe_machine(options.device).to_dict()}
    cases = itertools.chain(*GROWTH.values())
    results = list(bench(cases, OPTIMIZERS, device=options.device, seconds=options.seconds))
    print(json.dumps({**facts, "results": [result.to_dict() for result in results]}))
    if options.picture is not None:
        image = drawn(growth_picture(results), options.picture.suffix[1:])
        write_atomically(options.picture, image)


if __name__ == "__main__":
    main()
