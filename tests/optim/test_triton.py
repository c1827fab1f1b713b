"""The Triton kernels without a GPU: interpreted, compiled for several, launches counted."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam.optim import kernels
from optim.cases import CASES, gradient, matrix, optimizer_of, use

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from gpu_compile import KINDS, TARGETS, compiling, take_steps
from triton.runtime.jit import JITFunction

from coupled_adam.optim.kernels import triton as kernel

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_compiled(name, dtype):
    """Here for the most common GPU; benchmarks/gpu_compile.py says what each compilation needs."""
    with compiling("sm_90") as launches:
        take_steps(name, 768, dtype, "rows")
    assert launches


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KINDS)
def test_compiled_everywhere(name, target):
    for columns, layout in ((770, "transposed"), (8192, "rows")):
        with compiling(target) as launches:
            take_steps(name, columns, torch.bfloat16, layout)
        assert launches


def test_one_binary_for_all_steps():
    """Whatever changes from step to step, or from matrix to matrix, does not make another one."""
    ps = [nn.Parameter(matrix((64, 768), 0, torch.bfloat16)) for _ in range(3)]
    optimizers = [
        optimizer_of(ps, stochastic_rounding=True, **CASES[name]) for name in ("coupled", "LEAN")
    ]
    with compiling("sm_90") as launches:
        for t in range(1, 21):
            for optimizer in optimizers:
                optimizer.param_groups[0] |= {"lr": 1e-3 / t, "weight_decay": 0.1 / t}
                for p in ps:
                    p.grad = gradient((64, 768), t, torch.bfloat16)
                optimizer.step()
    # LEAN's first pass begins at t = 0, with numbers that are 0 and 1: these may be others.
    later = launches[len(launches) // 2 :]
    for name in {name for name, _ in launches}:
        assert len({id(binary) for other, binary in later if other == name}) == 1, name


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch):
    """What a step has compiled before can be captured; with other options it is refused."""
    for jitted in (kernel._sums, kernel._finish, kernel._update):
        jitted.device_caches.clear()  # another test may have compiled what is refused here
    p = nn.Parameter(matrix((64, 32)))
    p.grad = gradient((64, 32), 1)
    p.data, p.grad = p.data.float(), p.grad.float()
    optimizer = optimizer_of([p], weight_decay=0.1)
    with compiling("sm_80"):
        optimizer.step()
        monkeypatch.setattr(kernel, "_is_capturing", lambda x: True)
        optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = True
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(RuntimeError, match="take a step before the capture"):
            optimizer.step()
        monkeypatch.setattr(kernel, "_is_capturing", lambda x: False)
        optimizer.step()


@pytest.mark.parametrize("has_state", [False, True])
def test_the_first_step_is_not_captured(has_state, monkeypatch):
    """In a graph its state would be made anew at each replay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: has_state is None)
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setattr(kernels, "is_plain_memory", lambda x: True)
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None
    )
    with FakeTensorMode():
        p, other = (nn.Parameter(torch.empty(4, 3, device="cuda")) for _ in range(2))
        for q in (p, other):
            q.grad = torch.empty_like(q)
        optimizer = optimizer_of([p], capturable=True)
        optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "coupled": False})
        optimizer.param_groups[0]["params"] = [other]
        if has_state:
            optimizer.init_state()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="take a step before the capture"):
            optimizer.step()
    assert [bool(optimizer.state[q]) for q in (p, other)] == [has_state] * 2


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
    monkeypatch.setattr(kernel, "_launching_on", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(kernel, "_units", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None
    )
    with FakeTensorMode():
        yield noted


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
@pytest.mark.parametrize(("name", "launches"), [*zip(KINDS, (3, 3, 2, 2))])
def test_launches(name, launches, options, operations, matrices, fake_gpu):
    """Three for a matrix, two with LEAN; torch's operations beside them; nothing waits."""
    options = {**CASES[name], **options}
    dtype, scaled = options.pop("dtype", torch.float32), options.pop("scaled", False)
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
    fake_gpu.clear()  # of the first step
    with Launches("cuda") as torchs:
        optimizer.step()
    assert len(fake_gpu) == launches * matrices
    for_all = 2 * scaled  # the inverse of the scale
    assert len(torchs.names) == operations * matrices + for_all, torchs.names


def test_what_triton_is_given(monkeypatch):
    """Plain memory on its device, with vectors in single precision; LEAN's rows not too wide."""

    def chosen(shape, dtype=torch.float32, cast=None, name="coupled", transposed=False):
        values = torch.empty(shape[::-1] if transposed else shape, device="cuda", dtype=dtype)
        p = nn.Parameter(values.T if transposed else values)
        p.grad = torch.empty_like(p)
        optimizer = optimizer_of([p], **CASES[name])
        optimizer.init_state()
        if cast:
            optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].to(cast)
        (coupled,), _ = optimizer._collect()
        return coupled.kernel

    monkeypatch.setattr(kernels, "_triton_works", lambda *_: True)
    with FakeTensorMode():
        assert chosen((4, 3)) is kernels.blocks  # fake tensors have no memory
        monkeypatch.setattr(kernels, "is_plain_memory", lambda x: True)
        assert chosen((4, 3)) is kernel
        assert chosen((4, 8193)) is kernel
        assert chosen((4, 8192), name="LEAN") is kernel
        assert chosen((4, 8193), name="LEAN") is kernels.blocks
        assert chosen((4, 2048), name="LEAN", transposed=True) is kernel
        assert chosen((4, 2049), name="LEAN", transposed=True) is kernels.blocks
        assert chosen((4, 3), torch.float64) is kernels.blocks
        assert chosen((4, 3), torch.bfloat16, torch.bfloat16) is kernels.blocks


@pytest.mark.parametrize("is_installed", [True, False])
def test_where_triton_does_not_work(is_installed, monkeypatch):
    """It is tried once, and said once."""
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tried = []

    def fail(*_):
        tried.append(True)
        raise OSError("no libcuda.so")

    monkeypatch.setattr(kernel, "check", fail)
    param = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    on_a_gpu = SimpleNamespace(param=param)
    problem = r"cannot compile for cuda:0 .*no libcuda.so.*torch's operations"
    if not is_installed:
        monkeypatch.delattr(kernels, "triton")
        monkeypatch.delitem(sys.modules, "coupled_adam.optim.kernels.triton")
        monkeypatch.setitem(sys.modules, "triton", None)
        problem = "Triton is not installed"
    with pytest.warns(UserWarning, match=problem) as seen:
        works = [kernels._triton_works(on_a_gpu) for _ in range(3)]
    assert not any(works)
    assert len(seen) == 1
    assert len(tried) == is_installed
