"""The Triton kernels without a GPU: interpreted, and compiled for several."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from coupled_adam.optim import kernels
from optim.cases import CASES, gradient, matrix, optimizer_of

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from gpu_compile import KINDS, TARGETS, compiling, take_steps, usage

from coupled_adam.optim.kernels import triton as kernel

ROOT = Path(__file__).parents[2]


SLOWLY_INTERPRETED = (
    "TestTriton and test_as_the_oracle and float32 and not (amsgrad or LEAN)",
    "TestTriton and test_as_the_oracle and not float32",
    "TestTriton and not test_as_the_oracle",
)


@pytest.mark.parametrize(
    ("tests", "least"),
    [
        ("TestTriton and test_as_the_oracle and float32 and (amsgrad or LEAN)", 4),
        *(
            pytest.param(tests, 10, marks=pytest.mark.slow(minutes=1))
            for tests in SLOWLY_INTERPRETED
        ),
    ],
)
def test_interpreted(tests, least):
    """test_cuda.py in Triton's interpreter, which must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", tests, "tests/optim/test_cuda.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_compiled(name, dtype):
    """Here for the most common GPU; benchmarks/gpu_compile.py says what each compilation needs."""
    with compiling("sm_90") as launches:
        take_steps(name, 768, dtype, "rows")
    assert launches
    assert not any(usage(launch).spilled for launch in launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_read_ahead_16_bytes_at_a_time(dtype):
    """Gradient, parameter and mean update; of the row's moments, a thread has a few numbers."""
    with compiling("sm_90") as launches:
        take_steps("LEAN", 4096, dtype, "rows")
    passes = [launch for launch in launches if launch.kernel == "_lean"]
    assert passes
    for launch in passes:
        copies = re.findall(r"cp\.async\.c[ag]\S* [^;]*?\], (\w+),?", launch.binary.asm["ptx"])
        widths = [int(width, 0) for width in copies]
        assert widths.count(16) > 30
        assert len(widths) - widths.count(16) <= launch.stages


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KINDS)
def test_compiled_everywhere(name, target):
    """Without spilled registers, also where a program has the most to hold."""
    for columns, layout in ((770, "transposed"), (8192, "rows")):
        with compiling(target) as launches:
            take_steps(name, columns, torch.bfloat16, layout)
        assert launches
        assert not any(usage(launch).spilled for launch in launches)


def test_one_binary_for_all_steps():
    """Whatever changes from step to step, or from matrix to matrix, does not make another one.

    Coupled Adam takes three launches for a matrix, and LEAN two.
    """
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
    assert len(launches) == 20 * len(ps) * (3 + 2)
    for name in {launch.kernel for launch in launches}:
        assert len({id(x.binary) for x in launches if x.kernel == name}) == 1, name


@pytest.mark.parametrize("has_state", [False, True])
def test_the_first_step_is_not_captured(has_state, monkeypatch):
    """In a graph its state would be made anew at each replay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: has_state is None)
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setattr(kernels, "is_plain_memory", lambda x: True)
    monkeypatch.setattr(kernels, "PLAIN", (*kernels.PLAIN, FakeTensor))
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


def test_what_triton_is_given(monkeypatch):
    """Plain memory on its device, in single or half precision; LEAN's rows not too wide."""

    def chosen(shape, dtype=torch.float32, name="coupled"):
        p = nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype))
        p.grad = torch.empty_like(p)
        optimizer = optimizer_of([p], **CASES[name])
        optimizer.init_state()
        (coupled,), _ = optimizer._collect()
        return coupled.kernel

    monkeypatch.setattr(kernels, "_triton_works", lambda *_: True)
    with FakeTensorMode():
        assert chosen((4, 3)) is kernels.reference  # fake tensors have no memory
        monkeypatch.setattr(kernels, "is_plain_memory", lambda x: True)
        monkeypatch.setattr(kernels, "PLAIN", (*kernels.PLAIN, FakeTensor))
        assert chosen((4, 3)) is kernel
        assert chosen((4, 8192), name="LEAN") is kernel
        assert chosen((4, 8193), name="LEAN") is kernels.blocks
        assert chosen((4, 3), torch.float64) is kernels.blocks


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
