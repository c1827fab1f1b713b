"""What every kernel must do: the suite of the CPU kernels, and of Triton on a GPU or interpreted.

A subclass has the fixture ``kernel``, which makes a kernel that of all matrices, and says which
device, dtypes and layouts there are.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coupled_adam.optim import reference, rounding
from coupled_adam.optim.matrix import Scalars
from coupled_adam.optim.state import MOMENTS
from optim.cases import (
    CASES,
    DTYPES,
    LAYOUTS,
    LEAN,
    assert_as_oracle,
    check_steps,
    gradient,
    in_rows,
    matrix,
    optimizer_of,
    oracle_of,
    use,
)

every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
lean_and_coupled = pytest.mark.parametrize(
    "options", [CASES["coupled, amsgrad"], *LEAN.values()], ids=["coupled", *LEAN]
)


def stored(optimizer, p):
    """All that a step changes, as copies."""
    return {name: x.detach().clone() for name, x in {**optimizer.state[p], "param": p}.items()}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert torch.equal(x, right[name]), name


JUMPS = {"element": (7, 5), "row": (7,), "column": (slice(None), 5)}
"""Where a gradient jumps, by name."""


class EveryKernel:
    device = "cpu"
    dtypes = DTYPES
    layouts = LAYOUTS
    shapes = ((1, 1), (1, 300), (300, 1), (9, 770), (1025, 3), (130, 257))
    several_blocks = (200, 40)

    @pytest.fixture(params=DTYPES, ids=str)
    def dtype(self, request):
        if request.param not in self.dtypes:
            pytest.skip("the kernel is not given this dtype")
        return request.param

    def parameter(self, shape, dtype=torch.float32):
        return nn.Parameter(matrix(shape, 0, dtype).to(self.device))

    def gradient(self, shape, seed=1, dtype=torch.float32):
        return gradient(shape, seed, dtype).to(self.device)

    def scale(self, optimizer, scale, found_inf=0.0):
        """What GradScaler tells a fused optimizer."""
        optimizer.grad_scale = torch.tensor(scale, device=self.device)
        optimizer.found_inf = torch.tensor(found_inf, device=self.device)

    @every_case
    def test_as_the_oracle(self, options, dtype, kernel):
        layouts = self.layouts if dtype == torch.float32 else self.layouts[:2]
        for layout in layouts:
            check_steps((13, 7), dtype, layout, device=self.device, **options)

    @pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
    def test_any_shape(self, name, kernel):
        for shape in self.shapes:
            check_steps(shape, torch.float32, steps=2, device=self.device, **CASES[name])

    @every_case
    def test_scaled_and_skipped(self, options, kernel):
        """A step that overflows, the first one among them, is none; a scale is taken out."""
        p = self.parameter((13, 7))
        optimizer = optimizer_of([p], fused=True, **options)
        (group,) = optimizer.param_groups
        for step, overflows in enumerate((True, False, True, False, False)):
            grad = self.gradient((13, 7), step)
            oracle = oracle_of(type(optimizer), group, p, optimizer.state.get(p))
            before = {**optimizer.state.get(p, {}), "param": p.detach()}
            before = {name: x.clone() for name, x in before.items()}
            self.scale(optimizer, 8.0, 2.0 * overflows)
            p.grad = 8 * grad
            optimizer.step()
            after = stored(optimizer, p)
            if overflows:
                zeros = {name: torch.zeros_like(x) for name, x in after.items()}
                assert_same_bits(after, {**zeros, **before})
                continue
            oracle.step(in_rows(grad, group))
            assert_as_oracle(type(optimizer), group, p, optimizer.state[p], oracle)
            torch.testing.assert_close(p.grad, grad)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @lean_and_coupled
    def test_not_finite(self, options, bad, kernel, monkeypatch):
        """What is not finite spoils what it spoils in the reference, no more and no less.

        But for the moment of a row that LEAN does not move any more, which a kernel may leave out.
        """
        results = []
        for passes in (kernel, reference):
            use(monkeypatch, passes)
            p = self.parameter((9, 4))
            optimizer = optimizer_of([p], **options)
            for step in range(3):
                p.grad = self.gradient((9, 4), step)
                if step == 1:
                    p.grad[3, 2] = bad
                optimizer.step()
            results.append(stored(optimizer, p))
        for name, x in results[0].items():
            right = results[1][name]
            if name == "exp_avg" and "row_exp_avg_sq" in results[0]:
                assert (x.isfinite() | ~right.isfinite()).all()
                continue
            assert torch.equal(x.isnan(), right.isnan()), name
            assert torch.equal(x.isinf(), right.isinf()), name
        assert not all(x.isfinite().all() for x in results[0].values())

    @lean_and_coupled
    def test_a_square_that_overflows(self, options, kernel):
        """In LEAN the row keeps its place, and the others are not affected; else a column does."""
        p = self.parameter((9, 4))
        optimizer = optimizer_of([p], **{**options, "weight_decay": 0.0})
        for step in range(4):
            p.grad = self.gradient((9, 4), step)
            if step == 2:
                p.grad[3, 2] = 3e19
            before = p.detach().clone()
            optimizer.step()
            assert p.isfinite().all()
            moves = p.detach() != before
            if optimizer.param_groups[0]["zero_sum"] or optimizer.param_groups[0]["row_exponent"]:
                rows = [step == 1 or (step > 1 and row != 3) for row in range(1, 9)]
                assert moves[1:].all(1).tolist() == rows
                assert optimizer.state[p]["exp_avg_sq"].isfinite().all()
            else:
                columns = [step < 2 or column != 2 for column in range(4)]
                assert moves[1:].all(0).tolist() == columns

    @pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum", "zero-sum"])
    def test_a_sum_over_rows_that_overflows(self, name, kernel):
        """The column keeps its place, and the others move on: its nu is in no mean."""
        p = self.parameter((600, 4))
        optimizer = optimizer_of([p], **{**CASES[name], "weight_decay": 0.0})
        for step in range(5):
            p.grad = self.gradient((600, 4), step) + 1.0
            if step == 2:
                p.grad[:, 2] = 1.2e19  # whose square is 1.4e38, and fits
            before = p.detach().clone()
            optimizer.step()
            assert p.isfinite().all()
        overflowed = optimizer.state[p]["exp_avg_sq"].isinf()
        assert overflowed.tolist() in ([False] * 4, [False, False, True, False])
        assert torch.equal(p[:, overflowed], before[:, overflowed])
        assert optimizer.state[p]["mean_update"].ne(0).tolist() == (~overflowed).tolist()

    @pytest.mark.parametrize("jump", [1e9, 1e15])
    @pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum", "rows", "zero-sum"])
    def test_no_row_moves_further_than_thirty_rates(self, name, jump, kernel):
        """Neither when rows or columns jump, nor when a column comes back after a silence."""
        p = self.parameter((50, 8))
        options = {**CASES[name], "zero_sum": False, "row_exponent": 0.5, "weight_decay": 0.0}
        optimizer, furthest = optimizer_of([p], **options), 0.0
        for step in range(40):
            g = self.gradient((50, 8), step)
            if step > 2:
                g[:, 3] /= jump  # a weak column, in which one element jumps
            if step in (10, 25):
                g[7, 3] = 1.0
            if step in (15, 30):
                g[5] *= jump
            if step == 20:
                g[:, 3] = 1.0
            p.grad, before = g, p.detach().clone()
            optimizer.step()
            moved = (p.detach() - before).square().mean(1).sqrt() / optimizer.param_groups[0]["lr"]
            furthest = max(furthest, moved.max().item())
        most = 30 / optimizer.param_groups[0]["second_moment_scale"] ** 0.5
        assert most / 5 < furthest <= 1.001 * most

    @pytest.mark.parametrize("place", JUMPS.values(), ids=JUMPS.keys())
    @pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum", "zero-sum"])
    def test_a_jump_does_not_make_others_move_further(self, name, place, kernel):
        """Whatever jumps, for one step, and by any factor: the rest moves at most 1.5 times."""
        lengths = []
        for factor in (1.0, 1e3, 1e18):
            p = self.parameter((100, 64))
            optimizer = optimizer_of([p], **{**CASES[name], "weight_decay": 0.0})
            lengths.append([])
            for step in range(8):
                p.grad = self.gradient((100, 64), step)
                if step == 3:
                    p.grad[place] *= factor
                before = p.detach().clone()
                optimizer.step()
                assert p.isfinite().all()
                if step > 3:
                    moves = (p.detach() - before).abs()
                    moves[7] = moves[:, 5] = 0
                    lengths[-1].append(moves.sum().item())
        usual, *after_jumps = lengths
        for after_jump in after_jumps:
            assert all(length <= 1.5 * x for length, x in zip(after_jump, usual))

    @pytest.mark.parametrize("name", ["coupled", *LEAN])
    @pytest.mark.parametrize("is_tensor", [False, True])
    def test_nothing_moves_at_a_rate_of_zero(self, name, is_tensor, kernel):
        """What was to be given back is kept for a step that moves."""
        p = self.parameter((13, 7))
        optimizer = optimizer_of([p], **{**CASES[name], "weight_decay": 0.0})
        (group,) = optimizer.param_groups
        for step in range(5):
            group["lr"] = 0.0 if step in (2, 3) else 1e-2
            if is_tensor:
                group["lr"] = torch.tensor(group["lr"], device=self.device)
            p.grad = self.gradient((13, 7), step)
            before = stored(optimizer, p)
            optimizer.step()
            after = stored(optimizer, p)
            if step in (2, 3):
                assert torch.equal(after["param"], before["param"])
                if "mean_update" in before:
                    assert torch.equal(after["mean_update"], before["mean_update"])
                assert not torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])

    @pytest.mark.parametrize("is_scaled", [False, True])
    @pytest.mark.parametrize("name", ["LEAN", "LEAN, momentum"])
    def test_updates_sum_to_zero_from_a_step_on(self, name, is_scaled, kernel):
        """From 1 / (1 - beta2) on, also where the step is counted on the device."""
        p = self.parameter((13, 7))
        betas = (CASES[name]["betas"][0], 0.75)
        optimizer = optimizer_of([p], **{**CASES[name], "betas": betas}, fused=is_scaled or None)
        for step in range(1, 7):
            if is_scaled:
                self.scale(optimizer, 1.0)
            p.grad = self.gradient((13, 7), step)
            optimizer.step()
            assert optimizer.state[p]["mean_update"].any() == (step >= 4)

    @pytest.mark.parametrize("beta2", [0.999, 0.99999])
    @pytest.mark.parametrize("name", ["coupled", "LEAN"])
    def test_a_long_memory_has_no_bias(self, name, beta2, kernel):
        """beta2 and the share of what is new add up to 1: an average of equal squares is theirs."""
        p = self.parameter((4, 4))
        optimizer = optimizer_of([p], **{**CASES[name], "betas": (0.0, beta2)})
        optimizer.init_state()
        averages = [x for key, x in optimizer.state[p].items() if "exp_avg_sq" in key]
        for x in averages:
            x.fill_(4.0)
        optimizer.state[p]["step"].fill_(10**6)
        p.grad = torch.full_like(p, 2.0)
        for _ in range(50):
            optimizer.step()
        for x in averages:
            torch.testing.assert_close(x, torch.full_like(x, 4.0), rtol=3e-7, atol=0)

    @pytest.mark.parametrize("beta1", [2**-10, 0.5, 0.9])
    @pytest.mark.parametrize("name", ["coupled", "LEAN, momentum"])
    def test_a_small_gradient_after_a_large_one(self, name, beta1, kernel):
        """The first moment keeps all digits of both."""
        p = self.parameter((13, 7))
        optimizer = optimizer_of([p], **{**CASES[name], "betas": (beta1, 0.9)})
        for step, size in enumerate((1e4, 1e-4)):
            p.grad = size * self.gradient((13, 7), step)
            old = optimizer.state[p]["exp_avg"].double() if step else 0.0
            optimizer.step()
            expected = beta1 * old + (1 - beta1) * p.grad.double()
        torch.testing.assert_close(
            optimizer.state[p]["exp_avg"].double(), expected, rtol=3e-7, atol=0
        )

    @pytest.mark.parametrize("layout", ["rows", "transposed"])
    @pytest.mark.parametrize("is_fused", [False, True])
    # Of an index of 1 the salt has the highest bit.
    @pytest.mark.parametrize(("t", "index"), [(1, 1), (5, 0), (2**20, 5)])
    def test_rounds_stochastically(self, t, index, is_fused, layout, kernel, monkeypatch):
        """To the bit as rounding.py; step sizes that are exact in any order of the sums."""
        if layout not in self.layouts:
            pytest.skip("the kernel is not given this layout")
        monkeypatch.setattr(rounding, "global_offset", lambda _: (5, 2))
        start = matrix((40, 90), 0, torch.bfloat16).to(self.device)
        start = start.T.contiguous().T if layout == "transposed" else start
        others = [self.parameter((2, 2), torch.bfloat16) for _ in range(index)]
        p = nn.Parameter(start.clone())
        options = {"betas": (0.0, 0.0), "weight_decay": 0.1, "stochastic_rounding": True}
        optimizer = optimizer_of([*others, p], **options, fused=is_fused or None)
        if is_fused:  # the step is counted on the device
            self.scale(optimizer, 1.0)
        for q in (*others, p):
            q.grad = torch.full_like(q, 2.0**-7)
        optimizer.init_state()
        optimizer.state[p]["step"].fill_(t - 1)
        optimizer.step()
        rate = torch.tensor(1e-2) / torch.tensor(2.0**-7 + 1e-8)
        values = start.float() * (1 - 1e-2 * 0.1) - rate.to(start.device) * 2.0**-7
        noise = rounding.noise_of(optimizer.param_groups[0], p, float(t), index)
        expected = torch.empty_like(start)
        rounding.round_(expected, values, noise)
        assert torch.equal(p, expected)
        assert not torch.equal(expected, values.bfloat16())

    @lean_and_coupled
    def test_the_same_bits_again(self, options, kernel):
        results = []
        for _ in range(3):
            p = self.parameter(self.several_blocks)
            optimizer = optimizer_of([p], **options)
            for step in range(2):
                p.grad = self.gradient(self.several_blocks, step)
                optimizer.step()
            results.append(stored(optimizer, p))
        for again in results[1:]:
            assert_same_bits(results[0], again)

    @lean_and_coupled
    def test_tells_autograd(self, options, kernel):
        """That it has changed tensors in place, as torch's operations do."""
        p = self.parameter((13, 7))
        optimizer = optimizer_of([p], **options)
        for step in range(2):
            versions = {name: x._version for name, x in {**optimizer.state[p], "p": p}.items()}
            p.grad = self.gradient((13, 7), step)
            optimizer.step()
        assert versions.keys() == {"p", "step"} | MOMENTS & optimizer.state[p].keys()
        for name, x in {**optimizer.state[p], "p": p}.items():
            assert x._version > versions[name], name

    @pytest.mark.parametrize("name", ["coupled", "LEAN", "LEAN, momentum"])
    def test_parts_without_rows_or_columns(self, name, kernel):
        """Of a rank that has none: its sums are zeros, and it takes those of others."""
        p = self.parameter((4, 5))
        optimizer = optimizer_of([p], **CASES[name])
        p.grad = self.gradient((4, 5))
        optimizer.step()
        (whole,), _ = optimizer._collect()
        for part in (
            self.part(whole, slice(0, 0), slice(None)),
            self.part(whole, slice(None), slice(0, 0)),
        ):
            nu = part.exp_avg_sq.clone()
            if part.row_exp_avg_sq is not None:
                weights = torch.ones_like(part.row_exp_avg_sq)
                total = kernel.lean(part, weights, Scalars(t=2.0))
                assert not total[:-1].count_nonzero()
                assert total[-1] == len(weights)
                assert torch.equal(part.exp_avg_sq, nu)
            else:
                sums = kernel.sum_squares(part, False)
                assert not sums.columns.count_nonzero()
                sums.columns = torch.ones_like(sums.columns)
                kernel.apply_coupled(part, sums, Scalars(t=2.0))
                torch.testing.assert_close(part.exp_avg_sq, 0.95 * nu + 0.05 / 4)

    def part(self, whole, rows, columns):
        """A rank's part of a matrix of which other ranks have the rest."""
        vectors = {
            name: None if (x := getattr(whole, name)) is None else x[columns].clone()
            for name in ("exp_avg_sq", "max_exp_avg_sq", "mean_update")
        }
        r, exp_avg = whole.row_exp_avg_sq, whole.exp_avg
        return replace(
            whole,
            param=whole.param.detach()[rows, columns].clone(),
            grad=whole.grad[rows, columns],
            exp_avg=None if exp_avg is None else exp_avg[rows, columns],
            row_exp_avg_sq=None if r is None else r[rows],
            row_ranks=("others",),
            column_ranks=("others",),
            **vectors,
        )
