"""The Triton kernels without a GPU: interpreted, compiled for several, launches counted."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam.optim import kernels
from optim.cases import CASES, gradient, laid_out, matrix, optimizer_of, use

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from coupled_adam.optim.kernels import triton as kernel

ROOT = Path(__file__).parents[2]
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LAUNCHES = {
    **{name: ["_sums", "_finish", "_update"] for name in ("coupled", "coupled, amsgrad")},
    **{name: ["_lean", "_finish_lean"] for name in ("LEAN", "LEAN, momentum")},
}
"""Of a step that is not a matrix's first."""


def test_interpreted():
    """test_cuda.py in Triton's interpreter, which must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", "TestTriton", "tests/optim/test_cuda.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b\d{3} passed", result.stdout)


class StandIn:
    """A driver of a GPU that is not there."""

    def __init__(self, name):
        self.number = list(TARGETS).index(name)  # kernels are cached by the number of the device
        self.target = TARGETS[name]

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """Launches compile, and do nothing more: (name, kernel) of each, for the GPU of a name."""
    launches = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        launches.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    def compile_for(name):
        monkeypatch.setattr(driver, "_active", StandIn(name))
        monkeypatch.setattr(torch.version, "hip", "6.0" if name.startswith("gfx") else None)
        monkeypatch.setattr(JITFunction, "run", compile_only)
        use(monkeypatch, kernel)
        return launches

    return compile_for


def spills(binary, path):
    """How many bytes or registers a kernel puts aside."""
    if "amdgcn" in binary.asm:
        return sum(map(int, re.findall(r"\.[sv]gpr_spill_count: +(\d+)", binary.asm["amdgcn"])))
    path.write_bytes(binary.asm["cubin"])
    tool = [knobs.nvidia.cuobjdump.path, "-res-usage", path]
    usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    stack = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert stack
    return sum(map(int, stack))


def check_compiled(launches, path, shape, dtype, layout="rows", scaled=False, **options):
    """Two steps, none of whose kernels spills."""
    p = nn.Parameter(laid_out(matrix(shape, 0, dtype), layout))
    optimizer = optimizer_of([p], **options)
    if scaled:
        optimizer.param_groups[0]["fused"] = True
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(2):
        p.grad = laid_out(gradient(shape, step, dtype), layout)
        optimizer.step()
    assert launches
    for name, binary in launches:
        assert spills(binary, path) <= 8, name  # bytes, which are two registers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiled(name, dtype, compiled, tmp_path):
    """Nothing is spilled; here for the most common GPU."""
    options = {"stochastic_rounding": dtype == torch.bfloat16, **CASES[name]}
    check_compiled(compiled("sm_90"), tmp_path / "kernel.cubin", (64, 768), dtype, **options)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [64, 770, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiled_everywhere(name, target, dtype, columns, compiled, tmp_path):
    """Of whole rows that are very wide, or transposed, LEAN's program cannot but spill some."""
    launches, path = compiled(target), tmp_path / "kernel.cubin"
    for layout, scaled in (("rows", False), ("transposed", True)):
        options = {"layout": layout, "scaled": scaled, **CASES[name]}
        options["stochastic_rounding"] = scaled
        if "LEAN" not in name or (columns <= 4096 and layout == "rows"):
            check_compiled(launches, path, (64, columns), dtype, **options)


def test_one_binary_for_all_steps(compiled):
    """Whatever changes from step to step, or from matrix to matrix, does not make another one."""
    launches = compiled("sm_90")
    ps = [nn.Parameter(matrix((64, 768), 0, torch.bfloat16)) for _ in range(3)]
    optimizers = [
        optimizer_of(ps, stochastic_rounding=True, **CASES[name]) for name in ("coupled", "LEAN")
    ]
    for t in range(1, 21):
        for optimizer in optimizers:
            optimizer.param_groups[0] |= {"lr": 1e-3 / t, "weight_decay": 0.1 / t}
            for p in ps:
                p.grad = gradient((64, 768), t, torch.bfloat16)
            optimizer.step()
    names = {name for name, _ in launches}
    assert names == {"_sums", "_finish", "_update", "_lean", "_finish_lean"}
    # LEAN's first pass begins at t = 0, with numbers that are 0 and 1: these may be others.
    later = launches[len(launches) // 2 :]
    for name in names:
        assert len({id(binary) for other, binary in later if other == name}) == 1, name


class Launches(TorchDispatchMode):
    """Counts what is launched on the device, and refuses what waits for it."""

    FREE = frozenset({"empty", "empty_like", "empty_strided", "detach", "alias", "device"})

    def __init__(self, device):
        self.device = device
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        on_device = {x.device.type for x in (*given, *made) if x.numel()}
        if self.device in on_device and name not in self.FREE and not func.is_view:
            assert name not in {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}, name
            # A 0-dim tensor on the CPU is a number to an operation, but a copy waits.
            assert name not in {"_to_copy", "copy_"} or on_device == {self.device}, name
            self.names.append(name)
        return result


@pytest.fixture
def fake_gpu(monkeypatch):
    """Tensors on a GPU that have no memory, and Triton, which notes what it is to launch."""
    noted = []

    def note(self, *args, grid, warmup, **options):
        noted.append(self.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", note)
    use(monkeypatch, kernel)
    monkeypatch.setattr(kernel, "_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(kernel, "_units", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None
    )
    with FakeTensorMode():
        yield noted


def count(noted, *, dtype=torch.float32, scaled=False, matrices=1, **options):
    """Launches of the second step: Triton's, and torch's operations."""
    params = [
        nn.Parameter(torch.empty(512, 64, device="cuda", dtype=dtype)) for _ in range(matrices)
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = optimizer_of(params, **options)
    if scaled:
        optimizer.grad_scale = torch.empty((), device="cuda")
        optimizer.found_inf = torch.empty((), device="cuda")
    optimizer.step()
    noted.clear()
    with Launches("cuda") as launches:
        optimizer.step()
    return noted, launches.names


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize(
    ("options", "operations"),
    [
        ({}, 0),
        ({"weight_decay": 0.1, "maximize": True}, 0),
        ({"stochastic_rounding": True, "dtype": torch.bfloat16}, 0),
        # The count of steps is on the device.
        ({"fused": True}, 1),
        ({"capturable": True}, 1),
        ({"fused": True, "stochastic_rounding": True, "dtype": torch.bfloat16}, 1),
        # Two count the step unless it is skipped; one leaves the gradient unscaled, as torch does.
        ({"fused": True, "scaled": True}, 2 + 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(name, options, operations, matrices, fake_gpu):
    """Three for a matrix, two with LEAN; torch's operations beside them; nothing waits."""
    ours, torchs = count(fake_gpu, matrices=matrices, **{**CASES[name], **options})
    assert sorted(ours) == sorted(LAUNCHES[name] * matrices)
    for_all = 2 if "scaled" in options else 0  # the inverse of the scale
    assert len(torchs) == operations * matrices + for_all, torchs


def test_what_triton_is_given(monkeypatch):
    """Plain memory on its device, with vectors in single precision; LEAN's rows not too wide."""

    def chosen(shape, dtype=torch.float32, cast=None, name="coupled"):
        p = nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype))
        p.grad = torch.empty_like(p)
        optimizer = optimizer_of([p], **CASES[name])
        optimizer.init_state()
        if cast:
            optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].to(cast)
        (coupled,), _ = optimizer._collect()
        return coupled.kernel

    monkeypatch.setattr(kernels, "_triton_works", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with FakeTensorMode():
        assert chosen((4, 3)) is kernels.blocks  # fake tensors have no memory
        monkeypatch.setattr(kernels, "is_plain_memory", lambda x: True)
        assert chosen((4, 3)) is kernel
        assert chosen((4, 8193)) is kernel
        assert chosen((4, 8192), name="LEAN") is kernel
        assert chosen((4, 8193), name="LEAN") is kernels.blocks
        assert chosen((4, 3), torch.float64) is kernels.blocks
        assert chosen((4, 3), torch.bfloat16, torch.bfloat16) is kernels.blocks


@pytest.fixture
def unknown(monkeypatch):
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0), torch.float32


@pytest.mark.parametrize(
    "error", [OSError("no libcuda.so"), RuntimeError("Failed to find C compiler"), ImportError("x")]
)
def test_what_cannot_compile_is_tried_once(error, unknown, monkeypatch):
    tried = []

    def fail(*_):
        tried.append(True)
        raise error

    monkeypatch.setattr(kernel, "check", fail)
    with pytest.warns(UserWarning, match=r"cannot compile for cuda:0 .*torch's operations") as seen:
        assert not any(kernels._triton_works(*unknown) for _ in range(3))
    assert len(seen) == len(tried) == 1


def test_triton_is_not_installed(unknown, monkeypatch):
    monkeypatch.delattr(kernels, "triton")
    monkeypatch.delitem(sys.modules, "coupled_adam.optim.kernels.triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="Triton is not installed") as seen:
        assert not any(kernels._triton_works(*unknown) for _ in range(3))
    assert len(seen) == 1


def test_nothing_is_compiled_while_a_graph_is_captured(unknown, monkeypatch):
    monkeypatch.setattr(kernel, "check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not kernels._triton_works(*unknown)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernels._triton_works(*unknown)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernels._triton_works(*unknown)  # it is known by now


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_check_compiles_what_matrices_use(name, compiled):
    """What the first step compiles to try it out is what all later ones take."""
    launches = compiled(name)
    kernel.check(torch.device("cpu"), torch.bfloat16)
    tried = dict(launches)
    launches.clear()
    p = nn.Parameter(matrix((64, 768), 0, torch.bfloat16))
    optimizer = optimizer_of([p])
    p.grad = gradient((64, 768), 1, torch.bfloat16)
    optimizer.step()
    assert launches
    assert all(tried[function] is binary for function, binary in launches)
