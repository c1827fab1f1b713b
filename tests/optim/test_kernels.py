"""Every kernel against the reference, and what the fast paths promise: memory, clipping."""

import copy
import ctypes
import itertools
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam import CoupledAdam, CoupledAdamW, kernels
from coupled_adam.optim import reference, update
from coupled_adam.optim.kernels import native, operations
from coupled_adam.optim.matrix import OPTIONS, Matrix

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


LAYOUTS = ("rows", "transposed", "slices")
ROWS = ("rows",) * 3


def laid_out(values, layout):
    """The same numbers in another memory layout."""
    if layout == "transposed":
        return values.T.contiguous().T
    if layout == "slices":  # of wider rows
        return torch.cat([values, values], 1)[:, : values.shape[1]]
    return values.contiguous()


def tensors(rows, columns, dtype, layouts=ROWS, seed=0):
    """Parameter, gradient and first moment, [rows, columns], each in a memory layout."""
    generator = torch.Generator().manual_seed(seed)
    return [
        laid_out((torch.randn(rows, columns, generator=generator) * scale).to(dtype), layout)
        for scale, layout in zip((1.0, 1e-2, 1e-2), layouts)
    ]


GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled_weight_decay": True,
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "fused": None,
    "coupled": True,
    "second_moment_scale": 1.0,
    "row_exponent": 0.0,
    "zero_sum": False,
    "vocab_dim": 0,
    "stochastic_rounding": False,
}


def matrix_of(group, p, g, state, kernel):
    """A step of plain tensors, by a kernel."""
    p, g, m = (
        x if x is None or group["vocab_dim"] == 0 else x.T for x in (p, g, state.get("exp_avg"))
    )
    beta1, beta2 = group["betas"]
    return Matrix(
        group=group,
        parameter=p if group["vocab_dim"] == 0 else p.T,
        step=state["step"],
        vocab_size=p.shape[0],
        hidden_size=p.shape[1],
        param=p,
        grad=g,
        exp_avg=m,
        exp_avg_sq=state["exp_avg_sq"],
        max_exp_avg_sq=state.get("max_exp_avg_sq"),
        exp_avg_sq_row=state.get("exp_avg_sq_row"),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        traced=False,
        kernel=kernel,
    )


def compare(
    kernel, rows, columns, dtype, layouts=("rows",) * 3, as_is=True, factor=None, **options
):
    """Three steps by a kernel and by the reference, from a state that other steps have left."""
    group = {**GROUP, **options}
    vocab_dim, wide = group["vocab_dim"], torch.promote_types(dtype, torch.float32)
    p, g, m = tensors(rows, columns, dtype, layouts)
    for matrix in (g, m):  # of a token that never occurs
        matrix.select(vocab_dim, 0).zero_()
    generator = torch.Generator().manual_seed(1)
    nu = torch.rand(p.shape[1 - vocab_dim], generator=generator) * 1e-4
    r = torch.rand(p.shape[vocab_dim], generator=generator) * 1e-4
    r[0] = 0
    state = {"step": torch.tensor(3.0), "exp_avg_sq": nu.to(wide)}
    if group["betas"][0]:
        state["exp_avg"] = m
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = state["exp_avg_sq"] * 1.1
    if group["row_exponent"] or group["zero_sum"]:
        state["exp_avg_sq_row"] = r.to(wide)
    factor = None if factor is None else torch.tensor(factor)
    results = []
    for passes in (kernel, reference):
        p_after = laid_out(p.clone(), layouts[0])
        after = {name: value.clone() for name, value in state.items()}
        if "exp_avg" in after:
            after["exp_avg"] = laid_out(after["exp_avg"], layouts[2])
        for _ in range(3):
            matrix = matrix_of(group, p_after, g, after, passes)
            assert passes is not native or native.fits(matrix)
            sums = update.measure([matrix], as_is=as_is and factor is None)
            for dim, squares in (
                (vocab_dim, sums[0].squares),
                (1 - vocab_dim, sums[0].row_squares),
            ):
                if squares is not None:
                    exact = g.double().square().sum(dim)
                    torch.testing.assert_close(squares.double(), exact, rtol=2e-6, atol=0)
            update.update([matrix], sums, factor, None)
        results.append({"param": p_after, **after})
    for name, value in results[0].items():
        tolerance = DTYPES[dtype] if value.dtype == dtype else 2e-6
        torch.testing.assert_close(
            value,
            results[1][name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert results[0]["step"] == 6


CASES = (
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"amsgrad": True, "second_moment_scale": 0.25},
    {"row_exponent": 0.5},
    {"zero_sum": True, "weight_decay": 0.1},
    {"row_exponent": 0.75, "zero_sum": True},
    {"betas": (0.0, 0.95), "weight_decay": 0.1},
    {"betas": (0.0, 0.95), "row_exponent": 0.5, "zero_sum": True, "weight_decay": 0.1},
    {"betas": (0.0, 0.95), "zero_sum": True, "amsgrad": True},
    {"betas": (0.05, 0.95), "row_exponent": 1.0, "zero_sum": True},
)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations(dtype, options, monkeypatch):
    """In one block and in many; in every combination of memory layouts."""
    for layouts in itertools.product(LAYOUTS, repeat=3):
        compare(operations, 37, 11, dtype, layouts, **options)
    monkeypatch.setattr(operations, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(operations, "_SUM_ROWS", 5)
    for as_is in (False, True):
        for layouts in (ROWS, ["transposed"] * 3, ["rows", "transposed", "slices"]):
            compare(operations, 37, 11, dtype, layouts, as_is, **options)
            compare(operations, 11, 37, dtype, layouts, as_is, vocab_dim=1, **options)


built = pytest.mark.skipif(native.library() is None, reason="built without a C compiler")


@pytest.mark.skipif(
    sys.platform == "win32" or not shutil.which("cc"), reason="needs a C compiler for POSIX"
)
def test_native_is_built():
    assert kernels()["C"] == "available"


def instruction_sets():
    """The vector instructions that this processor has, as the C kernel numbers them."""
    if native.library() is None:
        return []
    return range(ctypes.c_int.in_dll(native.library(), "coupled_adam_instructions").value + 1)


@pytest.fixture(params=instruction_sets())
def instructions(request):
    """With each set of vector instructions that this processor has."""
    variable = ctypes.c_int.in_dll(native.library(), "coupled_adam_instructions")
    before, variable.value = variable.value, request.param
    yield variable
    variable.value = before


@built
@pytest.mark.parametrize("as_is", [False, True])
@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_native(dtype, options, as_is, instructions, monkeypatch):
    """By one thread, by several, and by more than there are rows; rows of all lengths."""
    for elements in (2**17, 1):
        monkeypatch.setattr(native, "_ELEMENTS_PER_THREAD", elements)
        for rows, columns in ((37, 11), (1, 1), (3, 300), (5000, 33)):
            for layouts in (ROWS, ["slices", "rows", "slices"]):
                compare(native, rows, columns, dtype, layouts, as_is, **options)


@built
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_small_matrix_leaves_torchs_threads_alive():
    """A step by fewer threads than torch has does not make the next operation start new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        p = nn.Parameter(torch.randn(512, 64))  # enough for two threads
        p.grad = torch.randn_like(p)
        optimizer, large = CoupledAdamW([p], coupled=True), torch.randn(2**20)
        large.add_(1)  # by all threads
        threads = set(os.listdir("/proc/self/task"))
        optimizer.step()
        large.add_(1)
        assert set(os.listdir("/proc/self/task")) == threads
    finally:
        torch.set_num_threads(before)


@built
@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_native_gives_the_same_bits_on_every_processor(stochastic, options):
    """With the vectors of each of them."""
    variable = ctypes.c_int.in_dll(native.library(), "coupled_adam_instructions")
    before, results = variable.value, []
    for variable.value in instruction_sets():
        p, g, _ = tensors(10_007, 70, torch.bfloat16 if stochastic else torch.float32)
        q = nn.Parameter(p)
        optimizer = CoupledAdamW([q], coupled=True, stochastic_rounding=stochastic, **options)
        for scale in (1.0, -0.5):
            q.grad = g * scale
            optimizer.step()
        results.append((q.detach(), *optimizer.state[q].values()))
    variable.value = before
    assert all(torch.equal(x, y) for result in results[1:] for x, y in zip(results[0], result))


@built
def test_native_gives_the_same_bits_again():
    p, g, _ = tensors(100_000, 7, torch.float32)
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
    p, g, _ = tensors(9, 4, dtype)
    g[3, 2] = bad
    results = []
    for options in ({}, {"fused": False}):
        q = nn.Parameter(p.clone())
        optimizer = CoupledAdamW([q], coupled=True, amsgrad=True, **options)
        q.grad = g
        for _ in range(2):
            optimizer.step()
        results.append([q.detach(), *optimizer.state[q].values()])
    for mine, expected in zip(*results):
        assert torch.equal(mine.isnan(), expected.isnan())
        assert torch.equal(mine.isinf(), expected.isinf())
    assert results[0][0][:, 2].isnan().any()


@built
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
def test_native_is_not_given_what_it_cannot_take(options):
    """Moments that somebody has cast, a slice of something, a subclass: other kernels take them."""
    p, g, _ = tensors(9, 4, torch.bfloat16)
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
    for mine, expected in zip(*states):
        torch.testing.assert_close(mine, expected, rtol=2**-6, atol=2**-6)


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
failed = library.coupled_adam_measure(ctypes.byref(record))
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel")
expected = [sum(g[r * columns + c] ** 2 for r in range(rows)) for c in range(columns)]
assert failed == 0 and list(sums) == expected
"""
    library = str(native.PATH)
    command = [sys.executable, "-c", program, library, *names]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_kernels_that_are_missing_are_named(monkeypatch, tmp_path):
    """Each is named with the reason, without a warning; and the step runs all the same."""
    monkeypatch.setattr(native, "PATH", tmp_path / "libcoupled_adam.so")
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    found = kernels()
    assert found["C"] == "not available (this package was built without it)"
    if not torch.cuda.is_available():
        assert found["Triton"].startswith("not used (")
    native.PATH.write_bytes(b"for another machine")
    assert kernels()["C"] == "not available (its library cannot be used here)"
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    weight.grad = torch.ones(5, 3)
    CoupledAdam([{"params": [weight], "coupled": True}]).step()
    assert weight.ne(0).all()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 20),
    vocab_dim=st.sampled_from([0, 1]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    block=st.integers(1, 2000),
    sum_rows=st.integers(1, 70),
)
def test_operations_any_shape(rows, columns, vocab_dim, layouts, block, sum_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_BLOCK_BYTES", block)
        patch.setattr(operations, "_SUM_ROWS", sum_rows)
        options = {"vocab_dim": vocab_dim, "weight_decay": 0.1}
        compare(operations, rows, columns, torch.float32, layouts, **options)


@pytest.mark.parametrize("factor", [0.5, 0.0])
@pytest.mark.parametrize("kernel", [pytest.param(native, marks=built), operations])
def test_factor(kernel, factor):
    """What clips the gradient; to nothing, too."""
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"row_exponent": 0.5, "zero_sum": True}):
            for betas in ((0.9, 0.95), (0.0, 0.95)):
                options = {**options, "betas": betas, "maximize": True, "weight_decay": 0.1}
                compare(kernel, 37, 11, dtype, factor=factor, **options)


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


@pytest.fixture(params=[pytest.param(True, marks=built), False], ids=["native", "operations"])
def kernel(request, monkeypatch):
    """With the kernel in C, and where that has not been built."""
    if not request.param:
        monkeypatch.setattr(native, "fits", lambda *_: False)
    return native if request.param else operations


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"weight_decay": 0.1}], ids=str)
def test_no_temporary_of_the_matrix(options, kernel):
    """A step makes vectors [H] in C, and a block besides with torch; nothing [V, H]."""
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
    block = operations._BLOCK_BYTES * torch.get_num_threads() // 4
    if kernel is native:
        assert largest.elements == 2 * columns  # the sums, in float64
        return
    assert largest.elements <= block
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


def test_folded_clipping_without_gradients():
    optimizer = CoupledAdamW(groups(model()), max_grad_norm=2.0)
    assert optimizer.grad_norm is None
    optimizer.step()
    assert optimizer.grad_norm == 0


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_max_grad_norm_is_in_copies_and_not_in_checkpoints(copied):
    optimizer = CoupledAdamW(groups(model()), max_grad_norm=2.0)
    optimizer.step()
    assert copied(optimizer).max_grad_norm == 2.0
    assert "max_grad_norm" not in str(optimizer.state_dict())


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_wrong_max_grad_norm_is_refused(wrong):
    with pytest.raises(ValueError, match="Invalid max_grad_norm"):
        CoupledAdamW(groups(model()), max_grad_norm=wrong)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_clipping_and_penalty_in_half_precision(dtype, kernel):
    """A clipped gradient with a penalty is in single precision, which not every kernel serves."""
    states = []
    for fused in (None, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 100).to(dtype))
        options = {"weight_decay": 0.1, "max_grad_norm": 1.0, "fused": fused}
        optimizer = CoupledAdam([p], coupled=True, **options)
        p.grad = torch.randn(64, 100).to(dtype)
        optimizer.step()
        states.append({"param": p.detach(), **optimizer.state[p]})
    torch.testing.assert_close(*states, rtol=1e-2, atol=1e-6)
    squares = [state["exp_avg_sq"] for state in states]
    torch.testing.assert_close(*squares, rtol=1e-5, atol=0)


@pytest.mark.parametrize("fused", [None, True, False])
def test_clipping_squares_that_overflow(fused, kernel):
    """As with clip_grad_norm_: an infinite norm leaves nothing of a finite gradient."""
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = CoupledAdamW([p], coupled=True, max_grad_norm=1.0, fused=fused, weight_decay=0.0)
    for huge in (1e20, 1.0):
        p.grad = torch.ones(4, 3)
        p.grad[1, 2] = huge
        optimizer.step()
        assert p.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[p].values())
        assert torch.equal(p.detach(), torch.ones(4, 3)) == (huge != 1.0)


def test_fused_clipping_in_float64():
    """It scales a float64 model's gradients in float64, and fails for none of the groups."""
    ours, theirs = model().double(), model().double()
    optimizer = CoupledAdamW(groups(ours), lr=1e-2, max_grad_norm=0.5, fused=True)
    control = CoupledAdamW(groups(theirs), lr=1e-2, fused=True)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        control.step()
        optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_moment_in_another_layout():
    """The state of a transposed parameter, loaded for a contiguous one, is laid out as that."""
    start, grad = torch.randn(9, 4), torch.randn(9, 4)
    transposed, contiguous = nn.Parameter(start.T.contiguous().T), nn.Parameter(start.clone())
    optimizers = []
    for p in (transposed, contiguous):
        p.grad = grad.clone()
        optimizers.append(CoupledAdamW([p], coupled=True))
    optimizers[0].step()
    with torch.no_grad():
        contiguous.copy_(transposed)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert optimizers[1].state[contiguous]["exp_avg"].is_contiguous()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(transposed, contiguous)


def test_scaled_gradient_that_is_expanded(kernel):
    """One number in many places cannot be unscaled in place; nothing is half-changed."""
    p, q = (nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    optimizer = CoupledAdamW([p], coupled=True, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    p.grad = torch.full((1, 3), 8.0).expand(4, 3)
    control = CoupledAdamW([q], coupled=True)
    q.grad = torch.ones(4, 3)
    optimizer.step()
    control.step()
    torch.testing.assert_close(p, q)
    assert torch.equal(p.grad, q.grad)


def test_small_betas_keep_a_small_gradient_after_a_large_one(kernel):
    """Interpolated from the nearer end: with beta1 = 1e-6 the moment is all but the gradient."""
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = CoupledAdamW([p], coupled=True, betas=(1e-9, 0.9))
    for size in (1e3, 1e-3):
        p.grad = torch.full((4, 3), size)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], p.grad, rtol=2e-3, atol=0)


STATES = {
    "coupled": ({}, {"exp_avg": (60, 8), "exp_avg_sq": (8,)}),
    "amsgrad": (
        {"amsgrad": True},
        {"exp_avg": (60, 8), "exp_avg_sq": (8,), "max_exp_avg_sq": (8,)},
    ),
    "a = 0.5": (
        {"row_exponent": 0.5},
        {"exp_avg": (60, 8), "exp_avg_sq": (8,), "exp_avg_sq_row": (60,)},
    ),
    "no momentum": ({"betas": (0.0, 0.99)}, {"exp_avg_sq": (8,)}),
    "no momentum, a = 0.5, zero-sum": (
        {"betas": (0.0, 0.99), "row_exponent": 0.5, "zero_sum": True},
        {"exp_avg_sq": (8,), "exp_avg_sq_row": (60,)},
    ),
}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(("options", "shapes"), STATES.values(), ids=STATES)
def test_state(options, shapes, fused):
    """Without momentum there is no V x H state, whatever kernel runs."""
    p = nn.Parameter(torch.randn(60, 8))
    optimizer = CoupledAdamW([p], coupled=True, fused=fused, **options)
    p.grad = torch.randn(60, 8)
    optimizer.step()
    state = {name: tuple(value.shape) for name, value in optimizer.state[p].items()}
    assert state == {"step": (), **shapes}


def test_an_option_that_no_fast_kernel_serves_goes_to_the_reference(monkeypatch):
    monkeypatch.setitem(OPTIONS, "column_exponent", 0.0)
    p = nn.Parameter(torch.randn(6, 4))
    p.grad = torch.randn(6, 4)
    chosen = []
    for exponent in (0.0, 0.5):
        group = {"params": [p], "coupled": True, "column_exponent": exponent}
        (matrix,), _ = CoupledAdamW([group])._collect()
        chosen.append(matrix.kernel)
    assert chosen[0] in (native, operations)
    assert chosen[1] is reference
