"""Compile the Triton kernels for several GPUs without one, and print what they need there.

    PYTHONPATH=src:tests python benchmarks/gpu_compile.py    # with every Triton: make gpu-compile

Each kernel is compiled as steps of matrices of both dtypes, of several widths and strides launch
it, with the Triton that Python finds. For each GPU the table has the threads of a program, how many
blocks of rows it reads at a time, its shared memory in KB, the registers of a thread, and the bytes
(NVIDIA) or registers (AMD) that a thread spills: the most over what a row stands for.
"""

import argparse
import contextlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import nn
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from coupled_adam.optim import update
from coupled_adam.optim.kernels import triton as kernel
from optim.cases import CASES, gradient, laid_out, matrix, optimizer_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KB that a program can have, as Triton asks the GPU."""
KINDS = ("coupled, amsgrad", "LEAN", "LEAN, momentum")
WIDTHS = (768, 770, 4096, 8192)
"""What is compiled goes by the next power of two, and by whether rows are aligned."""


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


class Launch(NamedTuple):
    """A kernel, what it was compiled to, and how many blocks of rows it reads at a time."""

    kernel: str
    binary: Any
    stages: int


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[Launch]]:
    """Launches compile for a GPU, and do nothing more."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binary = run(self, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(self.fn.__name__, binary, options.get("STAGES", 0)))

    active = "_active" if hasattr(driver, "_active") else "active"  # of older Tritons
    with (
        patch.object(driver, active, StandIn(target)),
        # ROCm's linker, which Tritons before 3.5 do not bring: only the assembly is read.
        patch.object(backends["amd"].compiler, "path_to_rocm_lld", lambda: "true", create=True),
        patch.object(torch.version, "hip", "6.0" if target.startswith("gfx") else None),
        patch.object(JITFunction, "run", compile_only),
        patch.object(kernel, "_device", lambda _: (128, 1024 * SHARED_MEMORY[target])),
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
    """What a program and its threads need."""

    threads: int = 0
    stages: int = 0
    shared_memory: int = 0
    registers: int = 0
    spilled: int = 0


def usage(launch: Launch) -> Usage:
    """Read it from AMD's assembly, or from NVIDIA's binary."""
    binary = launch.binary
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
    threads = binary.metadata.num_warps * binary.metadata.target.warp_size
    return Usage(threads, launch.stages, binary.metadata.shared, max(registers), sum(spilled))


def used_by(target: str, options: argparse.Namespace) -> dict[str, Usage]:
    """What the kernels need on a GPU; of LEAN's pass by kind, width and layout."""
    used: dict[str, Usage] = {}
    cases = [
        (name, columns, dtype, layout)
        for name, columns, dtype, layout in itertools.product(
            options.kinds, options.widths, (torch.float32, torch.bfloat16), ("rows", "transposed")
        )
        # Strided ones are all alike, and so is Coupled Adam, which does not take whole rows.
        if (layout == "rows" and "LEAN" in name) or columns < 1024
    ]
    for name, columns, dtype, layout in cases:
        with compiling(target) as launches:
            take_steps(name, columns, dtype, layout)
        assert launches
        for launch in launches:
            row = launch.kernel
            if row == "_lean":
                row += f"  {name}  {columns:,}" + " transposed" * (layout != "rows")
            needs = usage(launch)
            assert needs.shared_memory <= 1024 * SHARED_MEMORY[target], (row, target, needs)
            used[row] = Usage(*map(max, zip(needs, used.get(row, Usage()))))
    return used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    options = parser.parse_args()
    print(
        f"Triton {triton.__version__}: threads, stages, KB of shared memory, registers, spilled\n"
    )
    by_target = [used_by(target, options) for target in options.targets]
    print(f"{'':36}" + "".join(f"{target:>24}" for target in options.targets))
    for row in by_target[0]:
        cells = []
        for threads, stages, shared, registers, spilled in (used[row] for used in by_target):
            cell = (
                f"{threads} {stages or '-'} {shared / 1024:>4.0f} {registers:>4} {spilled or '':>4}"
            )
            cells.append(f"{cell:>24}")
        print(f"{row:36}" + "".join(cells))


if __name__ == "__main__":
    main()
