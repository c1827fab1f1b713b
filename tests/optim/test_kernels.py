"""Every kernel against the reference, and what the fast paths promise: memory, clipping.

``python test_kernels.py triton`` runs the Triton kernels in Triton's interpreter, on CPU tensors.
"""

import copy
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import CoupledAdam, CoupledAdamW
from coupled_adam.optim import kernels
from coupled_adam.optim.kernels import blocked, compiled, native
from coupled_adam.optim.reference import coupled_adam_
from coupled_adam.optim.rounding import Noise, mix

DTYPES = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    # The reference rounds a decayed parameter twice in each of the three steps.
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
}


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors(rows, columns, dtype, layout, seed=0):
    """Parameter, gradient and first moment, [rows, columns], in a memory layout."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for scale in (1.0, 1e-2, 1e-2):
        values = (torch.randn(rows, columns, generator=generator) * scale).to(dtype)
        if layout == "transposed":
            values = values.T.contiguous().T
        elif layout == "slices":  # of wider rows
            values = torch.cat([values, values], 1)[:, :columns]
        made.append(values)
    return made


def compare(kernel, rows, columns, dtype, layout, vocab_dim=0, seed=0, at_once=False, **options):
    """Three steps by a kernel and by the reference.

    The first moment is moved with the sums or not; or, ``at_once="all"``, all is done in one call.
    """
    p, g, m = tensors(rows, columns, dtype, layout, seed)
    if layout == "mixed":  # a gradient that lies otherwise than its parameter
        g = g.T.contiguous().T
    wide = torch.promote_types(dtype, torch.float32)
    nu = torch.rand(columns if vocab_dim == 0 else rows, generator=torch.Generator().manual_seed(1))
    nu = (nu * 1e-4).to(wide)
    highest = nu * 1.1 if options.pop("amsgrad", False) else None
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "second_moment_scale": 1.0}
    numbers |= {"weight_decay": 0.0, "maximize": False, "vocab_dim": vocab_dim, **options}
    ours = [x.clone() if x is not None else None for x in (p, m, nu, highest)]
    theirs = copy.deepcopy(ours)
    for step in (1.0, 2.0, 3.0):
        sums, moved = kernels.sums_of_squares(kernel, g, vocab_dim), False
        if at_once is True and not numbers["maximize"]:
            sums, moved = kernels.sums_and_moment_(kernel, g, ours[1], 0.9, vocab_dim)
            assert moved
        squares = g.double().square().sum(vocab_dim)
        torch.testing.assert_close(sums, squares.to(sums.dtype), rtol=2e-6, atol=0)
        kernels.coupled_adam_(
            *(kernel, ours[0], g, None if at_once == "all" else sums, ours[1], ours[2], step),
            rows=p.shape[vocab_dim],
            max_exp_avg_sq=ours[3],
            moved=moved,
            **numbers,
        )
        coupled_adam_(theirs[0], g, *theirs[1:3], step, max_exp_avg_sq=theirs[3], **numbers)
    for mine, reference in zip(ours, theirs):
        if mine is not None:
            tolerance = DTYPES[dtype] if mine.dtype == dtype else 2e-6
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


LAYOUTS = ("rows", "transposed", "slices", "mixed")
OPTIONS = (
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"amsgrad": True, "second_moment_scale": 0.25},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocked(dtype, layout, options, monkeypatch):
    """In one block, and in many."""
    compare(blocked, 37, 11, dtype, layout, **options)
    monkeypatch.setattr(blocked, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(blocked, "_SUM_ROWS", 5)
    for at_once in (False, True):
        compare(blocked, 37, 11, dtype, layout, at_once=at_once, **options)
        compare(blocked, 11, 37, dtype, layout, vocab_dim=1, at_once=at_once, **options)


built = pytest.mark.skipif(native._library() is None, reason="built without a C compiler")


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_native_is_built():
    assert native._library() is not None


@built
@pytest.mark.parametrize("at_once", [False, True, "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["rows", "slices"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_native(dtype, layout, options, at_once, monkeypatch):
    """By one thread, by several, and by more than there are rows."""
    if at_once == "all" and "maximize" in options:
        pytest.skip("the gradient is taken as it is")
    for worth_a_thread in (2**17, 1):
        monkeypatch.setattr(native, "_WORTH_A_THREAD", worth_a_thread)
        for rows, columns in ((37, 11), (1, 1), (5000, 33)):
            compare(native, rows, columns, dtype, layout, at_once=at_once, **options)


@built
def test_native_gives_the_same_bits_again():
    p, g, _ = tensors(100_000, 7, torch.float32, "rows")
    results = []
    for _ in range(3):
        q = nn.Parameter(p.clone())
        optimizer = CoupledAdamW([q], coupled=True)
        q.grad = g
        optimizer.step()
        results.append((q.detach(), optimizer.state[q]["exp_avg_sq"]))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))


@built
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_not_finite(dtype, bad):
    """What is not finite spoils what it spoils in the reference, no more and no less."""
    p, g, _ = tensors(9, 4, dtype, "rows")
    g[3, 2] = bad
    results = []
    for options in ({}, {"fused": False}):
        q = nn.Parameter(p.clone())
        optimizer = CoupledAdamW([q], coupled=True, amsgrad=True, **options)
        q.grad = g
        for _ in range(2):
            optimizer.step()
        results.append([q.detach(), *optimizer.state[q].values()])
    for mine, reference in zip(*results):
        assert torch.equal(mine.isnan(), reference.isnan())
        assert torch.equal(mine.isinf(), reference.isinf())
    assert results[0][0][:, 2].isnan().any()


@built
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
def test_native_is_not_given_what_it_cannot_take(options):
    """Moments that somebody has cast, a slice of something, a subclass: other kernels take them."""
    p, g, _ = tensors(9, 4, torch.bfloat16, "rows")
    states = []
    for fused in (None, False):
        q = nn.Parameter(p.clone())
        optimizer = CoupledAdamW([q], coupled=True, fused=fused, **options)
        q.grad = g
        optimizer.step()
        state = optimizer.state[q]
        for name in set(state) & {"exp_avg_sq", "max_exp_avg_sq"}:
            state[name] = state[name].bfloat16()
        optimizer.step()
        state["exp_avg_sq"] = torch.stack([state["exp_avg_sq"].float()] * 2, 1)[:, 0]
        optimizer.step()
        states.append([q.detach(), state["exp_avg_sq"]])
    for mine, reference in zip(*states):
        torch.testing.assert_close(mine, reference, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("fused", [None, True, False])
def test_fake_tensors(fused):
    """Tools that estimate memory run a step on tensors that have none."""
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(9, 4))
        p.grad = torch.empty(9, 4)
        optimizer = CoupledAdamW([p], coupled=True, fused=fused)
        for _ in range(2):
            optimizer.step()
        assert optimizer.state[p]["exp_avg_sq"].shape == (4,)


@built
def test_native_without_openmp():
    """Where no OpenMP is loaded it starts threads itself: the same numbers."""
    program = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "rows, columns, threads = 1001, 7, 3\n"
        "g = (ctypes.c_float * (rows * columns))(*(i % 13 - 6 for i in range(rows * columns)))\n"
        "sums = (ctypes.c_double * columns)()\n"
        "size = ctypes.c_int64\n"
        "failed = library.coupled_adam_sums(0, g, size(columns), None, size(0), size(rows),\n"
        "    size(columns), ctypes.c_double(0), sums, threads)\n"
        "assert not hasattr(ctypes.CDLL(None), 'GOMP_parallel')\n"
        "expected = [sum(g[r * columns + c] ** 2 for r in range(rows)) for c in range(columns)]\n"
        "assert failed == 0 and list(sums) == expected\n"
    )
    library = str(Path(native.__file__).with_name("libcoupled_adam.so"))
    command = [sys.executable, "-c", program, library]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("compiler", ["cc", "no-compiler-of-this-name"])
def test_wheel(compiler, tmp_path):
    """It holds the kernel for this platform, or is a wheel of Python alone where there is no cc.

    It is built from the source distribution, which holds all of the repository.
    """

    def build(target, folder):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", tmp_path]
        environment = {**os.environ, "CC": compiler}
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)

    build("sdist", Path(__file__).parents[2])
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    held = {path.name for path in source.iterdir()}
    assert held >= {"src", "tests", "docs", "examples", "study", "benchmarks", "constraints.txt"}
    assert not list(source.rglob("*.so"))
    build("wheel", source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    holds = "coupled_adam/optim/kernels/libcoupled_adam.so" in names
    assert holds == (compiler == "cc")
    assert wheel.stem.endswith("py3-none-any") == (not holds)
    assert "coupled_adam/optim/kernels/native.c" in names


@settings(max_examples=40)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 20),
    vocab_dim=st.sampled_from([0, 1]),
    layout=st.sampled_from(LAYOUTS),
    block=st.integers(1, 2000),
    sum_rows=st.integers(1, 70),
    seed=st.integers(0, 100),
)
def test_blocked_any_shape(rows, columns, vocab_dim, layout, block, sum_rows, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_BLOCK_BYTES", block)
        patch.setattr(blocked, "_SUM_ROWS", sum_rows)
        compare(blocked, rows, columns, torch.float32, layout, vocab_dim, seed, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_compiled():
    """With the compiler, and without one."""
    for dtype in DTYPES:
        compare(compiled, 37, 11, dtype, "rows", weight_decay=0.1, maximize=True)
    compare(compiled, 11, 37, torch.float32, "transposed", vocab_dim=1)
    assert compiled._has_compiler
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    without = {"cpp.cxx": ("no-compiler-of-this-name",), "force_disable_caches": True}
    try:
        with torch._inductor.config.patch(without):
            compare(compiled, 23, 7, torch.float32, "rows")
        assert not compiled._has_compiler
    finally:
        compiled._has_compiler = True
        compiled._compiled.cache_clear()
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(not kernels._has_triton(), reason="needs triton")
def test_triton():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "triton"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "all equal" in result.stdout


def triton_kernels():
    from coupled_adam.optim.kernels import triton

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in LAYOUTS:
            compare(triton, 37, 11, dtype, layout, weight_decay=0.1)
    for rows, columns in ((1, 1), (300, 130), (9, 700), (2049, 3)):
        for vocab_dim in (0, 1):
            compare(triton, rows, columns, torch.float32, "rows", vocab_dim, amsgrad=True)
    compare(triton, 65, 129, torch.float32, "rows", maximize=True, second_moment_scale=4.0)

    # Numbers on the device: the clip factor, the decay, and a step that is skipped.
    p, g, m = tensors(40, 9, torch.float32, "rows")
    nu = torch.full((9,), 1e-5)
    before = [x.clone() for x in (p, m, nu)]
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "second_moment_scale": 1.0}
    numbers |= {"max_exp_avg_sq": None, "vocab_dim": 0, "maximize": False, "weight_decay": 0.1}
    sums = kernels.sums_of_squares(triton, g, 0)
    one = torch.tensor(1.0)
    lr = torch.tensor(1e-2)
    step = torch.tensor(1.0, dtype=torch.float64)
    update = (triton, p, g, sums, m, nu, step)
    kernels.coupled_adam_(*update, rows=40, lr=lr, factor=0.5, skip=one, **numbers)
    assert all(torch.equal(x, y) for x, y in zip((p, m, nu), before))
    kernels.coupled_adam_(*update, rows=40, lr=lr, factor=0.5, skip=one * 0, **numbers)
    theirs = [x.clone() for x in before]
    coupled_adam_(theirs[0], g * 0.5, *theirs[1:], 1.0, lr=1e-2, **numbers)
    for mine, reference in zip((p, m, nu), theirs):
        torch.testing.assert_close(mine, reference, rtol=2e-6, atol=1e-9)
    # Stochastic rounding: as blocked rounds, with the key as a number and on the device.
    for layout in ("rows", "transposed"):
        for key in (mix(7), torch.tensor(mix(7))):
            p, g, m = tensors(70, 300, torch.bfloat16, layout)
            step_size, noise = torch.rand(300) * 1e-3, Noise(key, 5, 2)
            numbers = {"beta1": 0.9, "decay": 0.999, "factor": 1.0, "noise": noise}
            theirs = p.clone(), g, m.clone()
            triton.update_(p, g, m, step_size, **numbers)
            blocked.update_(*theirs, step_size, **numbers)
            assert (p != theirs[0]).float().mean() < 2e-3  # where products are rounded otherwise

    # The same bits at every call.
    g = torch.randn(5000, 40)
    assert torch.equal(
        triton.sums_of_squares(g, torch.float32), triton.sums_of_squares(g, torch.float32)
    )
    print("all equal")


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation makes anew."""

    def __init__(self, known):
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.elements = max(self.elements, storage.nbytes() // 4)
        return result


@pytest.fixture(params=[pytest.param(True, marks=built), False], ids=["native", "blocked"])
def kernel(request, monkeypatch):
    """With the kernel in C, and where that has not been built."""
    if not request.param:
        monkeypatch.setattr(native, "fits", lambda *_: False)
    return native if request.param else blocked


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"weight_decay": 0.1}], ids=str)
def test_no_temporary_of_the_matrix(options, kernel):
    """A step makes vectors [H], and blocks where the gradient is scaled; nothing [V, H]."""
    rows, columns = 60_000, 64
    p = nn.Parameter(torch.randn(rows, columns))
    optimizer = CoupledAdamW([p], coupled=True, **options)
    p.grad = torch.randn(rows, columns)
    optimizer.step()
    state = optimizer.state[p]
    elements = sum(value.numel() for value in state.values())
    assert elements == rows * columns + columns + 1
    with LargestTensor([p, p.grad, *state.values()]) as largest:
        optimizer.step()
    # The ones and zeros that go with a block of rows; a block itself where there is a factor.
    block = blocked._BLOCK_BYTES * torch.get_num_threads() // 4
    if kernel is native:
        sums = 2 * columns if "max_grad_norm" in options else 0  # in float64; else C's own
        assert largest.elements == sums
        return
    assert largest.elements <= (block if "max_grad_norm" in options else blocked._SUM_ROWS)
    assert block < rows * columns


def model():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(40, 6), nn.Linear(6, 40)
    return nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), head)


def groups(network):
    coupled = [network[0].weight, network[3].weight]
    rest = [p for p in network.parameters() if all(p is not q for q in coupled)]
    return [{"params": coupled, "coupled": True}, {"params": rest}]


def set_gradients(network, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in network.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * scale


@pytest.mark.parametrize("cls", [CoupledAdam, CoupledAdamW])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused": True},
        {"fused": False},
        {"foreach": True},
        {"weight_decay": 0.1},
        {"maximize": True},
    ],
    ids=str,
)
def test_folded_clipping(cls, options, kernel):
    """Equal to clip_grad_norm_ and a step, whether the norm is above the limit or below."""
    ours, theirs = model(), model()
    optimizer = cls(groups(ours), lr=1e-2, max_grad_norm=3.0, **options)
    control = cls(groups(theirs), lr=1e-2, **options)
    for step in range(8):
        scale = 0.01 if step % 3 == 0 else 1.0
        set_gradients(ours, step, scale)
        set_gradients(theirs, step, scale)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 3.0)
        control.step()
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        assert (norm > 3.0) == (scale == 1.0)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_folded_clipping_without_gradients_and_in_copies():
    ours = model()
    optimizer = CoupledAdamW(groups(ours), max_grad_norm=2.0)
    optimizer.step()
    assert optimizer.grad_norm is None
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.max_grad_norm == 2.0
    assert "max_grad_norm" not in str(optimizer.state_dict())
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="Invalid max_grad_norm"):
            CoupledAdamW(groups(ours), max_grad_norm=wrong)


@pytest.mark.parametrize("fused", [False, True])
def test_folded_clipping_of_scaled_gradients(fused, kernel):
    """Under GradScaler the norm is that of the unscaled gradients; an overflow changes nothing."""
    ours, theirs = model(), model()
    optimizer = CoupledAdamW(groups(ours), lr=1e-2, max_grad_norm=1.5, fused=fused)
    control = CoupledAdamW(groups(theirs), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    ids = torch.arange(12)
    for step in range(5):
        for network, one in ((ours, optimizer), (theirs, control)):
            one.zero_grad()
            loss = 30 * nn.functional.cross_entropy(network(ids), (ids + step) % 40)
            (scaler.scale(loss) if network is ours else loss).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.5)
        control.step()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        assert norm > 1.5
    before = copy.deepcopy(ours.state_dict())
    set_gradients(ours, 0)
    scaler.scale(torch.ones(()))
    ours[0].weight.grad[3, 2] = torch.inf
    scaler.step(optimizer)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    assert sys.argv[1] == "triton"
    triton_kernels()
