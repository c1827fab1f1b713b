"""Measure the time and memory of an optimizer's step, in pairs with torch's fused AdamW.

    python benchmarks/speed.py --json > benchmarks/results/bench/amd-epyc-1.json
    python benchmarks/speed.py --shapes 50304x768 --clip
    python benchmarks/speed.py --recipe 30M training.batch_size=4     # whole training steps

``benchmarks/speed_table.py`` makes the tables of docs/speed.md from the JSON.
"""

import argparse
import json

from bench.cases import SHAPES, parse_case
from bench.machine import describe_machine
from bench.optimizers import OPTIMIZERS
from bench.results import bench_table
from bench.steps import bench
from bench.training import summary, training_speed
from tqdm import tqdm

from coupled_adam.cli.options import DeviceOption
from coupled_adam.cli.terminal import show
from coupled_adam.lab.recipe import load_recipe, override, read_yaml
from coupled_adam.lab.training.environment import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--shapes", nargs="+", metavar="VxH", help="embedding matrices: 50304x768")
    parser.add_argument("--dtype", default="float32", help="of parameters and gradients")
    parser.add_argument("--clip", action="store_true", help="also clip the norm of the gradients")
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="only these of the table")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each optimizer")
    parser.add_argument("--recipe", help="time whole training steps of this recipe instead")
    parser.add_argument("--steps", type=int, default=20, help="of each optimizer, with --recipe")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="print all numbers, and nothing else")
    options = parser.parse_args()
    device = DeviceOption(device=options.device).usable_device()
    # Read before anything is timed: the code may be changed, and the machine busy, by the end.
    machine = describe_machine(device)
    content = {"environment": environment(), "machine": machine.to_dict()}
    if not options.json:
        print("\n".join(machine.notes))
    if options.recipe:
        pairs = [word.split("=", 1) for word in options.overrides]
        values = {key: read_yaml(value, key) for key, value in pairs}
        recipe = override(load_recipe(options.recipe), values)
        speed = training_speed(recipe, device=device, steps=options.steps)
        print(json.dumps(content | speed, indent=1) if options.json else summary(speed))
        return
    shapes = options.shapes or SHAPES["cuda" if device == "cuda" else "cpu"]
    cases = [parse_case(shape, options.dtype, options.clip) for shape in shapes]
    names = options.optimizers or list(OPTIMIZERS)
    timed = bench(cases, names, device=device, seconds=options.seconds)
    results = list(tqdm(timed, total=len(cases) * len(names), disable=None, leave=False))
    if options.json:
        print(json.dumps({**content, "results": [result.to_dict() for result in results]}))
    else:
        show(bench_table(results))


if __name__ == "__main__":
    main()
