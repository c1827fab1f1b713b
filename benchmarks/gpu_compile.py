"""Compile the Triton kernels for several GPUs without one, and print registers and spills.

    PYTHONPATH=src:tests python benchmarks/gpu_compile.py    # with every Triton: make gpu-compile

Each kernel is compiled as steps of matrices of both dtypes, of several widths and strides launch
it, with the Triton that Python finds. A row of the table has the most registers of a thread, and
the most bytes (NVIDIA) or registers (AMD) that it puts aside, over all of them.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from coupled_adam.optim import kernels, update
from coupled_adam.optim.kernels import triton as kernel
from optim.cases import CASES, gradient, laid_out, matrix, optimizer_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KINDS = ("coupled", "coupled, amsgrad", "LEAN", "LEAN, momentum")
WIDTHS = (64, 770, 2048, 4096, 8192)


class StandIn:
    """A driver of a GPU that is not there."""

    def __init__(self, target: str) -> None:
        self.target = TARGETS[target]
        self.number = list(TARGETS).index(target)  # Triton's caches go by the number of the device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Launches compile for a GPU, and do nothing more: the name and the binary of each."""
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    active = "_active" if hasattr(driver, "_active") else "active"  # of older Tritons
    with (
        patch.object(driver, active, StandIn(target)),
        patch.object(torch.version, "hip", "6.0" if target.startswith("gfx") else None),
        patch.object(JITFunction, "run", compile_only),
        patch.object(kernels, "choose", lambda _: kernel),
        patch.object(update, "choose", lambda _: kernel),
    ):
        yield launches


def take_steps(name: str, columns: int, dtype: torch.dtype, layout: str) -> None:
    """Two steps of a matrix [64, columns]; a transposed one is also scaled, bfloat16 rounded."""
    shape, options = (64, columns), {**CASES[name], "stochastic_rounding": dtype == torch.bfloat16}
    p = nn.Parameter(laid_out(matrix(shape, 0, dtype), layout))
    optimizer = optimizer_of([p], **options)
    if layout != "rows":
        optimizer.param_groups[0]["fused"] = True
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(2):
        p.grad = laid_out(gradient(shape, step, dtype), layout)
        optimizer.step()


class Usage(NamedTuple):
    """What a thread of a kernel uses."""

    registers: int
    spilled: int


def usage(binary: Any) -> Usage:
    """Read it from AMD's assembly, or from NVIDIA's binary."""
    if "amdgcn" in binary.asm:
        text, names = binary.asm["amdgcn"], (r"\.vgpr_count", r"\.[sv]gpr_spill_count")
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(binary.asm["cubin"])
            command = [tool, "-res-usage", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        text, names = done.stdout, ("REG", "(?:STACK|LOCAL)")
    registers, spilled = (map(int, re.findall(rf"{name}: *(\d+)", text)) for name in names)
    return Usage(max(registers), sum(spilled))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--all", action="store_true", help="a row for each width and layout")
    options = parser.parse_args()
    print(f"Triton {triton.__version__}: registers of a thread, and what it spills\n")
    rows: dict[tuple[str, ...], list[str]] = {}
    spills = 0
    for target in options.targets:
        found: dict[tuple[str, ...], Usage] = {}
        with compiling(target) as launches:
            for name in KINDS:
                for columns in options.widths:
                    for dtype in (torch.float32, torch.bfloat16):
                        for layout in ("rows", "transposed"):
                            if layout == "transposed" and "LEAN" in name and columns > 4096:
                                continue  # which it is not given
                            launches.clear()
                            take_steps(name, columns, dtype, layout)
                            assert launches
                            for function, binary in launches:
                                key: tuple[str, ...] = (function, name)
                                if options.all:
                                    short = str(dtype).removeprefix("torch.")
                                    key += (str(columns), short, layout)
                                used = usage(binary)
                                before = found.get(key, Usage(0, 0))
                                found[key] = Usage(*map(max, zip(used, before)))
        for key, used in found.items():
            spills += used.spilled > 0
            rows.setdefault(key, []).append(f"{used.registers:>7} {used.spilled or '':>4}")
    print(f"{'':52}" + "".join(f"{target:>13}" for target in options.targets))
    for key, cells in rows.items():
        print(f"{'  '.join(key):52}" + "".join(f"{cell:>13}" for cell in cells))
    return 0 if not spills else 1


if __name__ == "__main__":
    sys.exit(main())
