"""The Triton kernels without a GPU: interpreted, compiled for several, launches counted."""

import collections
import contextlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from records import record, take_step
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import CoupledAdamW
from coupled_adam.optim import kernels, rounding

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
# For 4 programs and more at once on a multiprocessor, in each of which a thread has some elements.
MOST_REGISTERS = {"_sums": 72, "_center": 128, "_finish": 64, "_update": 72}
ELEMENTS = {"_sums": 16, "_center": 8, "_update": 16}


def test_kernels_interpreted():
    """test_cuda.py in Triton's interpreter, which must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", "test_kernels", "tests/optim/test_cuda.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout


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

    def use(name):
        monkeypatch.setattr(driver, "_active", StandIn(name))
        monkeypatch.setattr(torch.version, "hip", "6.0" if name.startswith("gfx") else None)
        monkeypatch.setattr(JITFunction, "run", compile_only)
        return launches

    return use


def usage(binary, tmp_path):
    """Registers and bytes of stack of a kernel for NVIDIA's, and its instructions on memory."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tools = knobs.nvidia.cuobjdump.path, knobs.nvidia.nvdisasm.path
    listed, assembly = (
        subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
        for tool, option in zip(tools, ("-res-usage", "-c"))
    )
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", listed))
    wide = re.findall(r"\b(?:LDG|STG|LDGSTS)\.E[\w.]*", assembly)
    return {name: int(value) for name, value in found.items()}, wide


def check_compiled(launches, name, itemsize, aligned, tmp_path, expected=None):
    """Compare what was launched, and how many matrices each reads."""
    matrices = expected or {"_sums": 1, "_finish": 0, "_update": 3}
    assert [function for function, _ in launches] == list(matrices)
    for function, binary in launches:
        if name.startswith("gfx"):
            assembly = binary.asm["amdgcn"]
            spills = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", assembly)
            assert spills
            assert set(spills) == {"0"}, function
            if aligned and function != "_finish":
                assert re.search(r"(global|buffer)_load_dwordx4", assembly), function
            continue
        found, instructions = usage(binary, tmp_path)
        assert found["STACK"] == found["LOCAL"] == 0, function  # nothing is spilled
        assert found["REG"] <= (MOST_REGISTERS[function] if aligned else 128)
        if function == "_finish":
            continue
        wide = [x for x in instructions if ".128" in x and not x.startswith("STG")]
        least = matrices[function] * ELEMENTS[function] * itemsize // 16
        if aligned:
            assert len(wide) >= least, (function, instructions)
        else:  # only the step sizes and the mean, which are our own, are aligned even then
            vectors = 2 if expected and function == "_update" else 0
            assert len(wide) == vectors, (function, instructions)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_compiled(dtype, rounding, compiled, tmp_path):
    """No spills, wide loads where memory is aligned, few registers; here for the most common."""
    launches = compiled("sm_90")
    take_step(record(64, 768, dtype, stochastic_rounding=rounding))
    check_compiled(launches, "sm_90", dtype.itemsize, True, tmp_path)


def reads_with_rows(beta1):
    """Without a first moment both passes read the gradient in its place."""
    return {"_center": 2 if beta1 else 1, "_finish": 0, "_update": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_compiled_with_row_exponent_and_zero_sum(beta1, dtype, compiled, tmp_path):
    launches = compiled("sm_90")
    take_step(record(64, 768, dtype, row_exponent=0.5, zero_sum=True, beta1=beta1))
    check_compiled(launches, "sm_90", dtype.itemsize, True, tmp_path, reads_with_rows(beta1))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [64, 770, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_rows_compiled_everywhere(beta1, name, dtype, columns, compiled, tmp_path):
    launches = compiled(name)
    take_step(record(64, columns, dtype, row_exponent=0.5, zero_sum=True, beta1=beta1))
    expected = reads_with_rows(beta1)
    check_compiled(launches, name, dtype.itemsize, columns != 770, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("columns", [768, 770])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_compiled_everywhere(name, dtype, columns, layout, rounding, compiled, tmp_path):
    if rounding and dtype != torch.bfloat16:
        pytest.skip("only bfloat16 is rounded stochastically")
    launches = compiled(name)
    rows = columns if layout == "transposed" else 64  # what lies side by side
    options = {"layout": layout, "amsgrad": True, "stochastic_rounding": rounding}
    take_step(record(rows, columns, dtype, **options), torch.tensor(0.5), torch.tensor(0.0))
    check_compiled(launches, name, dtype.itemsize, columns == 768, tmp_path)


def test_one_binary_for_all_steps(compiled, monkeypatch):
    """Whatever changes from step to step or from rank to rank does not make another one."""
    launches = compiled("sm_90")
    matrix = record(64, 768, torch.bfloat16, stochastic_rounding=True)
    for t in range(1, 41):
        monkeypatch.setattr(rounding, "global_offset", lambda _, t=t: (t % 3 * 16, t % 2))
        take_step(replace(matrix, lr=1e-3 / t, position=t), torch.tensor(1.0 / t))
    binaries = collections.defaultdict(set)
    for name, binary in launches:
        binaries[name].add(id(binary))
    assert {name: len(found) for name, found in binaries.items()} == {
        "_sums": 1,
        "_finish": 1,
        "_update": 1,
    }


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
    monkeypatch.setattr(kernels, "_fits_triton", lambda matrix: True)  # also FakeTensors
    monkeypatch.setattr(kernels, "_triton_works", lambda *_: True)
    monkeypatch.setattr(kernel, "_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(kernel, "_units", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None
    )
    with FakeTensorMode():
        yield noted


def count(noted, *, dtype=torch.float32, scaled=False, matrices=1, device="cuda", **options):
    """Launches of the second step: Triton's, and torch's operations."""
    params = [
        nn.Parameter(torch.empty(512, 64, device=device, dtype=dtype)) for _ in range(matrices)
    ]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = CoupledAdamW(params, coupled=True, **options)
    if scaled:
        optimizer.grad_scale = torch.empty((), device="cuda")
        optimizer.found_inf = torch.empty((), device="cuda")
    optimizer.step()
    noted.clear()
    with Launches(device) as launches:
        optimizer.step()
    return noted, launches.names


@pytest.mark.parametrize(
    ("options", "operations"),
    [
        ({}, 0),
        ({"amsgrad": True}, 0),
        ({"maximize": True}, 0),
        ({"stochastic_rounding": True, "dtype": torch.bfloat16}, 0),
        # The count of steps is on the device.
        ({"fused": True}, 1),
        ({"capturable": True}, 1),
        ({"fused": True, "stochastic_rounding": True, "dtype": torch.bfloat16}, 1),
        # Two for a matrix; for all: stack, norm, add, two to divide, clamp.
        ({"max_grad_norm": 1.0}, 2 + 6),
        ({"max_grad_norm": 1.0, "matrices": 3}, 3 * 2 + 6),
        # 1 / scale is two; two count the step unless it is skipped; the last leaves the gradient
        # unscaled, as torch does.
        ({"fused": True, "scaled": True}, 2 + 2 + 1),
    ],
    ids=str,
)
def test_launches(options, operations, fake_gpu):
    """Three for a matrix; torch's operations beside them; nothing waits for the device."""
    ours, torchs = count(fake_gpu, **options)
    assert sorted(ours) == sorted(["_sums", "_finish", "_update"] * options.get("matrices", 1))
    assert len(torchs) == operations, torchs


CLIPPED = {"max_grad_norm": 1.0}
BETAS = {"betas": (0.0, 0.99)}


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize(
    ("options", "expected", "operations"),
    [
        ({}, ["_center", "_finish", "_update"], 0),
        (BETAS, ["_center", "_finish", "_update"], 0),
        # As above: two for a matrix and six for all.
        (CLIPPED, ["_sums", "_center", "_finish", "_update"], 2),
        # The second returns at once if nothing is clipped.
        ({**CLIPPED, **BETAS}, ["_center", "_center", "_finish", "_update"], 2),
        # And two that count the step.
        ({**BETAS, "fused": True, "scaled": True}, ["_center"] * 2 + ["_finish", "_update"], 2 + 1),
    ],
    ids=str,
)
def test_launches_with_row_exponent_and_zero_sum(options, expected, operations, matrices, fake_gpu):
    ours, torchs = count(fake_gpu, matrices=matrices, row_exponent=0.5, zero_sum=True, **options)
    assert sorted(ours) == sorted(expected * matrices)
    for_all = 6 if "max_grad_norm" in options else 2 if "scaled" in options else 0
    assert len(torchs) == operations * matrices + for_all, torchs


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_without_triton_nothing_waits_either(options, fake_gpu):
    """torch's operations, as on any device that Triton does not know."""
    ours, torchs = count(fake_gpu, device="meta", **options)
    assert not ours
    assert "linalg_vector_norm" in torchs


def test_fake_tensors_are_not_given_to_triton():
    with FakeTensorMode():
        fake = record(4, 3, torch.float32)
        assert not kernels._fits_triton(fake)
    assert kernels._fits_triton(record(4, 3, torch.float32))
    assert not kernels._fits_triton(record(4, 3, torch.float64))
    matrix = record(4, 3, torch.bfloat16)
    cast = replace(matrix, exp_avg_sq=matrix.exp_avg_sq.bfloat16())  # by somebody
    assert not kernels._fits_triton(cast)


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
    take_step(record(64, 768, torch.bfloat16))
    assert dict(launches) == tried
