"""The kernels of a CPU, and what is promised of each: which is chosen, memory, threads, bits."""

import ctypes
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from benchmarks.memory import peak
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import CoupledAdam, kernels
from coupled_adam.optim import kernels as optim_kernels
from coupled_adam.optim import reference
from coupled_adam.optim.kernels import blocks, native
from optim.cases import CASES, check_steps, gradient, matrix, optimizer_of, use
from optim.every_kernel import EveryKernel, assert_same_bits, every_case, stored

built = pytest.mark.skipif(native.library() is None, reason="built without a C compiler")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class TestReference(EveryKernel):
    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        use(monkeypatch, reference)
        return reference


class TestBlocks(EveryKernel):
    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        use(monkeypatch, blocks)
        monkeypatch.setattr(blocks, "_BLOCK_BYTES", 100)
        return blocks

    @pytest.mark.slow
    def test_sums_of_a_million_rows(self, kernel, monkeypatch):
        """In whatever order they lie in memory: as exact as single precision is."""
        monkeypatch.setattr(blocks, "_BLOCK_BYTES", 2**20)
        rows = 10**6
        for options in ({}, CASES["LEAN"]):
            p = nn.Parameter(torch.zeros(2, rows))
            optimizer = optimizer_of([p], vocab_dim=1, **options)
            p.grad = torch.randn(2, rows, generator=torch.Generator().manual_seed(0)) + 3.0
            optimizer.step()
            square = p.grad.double().square()
            share = 1 - optimizer.param_groups[0]["betas"][1]
            nu = optimizer.state[p]["exp_avg_sq"].double()
            torch.testing.assert_close(nu, share * square.mean(1), rtol=2e-6, atol=0)


class Operations(TorchDispatchMode):
    """Counts operations that are no views, and the bytes of the largest result."""

    count = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(result, torch.Tensor):
            self.count, self.largest = self.count + 1, max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize(("shape", "most"), [((50304, 768), 130), ((128256, 4096), 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
def test_blocks_are_few_on_a_device(name, dtype, shape, most):
    """Each operation is a launch there; none has a result larger than a block of 256 MB."""
    p = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))
    p.grad = torch.empty_like(p)
    optimizer = optimizer_of([p], **{**CASES[name], "weight_decay": 0.1})
    optimizer.step()
    with Operations() as operations:
        optimizer.step()
    assert operations.count <= most
    assert operations.largest <= 2**28


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
def test_memory_of_blocks(name, dtype, monkeypatch):
    """Beside the state a step takes one block; of a matrix in half precision, torch copies more."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 2**20)
    p = nn.Parameter(matrix((4096, 512), 0, dtype))
    optimizer = optimizer_of([p], **CASES[name], fused=False)
    p.grad = gradient((4096, 512), 1, dtype)
    optimizer.step()
    block = torch.get_num_threads() * 2**20
    most = {"LEAN, momentum": {4: 2.1, 2: 4.1}}.get(name, {4: 1.1, 2: 3.2})
    assert peak(optimizer.step) <= most[dtype.itemsize] * block


@built
class TestNative(EveryKernel):
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    layouts = ("rows", "columns of more", "every other row")

    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        use(monkeypatch, native)
        return native

    @pytest.mark.parametrize("name", ["coupled, amsgrad", "coupled, no momentum", "LEAN"])
    def test_any_nan_of_a_state_stays_one(self, name, kernel):
        """In bfloat16, also one with all bits set, as CUDA makes it."""
        for entry in ("exp_avg_sq", "max_exp_avg_sq", "row_exp_avg_sq", "mean_update"):
            p = self.parameter((9, 20), torch.bfloat16)
            optimizer = optimizer_of([p], **CASES[name])
            for step in range(3):
                p.grad = self.gradient((9, 20), step, torch.bfloat16)
                if step == 2 and entry in optimizer.state[p]:
                    optimizer.state[p][entry].view(torch.int32).fill_(0x7FFFFFFF)
                optimizer.step()
            if entry in optimizer.state[p]:
                assert p[1:].isnan().all(), entry

    @every_case
    def test_several_threads(self, options, dtype, kernel, monkeypatch):
        """More than there are rows, too."""
        monkeypatch.setattr(native, "_ELEMENTS_PER_THREAD", 1)
        for shape in ((1, 3), (1000, 33)):
            check_steps(shape, dtype, steps=2, **options)


@built
@pytest.mark.parametrize("dtype", TestNative.dtypes, ids=str)
@every_case
def test_native_gives_the_same_bits_on_every_processor(options, dtype):
    """With each set of vector instructions, of which ``TestNative`` has this processor's best."""
    variable = ctypes.c_int.in_dll(native.library(), "coupled_adam_instructions")
    best = variable.value
    for shape in ((10_007, 7), (33, 257), (9, 770)):
        results = []
        for variable.value in range(best + 1):
            p = nn.Parameter(matrix(shape, 0, dtype))
            optimizer = optimizer_of([p], stochastic_rounding=True, **options)
            for step in range(3):
                p.grad = gradient(shape, step, dtype)
                if step == 2:
                    p.grad[3, 2] = 3e19  # whose square may overflow
                optimizer.step()
            results.append(stored(optimizer, p))
        for other in results[1:]:
            assert_same_bits(results[0], other)


@pytest.mark.skipif(
    sys.platform == "win32" or not shutil.which("cc"), reason="needs a C compiler for POSIX"
)
def test_native_is_built():
    assert kernels()["C"] == "available"


@built
def test_native_without_openmp():
    """Where no OpenMP is loaded it takes one thread: the same numbers."""
    names = [f"{name}:{kind.__name__}" for name, kind in native._Record._fields_]
    program = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
class Record(ctypes.Structure):
    _fields_ = [(name, getattr(ctypes, kind)) for name, kind in
                (field.split(":") for field in sys.argv[2:])]
rows, columns = 1001, 7
g = (ctypes.c_float * (rows * columns))(*(i % 13 - 6 for i in range(rows * columns)))
sums = (ctypes.c_double * columns)()
address = ctypes.addressof
record = Record(threads=3, rows=rows, columns=columns, grad=address(g), grad_stride=columns,
                sums=address(sums))
failed = library.coupled_adam_sum_squares(ctypes.byref(record))
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel")
expected = [sum(g[r * columns + c] ** 2 for r in range(rows)) for c in range(columns)]
assert failed == 0 and list(sums) == expected
"""
    command = [sys.executable, "-c", program, str(native.PATH), *names]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_kernels_that_are_missing_are_named(monkeypatch, tmp_path):
    """Each is named with the reason, that in C by the first step, once, which runs all the same."""
    monkeypatch.setattr(native, "PATH", tmp_path / "libcoupled_adam.so")
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    status = kernels()
    assert status["C"] == "not available (this package was built without it)"
    if not torch.cuda.is_available():
        assert status["Triton"].startswith("not used (")
    native.PATH.write_bytes(b"for another machine")
    assert kernels()["C"] == "not available (its library cannot be used here)"
    optim_kernels._warn_of_no_library.cache_clear()
    weight = nn.Parameter(torch.zeros(5, 3))
    weight.grad = torch.ones(5, 3)
    CoupledAdam([weight], coupled=True, fused=False).step()  # as asked for
    with pytest.warns(UserWarning, match="the kernel in C is not available .*C compiler"):
        CoupledAdam([weight], coupled=True).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoupledAdam([weight], coupled=True, fused=True).step()
    assert weight.ne(0).all()


class Subclass(torch.Tensor):
    """As a wrapper of parameters makes it."""


def sign_of_nothing(p):
    p.sgn().sum().backward()  # a gradient of zeros without memory


def negative(p):
    values = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    p.grad = torch.complex(values, values).conj().imag  # in memory of the other sign
    assert p.grad.is_neg()


def of_a_subclass(p):
    p.grad = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).as_subclass(Subclass)


def expanded(p):
    p.grad = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).expand(9, 4)


@pytest.mark.parametrize("set_gradient", [sign_of_nothing, negative, of_a_subclass, expanded])
@pytest.mark.parametrize("options", [{}, CASES["LEAN"]], ids=["coupled", "LEAN"])
def test_gradients_that_are_not_plain_memory(options, set_gradient):
    """The numbers are those of the same gradient as plain memory."""
    p, q = (nn.Parameter(matrix((9, 4), 0, torch.float32)) for _ in range(2))
    optimizers = [optimizer_of([x], **{**options, "weight_decay": 0.1}) for x in (p, q)]
    for _ in range(2):
        p.grad = None
        set_gradient(p)
        q.grad = torch.zeros(9, 4) + p.grad.as_subclass(torch.Tensor)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("options", [{}, CASES["LEAN"]], ids=["coupled", "LEAN"])
def test_fake_tensors(options, fused):
    """Tools that estimate memory run a step on tensors that have none."""
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(9, 4))
        p.grad = torch.empty(9, 4)
        optimizer = optimizer_of([p], fused=fused, **options)
        for _ in range(2):
            optimizer.step()
        assert optimizer.state[p]["exp_avg_sq"].shape == (4,)
