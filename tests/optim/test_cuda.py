"""The Triton kernels as every kernel is tested.

This also runs without a GPU, on CPU tensors in Triton's interpreter, if the environment had
TRITON_INTERPRET=1 from the start: test_triton.py does that.
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coupled_adam.optim import reference, row_sparse
from coupled_adam.optim.matrix import Scalars
from coupled_adam.optim.sharded import full_tensor
from optim.cases import CASES, check_steps, gradient, matrix, optimizer_of, use
from optim.every_kernel import EveryKernel, assert_same_bits, lean_and_coupled, stored

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",  # of the interpreter, on overflow
    "ignore:Synchronization debug mode",
)


@pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="needs a GPU")
class TestTriton(EveryKernel):
    device = DEVICE
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if INTERPRETED:
        shapes = ((1, 1), (1, 300), (300, 1), (9, 770), (33, 130))
        several_blocks = (20, 40)

    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch):
        from coupled_adam.optim.kernels import triton as kernel

        use(monkeypatch, kernel)
        return kernel

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_sparse_gradients(self, dtype, kernel, monkeypatch):
        """As the reference's copies of the rows; a row that is not the table's is left out."""
        results = []
        for rows_kernel in (kernel, reference):
            use(monkeypatch, rows_kernel)
            p = self.parameter((40, 24), dtype)
            options = {"row_exponent": 0.75, "betas": (0.0, 0.9)}
            optimizer = optimizer_of([p], **options, stochastic_rounding=True)
            for step in range(6):
                generator = torch.Generator().manual_seed(step)
                rows = torch.randint(40, (12,), generator=generator)
                values = self.gradient((12, 24), step, dtype)
                if step == 3:
                    values[4] *= 1e30  # of a row that stops, and is no longer counted
                p.grad = torch.sparse_coo_tensor(rows[None].to(p.device), values, p.shape)
                optimizer.step()
            results.append(stored(optimizer, p))
            r = results[-1]["row_exp_avg_sq"]
            assert (
                results[-1]["row_count"] == (r.isfinite() & (r != 0)).sum() == r.count_nonzero() - 1
            )
        for name, x in results[0].items():
            tolerance = 2e-2 if dtype == torch.bfloat16 and name == "param" else 1e-5
            torch.testing.assert_close(x, results[1][name], rtol=tolerance, atol=tolerance)

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_sparse_rows_outside_of_the_table(self, kernel, monkeypatch):
        """The host does not wait for the GPU to check them, and nothing is written there."""
        whole = self.parameter((60, 8))
        before, p = whole.detach().clone(), nn.Parameter(whole.detach()[10:50])
        optimizer = optimizer_of([p], row_exponent=0.75, betas=(0.0, 0.9))
        for rows in ([3, 5], [3, 5], [3, -2], [39, 44]):
            place = torch.tensor([rows], device=p.device)
            values = torch.ones(2, 8, device=p.device)
            if not p.is_cuda:  # where the check is made, which is not what is tested here
                monkeypatch.setattr(row_sparse, "check_rows", lambda *_: None)
            p.grad = torch.sparse_coo_tensor(place, values, p.shape, check_invariants=False)
            p.grad._coalesced_(True)
            optimizer.step()
        assert torch.equal(whole[:10], before[:10])
        assert torch.equal(whole[50:], before[50:])
        assert p[[3, 5, 39]].ne(before[[13, 15, 49]]).all()
        assert optimizer.state[p]["row_count"] == 3

    def test_wide_rows(self):
        check_steps((3, 8192), torch.float32, steps=2, device=DEVICE, **CASES["LEAN"])

    @lean_and_coupled
    def test_numbers_that_are_on_the_device(self, options, monkeypatch):
        """The rate, the factor and the count of steps, as numbers and as tensors: the same bits."""
        results = []
        for on_device in (False, True):
            if on_device:
                for module in ("update", "matrix"):
                    name = f"coupled_adam.optim.{module}.as_python_number"
                    monkeypatch.setattr(name, in_a_tensor)
            p = self.parameter((13, 7))
            optimizer = optimizer_of([p], fused=True, **options)
            if on_device:
                optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, device=DEVICE)
            for step in range(3):
                self.scale(optimizer, 0.25)
                p.grad = self.gradient((13, 7), step)
                optimizer.step()
            results.append(stored(optimizer, p))
        assert_same_bits(*results)

    @pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
    def test_rows_far_apart(self, name):
        """Further than 32 bits can say, with no memory between: as the same rows side by side."""
        memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=DEVICE)
        places = iter((0, 32, 64))

        def far_apart(x):
            return memory.as_strided((2, 20), (2**31, 1), next(places)).copy_(x)

        results = []
        for laid in (torch.clone, far_apart):
            p = nn.Parameter(laid(matrix((2, 20), 0, torch.bfloat16).to(DEVICE)))
            optimizer = optimizer_of([p], **CASES[name])
            optimizer.init_state()
            if "exp_avg" in optimizer.state[p]:
                optimizer.state[p]["exp_avg"] = laid(optimizer.state[p]["exp_avg"])
            p.grad = laid(gradient((2, 20), 1, torch.bfloat16).to(DEVICE))
            optimizer.step()
            results.append(stored(optimizer, p))
        assert_same_bits(*results)

    @pytest.mark.parametrize("name", ["coupled", "coupled, amsgrad", "LEAN", "LEAN, momentum"])
    def test_parts_of_a_matrix(self, name, tmp_path, monkeypatch):
        """The sums of a DTensor are added up before ranks exchange them, or nothing changes."""
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("nccl" if HAS_GPU else "gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(DEVICE, (1,))
            results = []
            for placement in (None, Shard(0), Shard(1)):
                values = self.parameter((40, 19)).detach()
                if placement is not None:
                    values = distribute_tensor(values, mesh, [placement])
                p = nn.Parameter(values)
                optimizer = optimizer_of([p], **CASES[name])
                for step in range(3):
                    p.grad = self.gradient((40, 19), step)
                    if placement is not None:
                        p.grad = distribute_tensor(p.grad, mesh, [placement])
                    optimizer.step()
                before = stored(optimizer, p)
                self.scale(optimizer, 1.0, found_inf=1.0)
                p.grad = torch.full_like(p, torch.inf)
                optimizer.step()
                for key, x in stored(optimizer, p).items():
                    assert torch.equal(full_tensor(x), full_tensor(before[key])), key
                results.append(p.detach() if placement is None else p.detach().full_tensor())
            for again in results[1:]:
                torch.testing.assert_close(again, results[0], rtol=1e-6, atol=1e-7)
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize("is_cut", [False, True], ids=["rows", "columns"])
    def test_a_part_of_a_matrix_that_is_skipped(self, is_cut, kernel, monkeypatch):
        """Its sums are zeros, whatever was in the memory: other ranks add them to theirs."""

        def nothing_written(like, *shape):
            return torch.full(shape, torch.nan, dtype=torch.float32, device=like.device)

        monkeypatch.setattr(kernel, "_empty", nothing_written)
        p = self.parameter((40, 19))
        optimizer = optimizer_of([p], **CASES["LEAN"])
        p.grad = self.gradient((40, 19))
        optimizer.step()
        before = stored(optimizer, p)
        (whole,), _ = optimizer._collect()
        part = replace(whole, row_ranks=("others",), column_ranks=("others",) * is_cut)
        weights = torch.ones(40, device=DEVICE) if is_cut else None
        skip = torch.ones(1, device=DEVICE)
        total = kernel.lean(part, weights, Scalars(t=2.0, skip=skip))
        assert total.tolist() == [0.0] * (2 * 19 + 1)
        assert_same_bits(stored(optimizer, p), before)


def in_a_tensor(value, no_host_reads):
    """A number that is on a GPU; of the betas only Python numbers go to Triton."""
    return value.reshape(()) if isinstance(value, torch.Tensor) else value
